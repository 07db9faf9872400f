"""Searches on machines with many GPUs, some of which are in use, or fail during the search."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dsat
from dsat.errors import EngineError
from dsat.run.journal import FILE_NAME, read_events
from dsat.run.run import Run
from testing import warm_command
from testing.local import PROGRAMS
from testing.null_cuda import Device
from tests.null_cuda.conftest import MachineOf

_GIB = 2**30
_PROGRAM = PROGRAMS / "on_devices"
_ECC, _NVLINK = 214, 220


@pytest.fixture(autouse=True)
def _imported(imported: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    warm_command.use(imported, monkeypatch.setattr)


def _tune(run_dir: Path, slots: int, callback: Callable[[Any], None], **options: Any) -> Any:
    return dsat.tune(
        _PROGRAM / "deepspeed.yaml",
        _PROGRAM,
        method="random",
        run_dir=run_dir,
        devices=slots,
        zero_stages=[0, 1, 2],
        memory_model="formula",
        callbacks=[callback],
        finals=0,
        **options,
    )


def _used(run_dir: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(run_dir.glob("trials/*/device*.json")):
        found.setdefault(path.parent.name, []).append(json.loads(path.read_text()))
    return found


def _check_that_no_device_is_shared(used: dict[str, list[dict[str, Any]]]) -> int:
    """Check it for all pairs of concurrent trials; return the number of these pairs."""
    beside = 0
    for one, other in itertools.combinations(used.values(), 2):
        if one[0]["began_s"] < other[0]["ended_s"] and other[0]["began_s"] < one[0]["ended_s"]:
            assert not {rank["device"] for rank in one} & {rank["device"] for rank in other}
            beside += 1
    return beside


@pytest.mark.slow
def test_a_search_goes_on_without_what_is_in_use_and_what_fails(
    null_cuda: MachineOf, tmp_path: Path
) -> None:
    machine = null_cuda(*(Device(busy_bytes=5 * _GIB * (number == 2)) for number in range(8)))
    seen: list[Any] = []

    def fail(row: Any) -> None:
        seen.append(row)
        if len(seen) == 1:  # a device that the next trials would use
            machine.break_device(1, _ECC)

    result = _tune(tmp_path / "run", 1, fail, max_trials=9)
    assert len(seen) == len(result.trials) >= 6
    assert {row["outcome"] for row in seen} == {"OK"}, seen
    used = _used(tmp_path / "run")
    assert all("2" not in {rank["device"] for rank in ranks} for ranks in used.values())
    assert _check_that_no_device_is_shared(used) > 0
    assert result.best is not None
    assert not machine.held()


@pytest.mark.slow
def test_a_search_ends_with_a_message_when_too_few_devices_are_left(
    null_cuda: MachineOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = null_cuda(*[Device(4 * _GIB)] * 3)
    # By UUID, and in another order.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{machine.uuid(2)},{machine.uuid(0)}")

    def fail(row: Any) -> None:
        machine.break_device(0, _NVLINK)

    with pytest.raises(EngineError, match=r"device errors ended two attempts: .*NVLink error"):
        _tune(tmp_path / "run", 2, fail, max_trials=3)
    [ranks] = _used(tmp_path / "run").values()
    assert [rank["device"] for rank in ranks] == [machine.uuid(2), machine.uuid(0)]
    assert not machine.held()
    machine.break_device(0, 0)
    result = _tune(tmp_path / "run", 2, lambda row: None, max_trials=3, resume=True)
    assert {row["outcome"] for row in result.trials} == {"OK"}
    profile = Run(read_events(tmp_path / "run" / FILE_NAME)).profile
    assert profile is not None
    assert profile.slot_memory_bytes == 4 * _GIB
    assert not machine.held()
