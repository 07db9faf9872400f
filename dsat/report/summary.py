"""What a run found: the files for use and the tables for people, all from the journal."""

from __future__ import annotations

import json
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsat.report import format as fmt
from dsat.report.verdict import gain, knee, knee_row, verdict
from dsat.tuning.run import Run
from dsat.values.files import write_atomically
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import Trial, TrialKind

BEST_CONFIG_FILE = "best_ds_config.json"
BEST_METRICS_FILE = "best_ds_metrics.json"
SUMMARY_FILE = "summary.md"


@dataclass(frozen=True)
class StageRow:
    """One ZeRO stage's line in the summary, with its offloading (`z2_offload`)."""

    strategy: str
    trials: int
    out_of_memory: int
    failed: int
    best: Trial | None


def stage_rows(run: Run) -> list[StageRow]:
    """A row per stage that was tried; the profile and the finals do not count."""
    assert run.plan is not None
    objective = run.plan.objective
    rows = []
    for strategy in sorted({trial.strategy for trial in _tried(run)}):
        trials = [trial for trial in _tried(run) if trial.strategy == strategy]
        kinds = [run.outcomes[trial.id].kind for trial in trials]
        ran = [(value, trial) for trial in trials if (value := run.value(trial)) is not None]
        best = min(ran, key=lambda pair: objective.loss(pair[0]))[1] if ran else None
        lost = sum(kind.is_out_of_memory for kind in kinds)
        other = sum(not kind.is_out_of_memory and kind is not OutcomeKind.OK for kind in kinds)
        rows.append(StageRow(strategy, len(trials), lost, other, best))
    return rows


def best_config(run: Run) -> dict[str, Any] | None:
    """The best configuration, as `deepspeed.initialize` takes it."""
    if run.best is None or run.plan is None:
        return None
    return run.plan.config(run.best.overrides)


def write_files(run: Run, folder: Path, train_line: str) -> None:
    """Writes the best configuration, its metrics and `summary.md` into the run's folder."""
    config = best_config(run)
    if run.best is not None and config is not None:
        outcome = run.best_outcome
        assert outcome is not None and outcome.metrics is not None
        text = json.dumps(config, indent=2) + "\n"
        write_atomically(folder / BEST_CONFIG_FILE, text)
        text = json.dumps({"trial": run.best.name, **outcome.metrics.to_json()}, indent=2) + "\n"
        write_atomically(folder / BEST_METRICS_FILE, text)
    write_atomically(folder / SUMMARY_FILE, markdown(run, train_line))


def markdown(run: Run, train_line: str) -> str:
    """`summary.md`."""
    assert run.plan is not None
    lines = [f"# {run.info.get('name', 'dsat')}: {run.plan.method} search", ""]
    lines += [f"- {line}" for line in facts(run)]
    lines += ["", *markdown_table(HEADINGS, stage_cells(run)), ""]
    lines += [f"{line}\n" for line in verdict(run)]
    if run.best is not None:
        lines += [f"Train with it: `{train_line}`", ""]
    lines += _knee_lines(run)
    lines += ["## All trials", ""]
    lines += markdown_table(TRIAL_HEADINGS, _trial_cells(run))
    warnings = all_warnings(run)
    if warnings:
        lines += ["", "## Warnings", "", *(f"- {warning}" for warning in warnings)]
    return "\n".join(lines) + "\n"


def _knee_lines(run: Run) -> list[str]:
    """How the best value rises with the micro batch, and from where on it does so no more."""
    assert run.plan is not None
    rows = knee(run)
    where = knee_row(rows, run.plan.indifference)
    if where is None:
        return []
    cells = [
        (
            str(size),
            fmt.metric(run.plan.metric, value),
            fmt.percent(part) + (" (knee)" if size == where else ""),
        )
        for size, value, part in rows
    ]
    table = markdown_table(("micro batch", run.plan.metric, "of the best"), cells)
    return ["## The best of each micro batch", "", *table, ""]


TRIAL_HEADINGS = (
    "trial",
    "micro batch",
    "gas",
    "result",
    "memory predicted",
    "memory used",
    "took",
)
HEADINGS = ("stage", "trials", "out of memory", "failed", "best", "best trial")


def stage_cells(run: Run) -> list[tuple[str, ...]]:
    """The cells of the table under `HEADINGS`."""
    assert run.plan is not None
    return [
        (
            row.strategy.removeprefix("z").replace("_", " "),
            str(row.trials),
            str(row.out_of_memory),
            str(row.failed),
            fmt.metric(run.plan.metric, run.value(row.best) if row.best else None),
            row.best.name if row.best else "-",
        )
        for row in stage_rows(run)
    ]


