"""Output of `dsat show`, `dsat compare` and `dsat runs`."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from dsat.command.ds_config import flat
from dsat.engines.trial_folder import log_files, read_end
from dsat.run.run import Run, own_switches
from dsat.show import summary
from dsat.show.differences import differences
from dsat.show.past_runs import PastRun
from dsat.show.view import RunView, TrialView
from dsat.values import format as fmt
from dsat.values.objective import METRIC_NAMES
from dsat.values.outcome import MemoryUse, Metrics, Outcome
from dsat.values.table import Table
from dsat.values.text import escape, hide_secrets_in_values, printable
from dsat.values.trial import Trial

_LAST_LINES = 12  # of a log
_PLAIN_WIDTH = 140
_FOLDED_AT = 40  # width of a column, in characters, from which it may be folded
_PHASES = ("init", "forward", "backward", "step")

Part = RenderableType | Table
Views = Mapping[str, RunView]  # by the path or name that the user gave


def console(stream: Any) -> Console:
    """Return a console; without a terminal, it writes long lines without wrapping."""
    wide = None if stream.isatty() else _PLAIN_WIDTH
    return Console(file=stream, highlight=False, soft_wrap=wide is not None, width=wide)


def as_text(text: str) -> Text:
    """Return a text for a console, with terminal escape sequences made visible."""
    return Text(escape(text))


def show(stream: Any, parts: Iterable[Part]) -> None:
    """Print parts of an output; strings, such as commands, are not wrapped."""
    into = console(stream)
    for each in parts:
        if isinstance(each, str):
            into.print(as_text(each), soft_wrap=True)
        else:
            into.print(rich_table(each, into.width) if isinstance(each, Table) else each)


def rich_table(table: Table, width: int) -> RichTable:
    """Return a table for the terminal; drop optional columns that do not fit."""
    optional = list(table.optional)
    while optional and _width(table) > width:
        table = table.without(optional.pop(0))
    found = RichTable()
    for heading in table.headings:
        found.add_column(as_text(heading), no_wrap=heading in table.names, overflow="fold")
    for row in table.rows:
        found.add_row(*map(as_text, row))
    return found


def _width(table: Table) -> int:
    """Return the width of a table in characters, if long texts are folded."""
    columns = zip(table.headings, *table.rows, strict=True)
    widths = (max(map(cell_len, cells)) for cells in columns)
    folded = (
        width if heading in table.names else min(width, _FOLDED_AT)
        for heading, width in zip(table.headings, widths, strict=True)
    )
    return 1 + sum(3 + width for width in folded)


def describe_result(view: RunView) -> list[Part]:
    """Return the verdict of a run, its table of stages and its facts."""
    stages: list[Part] = [view.stage_table()] if view.stages else []
    headline, *others = map(as_text, view.verdict.lines)
    headline.stylize("bold")
    return [headline, *others, *stages, *map(as_text, view.facts)]


def describe_run(view: RunView, folder: Path, state: str) -> list[Part]:
    """Return title, result and existing result files of a run."""
    names = [summary.BEST_CONFIG_FILE] if view.best is not None else []
    files = [folder / name for name in (*names, "report.html")]
    return [
        as_text(f"{view.title} in {folder} ({state})"),
        *describe_result(view),
        *(str(path) for path in files if path.exists()),
    ]


def describe_trial(run: Run, trial: Trial, folder: Path) -> list[Part]:
    """Return everything about one trial, with the ends of its logs."""
    view, batch, slots = TrialView(run, trial), trial.batch, run.plan.slots_per_trial
    groups = batch.parallelism.groups(slots)
    stage = fmt.strategy(trial.strategy)
    lines = [
        f"{trial.name}: trial {trial.id}, {trial.kind.value}, ZeRO stage {stage}",
        f"micro batch {batch.micro_batch} x accumulation {batch.gas} x {groups} = global "
        f"batch {batch.train_batch_size}",
        f"result: {view.result}",
    ]
    found: list[Part] = [*map(as_text, lines)]
    if view.outcome is not None:
        found += _describe_outcome(run, view, view.outcome)
    return [*found, *_tails(folder)]


def trial_to_json(run: Run, trial: Trial, folder: Path) -> dict[str, Any]:
    """Return everything about one trial as JSON values."""
    view = TrialView(run, trial)
    memory = None if view.outcome is None else view.outcome.memory
    return {
        **view.to_json(),
        "folder": str(folder),
        "changes": {key: {"own": own, "here": here} for key, own, here in _changes(run, trial)},
        "memory": None if memory is None else asdict(memory),
        "detail": "" if view.outcome is None else view.outcome.detail,
        "warnings": [] if view.outcome is None else list(view.outcome.warnings),
    }


def compare_runs(views: Views) -> list[Part]:
    """Return a table of two or more runs, differences of their best trials, and caveats."""
    columns = [_column(view) for view in views.values()]
    rows = [(key, *(column[key] for column in columns)) for key in columns[0]]
    found: list[Part] = [Table(("", *views), rows)]
    trials = [(view.plan, view.best.trial) for view in views.values() if view.best is not None]
    settings = [
        flat(hide_secrets_in_values({**plan.config(trial.overrides), **trial.script_args}))
        for plan, trial in trials
    ]
    if len(settings) == len(views):
        differing = [
            (key, *(fmt.setting(each.get(key)) or "(not set)" for each in settings))
            for key in sorted({key for each in settings for key in each})
            if len({repr(each.get(key)) for each in settings}) > 1
        ]
        if differing:
            found.append(as_text("where the best configurations differ:"))
            found.append(Table(("setting", *views), differing))
        else:
            found.append(as_text("the best configurations are the same"))
    return [*found, *map(as_text, _caveats(views))]


def comparison_to_json(views: Views, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Return a comparison of runs as JSON values."""
    return {
        "runs": {name: view.to_json(folders[name]) for name, view in views.items()},
        "caveats": _caveats(views),
    }


