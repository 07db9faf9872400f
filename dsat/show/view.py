"""The view of a run, made from its journal, for terminal, pages, files and JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.command.ds_config import BATCH_KEYS, flat
from dsat.command.switches import SWITCHES
from dsat.run.events import is_of_budget
from dsat.run.run import Run, own_switches
from dsat.show.differences import STAGE, differences
from dsat.show.memory import used_bytes
from dsat.show.verdict import GainView, verdict
from dsat.space.deepspeed_settings import SETTING_NAMES
from dsat.space.plan import Plan
from dsat.values import format as fmt
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.table import Table
from dsat.values.text import hide_secrets_in_values
from dsat.values.trial import Trial, TrialKind


class TrialView:
    """A trial with its outcome.

    Attributes:
        result: how the trial ended, or `running`, or `interrupted`.
        value: value of the objective; None if not measured, and for a profile trial.
        used_bytes: peak memory of a device, counted as in predictions; None if not measured.
        settings: overrides with batch sizes, by dotted path, and switches; without secrets.
        ended_s: time of the end, in seconds of the run's wall time; None if unknown.
        ended_at_s: time of the end, in seconds since the epoch; None if unknown.
    """

    def __init__(self, run: Run, trial: Trial, *, is_best: bool = False) -> None:
        self.trial, self.is_best = trial, is_best
        self.outcome = run.outcomes.get(trial.id)
        self.result, self.used_bytes = "interrupted" if run.paused else "running", None
        if self.outcome is not None:
            self.result = fmt.outcome(self.outcome, run.plan.metric)
            self.used_bytes = used_bytes(run, self.outcome)
        self.value = None if trial.kind is TrialKind.PROFILE else run.value(trial)
        self.settings = flat(hide_secrets_in_values({**trial.overrides, **trial.script_args}))
        self.ended_s = run.ended_s.get(trial.id)
        self.ended_at_s = run.ended_at_s.get(trial.id)

    @property
    def is_own(self) -> bool:
        return self.trial.kind is TrialKind.BASELINE

    @property
    def label(self) -> str:
        """Name, with a mark if it is the best or the user's own."""
        return f"{self.trial.name}{' (best)' * self.is_best}{' (yours)' * self.is_own}"

    @property
    def changes(self) -> str:
        """Settings besides stage and batch sizes, in one line."""
        excluded = {*BATCH_KEYS, "zero_optimization.stage"}
        return ", ".join(
            f"{key.removeprefix('zero_optimization.')}={fmt.setting(value)}"
            for key, value in self.settings.items()
            if key not in excluded
        )

    @property
    def took_s(self) -> float | None:
        return None if self.outcome is None else self.outcome.duration_s

    def to_json(self) -> dict[str, Any]:
        """Return the trial as JSON values."""
        trial, outcome = self.trial, self.outcome
        return {
            "name": trial.name,
            "kind": trial.kind.value,
            "stage": trial.stage,
            **trial.batch.config(),
            "overrides": trial.overrides,
            "script_args": trial.script_args,
            "outcome": None if outcome is None else outcome.kind.value,
            "message": "" if outcome is None else outcome.message,
            "predicted_bytes": trial.predicted_bytes,
            "used_bytes": self.used_bytes,
            "metrics": outcome.metrics.to_json() if outcome and outcome.metrics else None,
        }


@dataclass(frozen=True)
class StageView:
    """Results of one strategy (`z2_offload`): the search's trials and the user's own."""

    strategy: str
    trials: int
    out_of_memory: int
    failed: int
    best: TrialView | None


