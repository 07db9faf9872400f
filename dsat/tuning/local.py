"""One search that this process controls, from opening the journal to writing result files."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from dsat.command.switches import CHECKPOINTING
from dsat.engines import Engine
from dsat.engines.agent import leftovers
from dsat.engines.engine import LocalEngine
from dsat.engines.start import FULL_RUN_ID, LocalOptions
from dsat.engines.trial_folder import TRIALS_FOLDER, follow, log_files
from dsat.errors import DsatError, JournalMismatch, SearchFailed, UserInputError
from dsat.in_trial.failures import INSIDE_DSAT
from dsat.memory.predictor import Basis
from dsat.prepare.hosts import describe
from dsat.run import history
from dsat.run.events import is_of_budget
from dsat.run.journal import FILE_NAME, Journal
from dsat.run.loop import Observer, drive
from dsat.run.profile_phase import name_of_trial
from dsat.run.run import Run
from dsat.run.tuner import Tuner
from dsat.show import page, summary
from dsat.show.log_lines import Kind, Narrator
from dsat.show.view import RunView
from dsat.simulation import anchors
from dsat.tuning import autotuner_files, run_folders, train_command
from dsat.tuning.preparation import Prepared
from dsat.values.format import count
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial, TrialKind

_log = logging.getLogger(__name__)
TRIALS = "dsat.trials"  # name of the logger of trial results, which a live table may replace
_log_of_trials = logging.getLogger(TRIALS)
_PAGE_EVERY_S = 30.0
# A function that makes an engine for a prepared run and its folder.
EngineFactory = Callable[[Prepared, Path], Engine]
# Engines that the user registered, by name in `Settings.engine`.
ENGINES: dict[str, EngineFactory] = {}


class LocalSearch(Observer):
    """A search that this process controls; a context manager.

    It locks the run's folder and opens the journal; on exit it ends all trials and closes both.

    Raises:
        UserInputError: the folder holds another run, has none to resume, or cannot be made.
        JournalError: the journal is in use (JournalLocked), damaged, or of another plan
            (JournalMismatch).
    """

    def __init__(self, ready: Prepared) -> None:
        self.interrupted = False
        self._engine: Engine | None = None
        self._page_is_due_s = time.monotonic() + _PAGE_EVERY_S
        with contextlib.ExitStack() as opened:
            name, settings = ready.experiment.name, ready.settings
            self.folder = run_folders.choose(settings, name, opened, ready.plan)
            resumed = run_folders.read(self.folder)
            ready = replace(ready, plan=run_folders.keep_budget(resumed, settings, ready.plan))
            earlier = run_folders.earlier_runs(self.folder, resumed, ready.plan, ready.info)
            # A new folder has no leftovers, and looking for them inspects all processes.
            ended = leftovers.end_processes(self.folder) if settings.resume else []
            if ended:
                _log.info(
                    "ended %s left over from an earlier run in this folder",
                    count(len(ended), "process"),
                )
            journal = opened.enter_context(Journal(self.folder / FILE_NAME))
            try:
                self._tuner = Tuner(
                    ready.plan,
                    journal,
                    info=ready.info,
                    earlier=history.reusable_trials(earlier, ready.plan, ready.info),
                    last_event_s=ready.began_s,
                )
            except JournalMismatch as error:
                raise JournalMismatch(f"{self.folder}: {error}") from None
            self._opened = opened.pop_all()
        self.run = self._tuner.run
        self.ready = ready.after(self.run)

    def __enter__(self) -> LocalSearch:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    @property
    def trials(self) -> Path:
        return self.folder / TRIALS_FOLDER

    def search(self, *observers: Observer) -> None:
        """Run the remaining trials and write result files; Ctrl-C ends trials and search."""
        for message in _messages(self.ready, self.folder, self.run):
            _log.info("%s", message)
        if self._has_work():
            try:
                self._drive(observers)
            except KeyboardInterrupt:
                _log.info("interrupted")
                self.interrupted = True
                if self._engine is not None:
                    self._engine.close()
                self._tuner.pause()
        _write_files(self.ready, self.run, self.folder)

    def _drive(self, observers: Sequence[Observer]) -> None:
        ready, settings = self.ready, self.ready.settings
        most_slots = settings.max_concurrent_trials * ready.plan.slots_per_trial
        make_engine = ENGINES.get(settings.engine, local_engine)
        self._engine = make_engine(ready, self.folder)
        self._opened.callback(self._engine.close)
        if not self._has_trials:
            return
        drive(
            self._tuner,
            self._engine,
            [self, Narrator(_log_line), *observers],
            max_slots=min(most_slots, settings.max_slots or most_slots),
            survey=self._survey,
        )

    def ended(self, run: Run, trial: Trial, outcome: Outcome) -> None:
        """Write result files: after each new best, and with the report at most every 30 s."""
        is_due = time.monotonic() >= self._page_is_due_s
        if is_due:
            self._page_is_due_s = time.monotonic() + _PAGE_EVERY_S
        if trial is run.best or is_due:
            _write_files(self.ready, run, self.folder, with_page=is_due)

    def _survey(self) -> Basis:
        """Return the basis of memory predictions: simulations if possible, else the profile."""
        ready, engine, profile = self.ready, self._engine, self.run.profile
        assert profile is not None
        if not isinstance(engine, LocalEngine):
            why_not = "this engine cannot simulate a script"
        elif engine.needs_command:
            why_not = "simulation needs ranks that dsat can start itself"
        elif not ready.hosts[0].is_here:
            why_not = "simulation needs dsat on one of the trials' hosts"
        else:
            return anchors.simulate_strategies(
                engine,
                ready.plan,
                profile,
                self._tuner.decisions.reference_configs(),
                as_cpu=ready.machine.is_cpu,
                say=_log.info,
            )
        return Basis.of_profile(profile, ready.plan.switches, note=why_not)

    @property
    def _has_trials(self) -> bool:
        """Return whether a trial may begin; interrupted trials do not use up the budget."""
        is_used = len(self.run.outcomes) >= self.ready.plan.max_trials
        return not self._tuner.finished and not (is_used and self.run.best is not None)

    def _has_work(self) -> bool:
        if self._has_trials:
            return True
        if self._tuner.finished:
            self._tuner.stop()
        return self.ready.settings.run_full_experiment and self.run.best is not None

    @property
    def profiled(self) -> bool:
        """Return False if the model could not be profiled, so that no search began."""
        return self._tuner.decisions.failure is None

    @property
    def failure(self) -> DsatError | None:
        """Error of a search that ended without a best trial or without a profile; else None.

        If the search was interrupted, only a failed profile is an error.
        """
        if not self.profiled or (self.run.best is None and not self.interrupted):
            return _failure(self.run, self.trials)
        return None

    def train(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        """Train in full length with the best configuration, if the user asked for it.

        The output is copied to `out` and `err` as it comes. Raises SearchFailed if training fails.
        """
        best = self.run.best
        if not self.ready.settings.run_full_experiment or best is None or self.interrupted:
            return
        if not isinstance(self._engine, LocalEngine):
            raise UserInputError("needs the local engine", where="--run-full-experiment")
        folder = self._engine.train(best)
        _log.info("training with %s in full length; its output is kept in %s", best.name, folder)
        followed = [
            (follow(folder / name), stream)
            for name, stream in zip(log_files(0), (out, err), strict=True)
            if stream is not None
        ]
        outcome = None
        while outcome is None:
            outcome = dict(self._engine.poll(1.0)).get(FULL_RUN_ID)
            for texts, stream in followed:
                stream.write(next(texts))
                stream.flush()
        if outcome.kind is not OutcomeKind.OK:
            raise SearchFailed(
                f"{outcome.describe('the full-length run')}. Its log is {folder / 'stderr.log'}.",
                "" if followed else outcome.detail,
            )
        _log.info("training finished; its output is in %s", folder)


def _log_line(kind: Kind, text: str) -> None:
    log = _log_of_trials if kind is Kind.TRIAL else _log
    log.log(logging.WARNING if kind is Kind.WARNING else logging.INFO, "%s", text)


def _write_files(ready: Prepared, run: Run, folder: Path, *, with_page: bool = True) -> None:
    """Write the result files, by default with the report."""
    view, line = RunView(run), train_command.make_line(ready, run, folder)
    summary.write_files(view, folder, line)
    train_command.write_own_files(ready, run, folder)
    if with_page:
        page.write_page(view, folder, line)
    section = ready.section
    if section is not None:
        results = section.results_dir or folder
        best = results / autotuner_files.OPTIMAL_CONFIG_FILE
        command = train_command.make_command(ready, run, best) or line
        autotuner_files.write_files(view, results, section.exps_dir, command)


def _messages(ready: Prepared, folder: Path, run: Run) -> Iterator[str]:
    """Yield messages to show before the run begins."""
    yield f"{describe(ready.hosts)}; run folder {folder}"
    for host in ready.hosts:
        for warning in host.machine.warnings:
            yield f"warning: {host.name}: {warning}" if host.name else f"warning: {warning}"
    plan = ready.plan
    any_batch = plan.train_batch_size is None and plan.max_train_batch_size is None
    if plan.objective.smaller_is_better and any_batch:
        yield (
            f"note: {plan.metric} is a time per optimizer step, so the smallest batch wins. Set "
            "--train-batch-size to compare equal batches"
        )
    yield from (f"note: {note}" for note in ready.notes)
    requested, finals = plan.finals or 0, run.finals
    if finals is not None and finals.over and not run.is_reopened and requested > finals.used:
        yield (
            "warning: the finals of this run have finished, and --finals cannot extend them. For "
            "more finals, start a new run (--run-dir NEW_FOLDER)"
        )
    changed = history.difference(run, plan, ready.info)
    if changed is not None:
        yield (
            f"warning: {changed}, but this run has finished and shows its old result. To measure "
            "again, start a new run (--run-dir NEW_FOLDER)"
        )


def local_engine(ready: Prepared, folder: Path) -> LocalEngine:
    """Make the local engine; if the user's command is running already, it is the first trial."""
    settings = ready.settings
    return LocalEngine(
        ready.experiment,
        ready.program,
        ready.hosts,
        folder,
        LocalOptions(
            settings.trial_options(ready.plan.own_batch), cold=settings.cold, seed=settings.seed
        ),
        slots_per_trial=ready.plan.slots_per_trial,
        own=ready.first,
    )


