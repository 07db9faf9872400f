"""DeepSpeed validates each configuration once, and its answer decides."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.command import experiment as experiments
from dsat.command.entrypoint import Entrypoint
from dsat.command.experiment import Experiment
from dsat.errors import UserInputError
from dsat.prepare import installed_deepspeed

PROGRAM = Entrypoint(script="train.py")
OTHER = replace(PROGRAM, interpreter="/another/python3")
# A stand-in that rejects `wrong` in a section, and ignores all keys but `zero_optimization`.
STAND_IN = """
    import json, os, sys
    asked = json.load(open(sys.argv[1]))
    with open(os.environ["STAND_IN_COUNT"], "a") as file:
        file.write("x")
    verdicts = []
    for question in asked["configs"]:
        zero = question["config"].get("zero_optimization", {})
        problems = [
            {"path": f"zero_optimization.{key}", "message": "is wrong", "hint": ""}
            for key, value in zero.items() if key.startswith("wrong") or value == "wrong"
        ]
        ignored = {key: "" for key in question["config"] if key != "zero_optimization"}
        verdicts.append({"problems": problems, "ignored": ignored})
    answer = {"version": "0.99", "verdicts": verdicts, "defaults": {"a.b": 7}}
    json.dump(answer, open(sys.argv[2], "w"))
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stand_in.py").write_text(textwrap.dedent(STAND_IN))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("STAND_IN_COUNT", str(tmp_path / "count"))
    monkeypatch.setattr(installed_deepspeed, "_PROGRAM", "stand_in")
    monkeypatch.setattr(installed_deepspeed, "_stamp", lambda: "0.99")
    return tmp_path / "dsat" / "deepspeed"


def experiment(overrides: dict[str, Any] | None = None, **config: Any) -> Experiment:
    found = experiments.make_experiment(["train.py"], "train", Path(), config, "ds.json")
    return replace(found, path=Path("exp.yaml"), overrides=overrides or {})


def check(own: Experiment, program: Entrypoint = PROGRAM) -> dict[str, Any]:
    return installed_deepspeed.check(own, program)


def test_each_configuration_is_asked_about_once(cache: Path) -> None:
    for size in (1, 1, 2):
        assert check(experiment(zero_optimization={"sub_group_size": size})) == {"a.b": 7}
    assert (cache.parents[1] / "count").read_text() == "xx"
    for path in cache.glob("*.json"):
        path.write_text("{")
    check(experiment(zero_optimization={"sub_group_size": 1}))
    assert (cache.parents[1] / "count").read_text() == "xxx"


def test_a_refusal_names_the_file_and_the_key(cache: Path) -> None:
    def refused(own: Experiment) -> str:
        with pytest.raises(UserInputError) as caught:
            check(own)
        return str(caught.value)

    wrong = {"zero_optimization": {"wrong": 1}}
    assert refused(experiment(**wrong)).startswith("ds.json: zero_optimization.wrong: is wrong")
    with pytest.MonkeyPatch.context() as patch:  # a cache that cannot be written hides no answer
        patch.setenv("XDG_CACHE_HOME", "/proc")
        assert "is wrong" in refused(experiment(**wrong))
    listed = experiment(zero_optimization={"overlap_comm": [True, "wrong"]})
    assert refused(listed).startswith("ds.json: zero_optimization.overlap_comm: is wrong")
    place = "exp.yaml: hyperparameters.overwrite_deepspeed_args"
    assert refused(experiment(wrong)).startswith(f"{place}.zero_optimization.wrong: is wrong")
    several = experiment({"my_own": 1}, zero_optimization={"wrong": 1, "wrong_too": 1})
    places = ["ds.json: zero_optimization.wrong", "ds.json: zero_optimization.wrong_too"]
    told = refused(several)
    assert [told.count(f"{each}:") for each in (*places, f"{place}.my_own")] == [1, 1, 1]
    # A script may read sections of its own in its configuration, but not in overrides.
    own: dict[str, Any] = {"my_script": 1}
    check(experiment(None, **own))
    check(experiment(own, **own))
    assert refused(experiment(own)).startswith(f"{place}.my_script: DeepSpeed 0.99 reads no")


def test_nothing_is_refused_where_deepspeed_does_not_answer(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = experiment(zero_optimization={"wrong": 1})
    assert check(wrong, OTHER) == {}
    monkeypatch.setattr("sys.executable", "/bin/false")
    assert check(wrong) == {}
    assert not list(cache.glob("*.json"))