class RunView:
    """View of a run at one moment, which renderers lay out without computing anything.

    Attributes:
        info: name, versions and machine, from the journal's first line.
        best_value: value of the objective; see `run.final_value`.
        facts: metric, best, trials, machine, wall time, why the run stopped, memory predictions.
    """

    def __init__(self, run: Run) -> None:
        best, baseline = run.best, run.baseline
        trials = {
            trial_id: TrialView(run, trial, is_best=trial is best)
            for trial_id, trial in run.trials.items()
        }
        self.info, self.plan, self.own_switches = run.info, run.plan, own_switches(run)
        self.stop_reason, self.running_s = run.stop_reason, run.running_s
        self.trials = list(trials.values())
        self.stages = list(_stages(run.plan, self.trials))
        self.best = None if best is None else trials[best.id]
        self.best_value, self.best_outcome = run.best_value, run.best_outcome
        self.baseline = None if baseline is None else trials[baseline.id]
        self.gain, self.verdict = GainView(run), verdict(run)
        self.facts = list(_facts(run))
        self.warnings = list(
            dict.fromkeys(text for outcome in run.outcomes.values() for text in outcome.warnings)
        )

    @property
    def title(self) -> str:
        """Title of the run, such as `my-model: asha search`."""
        return f"{self.info.get('name', 'dsat')}: {self.plan.method} search"

    @property
    def best_config(self) -> dict[str, Any] | None:
        """The best configuration, as passed to `deepspeed.initialize`; None if no trial is best."""
        return None if self.best is None else self.plan.config(self.best.trial.overrides)

    @property
    def ended(self) -> list[TrialView]:
        return [view for view in self.trials if view.outcome is not None]

    @property
    def ranked(self) -> list[TrialView]:
        """Measured trials, the best first."""
        loss, ran = self.plan.objective.loss, [t for t in self.trials if t.value is not None]
        return sorted(ran, key=lambda view: loss(view.value or 0.0))

    def stage_table(self) -> Table:
        headings = ("stage", "trials", "out of memory", "failed", "best of the search")
        rows = [
            (
                fmt.strategy(row.strategy),
                str(row.trials),
                str(row.out_of_memory),
                str(row.failed),
                fmt.metric(self.plan.metric, row.best.value if row.best else None),
                row.best.trial.name if row.best else "-",
            )
            for row in self.stages
        ]
        return Table(
            (*headings, "best trial"),
            rows,
            names=("best trial",),
            optional=("failed", "out of memory", "trials"),
        )

    def trial_table(self) -> Table:
        """Return a table of all trials that have begun.

        The column "other changes" lists differences from the user's own configuration, besides
        stage and batch sizes. It is left out if it would be empty.
        """
        headings = ("trial", "micro batch", "gas", "result", "memory predicted", "memory used")
        other_changes = [self._other_changes(view.trial) for view in self.trials]
        rows = [
            (
                view.label,
                str(view.trial.batch.micro_batch),
                str(view.trial.batch.gas),
                view.result,
                fmt.memory(view.trial.predicted_bytes),
                fmt.memory(view.used_bytes),
                "" if view.took_s is None else fmt.duration(view.took_s),
                changes,
            )
            for view, changes in zip(self.trials, other_changes, strict=True)
        ]
        table = Table(
            (*headings, "took", "other changes"),
            rows,
            names=("trial",),
            optional=("took", "memory predicted", "gas", "memory used"),
        )
        return table if any(other_changes) else table.without("other changes")

    def _other_changes(self, trial: Trial) -> str:
        changed = differences(self.plan, trial, self.own_switches)
        return ", ".join(str(d) for d in changed if d.key not in (STAGE, *BATCH_KEYS))

    def to_json(self, folder: Path) -> dict[str, Any]:
        return {
            "run_dir": str(folder),
            "metric": self.plan.metric,
            "stop_reason": self.stop_reason,
            "wall_s": round(self.running_s, 3),
            "best": self.best and self.best.to_json(),
            "best_value": self.best_value,
            "own_value": self.gain.own_value,
            "best_ds_config": self.best_config,
            "baseline": self.baseline and self.baseline.to_json(),
            "gain": self.gain.ratio,
            "verdict": list(self.verdict.lines),
            "finals": self.gain.finals,
            "trials": [view.to_json() for view in self.trials],
            "warnings": self.warnings,
        }


