"""The command: reads what the user wrote, wires the parts, prints what came of it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from dsat import __version__, ds_config, experiment, settings
from dsat.engines.local import LocalEngine, LocalOptions, Machine, find_machine
from dsat.engines.local import entrypoint as entrypoints
from dsat.engines.local.engine import FRESH_PROCESSES_ONLY, FULL_RUN_ID
from dsat.engines.local.entrypoint import Entrypoint
from dsat.errors import DsatError, UserInputError
from dsat.experiment import Experiment
from dsat.journal import FILE_NAME, Journal
from dsat.live import LiveView
from dsat.loop import drive
from dsat.plan import Plan
from dsat.report import summary
from dsat.run import Run
from dsat.settings import Settings
from dsat.trial import Outcome, OutcomeKind, Trial, TrialKind
from dsat.tuner import Tuner, make_space

RUNS_FOLDER = Path("dsat_runs")
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    chosen = settings.parse(words)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _tune(_prepare(chosen, words))
    except UserInputError as error:
        print(f"dsat: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except DsatError as error:
        print(f"dsat: error: {error}", file=sys.stderr)
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
        print_plan(ready)
        return EXIT_OK
    folder = _run_folder(chosen, ready.experiment.name)
    with Journal(folder / FILE_NAME) as journal:
        tuner = Tuner(ready.plan, journal, info=ready.info, events=journal.events)
        run = tuner.run
        view = _View(sys.stderr if chosen.json else sys.stdout, ready, folder)
        view.say(f"{ready.machine.describe()}; run folder {folder}")
        if ready.plan.objective.smaller_is_better and ready.plan.train_batch_size is None:
            view.say(
                f"note: {ready.plan.metric} is a time per optimizer step, which small batches make "
                "short; add --train-batch-size to compare like with like"
            )
        engine = _engine(ready, run, folder) if _has_work(ready, tuner) else None
        try:
            interrupted = not _search(ready, tuner, engine, view)
            summary.write_files(run, folder, train_line(ready, run, folder))
            if chosen.json:
                print(json.dumps(summary.to_json(run, folder), indent=2), flush=True)
            if tuner.failed:
                return report_failure(run, folder)
            view.show_result(run)
            print_where_to(ready, run, view, folder, interrupted)
            if interrupted:
                return EXIT_INTERRUPTED
            if run.best is None:
                return report_failure(run, folder)
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
            summary.write_files(run, self._folder, train_line(self._ready, run, self._folder))
        super().ended(run, trial, outcome)


def _has_work(ready: Prepared, tuner: Tuner) -> bool:
    """Whether anything is to be run; if not, what is known is only shown again."""
    if not tuner.finished:
        return True
    tuner.stop()
    return ready.chosen.run_full_experiment and tuner.run.best is not None


def _search(ready: Prepared, tuner: Tuner, engine: LocalEngine | None, view: LiveView) -> bool:
    """Runs the trials; False if it was interrupted, and nothing runs any more."""
    if engine is None:
        return True
    try:
        with view:
            drive(
                tuner,
                engine,
                view,
                max_slots=ready.chosen.max_slots,
                max_concurrent_trials=ready.chosen.max_concurrent_trials,
            )
    except KeyboardInterrupt:
        view.say("interrupted")
        engine.close()
        return False
    return True


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
    )
    return LocalEngine(
        ready.experiment,
        ready.program,
        ready.machine,
        folder,
        options,
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


def _run_folder(chosen: Settings, name: str) -> Path:
    """The folder of the run: a new one, or the one to continue."""
    if chosen.run_dir is not None:
        holds_run = (chosen.run_dir / FILE_NAME).exists()
        if chosen.resume and not holds_run:
            raise UserInputError("holds no run to resume", where=str(chosen.run_dir))
        if holds_run and not chosen.resume:
            raise UserInputError(
                "already holds a run",
                where=str(chosen.run_dir),
                hint="Add --resume to continue it, or choose another folder.",
            )
        chosen.run_dir.mkdir(parents=True, exist_ok=True)
        return chosen.run_dir
    stem = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    numbers = [
        int(path.name[len(stem) + 1 :])
        for path in RUNS_FOLDER.glob(f"{stem}-*")
        if path.name[len(stem) + 1 :].isdigit()
    ]
    if chosen.resume:
        if not numbers:
            raise UserInputError(
                f"there is no run {RUNS_FOLDER / stem}-* to resume", where="--resume"
            )
        return RUNS_FOLDER / f"{stem}-{max(numbers)}"
    number = max(numbers, default=0) + 1
    while True:
        folder = RUNS_FOLDER / f"{stem}-{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return folder


