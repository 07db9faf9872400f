"""Switches of scripts: how users write them, and how scripts receive them."""

from __future__ import annotations

from typing import Any

import pytest

from dsat.command import script_args, switches
from dsat.command.entrypoint import Entrypoint

HF = "--deepspeed ds.json --output_dir out".split()


@pytest.mark.parametrize(
    ("values", "hf", "expected"),
    [
        ({"--num_workers": "4"}, False, "--num_workers 4"),
        ({"dataloader_num_workers": 4}, True, "--dataloader_num_workers 4"),
        ({"dataloader_num_workers": 4}, False, ""),
        ({"attn_implementation": "eager"}, True, ""),
        ({"gradient_checkpointing": True}, True, "--gradient_checkpointing"),
        (
            {"gradient_checkpointing": "every_2_layers"},
            True,
            '--gradient_checkpointing --gradient_checkpointing_kwargs {"every_n_layers": 2}',
        ),
    ],
)
def test_a_command_has_the_flags_that_its_script_takes(
    values: dict[str, Any], hf: bool, expected: str
) -> None:
    found = script_args.adapt_to_trial(HF, {}, values, {}, add=hf)
    assert " ".join(found[len(HF) :]) == expected


def test_what_is_given_is_replaced_and_variables_and_cores_reach_the_ranks() -> None:
    args = (*HF, "--dataloader-num-workers=2", "--attn_implementation", "sdpa")
    values: dict[str, Any] = {"dataloader_num_workers": 4, "attn_implementation": "eager"}
    values |= {"ENV:NCCL_ALGO": "Ring", "bind_cores_to_rank": True}
    program = Entrypoint(script="train.py", args=args, env={"A": "1"})
    found = program.use_config("ds.json", {}, values, {})
    assert " ".join(found.args[len(HF) :]) == (
        "--dataloader-num-workers=4 --attn_implementation eager"
    )
    assert found.env == {"A": "1", "NCCL_ALGO": "Ring"}
    assert found.launch.binds_cores


@pytest.mark.parametrize(
    ("name", "value", "in_arguments", "expected"),
    [
        ("dataloader_num_workers", 4, True, "TrainingArguments(dataloader_num_workers=4)"),
        ("torch_compile", True, False, "engine.compile() after deepspeed.initialize"),
        ("gradient_checkpointing", False, False, "no `model.gradient_checkpointing_enable()`"),
        (
            "gradient_checkpointing",
            "reentrant",
            True,
            "TrainingArguments(gradient_checkpointing=True, "
            "gradient_checkpointing_kwargs={'use_reentrant': True})",
        ),
        (
            "gradient_checkpointing",
            "offload",
            True,
            "TrainingArguments(gradient_checkpointing=True, "
            "gradient_checkpointing_kwargs={'offload': True})",
        ),
        ("--num_workers", "4", False, "--num_workers=4"),
        ("ENV:A", "1", False, "A=1"),
    ],
)
def test_a_line_says_what_to_write(
    name: str, value: Any, in_arguments: bool, expected: str
) -> None:
    assert switches.instruction(name, value, in_arguments=in_arguments) == expected
