"""The loop that launches the tuner's trials on an engine and returns the outcomes to the tuner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dsat.engines import Engine
from dsat.errors import EngineError
from dsat.memory.forecast import Forecast
from dsat.memory.predictor import Basis
from dsat.run.run import Run
from dsat.run.tuner import Tuner
from dsat.values import format as fmt
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial

_POLL_S = 0.5


class Observer(Protocol):
    """Observer of a run, whose methods do nothing by default.

    `began` is called when the search begins, and `waited` after each poll of the engine.
    """

    def started(self, run: Run, trial: Trial) -> None:
        return

    def ended(self, run: Run, trial: Trial, outcome: Outcome) -> None:
        return

    def began(self, run: Run, forecast: Forecast | None) -> None:
        return

    def waited(self, run: Run) -> None:
        return


def drive(
    tuner: Tuner,
    engine: Engine,
    observers: Sequence[Observer] = (),
    *,
    max_slots: int | None = None,
    survey: Callable[[], Basis] | None = None,
) -> None:
    """Run trials until the tuner is finished.

    If the run was interrupted, trials without an outcome run again first.

    Args:
        max_slots: limit on the devices in use; None for all devices of the engine.
        survey: makes the basis of memory predictions; required if the plan simulates memory.

    Raises:
        EngineError: the engine has too few devices for a trial, or returns anything but outcomes of
            its trials.
    """
    run, per_trial = tuner.run, tuner.plan.slots_per_trial
    left_over = run.running
    is_announced = False
    if engine.num_slots < per_trial:
        raise EngineError(
            f"`{type(engine).__name__}.num_slots` is {engine.num_slots}, but a trial needs "
            f"{fmt.count(per_trial, 'device')}"
        )
    while not tuner.finished:
        if tuner.decisions.needs_memory_basis:
            assert survey is not None
            tuner.set_memory_basis(survey())
        if tuner.decisions.search_began and not is_announced:
            for observer in observers:
                observer.began(run, tuner.decisions.forecast)
            is_announced = True
        usable = engine.num_slots  # fewer once a device has failed
        if max_slots is not None:
            usable = min(usable, max_slots)
        free = usable - (len(run.running) - len(left_over)) * per_trial
        while left_over and free >= per_trial:
            _launch(engine, observers, run, left_over.pop(0))
            free -= per_trial
        if not left_over:
            for trial in tuner.next_trials(free):
                _launch(engine, observers, run, trial)
        if tuner.finished:
            break
        for trial_id, outcome in engine.poll(_POLL_S):
            if trial_id not in run.trials or not isinstance(outcome, Outcome):
                raise EngineError(
                    f"`{type(engine).__name__}.poll` returned {(trial_id, outcome)!r}, which is "
                    "not the outcome of a trial that it launched"
                )
            tuner.record(trial_id, outcome)
            for observer in observers:
                observer.ended(run, run.trials[trial_id], outcome)
        for observer in observers:
            observer.waited(run)
    tuner.stop()


def _launch(engine: Engine, observers: Sequence[Observer], run: Run, trial: Trial) -> None:
    engine.launch(trial)
    for observer in observers:
        observer.started(run, trial)