def _stages(plan: Plan, views: list[TrialView]) -> Iterator[StageView]:
    """Yield a row for each strategy, from the search's ended trials and the user's own."""
    compared = [
        view
        for view in views
        if view.trial.kind in (TrialKind.BASELINE, TrialKind.SEARCH) and view.outcome is not None
    ]
    for strategy in sorted({view.trial.strategy for view in compared}):
        trials = [view for view in compared if view.trial.strategy == strategy]
        kinds = [view.outcome.kind for view in trials if view.outcome is not None]
        ran = [view for view in trials if view.value is not None]
        best = min(ran, key=lambda view: plan.objective.loss(view.value or 0.0), default=None)
        lost = sum(kind.is_out_of_memory for kind in kinds)
        other = sum(not kind.is_out_of_memory and kind is not OutcomeKind.OK for kind in kinds)
        yield StageView(strategy, len(trials), lost, other, best)


def _facts(run: Run) -> Iterator[str]:
    yield f"metric: {run.plan.metric}"
    if run.best is not None and run.best_outcome is not None:
        yield f"best: {_best_line(run, run.best, run.best_outcome)}"
    yield f"trials: {_trial_counts(run)}"
    if "machine" in run.info:
        yield f"machine: {run.info['machine']}"
    yield f"wall time: {fmt.duration(run.running_s)}"
    if run.stop_reason is not None or run.paused:
        yield f"stopped: {run.stop_reason or 'interrupted'}"
    if any(trial.predicted_bytes is not None for trial in run.trials.values()):
        simulated = run.memory_basis is not None and run.memory_basis.simulated
        line = f"memory: predicted by {'simulation' if simulated else 'formula'}"
        errors = sorted(_memory_errors(run))
        if errors:
            line += (
                f", median error {fmt.percent(statistics.median(errors))}, largest "
                f"{fmt.percent(errors[-1])} over {fmt.count(len(errors), 'trial')} that ran"
            )
        yield line
    absent = [n for n in run.plan.tune if n in SWITCHES and n not in own_switches(run)]
    if run.profile is not None and absent and not set(run.plan.tune) >= set(SETTING_NAMES):
        yield f"not searched (absent from your script, or without effect): {', '.join(absent)}"


def _trial_counts(run: Run) -> str:
    """Return text on the numbers of trials, of finals, and of trials reserved but not needed."""
    kinds = [run.trials[trial_id].kind for trial_id in run.outcomes]
    finals = kinds.count(TrialKind.FINAL)
    parts = [str(len(kinds))]
    if finals:
        parts = [f"{len(kinds)} ({len(kinds) - finals} of the search, {finals} of the finals)"]
    remaining = run.plan.max_trials - len(kinds)
    if remaining > 0 and not finals and is_of_budget(run.stop_reason):
        parts.append(f"{remaining} reserved for finals, not needed")
    return "; ".join(parts)


def _best_line(run: Run, best: Trial, outcome: Outcome) -> str:
    metric, value = run.plan.metric, run.best_value
    text = fmt.outcome(outcome, metric)
    if value != outcome.value(run.plan.objective):  # a mean of the finals
        text = fmt.metric(metric, value)
    tokens = None if outcome.metrics is None else outcome.metrics.tokens_per_second
    if tokens is None or metric == "tokens_per_second":
        return f"{best.name}, {text}"
    ratio = run.plan.objective.gain(value or 0.0, outcome.value(run.plan.objective) or 0.0)
    return f"{best.name}, {text}, {fmt.metric('tokens_per_second', ratio * tokens)}"


def _memory_errors(run: Run) -> Iterator[float]:
    """Yield relative errors of memory predictions, for trials with exact measurements."""
    for trial in run.trials.values():
        outcome = run.outcomes.get(trial.id)
        if trial.predicted_bytes is None or outcome is None or not outcome.ok:
            continue
        used = used_bytes(run, outcome)
        if used is not None and outcome.memory is not None and outcome.memory.is_exact:
            yield abs(trial.predicted_bytes / used - 1)
