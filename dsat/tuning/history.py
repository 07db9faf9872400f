"""What earlier runs measured that a new run need not measure again."""

from __future__ import annotations

from collections.abc import Iterable

from dsat.engines import cached
from dsat.space.plan import Plan
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome, OutcomeKind

_HOLDS = (OutcomeKind.OK, OutcomeKind.OOM)


def known_outcomes(runs: Iterable[Run], plan: Plan) -> dict[str, Outcome]:
    """What earlier runs found that holds for a plan too: the same program, slots and memory.

    What failed for another reason than memory may be mended by now, and is run again.
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
