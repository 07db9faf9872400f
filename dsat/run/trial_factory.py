"""Creation of a run's trials."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsat.run.run import Run
from dsat.search.base import Proposal
from dsat.values.objective import METRICS
from dsat.values.outcome import StepFacts
from dsat.values.trial import BatchTriple, Trial, TrialKind
from dsat.values.zero_strategy import read_strategy

SEARCHED = (TrialKind.BASELINE, TrialKind.SEARCH)
_LIMITED = (TrialKind.SEARCH, TrialKind.FINAL, TrialKind.REPEAT)


def make_trial(
    run: Run,
    kind: TrialKind,
    overrides: Mapping[str, Any],
    batch: BatchTriple,
    script_args: Mapping[str, Any],
    *,
    proposal: Proposal | None = None,
    predicted_bytes: int | None = None,
) -> Trial:
    """Return a run's next trial; the run must record it before the next one is made.

    `overrides` include the batch sizes; `proposal` is None unless a search proposed the trial.
    """
    strategy, profile = read_strategy(run.plan.config(overrides)), run.profile
    stem = f"{strategy.name}_gas{batch.gas}_tmbspg{batch.micro_batch}"
    return Trial(
        id=len(run.trials),
        kind=kind,
        name=_name(run, kind, stem, run.plan.fingerprint(overrides, script_args)),
        stage=strategy.stage,
        strategy=strategy.name,
        batch=batch,
        overrides=overrides,
        script_args=script_args,
        lineage=None if proposal is None else proposal.arm,
        note={} if proposal is None else proposal.note,
        flops_per_sample=None if profile is None else profile.flops_per_sample,
        batch_dimensions={} if profile is None else profile.batch_dimensions,
        fed_instead={} if profile is None else profile.fed_instead,
        predicted_bytes=predicted_bytes,
        to_beat=_value_to_beat(run) if kind in SEARCHED else {},
        longest_s=run.longest_s(kind) if kind in _LIMITED else None,
        own_steps=_baseline_steps(run),
        batch_flag=run.batch_flag.name,
        accumulation_flag=run.batch_flag.accumulation,
        flag_leads=run.batch_flag.leads,
    )


def _baseline_steps(run: Run) -> StepFacts | None:
    """Return the configured and the actual accumulation of the baseline; None if unknown."""
    outcome = None if run.baseline is None else run.outcomes.get(run.baseline.id)
    curve = None if outcome is None else outcome.training
    facts = None if curve is None else curve.facts
    return None if facts is None else StepFacts(facts.gas, facts.micro_steps)


def _value_to_beat(run: Run) -> dict[str, float]:
    metric, value = run.plan.metric, run.value(run.leader or run.baseline)
    return {} if value is None or not METRICS[metric].has_interval else {metric: value}


def _name(run: Run, kind: TrialKind, stem: str, digest: str) -> str:
    """Return a unique name, `profile_z1_gas1_tmbspg3`, or without the kind for a search trial."""
    if kind is TrialKind.FINAL:
        stem = f"{kind.value}{count_finals(run) + 1}_{stem}"
    elif kind is not TrialKind.SEARCH:
        stem = f"{kind.value}_{stem}"
    names = {trial.name for trial in run.trials.values()}
    name, length = stem, 4
    while name in names:
        name, length = f"{stem}_{digest[:length]}", length + 1
    return name


def count_finals(run: Run) -> int:
    """Return the number of trials in all finals of a run so far."""
    return sum(trial.kind is TrialKind.FINAL for trial in run.trials.values())
