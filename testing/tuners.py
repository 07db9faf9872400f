"""Tuners of made-up machines, as far as tests want them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dsat.space.plan import Plan
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import Outcome
from dsat.values.trial import TrialKind
from testing.helpers import (
    Event,
    FakeClock,
    World,
    drive,
    profiled,
    ran,
    weightless,
)

# Nothing but the micro batch is left to search: one lineage, whose ZeRO section is the user's own.
ONE_LINEAGE: Mapping[str, Any] = {
    "zero_stages": (1,),
    "base_config": {
        "zero_optimization": {
            "stage": 1,
            "reduce_bucket_size": 1000,
            "contiguous_gradients": True,
        }
    },
}


def tuner_of(plan: Plan, events: list[Event] | None = None) -> tuple[Tuner, MemoryJournal]:
    journal = MemoryJournal(list(events or []))
    return Tuner(plan, journal, events=events, clock=FakeClock()), journal


def begun(
    plan: Plan, own: Outcome | None = None, *, ceiling: int = 15
) -> tuple[Tuner, MemoryJournal]:
    """A tuner whose model is profiled, by the user's own configuration or after its failure."""
    tuner, journal = tuner_of(plan)
    tuner.next_trials(plan.slots_per_trial)
    tuner.record(0, replace(own or ran(), profile=weightless(ceiling)))
    if not tuner.run.outcomes[0].ok:
        tuner.next_trials(plan.slots_per_trial)
        tuner.record(1, profiled(weightless(ceiling)))
    return tuner, journal


def events_of(plan: Plan, world: World, *, slots: int) -> list[Event]:
    tuner, journal = tuner_of(plan)
    drive(tuner, world, slots=slots)
    return journal.events


def configs_of(run: Run) -> list[str]:
    return [
        json.dumps(trial.overrides, sort_keys=True)
        for trial in run.trials.values()
        if trial.kind is not TrialKind.PROFILE
    ]
