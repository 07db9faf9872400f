"""The schema of the installed DeepSpeed is held against what DeepSpeed itself does."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dsat.inputs.ds_config import TOP_LEVEL_KEYS
from dsat.inputs.ds_schema import Schema

# Every setting of every section that DeepSpeed checks, with values of all kinds: whether DeepSpeed
# takes them, whether the schema does. Validators that are written by hand are no part of a schema,
# nor are types that JSON has not got.
_COMPARE = """
import json, logging
from deepspeed.runtime.config import DeepSpeedConfig
from pydantic import ValidationError
from dsat.errors import UserInputError
from dsat.in_trial.deepspeed_schema import schema
from dsat.inputs.ds_schema import Schema

logging.disable(logging.WARNING)
VALUES = (True, False, None, 0, 1, 2, 5, -1, 0.5, 2.5, 5e8, "auto", "cpu", "gpu", "none", "5",
          "0.5", "yes", "x", "", [], ["a"], [1], {}, {"a": 1})
BY_HAND = {"value_error", "assertion_error"}
found = schema()
known = Schema("this", found)
compared, wrong = 0, []
for section, part in found["properties"].items():
    if part.get("additionalProperties") is not False:
        continue
    kinds = {key: set(kind) - {"default"} for key, kind in part["properties"].items()}
    for key in [*(key for key, kind in kinds.items() if kind), "nobodys"]:
        for value in VALUES:
            config = {"train_batch_size": 1, section: {key: value}}
            try:
                DeepSpeedConfig(json.loads(json.dumps(config)))
                takes = True
            except ValidationError as error:
                takes = False if {e["type"] for e in error.errors()} - BY_HAND else None
            except Exception:
                takes = None
            try:
                known.check(config, where="")
                says = True
            except UserInputError:
                says = False
            compared += 1
            if takes is not None and takes != says:
                wrong.append([section, key, repr(value), takes])
print(json.dumps([compared, wrong, found]))
"""


@pytest.fixture(scope="module")
def compared() -> tuple[int, list[list[str]], Schema]:
    # In a process of its own: importing DeepSpeed warns, and warnings are errors here.
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _COMPARE],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    count, wrong, found = json.loads(run.stdout.splitlines()[-1])
    return count, wrong, Schema("this", found)


@pytest.mark.slow
def test_the_schema_takes_what_deepspeed_takes_and_nothing_else(
    compared: tuple[int, list[list[str]], Schema],
) -> None:
    count, wrong, _ = compared
    assert count > 2000
    assert wrong == []


@pytest.mark.slow
def test_what_readers_ask_for_and_what_is_gone_is_known(
    compared: tuple[int, list[list[str]], Schema],
) -> None:
    _, _, found = compared
    properties = found.content["properties"]
    assert set(properties) >= TOP_LEVEL_KEYS
    checkpointing = properties["activation_checkpointing"]["properties"]
    assert "cpu_checkpointing" in checkpointing
    assert found.default("activation_checkpointing.cpu_checkpointing") is False
    assert found.default("gradient_clipping") == 1.0
    assert found.default("zero_optimization.stage3_max_live_parameters") == 10**9
    assert found.default("zero_optimization.offload_optimizer.pin_memory") is True
    assert found.default("timers.throughput.enabled") is True
    assert "removed" in properties["amp"]
