"""One view of a run: the figures and texts that tables, pages, files and JSON show of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsat.report import format as fmt
from dsat.report.verdict import gain, gains, headline, say_gain, search_gain, verdict
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial, TrialKind

STAGE_HEADINGS = ("stage", "trials", "out of memory", "failed", "best of the search", "best trial")


@dataclass(frozen=True)
class TrialView:
    """A trial with its outcome.

    Attributes:
        result: one line on how it ended, or `running`.
        value: the objective's; None unless it was measured.
        used_bytes: peak of a slot, comparable with the prediction.
        ended_s: time since the run's start.
    """

    trial: Trial
    outcome: Outcome | None
    result: str
    value: float | None
    used_bytes: int | None
    is_best: bool
    ended_s: float | None

    @classmethod
    def of(cls, run: Run, trial: Trial) -> TrialView:
        """Return the view of one trial of a run."""
        assert run.plan is not None
        outcome = run.outcomes.get(trial.id)
        return cls(
            trial=trial,
            outcome=outcome,
            result="running" if outcome is None else fmt.outcome(outcome, run.plan.metric),
            value=run.value(trial),
            used_bytes=None if outcome is None else run.used_bytes(outcome),
            is_best=trial is run.best,
            ended_s=run.ended_s.get(trial.id),
        )

    @property
    def is_own(self) -> bool:
        """Check for the user's own configuration."""
        return self.trial.kind is TrialKind.BASELINE

    def cells(self) -> tuple[str, ...]:
        """Return the cells of a table under `TRIAL_HEADINGS`."""
        return (
            self.trial.name,
            str(self.trial.batch.micro_batch),
            str(self.trial.batch.gas),
            self.result,
            fmt.memory(self.trial.predicted_bytes),
            fmt.memory(self.used_bytes),
            "" if self.outcome is None else fmt.duration(self.outcome.duration_s),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the trial for programs."""
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


TRIAL_HEADINGS = (
    "trial",
    "micro batch",
    "gas",
    "result",
    "memory predicted",
    "memory used",
    "took",
)


@dataclass(frozen=True)
class StageRow:
    """Results of the search with one ZeRO stage and offloading (`z2_offload`)."""

    strategy: str
    trials: int
    out_of_memory: int
    failed: int
    best: Trial | None
    best_value: float | None


@dataclass(frozen=True)
class RunView:
    """Frozen view of a run, which renderers lay out without computing anything.

    Attributes:
        gain: best over the user's own configuration: confirmed by the finals, or else as the
            search measured both once. None where one of them was not measured.
        gain_text: the same with its interval, or with `unconfirmed`.
        gains: label and text of the gain at each global batch size, by the finals.
        facts: what was tuned, where, for how long, and why the run stopped.
        finals: comparison of the finals for programs; None without one.
    """

    name: str
    method: str
    metric: str
    stop_reason: str | None
    running_s: float
    max_trials: int
    trials: tuple[TrialView, ...]
    stages: tuple[StageRow, ...]
    best: TrialView | None
    best_value: float | None
    best_config: dict[str, Any] | None
    baseline: TrialView | None
    gain: float | None
    gain_text: str
    gains: tuple[tuple[str, str], ...]
    headline: str
    verdict: tuple[str, ...]
    facts: tuple[str, ...]
    warnings: tuple[str, ...]
    finals: dict[str, Any] | None

    @classmethod
    def of(cls, run: Run) -> RunView:
        """Return the view of a run as it is now."""
        assert run.plan is not None
        best, own = run.best, run.baseline
        ratio, text = _gain(run)
        warnings = dict.fromkeys(w for o in run.outcomes.values() for w in o.warnings)
        return cls(
            name=str(run.info.get("name", "dsat")),
            method=run.plan.method,
            metric=run.plan.metric,
            stop_reason=run.stop_reason,
            running_s=run.running_s,
            max_trials=run.plan.max_trials,
            trials=tuple(TrialView.of(run, trial) for trial in run.trials.values()),
            stages=tuple(_stages(run)),
            best=None if best is None else TrialView.of(run, best),
            best_value=run.best_value,
            best_config=None if best is None else run.plan.config(best.overrides),
            baseline=None if own is None else TrialView.of(run, own),
            gain=ratio,
            gain_text=text,
            gains=tuple(gains(run)),
            headline=headline(run),
            verdict=tuple(verdict(run)) if run.outcomes else ("No trial has ended.",),
            facts=tuple(_facts(run)),
            warnings=tuple(warnings),
            finals=_finals(run),
        )

    @property
    def ended(self) -> list[TrialView]:
        """Return the trials that have ended."""
        return [view for view in self.trials if view.outcome is not None]

    def stage_cells(self) -> list[tuple[str, ...]]:
        """Return the cells of the table under `STAGE_HEADINGS`."""
        return [
            (
                row.strategy.removeprefix("z").replace("_", " "),
                str(row.trials),
                str(row.out_of_memory),
                str(row.failed),
                fmt.metric(self.metric, row.best_value),
                row.best.name if row.best else "-",
            )
            for row in self.stages
        ]

    def to_json(self, folder: Path) -> dict[str, Any]:
        """Return the result for programs.

        Args:
            folder: of the run.
        """
        return {
            "run_dir": str(folder),
            "metric": self.metric,
            "stop_reason": self.stop_reason,
            "wall_s": round(self.running_s, 3),
            "best": self.best and self.best.to_json(),
            "best_ds_config": self.best_config,
            "baseline": self.baseline and self.baseline.to_json(),
            "gain": self.gain,
            "finals": self.finals,
            "trials": [view.to_json() for view in self.trials],
            "warnings": list(self.warnings),
        }


def _gain(run: Run) -> tuple[float | None, str]:
    if run.best is not None and run.best is run.baseline:
        return 1.0, "1.00x, your own"
    confirmed = gain(run)
    if confirmed is not None:
        return confirmed.ratio, say_gain(confirmed)
    measured = search_gain(run)
    return measured, "-" if measured is None else f"{measured:.2f}x, unconfirmed"


def _stages(run: Run) -> Iterator[StageRow]:
    """Yield a row per stage; the profile and the finals do not count."""
    assert run.plan is not None
    objective = run.plan.objective
    tried = [
        trial
        for trial in run.trials.values()
        if trial.kind in (TrialKind.BASELINE, TrialKind.SEARCH) and trial.id in run.outcomes
    ]
    for strategy in sorted({trial.strategy for trial in tried}):
        trials = [trial for trial in tried if trial.strategy == strategy]
        kinds = [run.outcomes[trial.id].kind for trial in trials]
        ran = [(value, trial) for trial in trials if (value := run.value(trial)) is not None]
        value, best = min(ran, key=lambda pair: objective.loss(pair[0]), default=(None, None))
        lost = sum(kind.is_out_of_memory for kind in kinds)
        other = sum(not kind.is_out_of_memory and kind is not OutcomeKind.OK for kind in kinds)
        yield StageRow(strategy, len(trials), lost, other, best, value)


def _facts(run: Run) -> Iterator[str]:
    assert run.plan is not None
    yield f"metric: {run.plan.metric}"
    yield f"trials: {len(run.outcomes)}"
    if "machine" in run.info:
        yield f"machine: {run.info['machine']}"
    yield f"wall time: {fmt.duration(run.running_s)}"
    yield f"stopped: {run.stop_reason or 'interrupted'}"
    if any(trial.predicted_bytes is not None for trial in run.trials.values()):
        simulated = run.memory_basis is not None and run.memory_basis.simulated
        line = f"memory: predicted by {'simulation' if simulated else 'formula'}"
        errors = sorted(_memory_errors(run))
        if errors:
            line += (
                f", median error {fmt.percent(statistics.median(errors))}, largest "
                f"{fmt.percent(errors[-1])} over {len(errors)} trials that ran"
            )
        yield line
    if run.skipped:
        count = len(run.skipped)
        plural = "" if count == 1 else "s"
        yield f"skipped: {count} configuration{plural} predicted to run out of memory"


def _memory_errors(run: Run) -> Iterator[float]:
    """Yield relative errors of predicted memory, where a device's allocator counted exactly."""
    for trial in run.trials.values():
        outcome = run.outcomes.get(trial.id)
        if trial.predicted_bytes is None or outcome is None or not outcome.ok:
            continue
        used = run.used_bytes(outcome)
        if used is not None and outcome.memory is not None and outcome.memory.is_exact:
            yield abs(trial.predicted_bytes / used - 1)


def _finals(run: Run) -> dict[str, Any] | None:
    finals = run.finals
    if gain(run) is None or finals is None or finals.comparison is None or finals.pick is None:
        return None
    same = finals.same_batch_gain
    return {
        "compared": run.trials[finals.pick.trial_id].name,
        "gain": asdict(finals.comparison.gain),
        "pairs": len(finals.pairs),
        "significant": finals.is_better,
        "recommended": finals.is_worth_it,
        "noise": finals.comparison.noise,
        "gain_at_own_global_batch": None if same is None else asdict(same),
    }
