"""The local engine and its supervisor on devices that fail as GPUs do."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.command.entrypoint import Entrypoint
from dsat.command.placement import Launch
from dsat.engines.engine import LocalEngine
from dsat.engines.machines import accelerators
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import Machine, find_machine, find_machines
from dsat.engines.retries import is_of_device
from dsat.errors import UserInputError
from dsat.prepare import hosts as hosts_of
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing import warm_command
from testing.local import engine_of
from testing.null_cuda import Device
from tests.null_cuda.conftest import MachineOf

_GIB = 2**30
_CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000},
}
OOM, HOST_OOM = OutcomeKind.OOM, OutcomeKind.HOST_OOM
ERROR, TIMEOUT = OutcomeKind.ERROR, OutcomeKind.TIMEOUT


def trial(
    number: int, kind: TrialKind = TrialKind.SEARCH, ranks: int = 1, **overrides: Any
) -> Trial:
    batch = BatchTriple(4 * ranks, 4, 1)
    return Trial(number, kind, f"t{number}", 1, batch, overrides={**batch.config(), **overrides})


@contextlib.contextmanager
def engine_on_devices(
    folder: Path,
    *devices: int,
    slots: int = 1,
    program: str = "tiny",
    prefix: Sequence[str] = (),
    **options: Any,
) -> Iterator[LocalEngine]:
    """Make an engine on some of the machine's devices, or on all; a prefix precedes all
    commands."""
    folder.mkdir()
    machine = find_machines({"here": prefix})[0].only([*map(str, devices)], ())
    engine = engine_of(
        program,
        folder,
        slots_per_trial=slots,
        ds_config=_CONFIG,
        hosts=[Host(machine, reach=tuple(prefix))],
        **{"max_steps": 4, "warm_up_s": 0.1, "measured_s": 0.1, **options},
    )
    try:
        yield engine
    finally:
        engine.close()


def outcome_of(engine: LocalEngine, number: int, **overrides: Any) -> Outcome:
    engine.launch(trial(number, **overrides))
    while not (ended := engine.poll(10.0)):
        pass
    [(trial_id, outcome)] = ended
    assert trial_id == number
    return outcome


def fresh(outcome: Outcome) -> list[str]:
    """Return the warnings of a successful trial about ranks in fresh processes."""
    assert outcome.ok, outcome.detail
    return [text for text in outcome.warnings if "fresh processes" in text]


def env_of(folder: Path, number: int) -> str:
    return (folder / "trials" / f"t{number}" / "cmd.txt").read_text()


OF_DEVICE = True
# The fault on rank 1 of two, the trial's outcome, and whether a second fault ends the run.
FAILURES = [
    ("cuMemCreate>40000000=2", OOM, "CUDA out of memory", not OF_DEVICE),
    ("cudaHostAlloc=2", HOST_OOM, "out of memory", not OF_DEVICE),
    ("cublasCreate_v2=3", OOM, "CUBLAS_STATUS_ALLOC_FAILED", not OF_DEVICE),
    ("cudaLaunchKernel#40=46", ERROR, "busy or unavailable", OF_DEVICE),
    ("cudaLaunchKernel#40=220", ERROR, "uncorrectable NVLink error", OF_DEVICE),
    ("cudaLaunchKernel#40=700", ERROR, "illegal memory access", not OF_DEVICE),
    ("cudaLaunchKernel#40=719", ERROR, "unspecified launch failure", OF_DEVICE),
    ("cudaLaunchKernel#40=214", ERROR, "uncorrectable ECC error", OF_DEVICE),
    ("cudaStreamSynchronize#2=702", ERROR, "launch timed out", OF_DEVICE),
    ("cudaLaunchKernel#40=999", ERROR, "unknown error", not OF_DEVICE),
    ("ncclCommInitRank=2", ERROR, "unhandled system error", not OF_DEVICE),
    ("ncclAllReduce#2=1", ERROR, "unhandled cuda error", OF_DEVICE),
    ("ncclBroadcast#1=6", ERROR, "remote process exited", not OF_DEVICE),
    ("cudaLaunchKernel#40=hang", TIMEOUT, "no result after", not OF_DEVICE),
    ("ncclAllReduce#2=hang", TIMEOUT, "no result after", not OF_DEVICE),
]


@pytest.mark.slow
def test_each_driver_failure_has_its_outcome_and_leaves_free_slots(
    null_cuda: MachineOf,
    imported: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = null_cuda(*[Device()] * 8)
    found: dict[int, Outcome] = {}
    monkeypatch.setattr("dsat.engines.retries._MAX_DEVICE_ERRORS", 1000)
    hanging = [number for number, (fault, *_) in enumerate(FAILURES) if "hang" in fault]
    others: dict[str, Any] = {"slots": 2, "program": "on_devices", "prefix": imported}
    with (
        engine_on_devices(tmp_path / "hang", *range(4, 8), timeout_s=5, **others) as patient,
        engine_on_devices(tmp_path / "run", *range(4), **others) as engine,
    ):
        # Hanging trials hang while all others run one by one, as a failed trial that ran
        # together with others would run again.
        for number in hanging:
            patient.launch(trial(number, ranks=2, faults={"1": FAILURES[number][0]}))
        for number, (fault, *_) in enumerate(FAILURES):
            if number not in hanging:
                found[number] = outcome_of(engine, number, ranks=2, faults={"1": fault})
        while len(found) < len(FAILURES):
            found.update(patient.poll(10.0))
        assert engine.num_slots == patient.num_slots == 4
        patient._builder = replace(patient._builder, options=engine._builder.options)
        last = [outcome_of(each, len(FAILURES), ranks=2) for each in (engine, patient)]
    wrong = [
        f"{fault}: {found[number].kind.value} {found[number].message}"
        for number, (fault, kind, text, _) in enumerate(FAILURES)
        if found[number].kind is not kind
        or text not in found[number].message + found[number].detail
    ]
    assert not wrong, "\n".join(wrong)
    of_device = [is_of_device(found[number]) for number in range(len(FAILURES))]
    assert of_device == [is_so for *_, is_so in FAILURES]
    assert all(outcome.ok for outcome in last), last
    assert not machine.held()


@pytest.mark.slow
@pytest.mark.nightly
def test_a_trial_that_aborts_runs_again_in_a_fresh_process(
    null_cuda: MachineOf,
    imported: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fork may be the cause of an abort."""
    machine = null_cuda(Device())
    with engine_on_devices(tmp_path / "run", prefix=imported) as engine:
        assert not fresh(outcome_of(engine, 0, kind=TrialKind.PROFILE))
        monkeypatch.setenv("NULL_CUDA_FAULTS", "cudaLaunchKernel#80=abort")
        engine.launch(trial(1))
        monkeypatch.setenv("NULL_CUDA_FAULTS", "")
        while not (ended := engine.poll(10.0)):
            pass
        assert fresh(ended[0][1])
    assert not machine.held()


