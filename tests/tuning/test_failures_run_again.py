"""Failures of an earlier run are run again on a resume; the rest is not."""

from __future__ import annotations

import pytest

from testing.scenarios import User
from testing.started import Told
from testing.world import Failure, World


def search(user: User, *options: object) -> Told:
    return user.tunes("--max-trials", 14, "--finals", 0, *options, method="random")


def cut(user: User, kind: str) -> None:
    """Interrupt a run just after the first trial that ended so."""
    path = user.folder / "run" / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    for number, event in enumerate(user.events(), start=1):
        if event["event"] == "finished" and event["outcome"]["kind"] == kind:
            path.write_text("".join(lines[:number]))
            return


@pytest.mark.parametrize("kind", ["TIMEOUT", "OOM"])
def test_a_failure_that_would_repeat_is_not_run_again(user: User, kind: str) -> None:
    user.world = World(failures=(Failure(kind, {"micro_batch": 16}, "as always"),))
    search(user)
    cut(user, kind)
    user.world = World()
    told = search(user, "--resume")
    again = {r["outcome"] for r in told.trials if r["train_micro_batch_size_per_gpu"] == 16}
    assert kind in again


@pytest.mark.parametrize("kind", ["ERROR", "OOM"])
def test_a_first_trial_that_failed_is_run_again_unless_memory_ran_out(
    user: User, kind: str
) -> None:
    user.world = World(failures=(Failure(kind, {}, "no luck"),))
    assert search(user).status == 1
    user.world = World()
    told = search(user, "--resume")
    assert told.status == (0 if kind == "ERROR" else 1)
    set_aside = user.folder / "run" / "journal-1.jsonl"
    assert set_aside.exists() is (kind == "ERROR"), "what ran out of memory would only do so again"
    refused = search(user)
    assert refused.status == 2 and "run" in refused.err, "it already holds a run"
