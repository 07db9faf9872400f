"""Searches that are killed, interrupted, short of resources, or started in unusual environments."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from testing.harms import die_writing, fail_writing, open_few_files
from testing.local import wait_until
from testing.scenarios import Harm, Terminal, User
from testing.started import Told
from tests.scenarios.checks import METHODS

BUDGET = 10


def check_whole(user: User, told: Told) -> None:
    """Check that a search reached its end, lost nothing and measured nothing twice."""
    assert told.status == 0, told.err
    rows = told.trials
    assert rows[0]["kind"] == "baseline" and told.json["gain"] > 1.5
    assert len(rows) <= BUDGET
    assert all(row["outcome"] is not None for row in rows), rows
    searched = [row for row in rows if row["kind"] != "final"]
    ran = Counter(json.dumps(row["overrides"], sort_keys=True) for row in searched)
    assert max(ran.values()) == 1, "a configuration was measured twice"
    assert user.best_config() == told.json["best_ds_config"]


def resume(user: User, method: str = "model") -> Told:
    return user.tunes("--max-trials", BUDGET, "--resume", method=method)


def check_refused_or_failed(told: Told) -> None:
    """Check that a command which could not continue gives a reason, and does not report a bug."""
    assert told.status in (1, 2), told
    assert "Traceback" not in told.err and "dsat: error: " in told.err


def measured(user: User) -> dict[str, float]:
    """Return the measured speeds in a run's journal, by trial name."""
    shown = user.types("show", "run", "--trials", "--json")
    assert shown.status == 0, shown.err
    rows = json.loads(shown.out)
    return {row["name"]: row["metrics"]["throughput"] for row in rows if row["metrics"]}


@pytest.mark.parametrize(
    ("method", "trial"),
    [
        *(("model", trial) for trial in (0, 1, 4, 9)),
        *(pytest.param(method, 4, marks=pytest.mark.slow) for method in METHODS[1:]),
    ],
)
def test_a_search_killed_at_a_trial_goes_on(user: User, method: str, trial: int) -> None:
    killed = Harm(signals={trial: (signal.SIGKILL,)})
    told = user.tunes("--max-trials", BUDGET, method=method, harm=killed)
    if told.status == 0:  # it ended with fewer trials
        return
    assert told.status == -signal.SIGKILL
    before = measured(user)
    assert len(before) <= trial
    check_whole(user, resume(user, method))
    after = measured(user)
    assert {name: after[name] for name in before} == before


@pytest.mark.slow
@pytest.mark.parametrize("method", ["model", "asha"])
@pytest.mark.parametrize("call", [1, 2, 3, 8, 21, 55])
def test_a_search_killed_at_a_write_goes_on(user: User, method: str, call: int) -> None:
    killed = Harm(before=functools.partial(die_writing, call))
    assert user.tunes("--max-trials", BUDGET, method=method, harm=killed).status < 0
    begun = (user.folder / "run" / "journal.jsonl").exists()
    again = resume(user, method)
    if not begun and again.status == 2:  # there is nothing to resume yet
        again = user.tunes("--max-trials", BUDGET, method=method)
    check_whole(user, again)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "call"),
    [*((errno.ENOSPC, call) for call in (1, 4, 9, 20, 40)), (errno.EIO, 9), (errno.EROFS, 1)],
)
@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "from then on"])
def test_a_search_that_cannot_write_says_so(
    user: User, code: int, call: int, for_ever: bool
) -> None:
    failing = functools.partial(fail_writing, call, code, for_ever=for_ever)
    told = user.tunes("--max-trials", BUDGET, harm=Harm(before=failing))
    if told.status == 0:  # what could not be written was no more than a copy
        return
    check_refused_or_failed(told)
    assert os.strerror(code) in told.err
    begun = (user.folder / "run" / "journal.jsonl").exists()
    again = resume(user) if begun else user.tunes("--max-trials", BUDGET)
    check_whole(user, again)


def test_one_ctrl_c_ends_a_search_with_the_best_so_far(user: User) -> None:
    told = user.tunes("--max-trials", BUDGET, harm=Harm(signals={4: (signal.SIGINT,)}))
    assert told.status == 130
    assert told.best["name"] in measured(user)
    assert "--resume" in told.err and "run" in told.err
    check_whole(user, resume(user))


@pytest.mark.parametrize("pair", [("HUP", "HUP"), ("TERM", "HUP"), ("INT", "TERM")])
def test_two_signals_together_are_one_interruption(user: User, pair: tuple[str, str]) -> None:
    """A closing terminal sends HUP twice; a service manager sends TERM and HUP."""
    both = tuple(signal.Signals[f"SIG{name}"] for name in pair)
    told = user.tunes("--max-trials", BUDGET, harm=Harm(signals={4: both}))
    assert told.status == 130 and "Traceback" not in told.err
    check_whole(user, resume(user))