@pytest.mark.slow
@pytest.mark.nightly
def test_where_an_import_initialises_cuda_ranks_are_fresh_processes(
    null_cuda: MachineOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a MIG device or without NVML, torch must initialise CUDA to count the devices."""
    null_cuda(Device(uuid="MIG-0a"), Device(uuid="MIG-0b"), nvml=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0b,MIG-0a")
    found = find_machine()
    assert found.devices == ("MIG-0b",)
    assert found.left_out == ("cuda MIG-0a is not used: CUDA gives a process only one MIG device",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-0b")
    spoilt = tmp_path / "modules"
    spoilt.mkdir()
    (spoilt / "sitecustomize.py").write_text("")
    (spoilt / "determined_spoilt.py").write_text("import torch; torch.cuda.device_count()")
    monkeypatch.setattr(
        "dsat.engines.supervisors.WARM_MODULES",
        ("torch", "deepspeed", "determined_spoilt"),
    )
    monkeypatch.setenv("PYTHONPATH", f"{spoilt}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with engine_on_devices(tmp_path / "run") as engine:
        [warning] = fresh(outcome_of(engine, 0, kind=TrialKind.PROFILE))
        assert "a forked process cannot use cuda" in warning
        assert engine.num_slots == 1
        # Without NVML, torch 2.15 crashes at its first expandable segment.
        assert "expandable_segments" not in env_of(tmp_path / "run", 0)


@pytest.mark.slow
def test_whether_ranks_can_be_forked_is_tried_on_a_device_that_works(
    null_cuda: MachineOf, imported: tuple[str, ...], tmp_path: Path
) -> None:
    machine = null_cuda(Device(), Device(), Device())
    machine.break_device(0, 46)
    with engine_on_devices(tmp_path / "run", prefix=imported) as engine:
        assert engine.num_slots == 2
        assert not fresh(outcome_of(engine, 0, kind=TrialKind.PROFILE))
        assert "CUDA_VISIBLE_DEVICES=1 " in env_of(tmp_path / "run", 0)


@pytest.mark.nightly
def test_memory_that_is_reserved_is_what_is_allocated(null_cuda: MachineOf, tmp_path: Path) -> None:
    null_cuda(Device(total_bytes=2 * _GIB))
    with engine_on_devices(tmp_path / "run") as engine:
        outcome = outcome_of(engine, 1)
    assert outcome.ok, outcome.detail
    assert "expandable_segments:True" in env_of(tmp_path / "run", 1)
    assert outcome.memory is not None
    allocated, reserved = outcome.memory.allocated_bytes, outcome.memory.reserved_bytes
    # Segments grow by 2 MiB for small tensors, and by 20 MiB for large ones.
    assert max(reserved.values()) <= max(allocated.values()) + 24 * 2**20


@pytest.mark.slow
def test_devices_are_chosen_as_the_user_chose_them(
    null_cuda: MachineOf,
    imported: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def find_machine() -> Machine:
        [machine] = find_machines({"here": imported})
        return machine

    small = Device(4 * _GIB, name="Null T4")
    devices = [Device(8 * _GIB), Device(8 * _GIB, busy_bytes=6 * _GIB), small]
    machine = null_cuda(*devices)
    found = find_machine()
    assert found.devices == ("0", "2")
    assert found.device_memory_bytes == (8 * _GIB, 4 * _GIB)
    assert found.memory_bytes == 4 * _GIB
    assert found.device_names == ("Null H100", "Null T4")
    in_use = r"cuda 1 is in use by other programs \(6\.\d+ GiB of 8 GiB\), so it is not used"
    assert re.search(in_use, found.describe())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{machine.uuid(2)},{machine.uuid(1)}")
    found = find_machine()
    assert found.devices == (machine.uuid(2), machine.uuid(1))
    assert "in use by other programs" in found.warnings[0]
    machine.break_device(2, 46)
    assert "busy or unavailable" in find_machine().left_out[0]
    # Memory that the command itself holds, as after the first run, is not use by others.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{machine.uuid(0)}, 10'\necho '{machine.uuid(1)}, [N/A]'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    before = accelerators.variables_of_memory_in_use()
    machine.use(0, 6 * _GIB)
    [held] = find_machines({"here": imported}, {**os.environ, **before})
    assert held.devices == ("0",)
    smi.unlink()
    assert accelerators.variables_of_memory_in_use() == {}


@pytest.mark.slow
def test_devices_that_a_command_names_are_used_whoever_else_is_there(
    null_cuda: MachineOf, imported: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    null_cuda(*(Device(8 * _GIB, busy_bytes=6 * _GIB * (number < 2)) for number in range(4)))
    warm_command.use(imported, monkeypatch.setattr)

    def devices_of(devices: tuple[int, ...] = (), but: tuple[int, ...] = ()) -> tuple[str, ...]:
        program = Entrypoint(launch=Launch(devices=devices, not_devices=but))
        with hosts_of.acquire_hosts("local", program) as (host,):
            return host.machine.devices

    assert devices_of() == ("2", "3")
    assert devices_of((1, 2)) == ("1", "2")
    assert devices_of(but=(3,)) == ("2",)
    with pytest.raises(UserInputError, match="there is no device 4: this machine has 2 GPUs"):
        devices_of((4,))
    chosen = Entrypoint(env={"CUDA_VISIBLE_DEVICES": "3,0"})
    with hosts_of.acquire_hosts("local", chosen) as (host,):
        assert host.machine.devices == ("3", "0")
