"""What a schema of DeepSpeed's finds wrong with a configuration, and how it says so."""

from __future__ import annotations

from typing import Any

import pytest

from dsat.errors import UserInputError
from dsat.inputs.ds_schema import Schema

OFFLOAD = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "device": {"enum": ["none", "cpu", "nvme"], "type": "string"},
        "buffer_count": {"type": "integer", "minimum": 0, "default": 4},
        "ratio": {"type": "number", "exclusiveMinimum": 0.0, "maximum": 1.0},
    },
}
SCHEMA = Schema(
    "0.99",
    {
        "type": "object",
        "additionalProperties": True,
        "properties": {
            "zero_optimization": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "stage": {"enum": [0, 1, 2, 3], "default": 0},
                    "overlap_comm": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                    "offload_optimizer": {"anyOf": [OFFLOAD, {"type": "null"}]},
                    "patterns": {"type": "array", "items": {"type": "string"}},
                    "mics": {"removed": "MiCS is gone. See elsewhere."},
                    "anything": {},
                },
            },
            "gradient_clipping": {"type": ["number", "null"], "plain": True},
            "dump_state": {"type": ["boolean", "null"], "plain": True},
            "pipeline": {
                "type": "object",
                "additionalProperties": True,
                "open": True,
                "properties": {"stages": {}},
            },
            "optimizer": {
                "type": "object",
                "additionalProperties": True,
                "properties": {"type": {"names": ["AdamW", "SGD"], "any_case": ["lion"]}},
            },
        },
    },
)


def zero(**settings: Any) -> dict[str, Any]:
    return {"zero_optimization": settings}


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            zero(overlap_com=True),
            "zero_optimization.overlap_com: DeepSpeed 0.99 has no setting 'overlap_com'. "
            "Did you mean 'overlap_comm'?",
        ),
        (
            zero(offload_optimizer={"device": "gpu"}),
            "zero_optimization.offload_optimizer.device: must be one of none, cpu, nvme, not "
            "'gpu'. Did you mean 'cpu'?",
        ),
        (
            zero(offload_optimizer="cpu"),
            "zero_optimization.offload_optimizer: must be a mapping, not 'cpu'",
        ),
        (
            zero(offload_optimizer={"buffer_count": -1}),
            "zero_optimization.offload_optimizer.buffer_count: must be an integer of at least 0, "
            "not -1",
        ),
        (
            zero(offload_optimizer={"buffer_count": 2.5}),
            "zero_optimization.offload_optimizer.buffer_count: must be an integer of at least 0, "
            "not 2.5",
        ),
        (
            zero(offload_optimizer={"ratio": 0}),
            "zero_optimization.offload_optimizer.ratio: must be a number above 0 and of at most 1, "
            "not 0",
        ),
        (zero(stage=4), "zero_optimization.stage: must be one of 0, 1, 2, 3, not 4"),
        (zero(overlap_comm=2), "zero_optimization.overlap_comm: must be true or false, not 2"),
        (zero(patterns=["a", 1]), "zero_optimization.patterns.1: must be text, not 1"),
        (
            zero(mics=8),
            "zero_optimization.mics: DeepSpeed 0.99 refuses it: MiCS is gone.",
        ),
        (
            {"gradient_cliping": 1},
            "gradient_cliping: DeepSpeed 0.99 reads no setting 'gradient_cliping'. "
            "Did you mean 'gradient_clipping'?",
        ),
        (
            {"gradient_clipping": "1.0"},
            "gradient_clipping: must be a number, not '1.0'",
        ),
        ({"dump_state": "yes"}, "dump_state: must be true or false, not 'yes'"),
        (
            {"optimizer": {"type": "AdamV"}},
            "optimizer.type: DeepSpeed 0.99 knows no 'AdamV'. Did you mean 'AdamW'?",
        ),
    ],
)
def test_every_mistake_is_one_line(config: dict[str, Any], line: str) -> None:
    with pytest.raises(UserInputError) as caught:
        SCHEMA.check(config, where="ds.json")
    assert str(caught.value) == f"ds.json: {line}"


@pytest.mark.parametrize(
    "config",
    [
        {},
        zero(stage=2, overlap_comm=None, offload_optimizer=None, anything=object()),
        zero(stage="auto", overlap_comm="auto", offload_optimizer={"buffer_count": "auto"}),
        # pydantic converts these.
        zero(overlap_comm="Yes", offload_optimizer={"buffer_count": "5", "ratio": "0.5"}),
        zero(offload_optimizer={"buffer_count": 5.0}),
        # Nobody looks at these.
        {"my_script": {"lr": 1}, "autotuning": {"enabled": 7}, "gradient_clipping": True},
        {"pipeline": {"stage": 1}, "optimizer": {"type": "LION", "lr": 1}},
        {"optimizer": {"type": None}, "gradient_clipping": None, "dump_state": 1},
    ],
)
def test_what_deepspeed_takes_is_taken(config: dict[str, Any]) -> None:
    SCHEMA.check(config, where="ds.json")


def test_what_is_passed_over_in_silence_is_known() -> None:
    assert SCHEMA.ignored({"my_script": 1, "gradient_clipping": 1}) == ["my_script"]


def test_defaults_are_deepspeeds() -> None:
    assert SCHEMA.default("zero_optimization.offload_optimizer.buffer_count") == 4
    assert SCHEMA.default("zero_optimization.stage") == 0
    for path in ("zero_optimization.mics", "zero_optimization.none", "none.none"):
        with pytest.raises(KeyError):
            SCHEMA.default(path)
