"""Runs that were cut off, raised, changed or repeated: nothing is lost or measured twice."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testing.command import run_of
from testing.scenarios import Harm, User
from testing.started import Told
from testing.world import Failure, World
from tests.scenarios.checks import EACH_METHOD, best_speed, check_result, configuration, of_kind

JOURNALS = Path(__file__).parent / "journals"


def check_complete(user: User, told: Told, trials: int) -> None:
    """Check that a run came to its end with every trial measured, and each once."""
    check_result(user, told)
    assert len(told.trials) <= trials
    assert all(row["outcome"] for row in told.trials)
    begun: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    for event in user.events():
        if event["event"] == "proposed":
            begun[event["trial"]["id"]] += 1
        elif event["event"] == "finished":
            ended[event["trial_id"]] += 1
    assert begun == ended and set(begun.values()) == {1}
    assert user.true_speed(user.best_config()) > 0.9 * best_speed(user.world)


def cut(user: User, events: int) -> None:
    """Leave so many events in the journal, as a run that was killed then."""
    path = user.folder / "run" / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:events]))


# -- cut off


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("method", EACH_METHOD)
def test_a_run_cut_off_anywhere_ends_as_a_whole_one(
    tmp_path: Path, method: str, at_once: int
) -> None:
    trials = 14
    whole = User(tmp_path / "whole", World(at_once=at_once))
    whole.has()
    told = whole.tunes("--max-trials", trials, method=method)
    check_complete(whole, told, trials)
    count = len(whole.events())
    for events in range(1, count, 7 if method == "model" else 5):
        user = replace(whole, folder=tmp_path / f"{events}")
        shutil.copytree(whole.folder, user.folder)
        cut(user, events)
        before = [e["trial_id"] for e in user.events() if e["event"] == "finished"]
        told = user.tunes("--max-trials", trials, "--resume", method=method)
        check_complete(user, told, trials)
        ends = [e["trial_id"] for e in user.events() if e["event"] == "finished"]
        assert ends[: len(before)] == before


def test_a_run_killed_at_every_trial_comes_to_its_end(tmp_path: Path) -> None:
    user = User(tmp_path, World(at_once=2))
    user.has()
    trials = 10
    for trial in range(trials + 1):
        resume = ("--resume",) if trial else ()
        killed = Harm(signals={trial: (signal.SIGKILL,)})
        told = user.tunes("--max-trials", trials, *resume, method="asha", harm=killed)
        if told.status != -signal.SIGKILL:
            break
    check_complete(user, told, trials)


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_journal_torn_in_a_line_goes_on(user: User, part: float) -> None:
    user.tunes("--max-trials", 9, method="asha")
    path = user.folder / "run" / "journal.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    told = user.tunes("--max-trials", 9, "--resume", method="asha")
    check_complete(user, told, 9)


def test_a_finished_run_is_told_again_and_nothing_is_run(user: User) -> None:
    first = user.tunes("--max-trials", 10)
    again = user.tunes("--max-trials", 10, "--resume")
    for told in (first, again):
        assert told.status == 0
    assert [r["name"] for r in again.trials] == [r["name"] for r in first.trials]
    assert again.json["best"] == first.json["best"] and again.json["gain"] == first.json["gain"]
    fewer = user.tunes("--max-trials", 5, "--resume")
    assert fewer.status == 0 and len(fewer.trials) == len(first.trials)


# -- another budget


@pytest.mark.parametrize("method", EACH_METHOD)
def test_a_run_goes_on_with_more_trials(user: User, method: str) -> None:
    options = ("--stop-when", 0) if method == "model" else ()
    first = user.tunes("--max-trials", 9, *options, method=method)
    told = user.tunes("--max-trials", 20, *options, "--resume", method=method)
    check_complete(user, told, 20)
    assert len(told.trials) > len(first.trials)
    assert [r["name"] for r in told.trials][: len(first.trials)] == [
        r["name"] for r in first.trials
    ]


def test_a_run_without_finals_goes_on_into_them(user: User) -> None:
    first = user.tunes("--max-trials", 16, "--finals", 0)
    assert "unconfirmed" in first.json["verdict"][0]
    told = user.tunes("--max-trials", 24, "--resume")
    check_complete(user, told, 24)
    assert told.json["finals"]["significant"] and "unconfirmed" not in told.json["verdict"][0]


def test_a_run_goes_on_by_the_finals_that_are_asked_for(user: User) -> None:
    """All of dsat reads them from the run, whose journal has them."""
    assert user.tunes("--max-trials", 4, "--finals", 0, method="random").status == 0
    more = ("--max-trials", 10, "--finals", 4, "--resume")
    told = user.tunes(*more, method="random")
    assert told.status == 0, told.err
    assert run_of(user.folder / "run").plan.finals == 4
    assert [row["kind"] for row in told.trials].count("final") in (2, 4)
    assert "(--finals)" not in " ".join(told.json["verdict"])


def test_more_trials_are_nothing_to_a_search_that_expects_nothing_of_them(user: User) -> None:
    first = user.tunes("--max-trials", 40)
    told = user.tunes("--max-trials", 60, "--resume")
    assert [r["name"] for r in told.trials] == [r["name"] for r in first.trials]
    assert told.json["best"] == first.json["best"]


# -- another plan


def ds_config(user: User, **changes: Any) -> None:
    user.has({"train_micro_batch_size_per_gpu": 1, **changes})


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (None, ("-r", 8), ("seed", "42", "8")),
        (None, ("--slot-memory", "12GiB"), ("slot memory", "12GiB")),
        ({"gradient_clipping": 1.0}, (), ("DeepSpeed configuration",)),
        ({"train_micro_batch_size_per_gpu": 2}, (), ("train_micro_batch_size_per_gpu",)),
        (None, ("--divisor", 4), ("divisor", "4")),
        (None, ("-z", 1, 2), ("stages",)),
        (None, ("--switch", "torch_compile=False,True"), ("false,true",)),
        (None, ("--start-profile-step", 2), ("steps",)),
    ],
)
def test_another_plan_is_another_run(
    user: User, change: dict[str, Any] | None, options: tuple[Any, ...], said: tuple[str, ...]
) -> None:
    user.tunes("--max-trials", 6, method="asha")
    before = user.reads("journal.jsonl")
    if change is not None:
        ds_config(user, **change)
    told = user.tunes("--max-trials", 6, "--resume", *options, method="asha")
    assert told.status == 2 and "Cannot resume: " in told.err
    assert all(word in told.err for word in said), told.err
    assert user.reads("journal.jsonl") == before, "nothing is lost"


def test_another_device_is_another_run(user: User) -> None:
    user.tunes("--max-trials", 6, method="asha")
    user.world = replace(user.world, device_name="NVIDIA H100 80GB HBM3")
    told = user.tunes("--max-trials", 6, "--resume", method="asha")
    assert told.status == 2
    assert "A100" in told.err and "H100" in told.err and "device" in told.err


# -- earlier runs of the folder


@pytest.mark.parametrize("method", ["model", "asha"])
def test_errors_are_tried_again_and_what_was_measured_is_not(user: User, method: str) -> None:
    """It was interrupted and the machine mended: only finals repeat a measurement."""
    mended = user.world
    failure = Failure("ERROR", {"strategy": "z1"}, "a full disk")
    user.world = replace(user.world, failures=(failure,))
    first = user.tunes("--max-trials", 14, "--finals", 0, method=method)
    assert first.status == 0 and any(row["outcome"] == "ERROR" for row in first.trials)
    cut(user, len(user.events()) - 1)  # before it stopped
    shutil.rmtree(user.folder / "run" / "trials")
    user.world = mended
    second = user.tunes("--max-trials", 20, "--finals", 6, "--resume", method=method)
    check_result(user, second)
    assert all(row["outcome"] == "OK" for row in second.trials)
    known = {configuration(row) for row in first.trials if row["outcome"] == "OK"}
    ran = {path.name for path in (user.folder / "run" / "trials").iterdir()}
    again = [row for row in of_kind(second, "baseline", "search") if configuration(row) in known]
    assert len(again) > 2 and any(row["stage"] == 1 for row in second.trials)
    assert not ran & {row["name"] for row in again}
    assert all(row["name"] in ran for row in of_kind(second, "final"))
    assert method == "model" or len(second.trials) > 20 >= len(ran), "of which none is used up"


# -- journals of earlier versions


def last_release(folder: Path) -> User:
    """Return a user in whose folder the last release has made a run, by this very world."""
    user = User(folder, World(at_once=2))
    shutil.copytree(JOURNALS / "last_release", folder, dirs_exist_ok=True)
    return user


@pytest.mark.parametrize("events", [5, 12, 21, 1000])
def test_a_run_of_the_last_release_is_resumed(tmp_path: Path, events: int) -> None:
    user = last_release(tmp_path)
    recorded = user.events()
    cut(user, events)
    told = user.tunes("--max-trials", 12, "--resume", method="asha")
    check_complete(user, told, 12)
    assert user.events()[: min(events, len(recorded))] == recorded[:events]
    more = user.tunes("--max-trials", 16, "--resume", method="asha")
    check_complete(user, more, 16)
    assert len(more.trials) > len(told.trials)


def test_fields_of_a_later_version_are_ignored(tmp_path: Path) -> None:
    user = last_release(tmp_path)
    plain = user.types("show", "run", "--json")
    path = tmp_path / "run" / "journal.jsonl"
    later = [{**event, "later": 1} for event in user.events()]
    for event in later:
        for key in event.keys() & {"plan", "trial", "outcome"}:
            event[key] = {**event[key], "later": {"a": 1}}
    later.insert(9, {"event": "from the future", "elapsed_s": 0.0})
    path.write_text("".join(f"{json.dumps(event)}\n" for event in later), encoding="utf-8")
    shown = user.types("show", "run", "--json")
    assert shown.status == 0 and shown.json["trials"] == plain.json["trials"]


@pytest.mark.parametrize("name", ["before_smaller_may_run", "of_last_version"])
def test_an_older_journal_is_shown(tmp_path: Path, name: str) -> None:
    """Without `Outcome.smaller_may_run`, `Trial.strategy` and half of `Plan`, the first."""
    (tmp_path / "run").mkdir()
    shutil.copy(JOURNALS / f"{name}.jsonl", tmp_path / "run" / "journal.jsonl")
    shown = User(tmp_path).types("show", "run", "--json", "--trials")
    assert shown.status == 0, shown.err
    assert len(shown.json) == 12 and sum(row["outcome"] == "OK" for row in shown.json) > 3
