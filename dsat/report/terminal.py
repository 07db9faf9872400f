"""Output of `dsat show`, `dsat compare` and `dsat runs`."""

from __future__ import annotations

import datetime
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from dsat.report import format as fmt
from dsat.report import page_rows, summary
from dsat.report.run_view import STAGE_HEADINGS, TRIAL_HEADINGS, RunView, TrialView
from dsat.tuning.run import Run
from dsat.values.objective import METRIC_NAMES
from dsat.values.trial import Trial, TrialKind

_LAST_LINES, _LAST_BYTES = 12, 64 * 1024
_LOGS = ("stdout.log", "stderr.log")
_PLAIN_WIDTH = 140


def console(stream: Any) -> Console:
    """A console that writes plain and wide lines where there is no terminal."""
    wide = None if stream.isatty() else _PLAIN_WIDTH
    return Console(file=stream, highlight=False, soft_wrap=wide is not None, width=wide)


def of_run(run: Run, folder: Path, state: str) -> list[RenderableType]:
    """The summary of a run."""
    view = RunView.of(run)
    title = f"{view.name}: {view.method} search in {folder}"
    found: list[RenderableType] = [*map(_line, [title, f"state: {state}", *view.facts])]
    if view.stages:
        found.append(_table(STAGE_HEADINGS, view.stage_cells()))
    found += map(_line, view.verdict)
    files = [name for name in (summary.BEST_CONFIG_FILE, "report.html") if (folder / name).exists()]
    found += [_line(f"{folder / name}") for name in files]
    return found


def of_trials(run: Run) -> list[RenderableType]:
    """The table of all trials."""
    rows = []
    for view in RunView.of(run).trials:
        marks = ["(best)"] * view.is_best + ["(yours)"] * view.is_own
        name, *cells = view.cells()
        rows.append((" ".join([name, *marks]), *cells))
    return [_table(TRIAL_HEADINGS, rows)] if rows else [_line("No trial has begun.")]


def of_trial(run: Run, trial: Trial, folder: Path) -> list[RenderableType]:
    """Everything of one trial.

    Args:
        run: that it belongs to.
        trial: which one.
        folder: the trial's.
    """
    assert run.plan is not None
    outcome = run.outcomes.get(trial.id)
    batch = trial.batch
    found: list[RenderableType] = [
        _line(
            f"{trial.name}: trial {trial.id}, {trial.kind.value}, ZeRO stage "
            f"{trial.strategy[1:].replace('_', ' ')}"
        ),
        _line(
            f"micro batch {batch.micro_batch} x accumulation {batch.gas} x "
            f"{run.plan.slots_per_trial} slots = global batch {batch.train_batch_size}"
        ),
    ]
    if outcome is None:
        return [*found, _line("running"), *_tails(folder)]
    found.append(_line(f"result: {fmt.outcome(outcome, run.plan.metric)}"))
    found.append(_line(f"took {fmt.duration(outcome.duration_s)}"))
    found += [_line(f"warning: {text}") for text in outcome.warnings]
    if outcome.metrics is not None:
        measured = outcome.metrics
        cells = [
            (name.replace("_", " "), fmt.metric(name, measured.value(name)))
            for name in METRIC_NAMES
            if measured.value(name) is not None
        ]
        cells += [
            ("measured steps", str(measured.num_steps)),
            ("95 % interval of the latency", f"±{fmt.percent(measured.ci95)}"),
        ]
        if measured.accidents:
            lost = fmt.percent(measured.lost_to_accidents)
            cells.append(("rare long steps, left out", f"{measured.accidents}, {lost} of the time"))
        found.append(_table(("measured", "value"), cells))
    found.append(_line("configuration, where it differs from yours:"))
    found.append(_table(("setting", "yours", "here"), _changes(run, trial)))
    found += _memory(trial, outcome.memory)
    if outcome.detail:
        found += [_line("what it said:"), _line(outcome.detail.rstrip())]
    return [*found, *_tails(folder)]


def trial_to_json(run: Run, trial: Trial, folder: Path) -> dict[str, Any]:
    """Everything of one trial, for programs."""
    outcome = run.outcomes.get(trial.id)
    memory = None if outcome is None else outcome.memory
    return {
        **TrialView.of(run, trial).to_json(),
        "folder": str(folder),
        "changes": {key: {"own": own, "here": here} for key, own, here in _changes(run, trial)},
        "memory": None if memory is None else asdict(memory),
        "detail": "" if outcome is None else outcome.detail,
        "warnings": [] if outcome is None else list(outcome.warnings),
    }


def of_comparison(runs: Mapping[str, Run]) -> list[RenderableType]:
    """Runs side by side.

    Args:
        runs: two or more, by the names of their folders.
    """
    told = [_told(run) for run in runs.values()]
    rows = [(key, *(each[key] for each in told)) for key in told[0]]
    found: list[RenderableType] = [_table(("", *runs), rows)]
    settings = [_best_settings(run) for run in runs.values()]
    keys = sorted({key for each in settings for key in each})
    differing = [
        (key, *(_setting(each.get(key)) for each in settings))
        for key in keys
        if len({repr(each.get(key)) for each in settings}) > 1
    ]
    if all(settings):
        title = "the best configurations are the same"
        found.append(_line("where the best configurations differ:" if differing else title))
        if differing:
            found.append(_table(("setting", *runs), differing))
    found += map(_line, _caveats(runs))
    found += map(_line, _in_both(runs))
    return found


def comparison_to_json(runs: Mapping[str, Run], folders: Mapping[str, Path]) -> dict[str, Any]:
    """Runs side by side, for programs."""
    return {
        "runs": {name: RunView.of(run).to_json(folders[name]) for name, run in runs.items()},
        "caveats": [*_caveats(runs), *_in_both(runs)],
    }


