from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from testing import warm_host
from testing.null_cuda import Device, Libraries, NullCuda, NullCudaUnavailable, build, loading

ROOT = Path(__file__).parents[2]
MachineOf = Callable[..., NullCuda]


@pytest.fixture(scope="session")
def libraries() -> Libraries:
    try:
        return build(ROOT / ".cache" / "null_cuda")
    except NullCudaUnavailable as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def imported(libraries: Libraries) -> tuple[str, ...]:
    """Return the prefix of a command that forks it from a process that has imported DeepSpeed."""
    return warm_host.prefix(DS_ACCELERATOR="cuda", **loading(libraries))


@pytest.fixture
def null_cuda(libraries: Libraries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MachineOf:
    """Return a function that makes devices; only processes that the test starts see them."""

    def make(*devices: Device, faults: str = "", **options: object) -> NullCuda:
        machine = NullCuda(libraries, tmp_path / "books", devices or (Device(),), **options)  # type: ignore[arg-type]
        for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
            monkeypatch.delenv(name, raising=False)
        for name, value in machine.environment(faults).items():
            monkeypatch.setenv(name, value)
        return machine

    return make