def _failure(run: Run, trials: Path) -> DsatError:
    """Return the error of a run without a result, from the failure that explains it best."""
    failures = [run.trials[i] for i, outcome in run.outcomes.items() if not outcome.ok]
    if not failures:
        return SearchFailed(str(run.stop_reason))
    if run.profile is None:
        trial = failures[-1]
    else:  # failed profile trials do not matter once one ran
        trial = next((t for t in failures if t.kind is not TrialKind.PROFILE), failures[-1])
    outcome = run.outcomes[trial.id]
    if outcome.kind is OutcomeKind.INVALID:
        return UserInputError(outcome.message)
    hint = ""
    if run.profile is None and is_of_budget(run.stop_reason):
        hint = " Other configurations may run: allow more trials (--max-trials)."
    elif outcome.kind is OutcomeKind.ERROR:
        hint = _blame(trial, outcome)
    elif outcome.kind is OutcomeKind.OOM and trial.kind is not TrialKind.SEARCH:
        hint = _does_not_fit(run)
    name = f"trial {trial.id}" if trial.kind is TrialKind.SEARCH else name_of_trial(trial)
    return SearchFailed(
        f"{outcome.describe(name)}.{hint} Its logs are in {trials / trial.name}.",
        "" if outcome.kind is OutcomeKind.OOM else outcome.detail,
    )


