"""Copies of the user's own configuration files with the best configuration in them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsat.command.own_files import Answer, form_of_training, rewrite_command
from dsat.command.switches import CHECKPOINTING

CONFIG = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2}
AXOLOTL = """\
base_model: ./tiny  # mine
micro_batch_size: 2
gradient_accumulation_steps: 4   # 8 in all
deepspeed: deepspeed_configs/zero2.json
datasets:
  - path: "data.jsonl"
    type: alpaca
"""
TRAINER = """\
### model
model_name_or_path: ./tiny
deepspeed: ds_z3.json
per_device_train_batch_size: 1  # small
learning_rate: 1.0e-4
"""
ACCELERATE = """\
# mine
distributed_type: DEEPSPEED
deepspeed_config:
  zero_stage: 2
  deepspeed_multinode_launcher: standard
mixed_precision: bf16
num_processes: 1  # one
"""


def answer(
    folder: Path,
    switches: Mapping[str, Any] = {CHECKPOINTING: True},
    *,
    by_accelerate: bool = False,
) -> Answer:
    path = folder / "run" / "best_ds_config.json"
    return Answer(path, CONFIG, switches, by_accelerate=by_accelerate)


def copied(command: str, text: str, best: Answer) -> tuple[list[str], str]:
    """Return the new command for one that names `own.yaml`, and the copy of that file."""
    folder = best.path.parents[1]
    (folder / "own.yaml").write_text(text)
    found = rewrite_command(command.split(), folder, best)
    assert found is not None
    return found.words, found.copies["own.yaml"]


@pytest.mark.parametrize(
    ("command", "text", "key", "kept"),
    [
        (
            "axolotl train own.yaml",
            AXOLOTL,
            "micro_batch_size",
            ["# mine", "# 8 in all", 'datasets:\n  - path: "data.jsonl"\n    type: alpaca\n'],
        ),
        (
            "accelerate launch -m axolotl.cli.train own.yaml",
            AXOLOTL,
            "micro_batch_size",
            ["# mine"],
        ),
        (
            "llamafactory-cli train own.yaml",
            TRAINER,
            "per_device_train_batch_size",
            ["### model", "# small", "1.0e-4"],
        ),
        ("trl sft --config own.yaml", TRAINER, "per_device_train_batch_size", ["# small"]),
        ("trl sft --config=own.yaml", TRAINER, "per_device_train_batch_size", ["# small"]),
        ("swift sft own.yaml", TRAINER, "per_device_train_batch_size", ["# small"]),
    ],
)
def test_a_copy_of_the_frameworks_file_has_the_answer_and_its_comments(
    command: str, text: str, key: str, kept: list[str], tmp_path: Path
) -> None:
    words, copy = copied(command, text, answer(tmp_path))
    path = tmp_path / "run/best_files/own.yaml"
    assert shlex.join(words) == command.replace("own.yaml", str(path))
    data = yaml.safe_load(copy)
    assert (data[key], data["gradient_accumulation_steps"]) == (8, 2)
    assert data["deepspeed"] == str(path.parents[1] / "best_ds_config.json")
    assert data["gradient_checkpointing"] is True
    assert all(comment in copy for comment in kept)
    changed = {key, "gradient_accumulation_steps", "deepspeed", "gradient_checkpointing"}
    own = yaml.safe_load(text)
    assert {k: v for k, v in data.items() if k not in changed} == {
        k: v for k, v in own.items() if k not in changed
    }


@pytest.mark.parametrize("word", ["", " --gradient_checkpointing_kwargs {}"])
def test_a_way_of_checkpointing_is_a_mapping_in_files_and_text_in_words(
    word: str, tmp_path: Path
) -> None:
    way = {CHECKPOINTING: True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}
    words, copy = copied(f"trl sft --config own.yaml{word}", TRAINER, answer(tmp_path, way))
    assert yaml.safe_load(copy)["gradient_checkpointing_kwargs"] == {"every_n_layers": 2}
    assert not word or json.loads(words[-1]) == {"every_n_layers": 2}


def test_the_newer_name_of_checkpointing_is_kept_for_it_wins(tmp_path: Path) -> None:
    command = "trl sft --config own.yaml --activation-checkpointing true"
    own = f"{TRAINER}activation_checkpointing: true\n"
    words, copy = copied(command, own, answer(tmp_path, {CHECKPOINTING: False}))
    data = yaml.safe_load(copy)
    assert data["activation_checkpointing"] is False and CHECKPOINTING not in data
    assert words[-1] == "False"


def test_frameworks_have_keys_of_their_own_for_fields_of_the_trainer(tmp_path: Path) -> None:
    chosen = {"optim": "adamw_torch_fused", "use_liger_kernel": True, "dataloader_num_workers": 2}
    words, copy = copied("axolotl train own.yaml", AXOLOTL, answer(tmp_path, chosen))
    data = yaml.safe_load(copy)
    assert (data["optimizer"], data["dataloader_num_workers"]) == ("adamw_torch_fused", 2)
    assert "optim" not in data and "use_liger_kernel" not in data
    for text, key in ((AXOLOTL, None), (TRAINER, "use_liger_kernel")):
        (tmp_path / "own.yaml").write_text(text)
        form = form_of_training([*words[:2], "own.yaml"], tmp_path)
        assert form is not None and form.key_of("use_liger_kernel") == key
    # LLaMA-Factory recomputes activations unless its file disables that.
    own = f"finetuning_type: lora\n{TRAINER}"
    for is_on in (True, False):
        best = answer(tmp_path, {CHECKPOINTING: is_on})
        data = yaml.safe_load(copied("llamafactory-cli train own.yaml", own, best)[1])
        assert (data[f"disable_{CHECKPOINTING}"], data[CHECKPOINTING]) == (not is_on, is_on)


def test_two_files_of_one_name_have_copies_of_their_own(tmp_path: Path) -> None:
    for folder, text in (("machines", ACCELERATE), ("trainings", TRAINER)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.yaml").write_text(text)
    words = "accelerate launch --config_file machines/own.yaml sft.py --config trainings/own.yaml"
    found = rewrite_command(words.split(), tmp_path, answer(tmp_path, by_accelerate=True))
    assert found is not None
    first, second = (str(tmp_path / "run/best_files" / name) for name in ("own.yaml", "own-2.yaml"))
    assert (found.words[3], found.words[-1]) == (first, second)
    assert "# one" in found.copies["own.yaml"] and "# small" in found.copies["own-2.yaml"]


def test_words_that_override_the_file_follow(tmp_path: Path) -> None:
    command = "axolotl train own.yaml --micro-batch-size 1 --learning-rate 0.1"
    words, _ = copied(command, AXOLOTL, answer(tmp_path))
    assert words[3:] == ["--micro-batch-size", "8", "--learning-rate", "0.1"]
    command = "llamafactory-cli train own.yaml per_device_train_batch_size=1 lr=2"
    words, _ = copied(command, TRAINER, answer(tmp_path))
    assert words[3:] == ["per_device_train_batch_size=8", "lr=2"]


def test_a_file_of_arguments_in_json(tmp_path: Path) -> None:
    (tmp_path / "args.json").write_text(json.dumps({"output_dir": "o", "deepspeed": "ds.json"}))
    found = rewrite_command(["torchrun", "train.py", "args.json"], tmp_path, answer(tmp_path))
    assert found is not None
    data = json.loads(found.copies["args.json"])
    assert data["per_device_train_batch_size"] == 8 and data["output_dir"] == "o"


def test_a_file_of_another_kind_gets_no_keys_that_its_script_may_refuse(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    text = "deepspeed: ds.json\nsteps: 9\ngradient_accumulation_steps: 1\n"
    _, copy = copied("python train.py --config own.yaml", text, answer(tmp_path))
    data = yaml.safe_load(copy)
    assert list(data) == ["deepspeed", "steps", "gradient_accumulation_steps"]
    assert data["deepspeed"] != "ds.json"
    assert data["gradient_accumulation_steps"] == CONFIG["gradient_accumulation_steps"] != 1


def test_a_configuration_within_a_file_of_another_kind_is_replaced_as_a_whole(
    tmp_path: Path,
) -> None:
    text = "deepspeed:\n  train_batch_size: 4\n  bf16: {enabled: true}\nsteps: 9\n"
    _, copy = copied("python train.py own.yaml", text, answer(tmp_path))
    assert yaml.safe_load(copy) == {"deepspeed": CONFIG, "steps": 9}


@pytest.mark.parametrize("own", ["true", "zero2", "{micro: 4, stage: 1}", "x" * 999])
def test_a_key_that_holds_no_configuration_is_left_alone(tmp_path: Path, own: str) -> None:
    (tmp_path / "own.yaml").write_text(f"deepspeed: {own}\nds_config: ds.json\n")
    assert rewrite_command(["python", "train.py", "own.yaml"], tmp_path, answer(tmp_path)) is None


@pytest.mark.parametrize("named", [True, False])
def test_accelerates_file_names_the_configuration(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    path = tmp_path / "own.yaml" if named else tmp_path / "home/accelerate/default_config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ACCELERATE)
    words = [*"accelerate launch --gradient_accumulation_steps 9 train.py --epochs 3".split()]
    words[2:2] = ["--config_file", "own.yaml"] if named else []
    found = rewrite_command(words, tmp_path, answer(tmp_path, by_accelerate=True))
    copy = tmp_path / "run" / "best_files" / path.name
    assert found is not None and shlex.join(found.words) == (
        f"accelerate launch --config_file {copy} --gradient_accumulation_steps 2 train.py "
        "--epochs 3"
    )
    assert yaml.safe_load(found.copies[path.name]) == {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_multinode_launcher": "standard",
            "deepspeed_config_file": str(tmp_path / "run" / "best_ds_config.json"),
        },
        "num_processes": 1,
    }
    assert "# mine" in found.copies[path.name] and "# one" in found.copies[path.name]


def test_a_file_of_the_scripts_own_may_look_like_accelerates(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("distributed_type: x\ndeepspeed_config: ds.json\n")
    found = rewrite_command(["torchrun", "train.py", "own.yaml"], tmp_path, answer(tmp_path))
    best = str(tmp_path / "run" / "best_ds_config.json")
    assert found is not None
    copy = yaml.safe_load(found.copies["own.yaml"])
    assert copy["deepspeed_config"] == {"deepspeed_config_file": best}


def test_without_a_file_of_its_own_accelerate_is_given_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    words = "accelerate launch --use_deepspeed train.py --gradient_accumulation_steps 4".split()
    found = rewrite_command(words, tmp_path, answer(tmp_path, by_accelerate=True))
    best = tmp_path / "run" / "best_ds_config.json"
    assert found is not None and not found.copies
    assert shlex.join(found.words) == (
        f"accelerate launch --deepspeed_config_file {best} --use_deepspeed "
        "--gradient_accumulation_steps 2 train.py --gradient_accumulation_steps 4"
    )


def test_trls_file_names_accelerates_file(tmp_path: Path) -> None:
    (tmp_path / "zero2.yaml").write_text(ACCELERATE)
    (tmp_path / "own.yaml").write_text("accelerate_config: zero2.yaml\nlearning_rate: 0.1\n")
    found = rewrite_command(
        "trl sft --config own.yaml".split(), tmp_path, answer(tmp_path, by_accelerate=True)
    )
    assert found is not None and set(found.copies) == {"own.yaml", "zero2.yaml"}
    data = yaml.safe_load(found.copies["own.yaml"])
    assert data["accelerate_config"] == str(tmp_path / "run/best_files/zero2.yaml")
    assert "deepspeed" not in data and data["per_device_train_batch_size"] == 8


def test_a_file_of_the_trainer_may_name_a_base_model(tmp_path: Path) -> None:
    own = f"base_model: gpt2\n{TRAINER}"
    _, copy = copied("python train.py own.yaml", own, answer(tmp_path))
    assert yaml.safe_load(copy)["per_device_train_batch_size"] == 8


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    (tmp_path / "data.yaml").write_text("names: [a, b]\n")
    (tmp_path / "own.yaml").write_text("base_model: gpt2\nlr: 0.1\n")
    (tmp_path / "broken.yaml").write_text("a: [")
    (tmp_path / "rows.json").write_text(json.dumps({"deepspeed": "x" * 2**20}))
    words = (
        "torchrun train.py ds.json data.yaml own.yaml broken.yaml missing.yaml rows.json".split()
    )
    assert rewrite_command(words, tmp_path, answer(tmp_path)) is None