def test_an_interruption_before_anything_ran_leaves_no_result(user: User) -> None:
    told = user.tunes("--max-trials", BUDGET, harm=Harm(signals={0: (signal.SIGINT,)}))
    assert told.status == 130
    assert not (user.folder / "run" / "best_ds_config.json").exists()
    check_whole(user, resume(user))


@pytest.mark.slow
def test_a_second_process_in_the_same_folder_is_refused(user: User) -> None:
    user.pause_s = 0.2
    first = user.starts(*user.words("--max-trials", BUDGET))
    wait_until((user.folder / "run" / "journal.jsonl").exists, "the run")
    second = user.tunes("--max-trials", BUDGET, "--resume")
    check_refused_or_failed(second)
    assert str(first.pid) in second.err
    check_whole(user, first.wait())


SURROUNDINGS = {
    "C locale": Harm(python=(), variables={"LC_ALL": "C", "PYTHONUTF8": "0"}),
    "without assertions": Harm(python=("-O",)),
    "isolated from the user's packages": Harm(python=("-s",)),
    "no home": Harm(variables={"HOME": os.devnull, "XDG_CACHE_HOME": f"{os.devnull}/cache"}),
    "few open files": Harm(before=open_few_files),
    "a narrow terminal": Harm(variables={"COLUMNS": "30"}),
}


@pytest.mark.parametrize(
    "harm",
    [
        pytest.param(harm, id=name, marks=[] if harm.python is None else pytest.mark.slow)
        for name, harm in SURROUNDINGS.items()
    ],
)
def test_surroundings_do_not_matter(user: User, harm: Harm) -> None:
    check_whole(user, user.tunes("--max-trials", BUDGET, harm=harm))


def test_any_name_of_a_folder_will_do(user: User) -> None:
    user.folder /= "-größe 模型/it's %d{x}$HOME"
    user.has()
    check_whole(user, user.tunes("--max-trials", BUDGET))
    check_whole(user, user.tunes("--max-trials", BUDGET, "--resume", experiment=False))


def test_a_folder_behind_a_link_will_do(user: User, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path, target_is_directory=True)
    user.folder = link
    check_whole(user, user.tunes("--max-trials", BUDGET))


def test_a_lock_that_leads_elsewhere_is_not_followed(user: User) -> None:
    (user.folder / "run").mkdir()
    (user.folder / "run" / ".dsat").symlink_to("../train.py")
    before = (user.folder / "train.py").read_text()
    told = user.tunes("--max-trials", 6)
    assert told.status and "symbolic links" in told.err and "Traceback" not in told.err
    assert (user.folder / "train.py").read_text() == before


def test_nobody_needs_to_read_the_output(user: User) -> None:
    user.tunes("--max-trials", BUDGET, harm=Harm(out_is_closed=True))
    check_whole(user, resume(user))


def fill_disk_of_output() -> None:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


@pytest.mark.parametrize(
    "words", ["show run", "show run --json", "export run --to csv --json", "runs . --json"]
)
def test_output_on_a_full_disk_is_a_failure(user: User, words: str) -> None:
    full = Harm(before=fill_disk_of_output)
    tuned = user.tunes("--max-trials", BUDGET, harm=full)
    check_whole(user, resume(user))
    for told in (tuned, user.types(*words.split(), harm=full)):
        assert told.status == 1
        assert told.err.splitlines()[-1] == "dsat: error: output is lost: No space left on device"


TERMINALS = {
    "a terminal": (Terminal(), {}),
    "a dumb one": (Terminal(), {"TERM": "dumb"}),
    "one without colour": (Terminal(), {"NO_COLOR": "1"}),
    "a tiny one": (Terminal(20, 5), {}),
    "one that is resized": (Terminal(120, 40, resized_to=(30, 10)), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("terminal", "variables"), TERMINALS.values(), ids=TERMINALS)
def test_a_search_in_a_terminal(user: User, terminal: Terminal, variables: dict[str, str]) -> None:
    harm = Harm(terminal=terminal, variables={"TERM": "xterm-256color", **variables})
    told = user.types(*user.words("--max-trials", BUDGET, shown=True), harm=harm)
    assert told.status == 0 and "Traceback" not in told.out
    if variables.get("TERM") == "dumb":
        assert "\x1b" not in told.out
    elif "NO_COLOR" in variables:
        assert "\x1b[3" not in told.out
    check_whole(user, resume(user))
