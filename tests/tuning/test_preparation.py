"""Preparation of a run: machines, and what dsat rejects before anything is started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import Machine
from dsat.engines.places import PROVIDERS
from dsat.engines.places.base import Environment
from dsat.errors import UserInputError
from dsat.tuning import preparation as prepare
from dsat.tuning.settings import Settings
from testing.local import cpu_machine

pytestmark = pytest.mark.usefixtures("unchecked_configurations")

A100, T4 = ("A100", 80 * 2**30), ("T4", 15 * 2**30)
SCRIPT = ("train.py", "--deepspeed_config", "ds_config.json")


@pytest.fixture(autouse=True)
def _script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    Path("ds_config.json").write_text('{"train_micro_batch_size_per_gpu": 1}')


@contextlib.contextmanager
def two_nodes(environment: Environment, given: Mapping[str, Any]) -> Iterator[list[Host]]:
    """Yield the hosts of a job of two nodes with two slots each."""
    yield [Host(cpu_machine(2), name, address=name) for name in ("n1", "n2")]


@contextlib.contextmanager
def within_a_quota(environment: Environment, given: Mapping[str, Any]) -> Iterator[list[Host]]:
    """Yield the host of a container on four cores, limited to the CPU time of two."""
    four = replace(cpu_machine(4), devices=("0", "1", "2", "3"))
    yield [Host(replace(four, devices=("0", "1"), threads=2, allowed=four.devices))]


def plan_of(command: str, engine: str) -> tuple[int, int]:
    """Return the slots of a trial, and the slots of each host."""
    words = (*command.split(), *SCRIPT)
    wanted = Settings(method="random", command=words, engine=engine, dry_run=True)
    with prepare.prepare_run(wanted) as ready:
        return ready.plan.slots_per_trial, ready.machine.num_slots


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "slots"),
    [
        ("torchrun --nnodes 2 --nproc-per-node 2", 4),
        ("torchrun --nnodes=2 --nproc_per_node=auto", 4),
        ("torchrun --nproc_per_node cpu", 2),
        ("deepspeed --num_nodes 2 --num_gpus 2", 4),
        ("deepspeed", 1),  # one rank for each NUMA node of the machine
    ],
)
def test_a_launcher_is_told_of_the_machines_that_a_job_has(
    command: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_a_job = PROVIDERS["slurm"]._replace(acquire=two_nodes, detect=lambda _: True)
    monkeypatch.setitem(PROVIDERS, "slurm", in_a_job)
    for engine in ("slurm", "auto"):
        assert plan_of(command, engine) == (slots, 2)
    if slots > 2:
        with pytest.raises(UserInputError, match="2 machines, but trials run on this one"):
            plan_of(command, "local")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "slots", "of_host"),
    [
        ("torchrun --nproc_per_node 4", 4, 4),
        ("torchrun --nproc_per_node cpu", 2, 2),
        ("deepspeed --num_gpus 1", 1, 2),
    ],
)
def test_ranks_that_are_asked_for_may_share_a_quota_of_processor_time(
    command: str, slots: int, of_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PROVIDERS, "local", PROVIDERS["local"]._replace(acquire=within_a_quota))
    assert plan_of(command, "local") == (slots, of_host)
    with pytest.raises(UserInputError, match="needs 5 devices"):
        plan_of("torchrun --nproc_per_node 5", "local")


@pytest.mark.parametrize(
    ("kinds", "choice"),
    [
        ([A100, T4, A100], "0,2"),
        ([A100, ("A100", 40 * 2**30)], "0"),
        ([A100, ("A100", 79 * 2**30)], ""),  # the firmware reserves a part
    ],
)
def test_devices_of_several_kinds_are_refused(
    kinds: list[tuple[str, int]], choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def acquire(environment: Environment, given: Mapping[str, Any]) -> Iterator[list[Host]]:
        names, sizes = zip(*kinds, strict=True)
        devices, variables = tuple("012"[: len(kinds)]), ("CUDA_VISIBLE_DEVICES",)
        machine = Machine("cuda", "A100", devices, variables, min(sizes), sizes)
        yield [Host(replace(machine, device_names=names))]

    monkeypatch.setitem(PROVIDERS, "local", PROVIDERS["local"]._replace(acquire=acquire))
    if not choice:
        assert plan_of("", "local")[1] == len(kinds)
        return
    match = rf"several kinds .*CUDA_VISIBLE_DEVICES={choice}\b"
    with pytest.raises(UserInputError, match=match):
        plan_of("", "local")
