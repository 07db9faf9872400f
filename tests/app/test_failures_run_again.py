"""Failures of an earlier run are run again on a resume; the rest is not."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.app import run_folders
from dsat.errors import UserInputError
from dsat.inputs.settings import Settings
from dsat.search import options_of
from dsat.space.space import Suggestion
from dsat.tuning import history
from dsat.tuning.journal import FILE_NAME, Journal
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import Outcome
from testing.helpers import World, drive, failed, plan_of

PLAN = plan_of(max_trials=8)


def a_run(folder: Path, *, profile: Outcome | None = None) -> Run:
    """A run in a folder: of the made-up world, or in which nothing ran."""
    folder.mkdir()
    with Journal(folder / FILE_NAME) as journal:
        tuner = Tuner(PLAN, journal)
        if profile is None:
            drive(tuner, World())
        else:
            while trials := tuner.next_trials(1):
                tuner.record(trials[0].id, profile)
            tuner.stop()
        return tuner.run


def begins_anew(folder: Path) -> bool:
    run_folders.earlier_runs(folder, PLAN, {}, takes_over=False)
    return is_empty(folder)


def is_empty(folder: Path) -> bool:
    return (folder / FILE_NAME).read_bytes() == b""


def test_what_another_device_measured_is_not_reused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    a100, h100 = (replace(PLAN, measured={"device": device}) for device in ("A100", "H100"))
    for plan, today, is_known in ((PLAN, h100, True), (a100, a100, True), (a100, h100, False)):
        run.plan = plan
        assert bool(history.known_outcomes([run], today, {})) is is_known


def test_what_another_script_or_other_software_measured_is_not_reused(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    run.info = {"software": "torch 2.9", "script_digest": "a"}
    for today, is_known in (
        (run.info, True),
        ({}, True),
        ({**run.info, "software": "torch 2.0"}, False),
        ({**run.info, "script_digest": "b"}, False),
    ):
        assert bool(history.known_outcomes([run], PLAN, today)) is is_known


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"slot_memory_bytes": 24 * 2**30}, "slot memory was 24GiB, now not given"),
        ({"slots_per_trial": 2}, "slots per trial was 2, now 1"),
        ({"measured": {"steps": [1, 2]}}, "profile steps (start, end, most) was [1, 2]"),
        ({"measured": {"program": "a"}}, "the entrypoint, its hyperparameters or its argument"),
    ],
)
def test_why_measurements_do_not_count(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    run.plan = replace(run.plan, **changes)
    assert said in str(history.difference(run, PLAN, {}))


def test_what_came_since_is_none_of_a_run_that_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="dsat")
    a_run(tmp_path / "run")
    name, option = next(iter(options_of(PLAN.method).items()))
    suggested = (Suggestion(1, 1, "z1", {}, {}),)
    today = replace(PLAN, suggested=suggested, search_options={name: option.initial})
    assert run_folders.earlier_runs(tmp_path / "run", today, {}, takes_over=True) == []
    assert not is_empty(tmp_path / "run") and not caplog.messages
    today = replace(PLAN, search_options={name: 9})
    assert len(run_folders.earlier_runs(tmp_path / "run", today, {}, takes_over=True)) == 1
    assert is_empty(tmp_path / "run")
    assert f"option of the search {name} was" in caplog.messages[0]
    assert caplog.messages[0].endswith("9: a new search begins and reuses what was measured")


@pytest.mark.parametrize("kind", ["ERROR", "OOM"])
def test_a_profile_that_failed_is_run_again_unless_memory_ran_out(
    kind: str, tmp_path: Path
) -> None:
    """Also by the next process, if this one is killed before it has begun anew."""
    folder = tmp_path / "run"
    profile = replace(failed(kind, "No module named 'nonsense'"), before_engine=kind == "ERROR")
    a_run(folder, profile=profile)
    assert begins_anew(folder) is (kind == "ERROR")
    if kind == "OOM":
        return
    [earlier] = run_folders.earlier_runs(folder, PLAN, {}, takes_over=False)
    assert history.known_outcomes([earlier], PLAN, {}) == {}
    settings = Settings(method="asha", run_dir=folder, resume=True)
    with contextlib.ExitStack() as locks:
        assert run_folders.of_run(settings, "name", locks) == folder
    with contextlib.ExitStack() as locks, pytest.raises(UserInputError, match="already holds a"):
        run_folders.of_run(replace(settings, resume=False), "name", locks)


def test_journals_that_were_set_aside_are_read_by_their_numbers(tmp_path: Path) -> None:
    a_run(tmp_path / "run")
    whole = (tmp_path / "run" / FILE_NAME).read_bytes().splitlines(keepends=True)
    for number in (1, 2, 10):
        part = b"".join(whole[: 1 + number])
        (tmp_path / "run" / f"journal-{number}.jsonl").write_bytes(part)
    earlier = run_folders.earlier_runs(tmp_path / "run", PLAN, {}, takes_over=False)
    known = [len(run.trials) + len(run.outcomes) for run in earlier]
    assert known == sorted(known) and len(set(known)) == 3


def cut_after(folder: Path, count: int) -> None:
    """Interrupt a run after so many events."""
    path = folder / FILE_NAME
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:count]))


def ends_of(run: Run, kind: str) -> list[int]:
    """Return the trials that ended so."""
    return [number for number, outcome in run.outcomes.items() if outcome.kind.value == kind]


def test_an_error_is_run_again_if_the_search_goes_on(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    assert run.best is not None and ends_of(run, "ERROR")
    assert not begins_anew(tmp_path / "run"), "what a finished run found stays"
    cut_after(tmp_path / "run", -1)
    assert begins_anew(tmp_path / "run")


def test_a_failure_that_would_repeat_is_not_run_again(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    first_error, *_ = ends_of(run, "ERROR")
    assert any(number < first_error for number in ends_of(run, "TIMEOUT"))
    with Journal(tmp_path / "run" / FILE_NAME) as journal:
        ended = [event.get("trial_id") for event in journal.events]
    cut_after(tmp_path / "run", ended.index(first_error))
    assert not begins_anew(tmp_path / "run")
