"""The command: reads what the user wrote, wires the parts, prints what came of it."""

from __future__ import annotations

import functools
import io
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TextIO

from dsat.app import estimate, run_folders
from dsat.app.exit_status import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from dsat.app.prepare import Prepared, prepare
from dsat.cli import output, settings_from_argv
from dsat.determined_cluster import submit
from dsat.engines import cached
from dsat.engines.local import LocalEngine, LocalOptions
from dsat.engines.local.engine import FRESH_PROCESSES_ONLY, FULL_RUN_ID
from dsat.errors import DsatError, UserInputError
from dsat.inputs.settings import EstimateSettings
from dsat.memory import anchors
from dsat.memory.predictor import Basis
from dsat.report import autotuner_files, page, summary
from dsat.report.live_view import LiveView
from dsat.report.verdict import verdict
from dsat.tuning import history
from dsat.tuning.journal import FILE_NAME, Journal, read_events
from dsat.tuning.loop import drive
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # not every terminal has a ±
    chosen = settings_from_argv.parse(words)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        if isinstance(chosen, EstimateSettings):
            found = estimate.estimate(chosen)
            print(json.dumps(found.to_json(), indent=2) if chosen.json else found)
            return EXIT_OK
        where = submit.where(chosen)
        if where.master is not None:
            return submit.tune(chosen, where)
        runs = prepare(chosen, words)
        status = max(_tune(ready) for ready in runs)
        if len(runs) > 1 and not chosen.dry_run:
            _compare(runs)
        return status
    except UserInputError as error:
        print(f"dsat: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except DsatError as error:
        detail = getattr(error, "detail", "")
        print(f"{detail}dsat: error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        print(f"dsat: error: {name}{error.strerror or error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _tune(ready: Prepared) -> int:
    chosen = ready.chosen
    if chosen.dry_run:
        output.print_plan(ready)
        return EXIT_OK
    known: dict[str, Outcome] = {}
    if ready.native is not None:
        folder = run_folders.of_results(ready.native)
        known = history.known_outcomes(run_folders.earlier_runs(folder, ready.plan), ready.plan)
    else:
        folder = run_folders.of_run(chosen, ready.experiment.name)
    with Journal(folder / FILE_NAME) as journal:
        tuner = Tuner(ready.plan, journal, info=ready.info, events=journal.events)
        run = tuner.run
        view = _View(sys.stderr if chosen.json else sys.stdout, ready, folder)
        view.say(f"{ready.machine.describe()}; run folder {folder}")
        view.say(*(f"note: {note}" for note in output.notes(ready)))
        engine = _engine(ready, run, folder) if _has_work(ready, tuner) else None
        try:
            interrupted = not _search(ready, tuner, engine, known, view)
            _write_files(ready, run, folder)
            if chosen.json:
                print(json.dumps(summary.to_json(run, folder), indent=2), flush=True)
            if tuner.failed:
                return output.report_failure(run, run_folders.of_trials(ready, folder))
            view.show_result(run)
            output.print_where_to(ready, run, view, folder, interrupted)
            if interrupted:
                return EXIT_INTERRUPTED
            if run.best is None:
                return output.report_failure(run, run_folders.of_trials(ready, folder))
            if chosen.run_full_experiment and engine is not None:
                _train(engine, run.best, view)
            return EXIT_OK
        finally:
            if engine is not None:
                engine.close()


class _View(LiveView):
    """Shows a run, and keeps its result files up to date with every new best."""

    def __init__(self, stream: TextIO, ready: Prepared, folder: Path) -> None:
        super().__init__(stream)
        self._ready = ready
        self._folder = folder

    def ended(self, run: Run, trial: Trial, outcome: Outcome) -> None:
        if trial is run.best:
            _write_files(self._ready, run, self._folder)
        super().ended(run, trial, outcome)


def _compare(runs: Sequence[Prepared]) -> None:
    """The same search on different numbers of slots: which of them is best, and its files."""
    found = []
    for ready in runs:
        assert ready.native is not None
        folder = ready.native.results_dir
        run = Run(read_events(folder / FILE_NAME))
        if run.best_value is not None:
            found.append((ready, run, run.best_value))
    objective = runs[0].plan.objective
    found.sort(key=lambda entry: objective.loss(entry[2]))
    for ready, run, _ in found:
        print(f"{ready.plan.slots_per_trial} slots: {' '.join(verdict(run)[:1])}")
    if found:
        ready, run, _ = found[0]
        assert ready.native is not None
        above = replace(
            ready.native,
            results_dir=ready.native.results_dir.parent,
            exps_dir=ready.native.exps_dir.parent,
        )
        _write_files(replace(ready, native=above), run, above.results_dir)


def _write_files(ready: Prepared, run: Run, folder: Path) -> None:
    """What was found so far, for use and for people."""
    line = output.train_line(ready, run, folder)
    summary.write_files(run, folder, line)
    page.write_page(run, folder, run_folders.of_trials(ready, folder), line)
    if ready.native is not None:
        command = output.train_command(ready, run, folder / autotuner_files.OPTIMAL_CONFIG_FILE)
        autotuner_files.write_files(run, folder, ready.native.exps_dir, command or [])


def _has_work(ready: Prepared, tuner: Tuner) -> bool:
    """Whether anything is to be run; if not, what is known is only shown again."""
    if not tuner.finished:
        return True
    tuner.stop()
    return ready.chosen.run_full_experiment and tuner.run.best is not None


def _search(
    ready: Prepared,
    tuner: Tuner,
    engine: LocalEngine | None,
    known: dict[str, Outcome],
    view: LiveView,
) -> bool:
    """Runs the trials; False if it was interrupted, and nothing runs any more."""
    if engine is None:
        return True
    try:
        with view:
            drive(
                tuner,
                cached.CachedEngine(engine, known, ready.plan),
                view,
                max_slots=ready.chosen.max_slots,
                max_concurrent_trials=ready.chosen.max_concurrent_trials,
                survey=functools.partial(_survey, ready, engine, view),
            )
    except KeyboardInterrupt:
        view.say("interrupted")
        engine.close()
        return False
    return True


def _survey(ready: Prepared, engine: LocalEngine, view: LiveView, tuner: Tuner) -> Basis:
    assert tuner.run.profile is not None
    return anchors.of_run(
        engine,
        ready.plan,
        tuner.run.profile,
        tuner.reference_configs(),
        as_cpu=ready.machine.is_cpu,
        say=view.say,
    )


def _engine(ready: Prepared, run: Run, folder: Path) -> LocalEngine:
    chosen = ready.chosen
    options = LocalOptions(
        trial_timeout_s=chosen.trial_timeout_s,
        slot_memory_bytes=chosen.slot_memory_bytes,
        cold=chosen.cold or _known_to_need_fresh_processes(run),
        start_step=chosen.start_profile_step,
        end_step=chosen.end_profile_step,
        max_steps=chosen.max_profile_steps,
        seed=chosen.random_seed,
        own_micro_batch=ready.plan.own_batch.micro_batch,
    )
    return LocalEngine(
        ready.experiment,
        ready.program,
        ready.machine,
        folder,
        options,
        trials=run_folders.of_trials(ready, folder),
        slots_per_trial=ready.plan.slots_per_trial,
    )


def _known_to_need_fresh_processes(run: Run) -> bool:
    """Whether this was found before the run was interrupted."""
    return any(FRESH_PROCESSES_ONLY in outcome.warnings for outcome in run.outcomes.values())


def _train(engine: LocalEngine, best: Trial, view: LiveView) -> None:
    """The full-length run with the best configuration."""
    folder = engine.train(best)
    view.say(f"training with {best.name}; output in {folder / 'stdout.log'}")
    while True:
        for trial_id, outcome in engine.poll(1.0):
            if trial_id != FULL_RUN_ID:
                continue
            if outcome.kind is OutcomeKind.OK:
                view.say(f"trained; checkpoints and reports in {folder}")
                return
            if outcome.detail:
                print(outcome.detail, file=sys.stderr)
            raise DsatError(
                f"the full-length run failed: {outcome.kind.value}: {outcome.message}. Its log is "
                f"{folder / 'stderr.log'}."
            )
