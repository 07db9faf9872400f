"""Outcomes of earlier runs that a new run reuses."""

from __future__ import annotations

from collections.abc import Iterable

from dsat.engines import cached
from dsat.space.plan import Plan
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome, OutcomeKind

_HOLDS = (OutcomeKind.OK, OutcomeKind.OOM)


def asked_trials(runs: Iterable[Run], plan: Plan) -> int:
    """Return how many trials people allowed while earlier runs of a plan went on; 0 if none did."""
    asked = (
        run.plan.max_trials
        for run in runs
        if run.has_begun
        and run.planned_trials == plan.max_trials
        and plan.difference(run.plan) is None
    )
    return max(asked, default=0)


def known_outcomes(runs: Iterable[Run], plan: Plan) -> dict[str, Outcome]:
    """Return outcomes that hold for a plan too: same program, slots, device and memory.

    Failures for another reason than memory are run again.
    """
    known: dict[str, Outcome] = {}
    for run in runs:
        if not run.has_begun:
            continue
        earlier = run.plan
        if earlier.measured_beside(plan) != plan.measured_beside(earlier):
            continue
        names = ("slots_per_trial", "slot_memory_bytes")
        if any(getattr(earlier, name) != getattr(plan, name) for name in names):
            continue
        for trial_id, outcome in run.outcomes.items():
            if outcome.kind in _HOLDS:
                known[cached.key(run.trials[trial_id], earlier)] = outcome
    return known
