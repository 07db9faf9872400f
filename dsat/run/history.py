"""Earlier runs: reading them, and the trials that a new run reuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.run.journal import read_events
from dsat.run.run import Run
from dsat.space.plan import Plan, difference_of
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial, TrialKind

_HOLDS = (OutcomeKind.OK, OutcomeKind.OOM)
_OF_INFO = ("software", "script_digest")  # not in every journal
_OF_DIGESTS = {
    "script_digest": "the training script",
    "measured.program": "the entrypoint, its hyperparameters or its argument mappings",
}


def read_run(path: Path) -> Run:
    """Read a run from its journal; another process may be writing it."""
    run = Run(read_events(path), name=str(path))
    began_s = path.stat().st_mtime - run.running_s  # for journals without dates
    run.ended_at_s = {n: at or began_s + run.ended_s[n] for n, at in run.ended_at_s.items()}
    return run


def difference(run: Run, plan: Plan, info: Mapping[str, Any]) -> str | None:
    """Return why a plan cannot use an earlier run's measurements; None if it can."""
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
    """Return the conditions of a measurement besides the configuration."""
    return {
        "slots_per_trial": plan.slots_per_trial,
        "slot_memory_bytes": plan.slot_memory_bytes,
        **{f"measured.{key}": value for key, value in plan.measured_beside(other).items()},
        **{name: info.get(name) for name in _OF_INFO},
    }


@dataclass(frozen=True)
class Measured:
    """A trial of an earlier run that a new plan can use.

    `neighbours` is the largest number of other trials that ran at the same time.
    """

    trial: Trial
    outcome: Outcome
    neighbours: int


def reusable_trials(runs: Iterable[Run], plan: Plan, info: Mapping[str, Any]) -> list[Measured]:
    """Return trials of earlier runs that a plan can use, in order.

    Finals are excluded, because most of them repeat other trials. Failures are excluded, because a
    new run tries them again, except trials that ran out of device memory.
    """
    return [
        Measured(trial, outcome, run.neighbours.get(trial.id, 0))
        for run in runs
        if run.has_begun and difference(run, plan, info) is None
        for trial in run.trials.values()
        if (outcome := run.outcomes.get(trial.id)) is not None
        and outcome.kind in _HOLDS
        and trial.kind is not TrialKind.FINAL
        and plan.config(trial.overrides) == run.plan.config(trial.overrides)
    ]
