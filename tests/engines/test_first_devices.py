"""The devices that a user's own command chooses are those of all trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from dsat.command import recorded_start
from testing.first_start import TRAINS, seen, user_folder
from testing.helpers import starts_of


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return user_folder(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("ranks", "given", "chosen"),
    [
        ([{"CUDA_VISIBLE_DEVICES": "4,5"}] * 2, {}, {"CUDA_VISIBLE_DEVICES": "4,5"}),
        ([{"CUDA_VISIBLE_DEVICES": "0,1"}] * 2, {}, {"CUDA_VISIBLE_DEVICES": "0,1"}),
        ([{"CUDA_VISIBLE_DEVICES": "4,5"}] * 2, {"CUDA_VISIBLE_DEVICES": "4,5"}, {}),
        ([{"CUDA_VISIBLE_DEVICES": "0,1", "CROSS_SIZE": "1"}] * 2, {}, {}),
        ([{"CUDA_VISIBLE_DEVICES": "2,3", "CROSS_SIZE": "1"}], {}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
        ([{"CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(2)], {}, {}),
        ([{}], {"CUDA_VISIBLE_DEVICES": "3"}, {}),
    ],
)
def test_a_choice_of_devices_in_the_command_is_kept(
    ranks: Sequence[Mapping[str, str]],
    given: Mapping[str, str],
    chosen: Mapping[str, str],
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").touch()
    starts = starts_of(tmp_path, ranks)
    program = recorded_start.recognise_program(starts, ["bash", "run.sh"], given, {0, 1})
    assert {n: v for n, v in program.env.items() if "VISIBLE" in n} == chosen


VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("above", "later", "chosen"),
    [
        ({VISIBLE: "0,1"}, ("", ""), "0,1"),  # CUDA_VISIBLE_DEVICES=0,1 deepspeed train.py
        ({VISIBLE: "2,3"}, ("", ""), None),  # with --num_gpus, which DeepSpeed prefers
        ({}, ("2,3", "2,3"), "2,3"),
        ({}, ("2,3,4", "2,3,4"), "2,3"),
        ({}, ("3", "1"), "3,1"),
    ],
)
def test_a_choice_under_deepspeeds_launcher_is_kept(
    above: Mapping[str, str], later: Sequence[str], chosen: str | None, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    starts = [
        replace(start, env_above=above, env_later={VISIBLE: own} if own else {})
        for start, own in zip(
            starts_of(tmp_path, [{VISIBLE: "0,1", "CROSS_SIZE": "1"}] * 2), later, strict=True
        )
    ]
    program = recorded_start.recognise_program(starts, ["bash", "run.sh"], {}, {0, 1})
    assert program.env.get(VISIBLE) == chosen


LAUNCHES = """
import os, subprocess
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
env = dict(os.environ, CUDA_VISIBLE_DEVICES="0", CROSS_SIZE="1", RANK="0", WORLD_SIZE="1")
subprocess.run(["python3", "train.py"], env=env)
"""


@pytest.mark.slow
def test_a_choice_that_deepspeeds_launcher_replaces_is_seen(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    (place / "launches.py").write_text(LAUNCHES)
    line = f"export {VISIBLE}=0; python3 launches.py; true"
    assert seen(place, "bash", "-c", line).env == {VISIBLE: "0"}


@pytest.mark.slow
def test_devices_that_a_script_chooses_itself_are_those_of_all_trials(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    own = 'import os; os.environ["CUDA_VISIBLE_DEVICES"] = "1"; os.environ["COLOUR"] = "red"'
    (place / "chooses.py").write_text(f"{own}\n{TRAINS}\n")
    assert seen(place, "python3", "chooses.py").env == {VISIBLE: "1"}
