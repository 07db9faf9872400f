"""The installed DeepSpeed says itself what it refuses, and takes every plain configuration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsat.in_trial.simulation import refusals
from dsat.inputs.ds_schema import Schema
from dsat.inputs.plain_settings import is_plain

ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
ANY_SCHEMA = Schema("this", {"properties": {}})


def config(stage: int, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    found = {"optimizer": ADAM, "zero_optimization": {"stage": stage, **(zero or {})}, **more}
    return {key: value for key, value in found.items() if value is not None}


CPU = {"device": "cpu"}
BF16 = {"bf16": {"enabled": True}}
REFUSED = {
    "prescaling": (config(2, prescale_gradients=True), "pre-scale gradients is not yet"),
    "sum": (config(3, gradient_allreduce_op="sum"), "not supported with ZeRO stage 3"),
    "norm": (config(1, {"compute_grad_norm": False}), "requires gradient_clipping=0"),
    "precisions": (config(1, **BF16, fp16={"enabled": True}), "simultaneously enabled"),
    "ratio": (config(2, {"offload_optimizer": {**CPU, "ratio": 0.5}}), "Partial offloading"),
    "untested": (config(1, optimizer={"type": "SGD"}), "untested ZeRO Optimizer"),
    "master": (
        config(0, bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
        "only supported with ZeRO Stage 1, 2, or 3",
    ),
    "max_grad_norm": (
        config(1, optimizer={"type": "Adam", "params": {"max_grad_norm": 1}}),
        "'max_grad_norm' is not supported",
    ),
    "alignment": (config(1, {"allgather_bucket_size": 7}), "must be a multiple"),
    "legacy": (config(1, {"legacy_stage1": True}), "deprecated version of ZeRO Stage 1"),
    "accumulation": (
        config(0, **BF16, data_types={"grad_accum_dtype": "fp32"}),
        "unsupported mix of",
    ),
}
TAKEN = {
    "prescaling": config(2, {"reduce_scatter": False}, prescale_gradients=True),
    "sum": config(2, gradient_allreduce_op="sum"),
    "norm": config(1, {"compute_grad_norm": False}, gradient_clipping=0.0),
    "ratio": config(3, {"offload_optimizer": {**CPU, "ratio": 0.5}}, **BF16),
    "untested": config(1, optimizer={"type": "SGD"}, zero_allow_untested_optimizer=True),
    "hpz": config(3, {"zero_hpz_partition_size": 2}, **BF16),
    "nobody knows the script's": config(1, optimizer=None, prescale_gradients=True),
    "auto": config(2, {"reduce_bucket_size": "auto"}, gradient_clipping="auto"),
}


def plain_configs() -> list[dict[str, Any]]:
    fp16 = {"fp16": {"enabled": True}}
    found = [config(0), config(1, **fp16), config(2, {"offload_optimizer": CPU}, **BF16)]
    found.append(config(3, {"offload_optimizer": CPU, "offload_param": CPU}, **BF16))
    switches = ("overlap_comm", "contiguous_gradients", "reduce_scatter", "round_robin_gradients")
    for stage, value in ((2, True), (3, False)):
        found.append(config(stage, dict.fromkeys(switches, value), **BF16))
    return found


@pytest.mark.slow
def test_deepspeed_says_what_it_refuses(tmp_path: Path) -> None:
    plain = plain_configs()
    assert all(is_plain(one, ANY_SCHEMA) for one in plain)
    refused = [one for one, _ in REFUSED.values()]
    configs = [*refused, *TAKEN.values(), *plain]
    questions, answers = tmp_path / "questions.json", tmp_path / "answers.json"
    questions.write_text(json.dumps({"slots": 2, "configs": configs}))
    run = subprocess.run(
        [sys.executable, "-m", refusals.__name__, str(questions), str(answers)],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(answers.read_text())
    for (name, (_, words)), objection in zip(REFUSED.items(), said[: len(REFUSED)], strict=True):
        assert objection is not None, name
        assert words in objection, name
    others = zip([*TAKEN.values(), *plain], said[len(REFUSED) :], strict=True)
    assert [(one, objection) for one, objection in others if objection is not None] == []
