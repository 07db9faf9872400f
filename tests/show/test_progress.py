"""What users see during a search, and how long it takes."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from dsat.in_trial.rank_files import ACTIVITY_FILE, Progress
from dsat.show import progress
from testing.scenarios import Harm, Terminal, User
from testing.world import World

pytestmark = pytest.mark.usefixtures("unchecked_configurations")


@pytest.mark.slow
@pytest.mark.parametrize(("at_once", "shorter"), [(1, 1.0), (3, 0.6)])
def test_the_time_left_is_that_of_the_trials_that_are_left(
    user: User, at_once: int, shorter: float
) -> None:
    """Trials take 30 to 37 s in this world."""
    user.world, user.pause_s = World(at_once=at_once), 0.02
    words = user.words("--max-trials", 20, "--finals", 0, method="random", shown=True)
    shown = user.types(*words, harm=Harm(terminal=Terminal(200, 60)))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.out)
    lefts = re.findall(
        r"at most (\d+) more trials \((\d+) min (\d+) s to (\d+) min (\d+) s\)", text
    )
    assert lefts, text[-2000:]
    for count, *times in ([int(number) for number in left] for left in lefts):
        low, high = 60 * times[0] + times[1], 60 * times[2] + times[3]
        assert low <= high and low >= 25 * count / at_once
        assert high <= 40 * count * shorter + 40


@pytest.mark.slow
def test_a_low_terminal_shows_fewer_trials_and_all_lines_below_them(user: User) -> None:
    """Results wrap here, so 12 trials need more lines than the terminal has."""
    user.pause_s = 0.02
    words = user.words("--max-trials", 20, "--finals", 0, method="random", shown=True)
    shown = user.types(*words, harm=Harm(terminal=Terminal(60, 24)))
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.out)
    assert "at most 1 more trial" in text
    assert [line for line in re.split("[\r\n]+", text) if line.strip() == "..."] == []


def test_what_a_trial_compiles_is_shown_with_the_time_that_it_takes(tmp_path: Path) -> None:
    assert progress.describe_activity(tmp_path / "t1") == "waits for devices"
    assert progress.describe_activity(tmp_path) == "starts"
    Progress(tmp_path).set_activity("compiling DeepSpeed's operator cpu_adam")
    os.utime(tmp_path / ACTIVITY_FILE, (time.time() - 130,) * 2)
    assert re.fullmatch(
        r"compiling .* cpu_adam \(2 min 1\d s\)", progress.describe_activity(tmp_path)
    )
    Progress(tmp_path).count(3)
    assert progress.describe_activity(tmp_path) == "step 3"
