from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest

from dsat.report import progress
from dsat.report.live_view import LiveView
from dsat.search.base import Outlook
from dsat.tuning.events import event_of
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from testing.helpers import FakeClock, plan_of
from testing.made_up_runs import Lawful, Steady, events_of_world


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def events() -> list[dict[str, object]]:
    return list(events_of_world(Steady(), finals=None))


def at(events: list[dict[str, object]], outcomes: int) -> Run:
    """The run when so many trials had ended."""
    run = Run()
    for event in events:
        run.apply(event_of(event))
        if len(run.outcomes) == outcomes:
            return run
    return run


def test_the_time_left_is_that_of_the_trials_that_are_left(events: list[dict[str, object]]) -> None:
    assert progress.time_left(at(events, 2), at_once=1) is None
    run = at(events, 14)
    assert run.plan.max_trials == 40 and run.plan.finals is None
    took = iter(range(11, 100))
    run.outcomes = {i: replace(o, duration_s=next(took)) for i, o in run.outcomes.items()}
    alone = progress.time_left(run, at_once=1)
    assert alone == "at most 26 more trials (6 min 10 s to 9 min 00 s)"
    # Ten of the 40 are the finals', which run one at a time.
    four = progress.time_left(run, at_once=4)
    assert four == "at most 26 more trials (3 min 20 s to 4 min 50 s)"


def test_the_view_on_a_terminal(events: list[dict[str, object]], tmp_path: Path) -> None:
    run = at(events, 14)
    first = next(iter(run.running))
    (tmp_path / first.name).mkdir()
    (tmp_path / first.name / "steps").write_bytes(b"%8d\n" % 6)
    stream = Terminal()
    view = LiveView(stream)
    outlook = Outlook("z2_offload", 24, 101.0, 0.314)
    progress.Status(num_slots=2, at_once=2, outlook=outlook).write(tmp_path)
    view.follow(tmp_path, tmp_path)
    with view:
        view.waited(run)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert run.best is not None
    assert "14 of at most 40 trials" in text and f"{len(run.running)} of 2 slots busy" in text
    assert f"Use {run.best.name}." in text and "x, unconfirmed: " in text
    assert "step 6" in text
    assert "at most 26 more trials" in text
    said = " ".join(text.split())
    assert (
        "next: stage 2 offload at micro batch 24, expected 101 samples/s, 31.4 % chance to beat"
        in said
    )


def test_a_trial_waits_for_slots_until_it_has_a_folder(
    events: list[dict[str, object]], tmp_path: Path
) -> None:
    run = at(events, 14)
    [trial] = run.running
    assert progress.doing(tmp_path / trial.name) == "waits for slots"
    status = progress.Status(num_slots=2, at_once=2)
    assert "0 of 2 slots busy" in progress.lines(run, status, tmp_path)
    (tmp_path / trial.name).mkdir()
    assert progress.doing(tmp_path / trial.name) == "starts"
    assert "1 of 2 slots busy" in progress.lines(run, status, tmp_path)
    for text, doing in ((b"\x00\x00", "starts"), (b"       6", "step 6")):
        (tmp_path / trial.name / "steps").write_bytes(text)
        assert progress.doing(tmp_path / trial.name) == doing


def test_what_the_model_search_thinks_comes_true() -> None:
    """The prediction of what it tries next, once it knows the machine, is near what that gives."""
    world, journal, errors = Lawful(), MemoryJournal(), []
    tuner = Tuner(plan_of("model", max_trials=25), journal, clock=FakeClock())
    while not tuner.finished:
        trials = tuner.next_trials(1)
        if not trials:
            break
        [trial] = trials
        outlook, outcome = tuner.decisions.outlook, world.outcome(trial)
        if outlook is not None and trial.kind.value == "search" and outcome.ok:
            assert outlook.micro_batch == trial.batch.micro_batch
            assert outlook.strategy == trial.strategy and 0 <= outlook.chance <= 1
            assert outcome.metrics is not None
            errors.append(abs(outlook.value / outcome.metrics.throughput - 1))
        tuner.record(trial.id, outcome)
    assert errors and errors[-1] < 0.1
