"""Failures of an earlier run are run again on a resume; the rest is not."""

from __future__ import annotations

import json

import pytest

from testing.scenarios import Told, User
from testing.world import Failure, World

BROKEN = Failure("ERROR", {"stage": 1}, "No module named 'nonsense'")


pytestmark = pytest.mark.usefixtures("unchecked_configurations")


def search(user: User, *options: object) -> Told:
    return user.tunes("--max-trials", 14, "--finals", 0, *options, method="random")


def cut(user: User, kind: str) -> None:
    """Interrupt a run just after the first trial that ended so; with "" just before its end."""
    path = user.folder / "run" / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    ended = [n for n, x in enumerate(lines) if f'"kind": "{kind}"' in x or f'"kind":"{kind}"' in x]
    ended = [n for n in ended if json.loads(lines[n])["event"] == "finished"]
    path.write_text("".join(lines[: ended[0] + 1] if kind else lines[:-1]))


def ends(told: Told, stage: int) -> set[str]:
    return {row["outcome"] for row in told.trials if row["stage"] == stage}


@pytest.mark.parametrize("is_over", [True, False])
def test_errors_are_run_again_if_the_search_goes_on(user: User, is_over: bool) -> None:
    user.world = World(failures=(BROKEN,))
    told = search(user)
    assert ends(told, 1) == {"ERROR"}
    if not is_over:
        cut(user, "")
    user.world = World()
    again = search(user, "--resume")
    assert ends(again, 1) == ({"ERROR"} if is_over else {"OK"}), "what a finished run found stays"
    known = {str(row["overrides"]): row["metrics"] for row in told.trials if row["metrics"]}
    measured = {str(row["overrides"]): row["metrics"] for row in again.trials}
    both = known.keys() & measured.keys()
    assert len(both) >= 3 and all(known[key] == measured[key] for key in both), "none ran again"


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
    refused = search(user)
    assert refused.status == 2 and "run" in refused.err, "it already holds a run"


def test_why_measurements_do_not_count_is_told(user: User) -> None:
    search(user)
    for options, words in (
        (("--slot-memory", "24GiB"), "slot memory 24GiB"),
        (("--start-profile-step", 2), "steps"),
    ):
        told = search(user, "--resume", *options)
        assert told.status in (0, 2)
        assert [word for word in words.split() if word not in told.err] == []