def list_runs(runs: Iterable[tuple[PastRun, RunView]]) -> list[Part]:
    """Return a table with a line for each run."""
    headings = ("run", "state", "method", "trials", "best", "gain", "last change")
    cells = []
    for past, view in runs:
        trials = f"{len(view.ended)} of {past.run.plan.max_trials}"
        best = fmt.metric(view.plan.metric, view.best_value)
        when = datetime.datetime.fromtimestamp(past.changed_s).strftime("%Y-%m-%d %H:%M")
        method, gain = view.plan.method, view.gain.text
        cells.append((str(past.folder), past.state, method, trials, best, gain, when))
    return [Table(headings, cells)]


def _describe_outcome(run: Run, view: TrialView, outcome: Outcome) -> list[Part]:
    found: list[Part] = [as_text(f"took {fmt.duration(outcome.duration_s)}")]
    found += [as_text(f"warning: {text}") for text in outcome.warnings]
    if outcome.metrics is not None:
        found.append(Table(("measured", "value"), _measured(outcome.metrics)))
    if changes := _changes(run, view.trial):
        found.append(as_text("settings that differ from your configuration:"))
        found.append(Table(("setting", "yours", "here"), changes))
    if view.trial.predicted_bytes is not None:
        predicted = fmt.memory(view.trial.predicted_bytes)
        found.append(as_text(f"predicted memory per device: {predicted}"))
    if outcome.memory is not None:
        found += _describe_memory(outcome.memory)
    if outcome.detail:
        found += [as_text("output of the script:"), as_text(outcome.detail.rstrip())]
    return found


def _describe_memory(memory: MemoryUse) -> Iterator[Part]:
    """Yield a table of the memory by phase, without columns that a CPU does not have."""
    known = {
        "tensors": memory.allocated_bytes,
        "reserved by the allocator": memory.reserved_bytes,
        "resident set of the process": memory.host_rss_bytes,
    }
    columns = {heading: sizes for heading, sizes in known.items() if sizes}
    phases = [phase for phase in _PHASES if any(phase in sizes for sizes in columns.values())]
    if phases:
        rows = [(p, *(fmt.memory(sizes.get(p)) for sizes in columns.values())) for p in phases]
        yield as_text("memory by phase:")
        yield Table(("phase", *columns), rows)


def _measured(metrics: Metrics) -> list[tuple[str, str]]:
    cells = [
        (name.replace("_", " "), fmt.metric(name, metrics.value(name)))
        for name in METRIC_NAMES
        if metrics.value(name) is not None
    ]
    cells.append(("measured steps", str(metrics.num_steps)))
    cells.append(("95 % confidence interval of the latency", f"±{fmt.percent(metrics.ci95)}"))
    if metrics.accidents:
        lost = fmt.percent(metrics.lost_to_accidents)
        cells.append(("rare long steps, left out", f"{metrics.accidents}, {lost} of the time"))
    return cells


def _changes(run: Run, trial: Trial) -> list[tuple[str, str, str]]:
    return [(each.key, *each.texts) for each in differences(run.plan, trial, own_switches(run))]


def _tails(folder: Path) -> Iterator[Part]:
    for path in (folder / name for name in log_files(0)):
        if lines := read_end(path)[-_LAST_LINES:]:
            yield as_text(f"the last lines of {path}:")
            yield from (as_text(f"  {printable(line, 400)}") for line in lines)


def _column(view: RunView) -> dict[str, str]:
    best = view.best
    return {
        "method": view.plan.method,
        "metric": view.plan.metric,
        "machine": str(view.info.get("machine", "-")),
        "devices of a trial": str(view.plan.slots_per_trial),
        "trials": str(len(view.ended)),
        "out of memory": str(
            sum(v.outcome is not None and v.outcome.kind.is_out_of_memory for v in view.trials)
        ),
        "wall time": fmt.duration(view.running_s),
        "best trial": "-" if best is None else best.trial.name,
        "best": fmt.metric(view.plan.metric, view.best_value),
        "global batch of the best": "-" if best is None else str(best.trial.batch.train_batch_size),
        "gain over your own": view.gain.text,
    }


def _caveats(views: Views) -> list[str]:
    """Return reasons why runs may not be comparable."""
    plans = [view.plan for view in views.values()]
    differing: dict[str, set[Any]] = {
        "They optimised different metrics: their best values cannot be compared.": {
            plan.metric for plan in plans
        },
        "They ran on different machines.": _recorded(views, "machine"),
        "They ran with different software.": _recorded(views, "software"),
        "They ran different commands, or one command with different arguments.": {
            plan.measured["program"] for plan in plans if "program" in plan.measured
        },
        "They ran different scripts, or the script changed.": _recorded(views, "script_digest"),
        "Their trials had different numbers of devices.": {plan.slots_per_trial for plan in plans},
        "They started from different configurations.": {
            repr(sorted(flat(plan.base_config).items())) for plan in plans
        },
    }
    return [text for text, values in differing.items() if len(values) > 1]


def _recorded(views: Views, key: str) -> set[str]:
    """Return the distinct recorded values of a key; runs of earlier versions may lack it."""
    return {str(view.info[key]) for view in views.values() if view.info.get(key)}
