from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsat.engines.agent.leftovers import CompilerLocks
from dsat.engines.machines.machine import Machine, find_machine
from dsat.prepare import installed_deepspeed
from testing.api_place import Place
from testing.scenarios import User

ROOT = Path(__file__).parent.parent
# Time limits of tests in seconds, by marker: many times their duration on a busy machine.
_LIMITS_S = {"nightly": 1800, "cluster": 1800, "slow": 900}
# Cache compiled modules. Otherwise each of the many hundred child processes compiles them, for half
# a second of CPU time, and each run compiles the tests with their assertions, for five seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files with slow tests first, so that two workers are busy until the end.

    Also limit the time of tests; one that hangs ends with the stacks of all threads.
    """
    for item in items:
        marked = [limit for name, limit in _LIMITS_S.items() if item.get_closest_marker(name)]
        if marked and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(max(marked)))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def _signals_are_heard() -> None:
    """Handle the signals that background jobs of a shell and of `nohup`, and children, ignore."""
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def _operators_compiled_once() -> None:
    """Compile DeepSpeed's operators in one folder, the same as in `make test`."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(ROOT / ".cache" / "torch_extensions"))


@pytest.fixture(scope="session")
def _compiler_locks(_operators_compiled_once: None) -> CompilerLocks:
    return CompilerLocks(os.environ)


@pytest.fixture(autouse=True)
def _no_lock_stays(_compiler_locks: CompilerLocks) -> Iterator[None]:
    """Remove the compiler's lock of a rank that a test killed; all others would wait for it."""
    yield
    _compiler_locks.remove()


@pytest.fixture(scope="session", autouse=True)
def _environment_is_active() -> None:
    """Put this environment's programs on the PATH, as activating it does."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(scope="session", autouse=True)
def _no_cluster(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Hide the Determined master that the developer has configured."""
    for variable in ("DET_MASTER", "DET_MASTER_ADDR", "DET_USER", "DET_PASS"):
        os.environ.pop(variable, None)
    os.environ["DET_DEBUG_CONFIG_PATH"] = str(tmp_path_factory.mktemp("determined"))


@pytest.fixture
def random_seed() -> int:
    """Seed of a test's random choices: the same in every run, unless `DSAT_TEST_SEED` is set."""
    return int(os.environ.get("DSAT_TEST_SEED", "1"))


@pytest.fixture
def user(tmp_path: Path) -> User:
    """Return a user whose script trains with micro batch 1, on a device on which 30 samples fit."""
    user = User(tmp_path)
    user.has()
    return user


@pytest.fixture
def unchecked_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not let DeepSpeed validate configurations, which takes seconds for each new one."""
    monkeypatch.setattr(installed_deepspeed, "_stamp", lambda: None)


@pytest.fixture(autouse=True)
def _only_slow_tests_ask_deepspeed(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("slow") is None:
        request.getfixturevalue("unchecked_configurations")


@pytest.fixture(scope="session")
def this_machine() -> Machine:
    return find_machine()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a user of the Python API with a program on a made-up machine."""
    user = User(tmp_path)
    user.has()
    return Place(user, monkeypatch)
