"""What a trial makes of a script's TrainingArguments."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsat.in_trial import hf_trainer
from dsat.in_trial.hf_trainer import TrainerSettings
from dsat.in_trial.script_switches import ScriptSwitches
from dsat.inputs.switches import OTHER_BATCH, OTHER_CONFIG
from dsat.values.trial import BatchTriple, Trial, TrialKind


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 16}))
    return path


def script_args(**changes: Any) -> SimpleNamespace:
    """As transformers 5 has them, just made and not yet checked."""
    values = {
        "deepspeed": "ds.json",
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": None,
        "activation_checkpointing": None,
        "max_steps": -1,
        "report_to": "all",
        "push_to_hub": True,
        "auto_find_batch_size": True,
        "eval_on_start": True,
        "resume_from_checkpoint": "checkpoint-5",
        "dataloader_drop_last": False,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": True,
        "optim": "adamw_torch_fused",
        "torch_compile": False,
    }
    return SimpleNamespace(**{**values, **changes})


def settings(
    path: Path | None, micro_batch: int = 16, gas: int = 2, overrides: Any = None, **changes: Any
) -> TrainerSettings:
    batch = BatchTriple(micro_batch * gas, micro_batch, gas)
    trial = Trial(1, TrialKind.SEARCH, "trial", 0, batch, overrides or {})
    return TrainerSettings(trial, path, **{"switches": ScriptSwitches({}, on_cpu=True), **changes})


@pytest.mark.parametrize("max_steps", [None, 82])
def test_only_a_measured_trial_is_short_and_leaves_nothing(
    config_path: Path, max_steps: int | None
) -> None:
    args, its = script_args(), {"zero_optimization": {"stage": 2}}
    trial = settings(config_path, overrides=its, max_steps=max_steps)
    assert hf_trainer.prepare(args, trial) == [OTHER_BATCH, OTHER_CONFIG]
    wanted = script_args(
        deepspeed=str(config_path), per_device_train_batch_size=16, gradient_accumulation_steps=2
    )
    if max_steps is not None:
        wanted.max_steps, wanted.report_to, wanted.resume_from_checkpoint = 82, "none", None
        wanted.push_to_hub = wanted.auto_find_batch_size = wanted.eval_on_start = False
        wanted.dataloader_drop_last = True
    assert args == wanted


def test_no_callback_makes_the_trainer_save_or_evaluate() -> None:
    callbacks = pytest.importorskip("transformers.trainer_callback")

    class Control(callbacks.TrainerControl):  # type: ignore[misc, name-defined]
        pass

    hf_trainer.ignore_requests(SimpleNamespace(TrainerControl=Control))
    control = Control(should_save=True)
    control.should_evaluate = control.should_log = True
    assert (control.should_save, control.should_evaluate, control.should_log) == (
        *(False, False, True),
    )


def test_the_first_trial_reads_the_file_that_accelerate_names(
    config_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 500}}
    config_path.write_text(json.dumps({"optimizer": {"type": "Adam"}, "scheduler": scheduler}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(config_path))
    switches = ScriptSwitches({}, on_cpu=True)
    args = script_args(deepspeed=None)
    hf_trainer.prepare(args, settings(None, 1, 1, max_steps=20, switches=switches))
    assert args.max_steps == 500 and "optim" not in switches.found


def test_a_dict_stays_a_dict_and_its_length_of_training_is_kept(config_path: Path) -> None:
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000}}
    config_path.write_text(json.dumps({"scheduler": scheduler}))
    args = script_args(deepspeed={"train_micro_batch_size_per_gpu": "auto"})
    hf_trainer.prepare(args, settings(config_path, max_steps=82))
    assert (args.deepspeed, args.max_steps) == ({"scheduler": scheduler}, 1000)


@pytest.mark.parametrize("deepspeed", [None, {}])
def test_without_deepspeed_it_only_ends_soon(config_path: Path, deepspeed: Any) -> None:
    args = script_args(deepspeed=deepspeed)
    assert hf_trainer.prepare(args, settings(config_path, max_steps=82)) == []
    assert (args.deepspeed, args.per_device_train_batch_size, args.max_steps) == (deepspeed, 8, 82)


@pytest.mark.parametrize(
    ("micro_batch", "gas", "expected"), [(8, 1, []), (16, 1, [OTHER_BATCH]), (8, 2, [OTHER_BATCH])]
)
def test_only_a_real_disagreement_is_told(
    config_path: Path, micro_batch: int, gas: int, expected: list[str]
) -> None:
    its = {"zero_optimization": {"stage": 2}}
    trial = settings(config_path, micro_batch=micro_batch, gas=gas, overrides=its)
    config_path.write_text(json.dumps(its))
    named = script_args(deepspeed=str(config_path))
    assert hf_trainer.prepare(copy.copy(named), trial) == expected
    assert hf_trainer.prepare(copy.copy(named), replace(trial, batch_in_file=True)) == []
    other = copy.copy(named)
    other.deepspeed = {"zero_optimization": {"stage": "auto"}, "steps_per_print": 9}
    assert hf_trainer.prepare(copy.copy(other), trial) == expected
    other.deepspeed = {"zero_optimization": {"stage": 1}}
    assert hf_trainer.prepare(other, trial) == [*expected, OTHER_CONFIG]


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("wanted", [True, False])
def test_gradient_checkpointing_under_both_its_names(
    config_path: Path, old: bool, wanted: bool
) -> None:
    args = script_args(gradient_checkpointing=True)
    if old:
        del args.activation_checkpointing
    switches = ScriptSwitches({"gradient_checkpointing": wanted}, on_cpu=True)
    hf_trainer.prepare(args, settings(config_path, switches=switches))
    field = "gradient_checkpointing" if old else "activation_checkpointing"
    assert getattr(args, field) is wanted