def of_runs(rows: Sequence[tuple[str, str, float, Run]]) -> list[RenderableType]:
    """A list of runs.

    Args:
        rows: name, state, when something last happened (seconds since the epoch), and the run.
    """
    headings = ("run", "state", "method", "trials", "best", "gain", "last change")
    cells = []
    for name, state, changed_s, run in rows:
        view = RunView.of(run)
        when = datetime.datetime.fromtimestamp(changed_s).strftime("%Y-%m-%d %H:%M")
        cells.append(
            (
                name,
                state,
                view.method,
                f"{len(view.ended)} of {view.max_trials}",
                fmt.metric(view.metric, view.best_value),
                view.gain_text,
                when,
            )
        )
    return [_table(headings, cells)]


def _changes(run: Run, trial: Trial) -> list[tuple[str, str, str]]:
    """Settings with the user's own value and the trial's, as text."""
    assert run.plan is not None
    own, its = run.plan.own_batch.config(), trial.batch.config()
    batch = {key: (own[key], its[key]) for key in own if own[key] != its[key]}
    both = {**batch, **run.changes(trial)}
    return [(key, _setting(pair[0]), _setting(pair[1])) for key, pair in both.items()]


def _setting(value: Any) -> str:
    return page_rows.text_of(value) or "(not set)"


def _memory(trial: Trial, memory: Any) -> list[RenderableType]:
    found: list[RenderableType] = [
        _line(f"memory of a slot, predicted: {fmt.memory(trial.predicted_bytes)}")
    ]
    if memory is None or not memory.by_phase:
        return found
    phases = dict.fromkeys([*memory.allocated_bytes, *memory.host_rss_bytes])
    rows = [
        (
            phase,
            fmt.memory(memory.allocated_bytes.get(phase)),
            fmt.memory(memory.reserved_bytes.get(phase)),
            fmt.memory(memory.host_rss_bytes.get(phase)),
        )
        for phase in phases
    ]
    headings = ("phase", "tensors", "reserved by the allocator", "resident set of the process")
    return [*found, _table(headings, rows)]


def _tails(folder: Path) -> list[RenderableType]:
    """The last lines of a trial's logs."""
    found: list[RenderableType] = []
    for name in _LOGS:
        lines = _last_lines(folder / name)
        if lines:
            found.append(_line(f"the last lines of {folder / name}:"))
            found += [_line(f"  {line}") for line in lines]
    return found


def _last_lines(path: Path) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _LAST_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [fmt.shortened(line) for line in text.splitlines()[-_LAST_LINES:]]


def _told(run: Run) -> dict[str, str]:
    """One column of a comparison."""
    assert run.plan is not None
    view = RunView.of(run)
    best = run.best
    return {
        "method": run.plan.method,
        "metric": run.plan.metric,
        "machine": str(run.info.get("machine", "-")),
        "slots of a trial": str(run.plan.slots_per_trial),
        "trials": str(len(run.outcomes)),
        "out of memory": str(sum(o.kind.is_out_of_memory for o in run.outcomes.values())),
        "wall time": fmt.duration(run.running_s),
        "best trial": "-" if best is None else best.name,
        "best": fmt.metric(view.metric, view.best_value),
        "its global batch": "-" if best is None else str(best.batch.train_batch_size),
        "gain over your own": view.gain_text,
    }


def _best_settings(run: Run) -> dict[str, Any]:
    config = summary.best_config(run)
    if config is None or run.best is None:
        return {}
    return {**page_rows.flat(config), **run.best.script_args}


def _caveats(runs: Mapping[str, Run]) -> list[str]:
    """Return reasons why the runs may not be comparable."""
    found = []
    plans = [run.plan for run in runs.values() if run.plan is not None]
    if len({plan.metric for plan in plans}) > 1:
        found.append("They optimised different metrics: their best values cannot be compared.")
    if len({str(run.info.get("machine")) for run in runs.values()}) > 1:
        found.append("They ran on different machines.")
    if len({plan.slots_per_trial for plan in plans}) > 1:
        found.append("Their trials had different numbers of slots.")
    if len({repr(sorted(page_rows.flat(plan.base_config).items())) for plan in plans}) > 1:
        found.append("They started from different configurations.")
    return found


def _in_both(runs: Mapping[str, Run]) -> list[str]:
    """Compare configurations that were measured in several runs."""
    names = list(runs)
    first = _values(runs[names[0]])
    found = []
    for name in names[1:]:
        other = _values(runs[name])
        same = first.keys() & other.keys()
        plan, against = runs[names[0]].plan, runs[name].plan
        assert plan is not None and against is not None
        if not same or plan.metric != against.metric:
            continue
        ratios = [plan.objective.gain(other[key], first[key]) for key in same]
        middle = math.exp(statistics.median(map(math.log, ratios)))
        found.append(
            f"{len(same)} configurations were measured in {names[0]} and in {name}; there they "
            f"were {middle:.3f} times as good (median, {min(ratios):.3f} to {max(ratios):.3f})."
        )
    return found


def _values(run: Run) -> dict[str, float]:
    """Return the measured value of each configuration."""
    assert run.plan is not None
    found = {}
    for trial in run.trials.values():
        value = run.value(trial)
        if trial.kind is not TrialKind.PROFILE and value is not None and value > 0:
            settings = {**page_rows.flat(run.plan.config(trial.overrides)), **trial.script_args}
            found[repr(sorted(settings.items()))] = value
    return found


def _line(text: str) -> Text:
    return Text(fmt.printable(text))


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table()
    for heading in headings:
        table.add_column(_line(heading))
    for row in rows:
        table.add_row(*map(_line, row))
    return table
