"""Outcomes of earlier runs that a new run reuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dsat.engines import cached
from dsat.run.run import Run
from dsat.space.plan import Plan, difference_of
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import TrialKind

_HOLDS = (OutcomeKind.OK, OutcomeKind.OOM)
_OF_INFO = ("software", "script_digest")  # which not every journal has
_OF_DIGESTS = {
    "script_digest": "the training script",
    "measured.program": "the entrypoint, its hyperparameters or its argument mappings",
}


def difference(run: Run, plan: Plan, info: Mapping[str, Any]) -> str | None:
    """Return why an earlier run's measurements do not count for a plan; None if they do.

    Args:
        run: the earlier run, which has begun.
        plan, info: of the run that is to use them.
    """
    was = _conditions(run.plan, plan, run.info)
    now = _conditions(plan, run.plan, info)
    for name in dict.fromkeys([*was, *now]):
        before, today = was.get(name), now.get(name)
        is_unknown = name in _OF_INFO and not (before and today)
        if before == today or is_unknown:
            continue
        if name in _OF_DIGESTS:
            return f"{_OF_DIGESTS[name]} changed"
        return difference_of(name, before, today)
    return None


def _conditions(plan: Plan, other: Plan, info: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything by which a measurement depends on more than its configuration."""
    return {
        "slots_per_trial": plan.slots_per_trial,
        "slot_memory_bytes": plan.slot_memory_bytes,
        **{f"measured.{key}": value for key, value in plan.measured_beside(other).items()},
        **{name: info.get(name) for name in _OF_INFO},
    }


def known_outcomes(runs: Iterable[Run], plan: Plan, info: Mapping[str, Any]) -> dict[str, Outcome]:
    """Return outcomes of earlier runs that hold for a plan too.

    Failures for another reason than memory are run again; finals are repetitions without a profile.
    """
    return {
        cached.key(run.trials[trial_id], run.plan): outcome
        for run in runs
        if run.has_begun and difference(run, plan, info) is None
        for trial_id, outcome in run.outcomes.items()
        if outcome.kind in _HOLDS and run.trials[trial_id].kind is not TrialKind.FINAL
    }
