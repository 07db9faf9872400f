"""Which flags of a script repeat its batch size or its accumulation."""

from __future__ import annotations

from typing import Any

import pytest

from dsat.in_trial.script_flags import find_accumulation_flag, find_batch_flag

LIKELIEST = "data.per_device_train_batch_size"
GAS_FLAG = "--gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("args", "options", "flag"),
    [
        (["--epochs", "3", "--batch_size", "7"], {}, "--batch_size"),
        (["--eval_batch_size", "7", "--train.batch=7"], {}, "--train.batch"),
        (["--eval_batch_size", "7", "--train.batch=8"], {}, ""),  # of all devices, perhaps
        (["model.width=7", "train.batch_size=7"], {}, "train.batch_size"),
        (["--bs", "7"], {}, "--bs"),
        (["-b", "7"], {}, "-b"),
        (["-k", "7"], {}, ""),
        (["--micro-bsz=7"], {}, "--micro-bsz"),
        (["--obs", "7"], {}, ""),
        (["--batch-size"], {}, ""),
        # Declared with this default, and not given.
        ([], {"--lr": 7, "--batch-log": None, "--micro-batch-size": 7}, "--micro-batch-size"),
        (["--batch-log", "9"], {"--batch-log": None, "--micro_batch": 7}, "--micro_batch"),
        (["--micro_batch", "9"], {"--micro_batch": 7}, ""),
        ([], {"--eval_batch_size": 7}, ""),
        # Flags of something else, and less likely ones, although they come first.
        (["--val_batch_size", "7", "--batch_size", "7"], {}, "--batch_size"),
        (["--log_every_n_batches", "7", "--gen-batch=7"], {"--batch_size": 7}, "--batch_size"),
        (["--max_batches", "7", "--loader_batch", "7"], {}, "--loader_batch"),
        (["--loader_batch=7", "data.per_device_train_batch_size=7"], {}, LIKELIEST),
        (["--max_batches", "7"], {}, "--max_batches"),
        (["--accumulate_grad_batches", "7"], {}, ""),
    ],
)
def test_the_flag_of_the_batch_size_is_one_that_the_script_has(
    args: list[str], options: dict[str, Any], flag: str
) -> None:
    assert find_batch_flag(args, 7, options) == flag


@pytest.mark.parametrize(
    ("args", "options", "gas", "flag"),
    [
        (["--grad_accum", "8"], {"--grad_accum": 1}, 8, "--grad_accum"),
        ([], {"--lr": 8, "--gradient-accumulation-steps": 8}, 8, "--gradient-accumulation-steps"),
        ([], {"--accum": 8, "--gradient_accumulation_steps": 8}, 8, GAS_FLAG),
        (["train.accumulate_grad_batches=8"], {}, 8, "train.accumulate_grad_batches"),
        ([], {"--update-freq": 8}, 8, "--update-freq"),  # fairseq, BEiT
        ([], {"--grad-acc-steps": 8}, 8, "--grad-acc-steps"),
        (["--gas=8"], {}, 8, "--gas"),
        (["--grad_accum", "4"], {"--grad_accum": 8}, 8, ""),
        ([], {"--eval_accumulation_steps": 8, "--gasoline": 8, "--accuracy": 8}, 8, ""),
        ([], {"--accum_iter": 1, "--gradient_accumulation_steps": 1}, 1, GAS_FLAG),
        ([], {"--accum_iter": 1}, 1, ""),
    ],
)
def test_the_flag_of_the_accumulation_has_the_users_number(
    args: list[str], options: dict[str, Any], gas: int, flag: str
) -> None:
    assert find_accumulation_flag(args, gas, options) == flag
