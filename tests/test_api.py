"""The Python API: the command line's words and defaults, as keywords and values."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dsat
from dsat import api
from dsat.errors import UserInputError
from dsat.inputs.option import options_of
from dsat.inputs.settings import EstimateSettings


class Seen(Exception):
    """The settings came through."""


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def take(settings: Any) -> None:
        found.append(settings)

    monkeypatch.setattr(api, "_estimate", take)
    return found


def test_the_api_is_there_only_when_it_is_used() -> None:
    code = "import dsat, sys; assert 'dsat.api' not in sys.modules; dsat.estimate; dir(dsat)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'guess'"):
        dsat.guess  # noqa: B018


def test_an_estimate_takes_the_words_of_the_command_line(seen: list[Any], tmp_path: Path) -> None:
    dsat.estimate("train.py", slot_memory=["24GiB", 2**30], slots=8, exact=True)
    dsat.estimate(tmp_path / "a.yaml")
    dsat.estimate(["torchrun", "train.py"], ds_config="ds.json")
    assert seen == [
        EstimateSettings(
            command=("train.py",),
            slot_memories=(24 * 2**30, 2**30),
            slot_counts=(8,),
            exact=True,
        ),
        EstimateSettings(config=tmp_path / "a.yaml", model_dir=tmp_path),
        EstimateSettings(command=("torchrun", "train.py"), ds_config=Path("ds.json")),
    ]


def test_every_option_of_an_estimate_is_a_keyword_with_its_default() -> None:
    parameters = inspect.signature(dsat.estimate).parameters
    for own in options_of(EstimateSettings):
        assert (own.keyword in parameters) is not own.shell_only
        if not own.shell_only:
            assert parameters[own.keyword].default == own.default
            assert f"{own.keyword}: {own.help}" in dsat.estimate.__doc__


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"slot_memory": "lots"}, "slot_memory: invalid memory size 'lots'"),
        ({"slots": 0}, "slots: 0 is less than 1"),
        ({"exact": "yes"}, "exact: 'yes' is not True or False"),
    ],
)
def test_a_wrong_value_is_a_users_error(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserInputError) as found:
        dsat.estimate("train.py", **options)
    assert said in str(found.value)


def test_an_unknown_keyword_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'slot_mem'"):
        dsat.estimate("train.py", slot_mem=1)


@pytest.mark.parametrize("target", [[], ["train.py", 3], 7])
def test_a_target_is_a_path_or_a_command(target: Any) -> None:
    with pytest.raises((UserInputError, TypeError), match="target"):
        dsat.estimate(target)