def _blame(trial: Trial, outcome: Outcome) -> str:
    if INSIDE_DSAT in outcome.message:
        return " Please report it, with the traceback, as a bug of dsat."
    if not outcome.detail or trial.kind is TrialKind.SEARCH:
        return ""
    if trial.kind is TrialKind.BASELINE or outcome.before_engine:
        steps, when = outcome.completed_steps, ""
        if steps:
            when = f", after {count(steps, 'optimizer step')}"
        is_own = trial.kind is TrialKind.BASELINE
        where = "with your own configuration" if is_own else "before deepspeed.initialize"
        return f" This is your script's own error, {where}{when}."
    return (
        f" Your own configuration had failed before. This trial ran {trial.strategy} with micro "
        f"batch {trial.batch.micro_batch} instead."
    )


def _does_not_fit(run: Run) -> str:
    ran = [run.trials[i].name for i, outcome in run.outcomes.items() if outcome.ok]
    if ran:
        return f" Only {ran[0]} ran, to profile the model: allow more trials (--max-trials)."
    labels = [t.strategy for t in run.trials.values() if t.kind is TrialKind.PROFILE]
    stages = "" if 3 in run.plan.searched_stages else ", higher --zero-stages"
    several = run.plan.slots_per_trial > 1
    recomputing = "" if run.plan.switches.get(CHECKPOINTING) else "activation checkpointing, "
    shared = ", --search tensor_parallel.autotp_size sequence_parallel_size" if several else ""
    return (
        f" The model does not fit even at the smallest micro batch with {', '.join(labels)}. Use "
        f"{recomputing}more devices{stages}{shared}, or --nvme-path."
    )
