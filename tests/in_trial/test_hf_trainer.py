"""How a trial changes a script's TrainingArguments."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsat.command.switches import OTHER_BATCH, OTHER_CONFIG
from dsat.in_trial.adapters import hf_trainer
from dsat.in_trial.adapters.trial import RunningTrial
from dsat.in_trial.script_switches import ScriptSwitches
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.scripts import CONFIG, Scripts

pytest.importorskip("transformers")
slow = pytest.mark.slow
ARGUMENTS = f"""
import copy
from transformers import TrainerControl, TrainingArguments
CONFIG = {CONFIG}
FIELDS = '''
    per_device_train_batch_size gradient_accumulation_steps max_steps push_to_hub
    auto_find_batch_size eval_on_start resume_from_checkpoint dataloader_drop_last
    gradient_checkpointing report_to
'''.split()
OWN = dict(
    per_device_train_batch_size=8,
    report_to="tensorboard",
    push_to_hub=True,
    auto_find_batch_size=True,
    resume_from_checkpoint="checkpoint-5",
    eval_on_start=True,
    eval_strategy="steps",
)


def arguments(**changes):
    return TrainingArguments(FOLDER / "out", use_cpu=True, **{{**OWN, **changes}})


def fields_of(args):
    return {{name: getattr(args, name, None) for name in FIELDS}}


def size_of(config):
    return copy.deepcopy({{**CONFIG, "train_micro_batch_size_per_gpu": config}})
"""
MAKES = """
alone = arguments()  # first: transformers 4.46 keeps in mind that others used DeepSpeed
by_file, by_dict = arguments(deepspeed="ds_config.json"), arguments(deepspeed=size_of("auto"))
note(
    by_file=fields_of(by_file),
    file=by_file.deepspeed,
    by_dict=fields_of(by_dict),
    dict=by_dict.deepspeed["train_micro_batch_size_per_gpu"],
    alone=fields_of(alone),
)
control = TrainerControl(should_save=True)
control.should_evaluate = control.should_log = True
note(control=[control.should_save, control.should_evaluate, control.should_log])
"""
TRIAL: dict[str, Any] = {"micro_batch": 16, "gas": 2}


@slow
def test_a_measured_trial_is_short_and_leaves_nothing(scripts: Scripts) -> None:
    ended = scripts.run(ARGUMENTS + MAKES, **TRIAL)
    notes = ended.notes()
    for way in ("by_file", "by_dict", "alone"):
        found, own = notes[way], way == "alone"
        sizes = found["per_device_train_batch_size"], found["gradient_accumulation_steps"]
        assert sizes == ((8, 1) if own else (16, 2))
        assert found["max_steps"] > 1000 and found["dataloader_drop_last"]
        switches = ("push_to_hub", "auto_find_batch_size", "eval_on_start")
        assert not any(found[name] for name in switches), found
        assert found["resume_from_checkpoint"] is None and found["report_to"] == []
    assert Path(notes["file"]) == ended.folder / "ds_config.json"
    assert notes["dict"] == 16, "a dictionary stays one"
    assert notes["control"] == [False, False, True], "no callback makes it save or evaluate"


FULL = """
args = arguments(deepspeed="ds_config.json", push_to_hub=False)
note(fields=fields_of(args), control=TrainerControl(should_save=True).should_save)
"""


@slow
def test_a_run_in_full_length_has_the_trials_batch_and_is_the_scripts_else(
    scripts: Scripts,
) -> None:
    notes = scripts.run_in_full(ARGUMENTS + FULL).notes()
    found = notes["fields"]
    assert found["per_device_train_batch_size"] == 2 and notes["control"]
    assert found["max_steps"] == -1 and found["resume_from_checkpoint"] == "checkpoint-5"
    assert found["eval_on_start"] and found["report_to"] == ["tensorboard"]


@slow
def test_the_length_of_training_in_a_scheduler_is_kept(scripts: Scripts) -> None:
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 1000}}
    ended = scripts.run(ARGUMENTS + MAKES, config={"scheduler": scheduler}, **TRIAL)
    assert ended.notes()["by_file"]["max_steps"] == 1000
    assert ended.notes()["by_dict"]["max_steps"] == 1000


@slow
@pytest.mark.parametrize(
    ("micro_batch", "gas", "given", "expected"),
    [
        (8, 1, "{**CONFIG, 'zero_optimization': {'stage': 'auto'}}", []),
        (16, 1, "{**CONFIG, 'zero_optimization': {'stage': 1}}", [OTHER_BATCH]),
        (
            8,
            2,
            "{**CONFIG, 'steps_per_print': 9, 'zero_optimization': {'stage': 1}}",
            [OTHER_BATCH],
        ),
        (8, 1, "{**CONFIG, 'zero_optimization': {'stage': 3}}", [OTHER_CONFIG]),
        (8, 1, "own_config()", []),
    ],
)
def test_only_a_real_disagreement_is_told(
    scripts: Scripts, micro_batch: int, gas: int, given: str, expected: list[str]
) -> None:
    script = f"arguments(deepspeed={given})\ntrain(make_engine())"
    ended = scripts.run(ARGUMENTS + script, micro_batch=micro_batch, gas=gas).well()
    assert [text for text in ended.warnings if text in (OTHER_BATCH, OTHER_CONFIG)] == expected


@slow
@pytest.mark.parametrize("wanted", [True, False])
def test_gradient_checkpointing_is_the_trials(scripts: Scripts, wanted: bool) -> None:
    made = "args = arguments(deepspeed='ds_config.json', gradient_checkpointing=not " + f"{wanted})"
    noted = "note(on=bool(args.gradient_checkpointing))"
    ended = scripts.run(
        f"{ARGUMENTS}\n{made}\n{noted}", switches={"gradient_checkpointing": wanted}
    )
    assert ended.notes()["on"] is wanted


WITHOUT_DEEPSPEED = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 64
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8))
args = TrainingArguments(FOLDER / "out", use_cpu=True, max_steps=5, report_to="none")
Trainer(model, args, train_dataset=rows).train()
note(trained=True)
"""


