"""Outcomes of earlier runs that a new run reuses."""

from __future__ import annotations

from collections.abc import Iterable

from dsat.engines import cached
from dsat.space.plan import Plan
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome, OutcomeKind

_HOLDS = (OutcomeKind.OK, OutcomeKind.OOM)


def known_outcomes(runs: Iterable[Run], plan: Plan) -> dict[str, Outcome]:
    """Return outcomes that hold for a plan too: same program, slots and memory.

    Failures for another reason than memory are run again.
    """
    known: dict[str, Outcome] = {}
    for run in runs:
        earlier = run.plan
        if earlier is None or any(
            getattr(earlier, name) != getattr(plan, name)
            for name in ("measured", "slots_per_trial", "slot_memory_bytes")
        ):
            continue
        for trial_id, outcome in run.outcomes.items():
            if outcome.kind in _HOLDS:
                known[cached.key(run.trials[trial_id], earlier)] = outcome
    return known
