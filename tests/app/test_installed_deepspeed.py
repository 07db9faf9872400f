"""The installed DeepSpeed is asked once, and nothing depends on an answer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.app import installed_deepspeed
from dsat.app.installed_deepspeed import InstalledDeepSpeed
from dsat.errors import UserInputError
from dsat.inputs import experiment as experiments
from dsat.inputs.ds_schema import Schema
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import Experiment

PROGRAM = Entrypoint(script="train.py")
CONTENT = {
    "type": "object",
    "additionalProperties": True,
    "properties": {
        "zero_optimization": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "overlap_comm": {"type": "boolean", "default": False},
                "sub_group_size": {"type": "integer", "default": 7},
            },
        }
    },
}


def experiment(overrides: dict[str, Any] | None = None, **config: Any) -> Experiment:
    found = experiments.of_dict(["train.py"], "train", Path(), config, "ds.json")
    return replace(found, path=Path("exp.yaml"), overrides=overrides or {})


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files into which a DeepSpeed was asked to write, which it did."""
    found: list[Path] = []

    def ask(path: Path, errors: Any) -> None:
        found.append(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"version": "0.99", "schema": CONTENT}))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(installed_deepspeed, "_ask", ask)
    return found


def test_deepspeed_is_asked_once(asked: list[Path]) -> None:
    for _ in range(2):
        with InstalledDeepSpeed() as deepspeed:
            assert deepspeed.schema == Schema("0.99", CONTENT)
    assert len(asked) == 1
    asked[0].write_text("{")
    with InstalledDeepSpeed() as deepspeed:
        assert deepspeed.schema == Schema("0.99", CONTENT)
    assert len(asked) == 2


def check(own: Experiment, program: Entrypoint = PROGRAM) -> None:
    with InstalledDeepSpeed() as deepspeed:
        deepspeed.check(own, program)


def knob_defaults(program: Entrypoint = PROGRAM) -> dict[str, Any]:
    with InstalledDeepSpeed() as deepspeed:
        return deepspeed.knob_defaults(program)


def test_what_it_refuses_is_refused(asked: list[Path]) -> None:
    def refused(own: Experiment) -> str:
        with pytest.raises(UserInputError) as caught:
            check(own)
        return str(caught.value)

    check(experiment(zero_optimization={"overlap_comm": True}))
    wrong = {"zero_optimization": {"overlap_com": True}}
    assert refused(experiment(**wrong)).startswith("ds.json: zero_optimization.overlap_com: ")
    listed = experiment(zero_optimization={"overlap_comm": [True, "often"]})
    assert refused(listed).startswith("ds.json: zero_optimization.overlap_comm: must be true or")
    place = "exp.yaml: hyperparameters.overwrite_deepspeed_args"
    assert refused(experiment(wrong)).startswith(f"{place}.zero_optimization.overlap_com: ")
    # Of a whole configuration the script may read some itself; of overrides nothing else does.
    own: dict[str, Any] = {"my_script": 1}
    check(experiment(None, **own))
    check(experiment(own, **own))
    assert refused(experiment(own)).startswith(f"{place}.my_script: DeepSpeed 0.99 reads no")
    assert asked


def test_the_defaults_of_knobs_are_those_that_it_has(asked: list[Path]) -> None:
    assert knob_defaults() == {
        "zero_optimization.overlap_comm": False,
        "zero_optimization.sub_group_size": 7,
    }
    other = replace(PROGRAM, interpreter="/another/python3")
    assert knob_defaults(other) == {}
    check(experiment(zero_optimization={"nonsense": 1}), other)
    assert len(asked) == 1


def test_where_it_cannot_be_asked_our_own_list_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.executable", "/bin/false")
    with InstalledDeepSpeed() as deepspeed:
        assert deepspeed.schema is None
    assert knob_defaults() == {}
    check(experiment(zero_optimization={"nonsense": 1}))
    with pytest.raises(UserInputError, match="gradient_cliping"):
        check(experiment({"gradient_cliping": 1}))
