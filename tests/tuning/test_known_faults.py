"""Strategies that the installed DeepSpeed trains wrongly are not searched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from testing import scenarios
from testing.scenarios import User, machine_of

MICRO = "train_micro_batch_size_per_gpu"
OWN = {MICRO: 4, "gradient_accumulation_steps": 4}
STAGE_2 = {"zero_optimization": {"stage": 2}}


def install(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a version of DeepSpeed is installed on the made-up machine."""
    software = (f"deepspeed {version}",) if version else ()
    found = lambda world: replace(machine_of(world), software=software)  # noqa: E731
    monkeypatch.setattr(scenarios, "machine_of", found)


@pytest.mark.parametrize(
    ("version", "config", "options", "stages"),
    [
        ("0.18.2", OWN, "", {0, 1, 3}),
        ("0.18.2", OWN, "-z 0 1 2 3", {0, 1, 2, 3}),  # the user named them
        (
            "0.18.2",
            {MICRO: 4},
            "--train-batch-size 64",
            {0, 1, 3},
        ),  # accumulated, perhaps
        ("0.18.2", {MICRO: 4}, "", {0, 1, 2, 3}),
        ("0.18.3", OWN, "", {0, 1, 2, 3}),
        ("", OWN, "", {0, 1, 2, 3}),
        ("0.18.2", {**OWN, **STAGE_2}, "", {0, 1, 2, 3}),
    ],
)
def test_a_stage_with_a_fault_is_left_out(
    user: User,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    config: dict[str, Any],
    options: str,
    stages: set[int],
) -> None:
    install(version, monkeypatch)
    user.has(config)
    told = user.tunes("--dry-run", *options.split(), method="random")
    plan = told.json["plan"]
    assert {*plan["zero_stages"]} - {*plan["faulty_stages"]} == stages
    is_own = "zero_optimization" in config
    assert ("your configuration has a known fault" in told.err) is is_own
    assert ("DeepSpeed#7718" in told.err and "0.19.5" in told.err) is (is_own or 2 not in stages)


@pytest.mark.parametrize(
    ("more", "version", "options", "stages"),
    [
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "", "", {1, 2, 3}),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "0.18.5", "", {2, 3}),  # stage 1 has a fault
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "0.18.4", "", {0, 2, 3}),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "0.15.4", "", {0, 1, 2, 3}),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "0.18.4", "", {1, 2, 3}),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "", "", {0, 1, 2, 3}),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "", "", {1, 2, 3}),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "", "-z 0 1", {0, 1}),  # the user named them
    ],
)
def test_a_stage_that_refuses_the_types_is_left_out(
    user: User,
    monkeypatch: pytest.MonkeyPatch,
    more: dict[str, Any],
    version: str,
    options: str,
    stages: set[int],
) -> None:
    install(version, monkeypatch)
    user.has({MICRO: 4, **STAGE_2, "bf16": {"enabled": True}, **more})
    told = user.tunes("--dry-run", *options.split(), method="random")
    plan = told.json["plan"]
    assert {*plan["zero_stages"]} - {*plan["faulty_stages"]} == stages
    assert ("stage 0 is not searched: DeepSpeed refuses it" in told.err) is (0 not in stages)


def test_a_run_goes_on_with_a_version_without_the_fault(
    user: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    user.has(OWN)
    searched = []
    for version, options in (("0.18.2", (4,)), ("0.19.8", (6, "--resume"))):
        install(version, monkeypatch)
        told = user.tunes("--finals", 0, "--max-trials", *options, method="random")
        assert told.status == 0, told.err
        searched.append("\nstage 2: " in told.err)
    assert searched == [False, True]
