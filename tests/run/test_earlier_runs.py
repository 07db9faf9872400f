"""Trials of earlier runs are observations of a new one, and count in its budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from dsat.run.history import reusable_trials
from dsat.run.journal import MemoryJournal
from dsat.run.loop import drive
from dsat.run.run import Run
from dsat.run.tuner import Tuner
from dsat.search import (
    SEARCHES,
    Context,
    Observation,
    Proposal,
    RandomSearch,
    Stop,
    Wait,
    usual_options,
)
from dsat.show.view import RunView
from dsat.space.plan import Plan
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial
from testing.helpers import plan_of, ran, weightless
from testing.simulated import SimulatedEngine


def measure(trial: Trial) -> Outcome:
    """Return a value that grows with the micro batch, and the profile of the model."""
    return replace(ran(trial.batch.micro_batch), profile=weightless(1000), duration_s=100.0)


def run(
    plan: Plan, *earlier: Run, measured: Callable[[Trial], Outcome] = measure
) -> tuple[Run, list[Trial]]:
    """Run a search after earlier runs; return it, and the trials that it launched."""
    launched: list[Trial] = []

    def outcome_of(trial: Trial) -> Outcome:
        launched.append(trial)
        return measured(trial)

    tuner = Tuner(plan, MemoryJournal(), earlier=reusable_trials(earlier, plan, {}))
    drive(tuner, SimulatedEngine(outcome_of, num_slots=1))
    return tuner.run, launched


PLAN = replace(plan_of("random", max_trials=8), finals=0, search_options=usual_options("random"))


def test_finals_that_are_not_needed_are_counted_beside_earlier_trials() -> None:
    def own_is_best(trial: Trial) -> Outcome:
        return replace(measure(trial), metrics=ran(1000 if trial.id == 0 else 1).metrics)

    first, _ = run(PLAN, measured=own_is_best)
    plan = replace(PLAN, finals=2, max_trials=16)
    second, launched = run(plan, first, measured=own_is_best)
    assert second.best is second.baseline and second.finals is None
    assert len(launched) == 6 and len(second.earlier) == 8
    [line] = [fact for fact in RunView(second).facts if fact.startswith("trials: ")]
    assert line == "trials: 14; 2 reserved for finals, not needed"


def test_the_flag_of_a_fixed_batch_is_known_from_earlier_runs() -> None:
    own = PLAN.own_batch.micro_batch

    def feeds_its_flag(trial: Trial) -> Outcome:
        if trial.batch.micro_batch == own or trial.batch_flag:
            return measure(trial)
        return Outcome(OutcomeKind.INVALID, fixed_batch=own, batch_flag="--bs")

    first, before = run(PLAN, measured=feeds_its_flag)
    plan = replace(PLAN, finals=2, max_trials=14)
    second, launched = run(plan, first, measured=feeds_its_flag)
    assert {trial.batch_flag for trial in before} == {"", "--bs"}
    assert {trial.batch_flag for trial in launched} == {"--bs"}
    assert all(outcome.ok for outcome in second.outcomes.values())


def test_a_search_sees_what_earlier_runs_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sequence[Observation]] = []

    class Watched(RandomSearch):
        def propose(
            self, observations: Sequence[Observation], context: Context
        ) -> Proposal | Wait | Stop:
            seen.append(observations)
            return super().propose(observations, context)

    first, before = run(PLAN)
    monkeypatch.setitem(SEARCHES, "watched", Watched)
    run(replace(PLAN, method="watched"), first)
    assert len(seen[0]) == len(before)
    assert all(each.outcome is not None for each in seen[0])


def test_trials_outside_of_the_new_space_are_left_out() -> None:
    first, _ = run(PLAN)
    second, _ = run(replace(PLAN, max_micro_batch=4), first)
    assert second.leader is not None and second.leader.batch.micro_batch <= 4


def test_a_resumed_run_keeps_what_it_reused() -> None:
    first, _ = run(PLAN)
    journal = MemoryJournal()
    tuner = Tuner(PLAN, journal, earlier=reusable_trials([first], PLAN, {}))
    tuner.next_trials(1)
    again = Tuner(PLAN, MemoryJournal(journal.events))
    assert again.run.earlier == tuner.run.earlier != set()
