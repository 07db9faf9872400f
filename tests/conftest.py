from __future__ import annotations

import os
from pathlib import Path

import pytest

from dsat.engines.local import Machine, find_machine

ROOT = Path(__file__).parent.parent


# With two workers, each of these groups has one: at most two trials at a time run on the machine.
_ON_A_CLUSTER = ("test_cluster", "test_master", "test_memory_simulator", "test_predicted_memory")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow tests first, in two groups that share no process (see pytest-xdist's loadgroup)."""

    def rank(item: pytest.Item) -> int:
        if item.get_closest_marker("slow") is None:
            return 2
        return 0 if item.path.name.startswith(_ON_A_CLUSTER) else 1

    for item in items:
        if rank(item) < 2:
            item.add_marker(pytest.mark.xdist_group(("cluster", "machine")[rank(item)]))
    items.sort(key=rank)


@pytest.fixture(scope="session", autouse=True)
def _operators_compiled_once() -> None:
    """DeepSpeed compiles its operators where this says; `make test` says the same."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))


@pytest.fixture(scope="session", autouse=True)
def _no_cluster(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A master that whoever runs the tests has configured is none of theirs."""
    for variable in ("DET_MASTER", "DET_MASTER_ADDR", "DET_USER", "DET_PASS"):
        os.environ.pop(variable, None)
    os.environ["DET_DEBUG_CONFIG_PATH"] = str(tmp_path_factory.mktemp("determined"))


@pytest.fixture(scope="session")
def this_machine() -> Machine:
    return find_machine()
