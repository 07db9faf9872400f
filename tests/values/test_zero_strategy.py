"""Strategies and parallelism, as a dry run prints them for configurations and options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dsat.prepare import installed_deepspeed
from testing import scenarios
from testing.local import cpu_machine
from testing.scenarios import User
from testing.world import Failure, World

CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/tmp"}


@dataclass(frozen=True)
class DryRun:
    """The user's own strategy, the strategies to try if it does not fit, and those to search.

    `3 cpu +nvme` is stage 3 with the optimizer on the CPU and parameters on NVMe. `groups` says how
    slots share samples.
    """

    own: str
    ladder: str
    searched: str
    groups: str


@pytest.fixture(autouse=True)
def _without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip DeepSpeed's validation of each configuration, which takes seconds."""
    monkeypatch.setattr(installed_deepspeed, "_stamp", lambda: None)


def dry_run(folder: Path, slots: int, config: dict[str, Any], *options: str) -> DryRun:
    user = User(folder, World(slots=slots))
    user.has({"train_micro_batch_size_per_gpu": 1, **config})
    told = user.types(
        *("model", "--engine", "local", "--dry-run", "--slots", slots, "--ds-config", "ds.json"),
        *(*options, "--", "train.py"),
    )
    assert told.status == 0, told.err
    ladder = re.search(r"dsat tries: (.*)", told.out)
    return DryRun(
        re.findall(r"trial 0 \(baseline_(\w+)_gas", told.out)[0],
        _short(ladder[1]).replace(";", ",") if ladder else "",
        ", ".join(map(_short, re.findall(r"^  (stage[^:]*):", told.out, re.M))),
        re.findall(r"your global batch: .* x (.*)", told.out)[0],
    )


def _short(label: str) -> str:
    for long, word in (("stage ", ""), (", optimizer on", ""), (", parameters on ", " +")):
        label = label.replace(long, word)
    return label


