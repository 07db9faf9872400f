"""The commands: they take settings, print text or JSON, and return an exit status."""

from __future__ import annotations

import json
import sys
from typing import Any

from dsat.cli import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, output
from dsat.cli.parser import AnySettings
from dsat.cli.read_only import read_only
from dsat.determined_cluster import submit
from dsat.determined_cluster.select_master import Choice
from dsat.estimating import fits, tables
from dsat.estimating.options import EstimateSettings
from dsat.projecting import projector
from dsat.projecting.options import ProjectSettings
from dsat.show import terminal
from dsat.show.live import LiveView
from dsat.show.settings import WatchSettings
from dsat.show.view import RunView
from dsat.tuning import dry_run, local
from dsat.tuning.command_line import CommandLine
from dsat.tuning.preparation import prepare_run
from dsat.tuning.settings import Settings
from dsat.values import format as fmt


def run(settings: AnySettings, line: CommandLine) -> int:
    """Run one command and return the exit status."""
    view = LiveView()
    with output.messages_to(view):
        if isinstance(settings, EstimateSettings):
            return _estimate(settings, view)
        if isinstance(settings, ProjectSettings):
            _print_prediction(projector.project(settings), settings)
            return EXIT_OK
        if isinstance(settings, WatchSettings) and settings.experiment is not None:
            return _print_submitted(submit.follow(settings.experiment), as_json=settings.json)
        if not isinstance(settings, Settings):
            return read_only(settings)
        choice = submit.select_place(settings)
        if choice.master is None:
            return _tune_here(settings, line, view)
        return _tune_on_cluster(settings, choice, view)


def _estimate(settings: EstimateSettings, view: LiveView) -> int:
    if settings.fits is not None:
        return _fit(settings)
    is_interrupted = False
    with tables.opened(settings) as tabled:
        try:
            with view:
                for slots in tabled.simulate():
                    if view.is_live:
                        heading = f"{fmt.count(slots, 'GPU')}: {tabled.progress}"
                        view.show(heading, tabled.table(slots))
        except KeyboardInterrupt:  # the formula replaces the simulations that are missing
            is_interrupted = True
        estimate = tabled.estimate()
    _print_prediction(estimate, settings)
    if is_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if estimate.is_complete or not settings.exact else EXIT_FAILED


def _fit(settings: EstimateSettings) -> int:
    try:
        fit = fits.fit(settings)
    except Exception as error:  # also bugs: status 1 would mean that the model does not fit
        output.report(error)
        return EXIT_USAGE
    _print_prediction(fit, settings)
    return EXIT_OK if fit.fits else EXIT_FAILED


def _print_prediction(prediction: Any, settings: EstimateSettings | ProjectSettings) -> None:
    print(json.dumps(prediction.to_json(), indent=2) if settings.json else prediction, flush=True)


def _tune_on_cluster(settings: Settings, choice: Choice, view: LiveView) -> int:
    ready = submit.prepare(settings, choice)
    if settings.dry_run:
        view.say(ready.place)
        print("\n".join(ready.describe()))
        return EXIT_OK
    return _print_submitted(submit.submit(ready, detach=settings.detach), as_json=settings.json)


def _print_submitted(submitted: submit.Submitted, *, as_json: bool) -> int:
    """Return the exit status of a search on a cluster; print its result if `as_json`."""
    if as_json:
        output.print_json(submitted.to_json())
    if submitted.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if submitted.has_result or submitted.state is None else EXIT_FAILED


def _tune_here(settings: Settings, line: CommandLine, view: LiveView) -> int:
    with prepare_run(settings, line) as ready:
        if settings.dry_run:
            if settings.json:
                output.print_json(dry_run.plan_to_json(ready))
            else:
                print("\n".join(dry_run.describe_plan(ready)))
            return EXIT_OK
        with local.LocalSearch(ready) as search:
            return _search(search, view)


def _search(search: local.LocalSearch, view: LiveView) -> int:
    view.follow(search.trials)
    with view:
        search.search(view)
    if search.ready.settings.json:
        output.print_json(RunView(search.run).to_json(search.folder))
    if search.profiled:
        terminal.show(
            sys.stderr if search.ready.settings.json else sys.stdout, output.result_of(search)
        )
    if search.profiled and search.interrupted:
        view.say(output.how_to_continue(search.ready, search.folder))
    if search.interrupted:
        return EXIT_INTERRUPTED
    if search.failure is not None:
        return output.report(search.failure)
    search.train(sys.stderr if search.ready.settings.json else sys.stdout, sys.stderr)
    return EXIT_OK
