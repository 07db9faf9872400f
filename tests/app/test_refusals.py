"""What the installed DeepSpeed refuses is asked once, and told in one line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsat.app import refusals
from dsat.app.refusals import Refusals
from dsat.errors import UserInputError
from dsat.inputs.ds_schema import Schema
from dsat.inputs.entrypoint import Entrypoint
from testing.helpers import plan_of

PROGRAM = Entrypoint(script="train.py")
SCHEMA = Schema(
    "0.99",
    {"properties": {"prescale_gradients": {"type": "boolean", "default": False}}},
)
PRESCALED = {"optimizer": {"type": "Adam"}, "prescale_gradients": True}


class Installed:
    schema: Schema | None = SCHEMA
    stamp = "0.99 of a test"


class Asked(list[Mapping[str, Any]]):
    """The configurations of which DeepSpeed was asked, one after the other."""

    answers: Mapping[int, str] = {}  # by stage

    def __call__(self, configs: Sequence[Mapping[str, Any]], slots: int) -> list[str | None]:
        self += configs
        stages = [(config.get("zero_optimization") or {}).get("stage", 0) for config in configs]
        return [self.answers.get(stage) for stage in stages]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(refusals, "_ask", found)
    return found


def without_refused(config: Mapping[str, Any], program: Entrypoint = PROGRAM) -> Any:
    found = Refusals(Installed())  # type: ignore[arg-type]
    return found.without_refused(plan_of(base_config=config), program, where="ds.json").refused


def test_a_plain_configuration_is_not_asked_about(asked: Asked) -> None:
    plain = {
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "prescale_gradients": False,
        "fp16": {"enabled": True},
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "my_script": {"reads": "this"},
    }
    assert without_refused(plain) == {}
    assert asked == []
    for other in (
        {"prescale_gradients": True},
        {"bf16": {"enabled": True}},
        {"optimizer": {"type": "SGD"}},
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        {"zero_optimization": {"stage": 2, "compute_grad_norm": False}},
        {"zero_optimization": {"stage": 2, "allgather_bucket_size": 7}},
    ):
        del asked[:]
        without_refused({**plain, **other})
        assert {**plain, **other} in asked, other


def test_it_is_asked_once(asked: Asked) -> None:
    asked.answers = {3: "never in stage 3"}
    assert without_refused(PRESCALED) == {"z3": {"stage": (3,)}}
    count = len(asked)
    assert count > 3
    more = {**PRESCALED, "train_micro_batch_size_per_gpu": 7, "steps_per_print": 9}
    assert without_refused(more) == {"z3": {"stage": (3,)}}
    assert len(asked) == count


def test_the_users_own_configuration_is_refused_in_one_line(asked: Asked) -> None:
    asked.answers = {0: "never like this"}
    with pytest.raises(UserInputError) as caught:
        without_refused(PRESCALED)
    assert str(caught.value) == "ds.json: DeepSpeed 0.99 refuses it: never like this"
    asked.answers = dict.fromkeys((1, 2, 3), "only in stage 0")
    other = {**PRESCALED, "gradient_predivide_factor": 2.0}
    with pytest.raises(UserInputError, match="nothing is left to try: stage 1 is not tried: only"):
        without_refused(other)


def test_where_nobody_can_be_asked_nothing_is_refused(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked.answers = dict.fromkeys(range(4), "never")
    assert without_refused(PRESCALED, Entrypoint(script="x", interpreter="/other/python3")) == {}
    monkeypatch.setattr(refusals, "_ask", lambda *_: None)
    assert without_refused(PRESCALED) == {}
    monkeypatch.setattr(refusals, "_ask", asked)  # what was not answered is not remembered
    with pytest.raises(UserInputError):
        without_refused(PRESCALED)
    monkeypatch.setattr(Installed, "schema", None)
    assert without_refused(PRESCALED) == {}