def facts(run: Run) -> list[str]:
    """What was tuned, where, how long it took and why it ended."""
    assert run.plan is not None
    lines = [f"metric: {run.plan.metric}", f"trials: {len(run.outcomes)}"]
    if "machine" in run.info:
        lines.append(f"machine: {run.info['machine']}")
    lines.append(f"wall time: {fmt.duration(run.running_s)}")
    lines.append(f"stopped: {run.stop_reason or 'interrupted'}")
    return lines + _memory_facts(run)


def _memory_facts(run: Run) -> list[str]:
    """How memory was predicted, how well where that can be told, and what it saved."""
    lines = []
    if any(trial.predicted_bytes is not None for trial in run.trials.values()):
        simulated = run.memory_basis is not None and run.memory_basis.simulated
        lines.append(f"memory: predicted by {'simulation' if simulated else 'formula'}")
    errors = sorted(_memory_errors(run))
    if errors:
        lines[0] += (
            f", median error {fmt.percent(statistics.median(errors))}, largest "
            f"{fmt.percent(errors[-1])} over {len(errors)} trials that ran"
        )
    if run.skipped:
        count = len(run.skipped)
        plural = "" if count == 1 else "s"
        lines.append(f"skipped: {count} configuration{plural} predicted to run out of memory")
    return lines


def _memory_errors(run: Run) -> Iterator[float]:
    """Predicted against used bytes, as fractions; of what a device's allocator has counted."""
    for trial in run.trials.values():
        outcome = run.outcomes.get(trial.id)
        if trial.predicted_bytes is None or outcome is None or not outcome.ok:
            continue
        used = run.used_bytes(outcome)
        if used is not None and outcome.memory is not None and outcome.memory.is_exact:
            yield abs(trial.predicted_bytes / used - 1)


def all_warnings(run: Run) -> list[str]:
    """Every warning once, in the order of the trials."""
    return list(dict.fromkeys(w for o in run.outcomes.values() for w in o.warnings))


def to_json(run: Run, folder: Path) -> dict[str, Any]:
    """The result for programs."""
    assert run.plan is not None
    baseline = run.baseline
    own_value = run.value(baseline) if baseline else None
    ratio = None
    if run.best_value is not None and own_value is not None:
        ratio = run.plan.objective.gain(run.best_value, own_value)
    confirmed = gain(run)
    if confirmed is not None:
        ratio = confirmed.ratio if run.best is not baseline else 1.0
    return {
        "run_dir": str(folder),
        "metric": run.plan.metric,
        "stop_reason": run.stop_reason,
        "wall_s": round(run.running_s, 3),
        "best": run.best and trial_row(run, run.best),
        "best_ds_config": best_config(run),
        "baseline": baseline and trial_row(run, baseline),
        "gain": ratio,
        "finals": None if run.finals is None or confirmed is None else _finals_json(run),
        "trials": [trial_row(run, trial) for trial in run.trials.values()],
        "warnings": all_warnings(run),
    }


def _finals_json(run: Run) -> dict[str, Any]:
    """What the finals compared, and what they found."""
    finals = run.finals
    assert finals is not None and finals.comparison is not None and finals.pick is not None
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


def trial_row(run: Run, trial: Trial) -> dict[str, Any]:
    """A trial for programs."""
    outcome = run.outcomes.get(trial.id)
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
        "used_bytes": None if outcome is None else run.used_bytes(outcome),
        "metrics": outcome.metrics.to_json() if outcome and outcome.metrics else None,
    }


def _tried(run: Run) -> list[Trial]:
    return [
        trial
        for trial in run.trials.values()
        if trial.kind in (TrialKind.BASELINE, TrialKind.SEARCH) and trial.id in run.outcomes
    ]


def _trial_cells(run: Run) -> list[tuple[str, ...]]:
    assert run.plan is not None
    return [
        (
            trial.name,
            str(trial.batch.micro_batch),
            str(trial.batch.gas),
            fmt.outcome(outcome, run.plan.metric),
            fmt.memory(trial.predicted_bytes),
            fmt.memory(run.used_bytes(outcome)),
            fmt.duration(outcome.duration_s),
        )
        for trial in run.trials.values()
        if (outcome := run.outcomes.get(trial.id)) is not None
    ]


def markdown_table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Collection[str] = ()
) -> list[str]:
    """The lines of a table, its columns aligned; those headed by `numbers` to the right.

    As wide as the "pipe" format of the tabulate package makes it.
    """
    table = [[cell.replace("|", "\\|") for cell in row] for row in (headings, *rows)]
    widths = [
        max(len(heading) + 2, *(len(row[i]) for row in table)) for i, heading in enumerate(table[0])
    ]
    right = [heading in numbers for heading in headings]

    def line(cells: Sequence[str]) -> str:
        columns = zip(cells, widths, right, strict=True)
        return "| " + " | ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in columns) + " |"

    rules = [
        "-" * (width + 1) + ":" if r else ":" + "-" * (width + 1)
        for width, r in zip(widths, right, strict=True)
    ]
    return [line(table[0]), "|" + "|".join(rules) + "|", *map(line, table[1:])]
