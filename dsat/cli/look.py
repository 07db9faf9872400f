"""The commands that only look: they print or write files, and change no run."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsat import doctor
from dsat.app import past_runs, shared_runs, watch
from dsat.cli import output
from dsat.cli.exit_status import EXIT_FAILED, EXIT_OK
from dsat.determined_cluster import submit
from dsat.errors import UserInputError
from dsat.inputs.look_settings import (
    CompareSettings,
    DoctorSettings,
    ExportSettings,
    ImportSettings,
    LookSettings,
    RunsSettings,
    ShowSettings,
    WatchSettings,
)
from dsat.report import exports, share, terminal
from dsat.report.run_view import RunView
from dsat.report.share import SharedRun
from dsat.run.run import Run
from dsat.values.text import printable
from dsat.values.trial import Trial


def look(settings: LookSettings) -> int:
    """Run a command that only looks, and return the exit status."""
    commands: dict[type, Callable[[Any], int | None]] = {
        ShowSettings: _show,
        CompareSettings: _compare,
        RunsSettings: _list,
        ExportSettings: _export,
        ImportSettings: _import,
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
        told: Any = terminal.trial_to_json(run, trial, folder)
        shown = terminal.of_trial(run, trial, folder)
    elif settings.trials:
        told = [view.to_json() for view in RunView.of(run).trials]
        shown = terminal.of_trials(run)
    else:
        told = {**RunView.of(run).to_json(past.folder), "state": past.state}
        shown = terminal.of_run(run, past.folder, past.state)
    _print(told if settings.json else None, shown)


def _compare(settings: CompareSettings) -> None:
    loaded = {str(path): past_runs.load(path) for path in settings.runs}
    if len({past.folder.resolve() for past in loaded.values()}) < len(settings.runs):
        raise UserInputError("a run is named twice", where="compare")
    views = {name: RunView.of(past.run) for name, past in loaded.items()}
    folders = {name: past.folder for name, past in loaded.items()}
    told = terminal.comparison_to_json(views, folders) if settings.json else None
    _print(told, terminal.of_comparison(views))


def _list(settings: RunsSettings) -> None:
    found, unread = past_runs.load_all(settings.folder)
    for message in unread:
        print(f"dsat: {message}", file=sys.stderr)
    told = [
        RunView.of(past.run).to_json(past.folder)
        | {"state": past.state, "changed_s": past.changed_s}
        for past in found
    ]
    rows = [(str(past.folder), past.state, past.changed_s, past.run) for past in found]
    _print(told if settings.json else None, terminal.of_runs(rows))


def _export(settings: ExportSettings) -> None:
    past, notes = past_runs.load(settings.run), []
    if settings.share is not None:
        target = settings.share
        share.write(SharedRun.of(RunView.of(past.run)), target)
        said = "It holds sizes of the model, devices, versions, settings and measurements."
        notes = [f"{said} Read it before you give it away."]
    else:
        assert settings.to is not None
        name = past.folder.resolve().name
        target = settings.output or Path(f"{name}{exports.EXPORTERS[settings.to][1]}")
        exports.export(past.run, settings.to, target, name)
    _print({"output": str(target)} if settings.json else None, [str(target), *notes])


def _import(settings: ImportSettings) -> None:
    found = shared_runs.take_in(settings.files)
    table = terminal.rich_table(share.table(found))
    _print([run.to_json() for run in found] if settings.json else None, [table])


def _watch(settings: WatchSettings) -> None:
    given = settings.run
    holds_runs = given is not None and given.is_dir() and bool(past_runs.folders(given))
    folder = given if given is not None and holds_runs else past_runs.find(given)
    server = watch.Server(folder, settings.port)
    if settings.json:  # with the token: whoever opens the page needs it
        print(json.dumps({"url": server.url}, indent=2))
    else:
        _print(None, watch.where(server.url))
    sys.stdout.flush()
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


def _doctor(settings: DoctorSettings) -> int:
    findings = doctor.examine(submit.configured_master())
    if settings.json:
        found = [vars(each) for each in findings]
        output.print_json({"state": doctor.worst(findings), "findings": found})
    else:
        for each in findings:
            print(printable(f"{each.state:<8} {each.part:<13} {each.found}"))
            for line in filter(None, (each.problem, each.remedy and f"-> {each.remedy}")):
                print(printable(f"{'':<22} {line}"))
    return EXIT_FAILED if doctor.worst(findings) == doctor.FAILS else EXIT_OK


def _trial(run: Run, name: str) -> Trial:
    named = [trial for trial in run.trials.values() if name in (trial.name, str(trial.id))]
    if not named:
        raise UserInputError(
            "is no trial of this run",
            where=f"--trial {name}",
            hint="`dsat show --trials` lists them.",
        )
    return named[0]


def _print(told: Any, shown: list[Any]) -> None:
    if told is not None:
        output.print_json(told)
        return
    console = terminal.console(sys.stdout)
    for each in shown:
        console.print(each)
