"""What people ask of a search that goes on, through the folder of its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsat.app import mailbox
from dsat.run.requests import Request, RequestKind
from testing.local import wait_until
from testing.scenarios import Told, User
from testing.world import World

TRIALS = 14


def asked(user: User, *requests: Request, after: int = 5) -> Told:
    """Start a search, leave requests once so many trials were begun, and wait for its end."""
    user.has()
    words = user.words("--max-trials", TRIALS, "--finals", 0, method="random")
    started = user.starts(*words)
    trials = user.folder / "run" / "trials"
    wait_until(lambda: trials.exists() and len(list(trials.iterdir())) >= after, "trials")
    for request in requests:
        mailbox.leave(user.folder / "run", request)
    return started.wait()


def resumed(user: User, trials: int = TRIALS) -> Told:
    user.pause_s = 0.0
    return user.tunes("--max-trials", trials, "--finals", 0, "--resume", method="random")


@pytest.fixture
def user(tmp_path: Path) -> User:
    """Return a user whose trials take a tenth of a second each."""
    return User(tmp_path, World(at_once=2), pause_s=0.1)


def events(user: User, kind: str) -> list[dict[str, Any]]:
    return [event for event in user.events() if event["event"] == kind]


def test_a_stop_lets_what_runs_end_and_the_run_goes_on_when_resumed(user: User) -> None:
    told = asked(user, Request(RequestKind.STOP))
    assert told.status == 0 and "asked to stop" in told.json["stop_reason"]
    assert 5 <= len(told.trials) < TRIALS
    assert all(row["outcome"] for row in told.trials)
    assert user.best_config() == told.json["best_ds_config"]
    after = resumed(user)
    assert len(after.trials) == TRIALS and "budget" in after.json["stop_reason"]
    assert [r["name"] for r in after.trials][: len(told.trials)] == [r["name"] for r in told.trials]


def test_more_trials_may_be_allowed_meanwhile_and_fewer_not(user: User) -> None:
    less, more = (Request(RequestKind.BUDGET, max_trials=n) for n in (6, TRIALS + 4))
    told = asked(user, less, Request(RequestKind.BUDGET), more)
    assert told.status == 0 and len(told.trials) == TRIALS + 4
    # Whoever resumes it with the same options has what was asked for meanwhile.
    assert len(resumed(user).trials) == TRIALS + 4
    assert len(resumed(user, TRIALS + 6).trials) == TRIALS + 6


def test_what_is_no_request_is_deleted_and_said(user: User) -> None:
    folder = user.folder / "run" / mailbox.FOLDER
    folder.mkdir(parents=True)
    nothing_runs = [Request(RequestKind.CANCEL, trial_id=n) for n in (None, 0, 99)]
    told = asked(user, *nothing_runs)
    assert told.status == 0 and len(told.trials) == TRIALS
    assert all(row["outcome"] == "OK" for row in told.trials)
    user.has()
    for text in ("{", "[]", json.dumps({"kind": "other"})):
        path = folder / f"{len(text):020}.json"
        path.write_text(text)
        mailbox.take(user.folder / "run")
        assert not path.exists()
