"""Read-only commands: they print, export or serve runs, or check the environment."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsat import doctor
from dsat.cli import EXIT_FAILED, EXIT_OK, output
from dsat.determined_cluster.select_master import choose
from dsat.engines.places import AUTO
from dsat.errors import UserInputError
from dsat.run.journal import RUNS_FOLDER
from dsat.run.run import Run
from dsat.show import exports, past_runs, terminal, watch
from dsat.show.settings import (
    CompareSettings,
    DoctorSettings,
    ExportSettings,
    ReadOnlySettings,
    RunsSettings,
    ShowSettings,
    WatchSettings,
)
from dsat.show.view import RunView
from dsat.values.text import printable
from dsat.values.trial import Trial


def read_only(settings: ReadOnlySettings) -> int:
    """Run a read-only command and return the exit status."""
    commands: dict[type, Callable[[Any], int | None]] = {
        ShowSettings: _show,
        CompareSettings: _compare,
        RunsSettings: _list,
        ExportSettings: _export,
        WatchSettings: _watch,
        DoctorSettings: _doctor,
    }
    return commands[type(settings)](settings) or EXIT_OK


def _show(settings: ShowSettings) -> None:
    past = past_runs.load(settings.run)
    run = past.run
    if settings.trial is not None:
        trial = _trial(run, settings.trial)
        folder = past.trials / trial.name
        _print(
            terminal.trial_to_json(run, trial, folder) if settings.json else None,
            terminal.describe_trial(run, trial, folder),
        )
        return
    view = RunView(run)
    if settings.trials:
        rows = [trial_view.to_json() for trial_view in view.trials] if settings.json else None
        _print(rows, [view.trial_table() if view.trials else "No trial has begun."])
    else:
        document = {**view.to_json(past.folder), "state": past.state} if settings.json else None
        _print(document, terminal.describe_run(view, past.folder, past.state))


def _compare(settings: CompareSettings) -> None:
    loaded = {str(path): past_runs.load(path) for path in settings.runs}
    if len({past.folder.resolve() for past in loaded.values()}) < len(settings.runs):
        raise UserInputError("a run is named twice", where="compare")
    views = {name: RunView(past.run) for name, past in loaded.items()}
    folders = {name: past.folder for name, past in loaded.items()}
    document = terminal.comparison_to_json(views, folders) if settings.json else None
    _print(document, terminal.compare_runs(views))


def _list(settings: RunsSettings) -> None:
    views, unread = past_runs.load_all(settings.folder)
    for message in unread:
        print(printable(f"dsat: {message}"), file=sys.stderr)
    if not views and not unread:
        print(f"dsat: there is no run in {settings.folder or RUNS_FOLDER}", file=sys.stderr)
    if not views and not settings.json:
        return
    document = [
        view.to_json(past.folder) | {"state": past.state, "changed_s": past.changed_s}
        for past, view in views
    ]
    _print(document if settings.json else None, terminal.list_runs(views))


def _export(settings: ExportSettings) -> None:
    past = past_runs.load(settings.run)
    assert settings.to is not None
    name = past.folder.resolve().name
    target = settings.output or Path(f"{name}{exports.EXPORTERS[settings.to].suffix}")
    exports.export(RunView(past.run), settings.to, target, name)
    _print({"output": str(target)} if settings.json else None, [str(target)])


def _watch(settings: WatchSettings) -> None:
    server = watch.Server(past_runs.find(settings.run), settings.port)
    _print({"url": server.url} if settings.json else None, server.how_to_open())
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


def _doctor(settings: DoctorSettings) -> int:
    findings = doctor.examine(choose(AUTO).master)
    if settings.json:
        rows = [vars(finding) for finding in findings]
        output.print_json({"state": doctor.worst(findings), "findings": rows})
    else:
        for finding in findings:
            print(printable(f"{finding.state:<8} {finding.part:<13} {finding.found}"))
            for line in filter(None, (finding.problem, finding.remedy and f"-> {finding.remedy}")):
                print(printable(f"{'':<22} {line}"))
    return EXIT_FAILED if doctor.worst(findings) == doctor.FAILS else EXIT_OK


def _trial(run: Run, name: str) -> Trial:
    matches = [trial for trial in run.trials.values() if name in (trial.name, str(trial.id))]
    if not matches:
        raise UserInputError(
            "there is no such trial in this run",
            where=f"--trial {name}",
            hint="`dsat show --trials` lists all trials.",
        )
    return matches[0]


def _print(document: Any, parts: list[Any]) -> None:
    if document is not None:
        output.print_json(document)
        return
    terminal.show(sys.stdout, parts)
