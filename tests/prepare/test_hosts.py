"""The devices that a command uses if no number is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from dsat.command import entrypoint
from dsat.engines.machines.hosts import Host
from dsat.prepare.hosts import all_slots
from testing.scenarios import machine_of
from testing.world import World


@pytest.mark.parametrize("local_size", [None, "3"])
def test_ranks_on_a_cpu_are_those_that_deepspeed_starts(
    local_size: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    if local_size:
        monkeypatch.setenv("LOCAL_SIZE", local_size)
    (tmp_path / "train.py").touch()
    gpus = Host(machine_of(World(slots=4)))
    cores = replace(gpus, machine=replace(gpus.machine, accelerator="cpu"))
    program = entrypoint.parse("deepspeed train.py", tmp_path)
    assert all_slots([cores], program) == CPU_Accelerator().device_count()
    assert all_slots([gpus], program) == 4
    torchrun = entrypoint.parse("torchrun --nproc-per-node auto train.py", tmp_path)
    assert all_slots([cores], torchrun) == 4
