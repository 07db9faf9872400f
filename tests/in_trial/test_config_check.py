"""Validation of configurations with the configuration classes of the installed DeepSpeed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsat.space.deepspeed_settings import SETTINGS
from testing.versions import needs

pytestmark = pytest.mark.slow  # imports DeepSpeed

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a ZeRO setting that does not exist": (
        {"zero_optimization": {"stage": 1, "reduce_bucket": 10**6}},
        "zero_optimization.reduce_bucket",
        "'reduce_bucket_size'",
    ),
    "a setting of a section that does not exist": (
        {"bf16": {"enable": True}},
        "bf16.enable",
        "'enabled'",
    ),
    "a typing error that DeepSpeed ignores": (
        {"gradient_cliping": 1.0},
        "gradient_cliping",
        "'gradient_clipping'",
    ),
    "a typing error in a section without a model": (
        {"activation_checkpointing": {"cpu_checkpoint": True}},
        "activation_checkpointing.cpu_checkpoint",
        "'cpu_checkpointing'",
    ),
    "a typing error in a section of a section": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_mem": True}}},
        "zero_optimization.offload_param.pin_mem",
        "'pin_memory'",
    ),
    "a flag for a section": (
        {"flops_profiler": True},
        "flops_profiler",
        "mapping, not true",
    ),
    "a removed section": (
        {"amp": {"enabled": True}},
        "amp",
        "Deleting 'amp' is enough",
    ),
    "a removed setting": (
        {
            "zero_optimization": {
                "stage": 3,
                "mics_shard_size": 2,
                "mics_hierarchical_params_gather": True,
            }
        },
        "zero_optimization.mics_shard_size",
        "Deleting 'zero_optimization.mics_shard_size' is enough",
    ),
    "two precisions": (
        {"bf16": {"enabled": True}, "fp16": {"enabled": True}},
        "",
        "cannot be simultaneously enabled",
    ),
    "a word for a truth value": (
        {"zero_optimization": {"overlap_comm": "often"}},
        "zero_optimization.overlap_comm",
        "not 'often'",
    ),
    "a number out of bounds": (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 1.5}}},
        "zero_optimization.offload_optimizer.ratio",
        "not 1.5",
    ),
}
TAKEN: dict[str, dict[str, Any]] = {
    "auto": {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "gradient_clipping": "auto"},
    "usual": {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "sub_group_size": 5e8, "stage3_max_live_parameters": 1},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "wall_clock_breakdown": False,
        "tensorboard": {"enabled": True, "output_path": "x"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "my_own": {"lr": 1},
    },
}

SEVERAL: dict[str, Any] = {
    "zero_optimization": {
        "overlap_com": True,
        "stage": 2,
        "reduce_bucket": 5,
        "sub_group_size": -1,
    },
    "optimizer": {"type": "AdamW", "parms": {"lr": 1}},
}
SEVERAL_PATHS = {
    "zero_optimization.sub_group_size",
    "zero_optimization.overlap_com",
    "zero_optimization.reduce_bucket",
    "optimizer.parms",
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("check")
    configs = [config for config, _, _ in REFUSED.values()] + list(TAKEN.values())
    part = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    questions = {
        "configs": [{"config": config, "whole": True} for config in configs]
        + [{"config": part, "whole": False}]
        + [{"config": each, "whole": True} for each in (part, SEVERAL)],
        "defaults": [*(setting.path for setting in SETTINGS), "zero_optimization.nothing"],
    }
    asked, answered = folder / "questions.json", folder / "answers.json"
    asked.write_text(json.dumps(questions))
    command = [sys.executable, "-m", "dsat.in_trial.config_check", str(asked), str(answered)]
    subprocess.run(command, check=True, timeout=600, cwd=Path(__file__).parents[2])
    found: dict[str, Any] = json.loads(answered.read_text())
    return found


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(name, marks=needs("deepspeed", "0.19.8", "has this setting"))
        if name in ("a removed section", "a removed setting")
        else name
        for name in REFUSED
    ],
)
def test_problems_have_their_place_and_a_close_match(what: str, answers: dict[str, Any]) -> None:
    _, path, said = REFUSED[what]
    [problem] = answers["verdicts"][list(REFUSED).index(what)]["problems"]
    assert problem["path"] == path
    assert said in problem["message"] + problem["hint"]


def test_what_deepspeed_takes_is_taken(answers: dict[str, Any]) -> None:
    *taken, part, whole, _ = answers["verdicts"][len(REFUSED) :]
    assert [verdict["problems"] for verdict in taken] == [[]] * len(TAKEN)
    assert list(taken[-1]["ignored"]) == ["my_own"]
    # Conditions on several settings count for whole configurations only.
    assert not part["problems"]
    [problem] = whole["problems"]
    assert "Stage 3" in problem["message"]


def test_all_problems_are_found_at_once(answers: dict[str, Any]) -> None:
    [*_, verdict] = answers["verdicts"]
    assert {problem["path"] for problem in verdict["problems"]} == SEVERAL_PATHS


@needs("deepspeed", "0.19.8", "has other settings and defaults")
def test_defaults_of_settings(answers: dict[str, Any]) -> None:
    defaults = answers["defaults"]
    assert set(defaults) == {setting.path for setting in SETTINGS}
    assert defaults["zero_optimization.stage3_max_live_parameters"] == 10**9
    assert defaults["zero_optimization.offload_optimizer.pin_memory"] is True
    assert defaults["activation_checkpointing.cpu_checkpointing"] is False
