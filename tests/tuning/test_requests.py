"""What people ask of a run that goes on: it is journaled, done, and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dsat.tuning.journal import MemoryJournal
from dsat.tuning.loop import drive
from dsat.tuning.requests import Request, RequestKind
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial
from testing.helpers import FakeClock, plan_of
from testing.made_up_runs import Steady
from testing.simulated import SimulatedEngine

STOP = Request(RequestKind.STOP)
WORLD = Steady()


def tuner_of(journal: MemoryJournal, trials: int = 20, finals: int | None = 0) -> Tuner:
    plan = plan_of("random", max_trials=trials, finals=finals)
    return Tuner(plan, journal, events=[*journal.events], clock=FakeClock())


def driven(tuner: Tuner, asked: dict[int, Request] | None = None, duration_s: float = 1.0) -> Run:
    """Runs to the end; requests come when so many trials have been started."""
    left = dict(asked or {})

    def requests() -> Iterator[Request]:
        for started in [n for n in left if len(tuner.run.trials) >= n]:
            yield left.pop(started)

    def outcome_of(trial: Trial) -> Outcome:
        return replace(WORLD.outcome(trial), duration_s=duration_s)

    engine = SimulatedEngine(outcome_of, num_slots=2)
    drive(tuner, engine, max_concurrent_trials=2, requests=requests)
    assert left == {}
    return tuner.run


def test_a_stop_lets_what_runs_end_and_starts_nothing_more() -> None:
    journal = MemoryJournal()
    run = driven(tuner_of(journal), {6: STOP}, duration_s=3.0)
    kinds = [event["event"] for event in journal.events]
    after = kinds[kinds.index("stop_asked") :]
    assert "proposed" not in after and after.count("finished") >= 1
    assert run.stop_reason == "it was asked to stop" and not run.running
    assert 6 <= len(run.outcomes) < 20
    assert Run(journal.events).stop_reason == run.stop_reason


def test_a_stopped_run_goes_on_when_it_is_resumed() -> None:
    whole, journal = MemoryJournal(), MemoryJournal()
    unstopped = driven(tuner_of(whole))
    driven(tuner_of(journal), {6: STOP})
    run = driven(tuner_of(journal))
    assert [t.name for t in run.trials.values()] == [t.name for t in unstopped.trials.values()]
    assert run.stop_reason == unstopped.stop_reason


def test_a_canceled_trial_is_journaled_as_such_and_the_search_goes_on() -> None:
    journal = MemoryJournal()
    cancel = Request(RequestKind.CANCEL, trial_id=5)
    run = driven(tuner_of(journal), {6: cancel}, duration_s=100.0)
    assert run.outcomes[5].kind is OutcomeKind.CANCELED
    asked = [e for e in journal.events if e["event"] == "cancel_asked"]
    assert [event["trial_id"] for event in asked] == [5]
    assert len(run.outcomes) == 20
    again = tuner_of(journal)  # decides the same again
    assert again.finished and again.run.outcomes.keys() == run.outcomes.keys()


def test_a_canceled_trial_that_had_not_ended_is_not_run_again() -> None:
    """dsat was killed between the request and the outcome."""
    journal = MemoryJournal()
    tuner = tuner_of(journal)
    [own] = tuner.next_trials(1)
    tuner.record(own.id, WORLD.outcome(own))
    hangs, other = tuner.next_trials(2)
    tuner.ask_cancel(hangs.id)
    for _ in range(2):
        resumed = tuner_of(journal)
        assert resumed.run.outcomes[hangs.id].kind is OutcomeKind.CANCELED
        assert resumed.run.running == [other]


@pytest.mark.parametrize("trial_id", [None, 0])
def test_nothing_is_canceled_that_does_not_run(trial_id: int | None) -> None:
    journal = MemoryJournal()
    run = driven(tuner_of(journal), {6: Request(RequestKind.CANCEL, trial_id=trial_id)})
    assert [o.kind for o in run.outcomes.values()].count(OutcomeKind.CANCELED) == 0
    assert not [e for e in journal.events if e["event"] == "cancel_asked"]


@pytest.mark.parametrize("finals", [0, None])
def test_a_raised_budget_is_used(finals: int | None) -> None:
    journal = MemoryJournal()
    more = Request(RequestKind.BUDGET, max_trials=24)
    tuner = tuner_of(journal, trials=12, finals=finals)
    run = driven(tuner, {6: more})
    assert 12 < len(run.outcomes) <= 24 and tuner.plan.max_trials == 24
    assert (run.finals is not None) is (finals is None)
    # Whoever resumes it with the same options has what was asked for meanwhile.
    for trials in (12, 24):
        again = tuner_of(journal, trials=trials, finals=finals)
        assert again.finished and list(again.run.trials) == list(run.trials)
        assert again.plan.max_trials == 24


def test_other_options_replace_a_raised_budget() -> None:
    journal = MemoryJournal()
    driven(tuner_of(journal, trials=12), {6: Request(RequestKind.BUDGET, max_trials=24)})
    for _ in range(2):
        again = tuner_of(journal, trials=14)
        assert again.run.plan == again.plan and again.plan.max_trials == 14


@pytest.mark.parametrize("max_trials", [None, 3])
def test_a_budget_is_not_lowered(max_trials: int | None) -> None:
    journal = MemoryJournal()
    less = Request(RequestKind.BUDGET, max_trials=max_trials)
    assert len(driven(tuner_of(journal, trials=12), {6: less}).outcomes) == 12
    assert not [e for e in journal.events if e["event"] == "budget"]