@pytest.mark.parametrize(
    ("zero", "own"),
    [
        (None, "z0"),
        ({"stage": 2, "offload_optimizer": CPU}, "z2_offload"),
        ({"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}, "z3_offload_param"),
        ({"stage": 3, "offload_param": CPU}, "z3_offparam"),
        ({"stage": 3, "offload_optimizer": NVME}, "z3_nvme"),
        ({"stage": 2, "offload_optimizer": NVME}, "z2_offload"),
        # Offloading that a stage does not support is left out.
        ({"stage": 2, "offload_param": CPU}, "z2"),
        ({"stage": 0, "offload_optimizer": CPU}, "z0"),
        ({"stage": 2, "offload_optimizer": None}, "z2"),
        ({"stage": "2"}, "z2"),
    ],
)
def test_the_strategy_of_a_configuration(
    tmp_path: Path, zero: dict[str, Any] | None, own: str
) -> None:
    assert dry_run(tmp_path, 1, {"zero_optimization": zero}).own == own


FP32 = {"bf16": {"enabled": False}}


@pytest.mark.parametrize(
    ("slots", "zero", "more", "options", "ladder"),
    [
        # Stage 1 holds all gradients before it reduces them.
        (8, {"stage": 1}, {}, "", "2, 2 cpu, 3, 3 cpu, 3 cpu +cpu"),
        (8, {"stage": 0}, {}, "", "1, 2, 2 cpu, 3, 3 cpu, 3 cpu +cpu"),
        # With two slots, stage 3 needs more memory than stage 2 with the optimizer on the host.
        # In bf16 the optimizer step needs more than the gradients of stage 1.
        (2, {"stage": 1}, {}, "", "2 cpu, 3 cpu, 3 cpu +cpu"),
        (2, {"stage": 1}, FP32, "", "2, 2 cpu, 3 cpu, 3 cpu +cpu"),
        (4, {"stage": 1}, {}, "--zero-stages 1 2", "2, 2 cpu"),
        # The list begins with the user's strategy.
        (8, {"stage": 3, "offload_optimizer": CPU}, {}, "", "3 cpu +cpu"),
        (8, {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}, {}, "", ""),
        (1, {"stage": 1}, {}, "--nvme-path /tmp", "2 cpu, 3 cpu, 3 cpu +cpu, 3 nvme +nvme"),
        # Settings that the user fixed stay. The step of stage 3 processes its state by groups.
        (1, {"stage": 1, "offload_optimizer": {"device": "none"}}, {}, "", "3"),
        (1, {"stage": 1}, {}, "--fix offload_optimizer offload_param", "3"),
    ],
)
def test_the_ladder(
    tmp_path: Path, slots: int, zero: Any, more: dict[str, Any], options: str, ladder: str
) -> None:
    found = dry_run(tmp_path, slots, {"zero_optimization": zero, **more}, *options.split())
    assert found.ladder == ladder


@pytest.mark.parametrize(
    ("zero", "options", "searched"),
    [
        # No offloading when the model fits without; the user's own in every stage that has it.
        ({"stage": 1}, "", "0, 1, 2, 3"),
        ({"stage": 3, "offload_optimizer": CPU}, "", "0, 1 cpu, 2 cpu, 3 cpu"),
        (
            {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
            "--zero-stages 0 1 3",
            "0, 1 cpu, 3 cpu +cpu",
        ),
        (
            {"stage": 1},
            "--tune offload_optimizer offload_param --zero-stages 3",
            "3, 3 cpu, 3 cpu +cpu",
        ),
    ],
)
def test_what_is_searched(tmp_path: Path, zero: Any, options: str, searched: str) -> None:
    found = dry_run(tmp_path, 2, {"zero_optimization": zero}, *options.split())
    assert found.searched == searched


def test_cores_have_no_other_memory_to_offload_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenarios, "machine_of", lambda world: cpu_machine(2))
    assert dry_run(tmp_path, 2, {"zero_optimization": {"stage": 0}}).ladder == "1, 3"
    asked = dry_run(tmp_path, 2, {"zero_optimization": {"stage": 1}}, "--tune", "offload_optimizer")
    assert (asked.ladder, asked.searched) == ("2 cpu, 3 cpu", "0, 1, 2, 3, 2 cpu, 3 cpu")


def test_after_a_rung_fitted_those_above_it_are_searched_too(tmp_path: Path) -> None:
    """NVMe is not among them, as it helps only if host memory is short, too."""
    user = User(tmp_path, World(slots=8, failures=(Failure("OOM", {"stage": [0, 1, 2]}),)))
    user.has({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}})
    told = user.tunes("--max-trials", 8, "--nvme-path", tmp_path)
    assert told.status == 0, told.err
    profiles = [row["name"] for row in told.trials if row["kind"] == "profile"]
    assert [name.partition("_gas")[0] for name in profiles] == [
        *("profile_z1", "profile_z2", "profile_z2_offload", "profile_z3")
    ]
    searched = re.findall(r"^(stage[^:]*): .* per device at micro batch", told.err, re.M)
    assert list(map(_short, searched)) == ["3", "3 cpu", "3 cpu +cpu"]


@pytest.mark.parametrize(
    ("config", "groups"),
    [
        ({}, "8 devices"),
        ({"tensor_parallel": {"autotp_size": 2}}, "4 groups of 2 devices (tensor parallel 2)"),
        (
            {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 4},
            "1 groups of 8 devices (tensor parallel 2, sequence parallel 4)",
        ),
        ({"tensor_parallel": {"autotp_size": 0}, "sequence_parallel_size": "auto"}, "8 devices"),
        ({"tensor_parallel": None}, "8 devices"),
    ],
)
def test_how_slots_share_samples(tmp_path: Path, config: dict[str, Any], groups: str) -> None:
    assert dry_run(tmp_path, 8, config).groups == groups