@slow
def test_a_trainer_without_deepspeed_is_refused_before_it_trains(scripts: Scripts) -> None:
    """Otherwise it would train to its end, and the script would save a model."""
    ended = scripts.run(WITHOUT_DEEPSPEED)
    assert ended.outcome.kind is OutcomeKind.INVALID
    assert "the Trainer does not use DeepSpeed" in ended.outcome.message
    assert not (ended.folder / "notes0.json").exists()


PLUGINS = """
from accelerate import DeepSpeedPlugin

def seen(**given):
    config = DeepSpeedPlugin(**given).hf_ds_config.config
    stage = config["zero_optimization"]["stage"]
    return stage, config["gradient_accumulation_steps"], "train_batch_size" in config

def with_stage(stage):
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    return {**sizes, "train_batch_size": 8, "zero_optimization": {"stage": stage}}

first = FIRST
note(seen=[seen(**first), seen(hf_ds_config=with_stage(3)), seen(**first)])
train(make_engine())
"""


@slow
@pytest.mark.parametrize("first", ['{"hf_ds_config": with_stage(2)}', '{"zero_stage": 2}'])
def test_an_accelerate_plugin_for_another_model_keeps_its_configuration(
    first: str, scripts: Scripts
) -> None:
    """A frozen teacher may be in stage 3, the only one that needs no optimizer."""
    pytest.importorskip("accelerate")
    own, teacher, again = scripts.run(PLUGINS.replace("FIRST", first)).well().notes()["seen"]
    assert own == again and own[:2] == [1, 1]
    assert teacher == [3, 1, False]


def test_the_first_trial_reads_the_file_that_accelerate_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the file as transformers does, which accepts a key that occurs twice."""
    path = tmp_path / "ds_config.json"
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 500}}
    text = json.dumps({"optimizer": {"type": "Adam"}, "scheduler": scheduler})
    path.write_text('{"optimizer": {}, ' + text.removeprefix("{"))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    trial = Trial(0, TrialKind.BASELINE, "own", 0, BatchTriple(1, 1, 1), {})
    switches = ScriptSwitches({}, {}, on_cpu=True)
    settings = hf_trainer.TrainerSettings(trial, None, switches, max_steps=20)
    values = {"dataloader_num_workers": 0, "optim": "adamw_torch", "gradient_checkpointing": False}
    args = SimpleNamespace(deepspeed=None, **values)
    hf_trainer.prepare(RunningTrial(trainer=settings), args)
    assert args.max_steps == 500 and "optim" not in switches.found
