"""Flags that follow a trial's configuration, and the meaning of "auto" on a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dsat.command import script_args
from dsat.command.script_args import HF_BATCH_FLAGS
from dsat.command.switches import CHECKPOINTING

MICRO = "train_micro_batch_size_per_gpu"
GAS = "gradient_accumulation_steps"
HF = ["--deepspeed", "ds.json", "--output_dir", "out"]
BATCH = {MICRO: 16, GAS: 2}

HF_FLAGS = {**HF_BATCH_FLAGS, CHECKPOINTING: "--gradient_checkpointing"}


def rewritten(line: str, values: Mapping[str, Any], *, add: bool = False) -> str:
    return " ".join(script_args.rewrite(line.split(), values, HF_FLAGS, add=add))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("--per_device_train_batch_size=8", "--per_device_train_batch_size=16"),
        ("--per-device-train-batch-size 8 x", "--per-device-train-batch-size 16 x"),
        ("--per_device_train_batch_size=", "--per_device_train_batch_size=16"),
        (
            "a --per_device_train_batch_size 8 b --per_device_train_batch_size=4 c",
            "a --per_device_train_batch_size 16 b --per_device_train_batch_size=16 c",
        ),
        (
            "--per_device_train_batch_size --gradient_accumulation_steps 1",
            "--per_device_train_batch_size 16 --gradient_accumulation_steps 2",
        ),
        ("--per_device_eval_batch_size 8", "--per_device_eval_batch_size 8"),
        ("-- --per_device_train_batch_size 8", "-- --per_device_train_batch_size 8"),
        ("per_device_train_batch_size 8", "per_device_train_batch_size 8"),
    ],
)
def test_a_flag_gets_its_value(before: str, after: str) -> None:
    assert rewritten(before, BATCH) == after
    assert rewritten(before, {MICRO: "auto", GAS: None}, add=True) == before


def test_what_is_missing_is_added_before_the_end_of_the_options() -> None:
    both = "--per_device_train_batch_size 16 --gradient_accumulation_steps 2"
    assert rewritten("--files a b", BATCH, add=True) == f"--files a b {both}"
    assert rewritten("--x -- a", BATCH, add=True) == f"--x {both} -- a"
    assert rewritten("--gradient-accumulation-steps=8", BATCH, add=True) == (
        "--gradient-accumulation-steps=2 --per_device_train_batch_size 16"
    )


@pytest.mark.parametrize(
    ("before", "on", "off"),
    [
        ("--x", "--x --gradient_checkpointing", "--x"),
        ("--gradient_checkpointing --x", "--gradient_checkpointing --x", "--x"),
        (
            "--gradient_checkpointing --x --gradient_checkpointing=False",
            "--gradient_checkpointing --x --gradient_checkpointing=True",
            "--x --gradient_checkpointing=False",
        ),
        (
            "--gradient_checkpointing False --x",
            "--gradient_checkpointing True --x",
            "--gradient_checkpointing False --x",
        ),
        (
            "--gradient_checkpointing=1 --x --gradient_checkpointing no",
            "--gradient_checkpointing=True --x --gradient_checkpointing True",
            "--gradient_checkpointing=False --x --gradient_checkpointing False",
        ),
        ("--gradient-checkpointing=yes", *[f"--gradient-checkpointing={b}" for b in (True, False)]),
        ("--gradient_checkpointing file", "--gradient_checkpointing file", "file"),
        ("--no_gradient_checkpointing", "--gradient_checkpointing", "--no_gradient_checkpointing"),
        (
            "--deepspeed ds.json --max_steps 1",
            "--deepspeed ds.json --max_steps 1 --gradient_checkpointing",
            "--deepspeed ds.json --max_steps 1 --gradient_checkpointing False",
        ),
    ],
)
def test_a_switch_keeps_its_form(before: str, on: str, off: str) -> None:
    assert rewritten(before, {"gradient_checkpointing": True}, add=True) == on
    assert rewritten(before, {"gradient_checkpointing": False}, add=True) == off


def test_the_flags_of_a_script() -> None:
    own = {MICRO: "--bs"}
    assert script_args.mappings_for(["--bs", "8"], own) == own
    assert script_args.mappings_for(["--bs", "8"], {}) == {}
    hf = dict(HF_BATCH_FLAGS)
    assert script_args.mappings_for(HF, own) == {**hf, **own}
    for flag in ("--gradient_checkpointing", "--activation_checkpointing"):
        mappings = script_args.mappings_for([*HF, flag], {})
        assert mappings == {**hf, "gradient_checkpointing": flag}


@pytest.mark.parametrize(
    ("args", "given", "add", "expected"),
    [
        (
            [*HF, "--gradient_checkpointing", "--per_device_train_batch_size", "8"],
            {"stage": "--stage"},
            True,
            [
                *HF,
                *"--per_device_train_batch_size 16 --gradient_accumulation_steps 2".split(),
                *("--stage", "3"),
            ],
        ),
        (
            ["--device", "x"],
            {"zero_optimization.offload_param.device": "--device"},
            False,
            ["--device", "cpu"],
        ),
        (["-b", "4"], {MICRO: "-b"}, False, ["-b", "16"]),
        (["trainer.b=4", "x=1"], {MICRO: "trainer.b"}, False, ["trainer.b=16", "x=1"]),
        (
            ["--bs", "1", "--gradient_accumulation_steps", "1"],
            {},
            True,
            ["--bs", "1", "--gradient_accumulation_steps", "2"],
        ),
    ],
)
def test_the_arguments_of_a_trial(
    args: Sequence[str], given: Mapping[str, str], add: bool, expected: Sequence[str]
) -> None:
    """Settings are found by their names or paths. Only flags of the Trainer are added."""
    config = {**BATCH, "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    switches = {"gradient_checkpointing": False}
    assert [*script_args.adapt_to_trial(args, config, switches, given, add=add)] == expected


# -- what the user maps


@pytest.mark.parametrize(
    ("flag", "args", "spelled"),
    [
        ("-b", ["-b", "8"], "-b"),
        ("--trainer.batch_size", ["trainer.batch_size=8"], "trainer.batch_size"),
        ("--batch-size", ["--batch_size", "8"], "--batch_size"),
        ("--batch_size", ["--batch-size=8"], "--batch-size"),
        ("--per-device-train-batch-size", ["--deepspeed=x"], "--per-device-train-batch-size"),
    ],
)
def test_a_mapping_is_spelled_as_the_script_gets_it(
    flag: str, args: list[str], spelled: str
) -> None:
    assert script_args.check_mappings({MICRO: flag}, args, where="ds.json") == {MICRO: spelled}


@pytest.mark.parametrize(
    ("args", "wanted", "expected"),
    [
        ([], True, ["--ckpt"]),
        (["--ckpt"], False, []),
        (["--ckpt", "--x"], True, ["--ckpt", "--x"]),
    ],
)
def test_a_switch_that_the_user_maps_is_given_or_taken_away(
    args: list[str], wanted: bool, expected: list[str]
) -> None:
    given = script_args.check_mappings({CHECKPOINTING: "--ckpt"}, args, where="--arg-mapping")
    values = {CHECKPOINTING: wanted}
    assert list(script_args.adapt_to_trial(args, {}, values, given, add=False)) == expected
    assert script_args.is_on(args, "--ckpt") is ("--ckpt" in args)
