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

from dsat import __version__, arguments, ds_config, experiment, settings
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
from dsat.space import allowed_micro_batches
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


@dataclass(frozen=True)
class _Prepared:
    """Everything that is known before a run begins; `words` is the command line."""

    words: list[str]
    chosen: Settings
    experiment: Experiment
    program: Entrypoint
    machine: Machine
    plan: Plan

    @property
    def info(self) -> dict[str, Any]:
        return {
            "name": self.experiment.name,
            "dsat": __version__,
            "machine": self.machine.describe(),
            "config": str(self.experiment.path),
            "model_dir": str(self.experiment.model_dir),
        }


def _prepare(chosen: Settings, words: list[str]) -> _Prepared:
    """Reads and checks everything the user gave."""
    if chosen.engine == "determined":
        raise UserInputError(
            "this version tunes on the local machine only",
            where="--engine determined",
            hint="Use --engine local.",
        )
    if chosen.search_runner_config is not None:
        experiment.read_mapping(chosen.search_runner_config)
    user = experiment.read(chosen.config, chosen.model_dir, chosen.include)
    program = entrypoints.parse(user.entrypoint, user.model_dir)
    _check_config_path(user, program)
    slots = chosen.slots or user.slots_per_trial
    if program.slots not in (None, slots):
        raise UserInputError(
            f"starts {program.slots} ranks, but a trial has {slots} slots",
            where="entrypoint",
            hint="Make resources.slots_per_trial (or --slots) and the entrypoint agree.",
        )
    plan = _plan(chosen, user, program, slots)
    machine = find_machine()
    _check_slots(chosen, machine, slots)
    return _Prepared(words, chosen, user, program, machine, plan)


def _plan(chosen: Settings, user: Experiment, program: Entrypoint, slots: int) -> Plan:
    base = user.base_config
    sizes = arguments.batch_from_args(base, program.args, user.arg_mappings)
    own_batch = ds_config.resolve_batch(sizes, slots, where=user.ds_config_name)
    allowed = allowed_micro_batches(
        train_batch_size=chosen.train_batch_size, divisible_by=chosen.divisible_by, slots=slots
    )
    if not allowed:
        unit = slots * chosen.divisible_by
        raise UserInputError(
            f"{chosen.train_batch_size} cannot be reached with {slots} slots and micro batches "
            f"that are multiples of {chosen.divisible_by}",
            where="--train-batch-size",
            hint=f"Choose a multiple of {unit}.",
        )
    return Plan(
        method=chosen.method,
        metric=chosen.metric,
        max_trials=chosen.max_trials,
        zero_stages=chosen.zero_stages,
        seed=chosen.random_seed,
        slots_per_trial=slots,
        base_config=base,
        own_batch=own_batch,
        search_options=chosen.search_options,
        measured={
            # A digest, because an entrypoint or a hyperparameter may be a credential.
            "program": ds_config.fingerprint(
                {
                    "entrypoint": user.entrypoint,
                    "hparams": dict(user.hparams),
                    "arg_mappings": dict(user.arg_mappings),
                }
            ),
            "steps": [chosen.start_profile_step, chosen.end_profile_step, chosen.max_profile_steps],
        },
        train_batch_size=chosen.train_batch_size,
        divisible_by=chosen.divisible_by,
        slot_memory_bytes=chosen.slot_memory_bytes,
    )


def _check_config_path(user: Experiment, program: Entrypoint) -> None:
    given, known = program.config_path, user.hparams[ds_config.CONFIG_KEY]
    if given is None or not isinstance(known, str):
        return
    if os.path.normpath(given) != os.path.normpath(known):
        raise UserInputError(
            f"names the DeepSpeed configuration {given!r}, but hyperparameters."
            f"{ds_config.CONFIG_KEY} is {known!r}",
            where=f"{user.path}: entrypoint",
            hint="Make both the same.",
        )


def _check_slots(chosen: Settings, machine: Machine, slots: int) -> None:
    if slots > machine.num_slots:
        raise UserInputError(
            f"a trial needs {slots} slots, and this machine has {machine.describe()}",
            where="resources.slots_per_trial",
            hint=f"Use --slots {machine.num_slots} or another machine.",
        )
    if chosen.max_slots is not None and chosen.max_slots < slots:
        raise UserInputError(
            f"{chosen.max_slots} is less than the {slots} slots of one trial", where="--max-slots"
        )
    if chosen.slot_memory_bytes is not None and not machine.is_cpu:
        if chosen.slot_memory_bytes > machine.memory_bytes:
            raise UserInputError(
                f"is more than a slot has: {machine.describe()}", where="--slot-memory"
            )
        if machine.accelerator != "cuda":
            raise UserInputError(
                f"cannot be enforced on {machine.accelerator}", where="--slot-memory"
            )


def _tune(ready: _Prepared) -> int:
    chosen = ready.chosen
    if chosen.dry_run:
        _print_plan(ready)
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
            summary.write_files(run, folder, _train_line(ready, run, folder))
            if chosen.json:
                print(json.dumps(summary.to_json(run, folder), indent=2), flush=True)
            if tuner.failed:
                return _report_failure(run, folder)
            view.show_result(run)
            _print_where_to(ready, run, view, folder, interrupted)
            if interrupted:
                return EXIT_INTERRUPTED
            if run.best is None:
                return _report_failure(run, folder)
            if chosen.run_full_experiment and engine is not None:
                _train(engine, run.best, view)
            return EXIT_OK
        finally:
            if engine is not None:
                engine.close()


class _View(LiveView):
    """Shows a run, and keeps its result files up to date with every new best."""

    def __init__(self, stream: TextIO, ready: _Prepared, folder: Path) -> None:
        super().__init__(stream)
        self._ready = ready
        self._folder = folder

    def ended(self, run: Run, trial: Trial, outcome: Outcome) -> None:
        if trial is run.best:
            summary.write_files(run, self._folder, _train_line(self._ready, run, self._folder))
        super().ended(run, trial, outcome)


def _has_work(ready: _Prepared, tuner: Tuner) -> bool:
    """Whether anything is to be run; if not, what is known is only shown again."""
    if not tuner.finished:
        return True
    tuner.stop()
    return ready.chosen.run_full_experiment and tuner.run.best is not None


def _search(ready: _Prepared, tuner: Tuner, engine: LocalEngine | None, view: LiveView) -> bool:
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


def _engine(ready: _Prepared, run: Run, folder: Path) -> LocalEngine:
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


def _print_plan(ready: _Prepared) -> None:
    """What `--dry-run` shows."""
    plan, program = ready.plan, ready.program
    tuner = Tuner(plan, _Nowhere(), info=ready.info)
    first = tuner.next_trials(ready.machine.num_slots)[0]
    stages = make_space(plan).describe()
    command = program.command()
    if ready.chosen.json:
        plan_json = {**plan.to_json(), "machine": ready.machine.describe(), "space": stages}
        text = {"plan": plan_json, "first_trial": first.to_json(), "command": command}
        print(json.dumps(text, indent=2))
        return
    own = plan.own_batch
    print(f"{ready.experiment.name}: {plan.method} search for the best {plan.metric}")
    print(f"on {ready.machine.describe()}, {plan.slots_per_trial} per trial")
    print(f"at most {plan.max_trials} trials: the model profile, your own configuration, then:")
    for line in stages:
        print(f"  {line}")
    fixed = [key for key in plan.fixed if key != "stage"]
    if fixed:
        print(f"fixed by your configuration: {', '.join(fixed)}")
    print(
        f"your own batch: {own.train_batch_size} = micro batch {own.micro_batch} x gradient "
        f"accumulation {own.gas} x {plan.slots_per_trial} slots"
    )
    print(f"trial 0 ({first.name}), {plan.slots_per_trial} ranks of: {shlex.join(command)}")
    print(f"with {json.dumps(first.overrides)} over {ready.experiment.ds_config_name}")


class _Nowhere:
    """A journal for decisions that nobody will act on."""

    def append(self, event: object) -> None:
        pass


def _train_line(ready: _Prepared, run: Run, folder: Path) -> str:
    """What to type to train with the best configuration."""
    best = (folder / summary.BEST_CONFIG_FILE).resolve()
    program, slots = ready.program, ready.plan.slots_per_trial
    given = ready.experiment.entrypoint
    needs_task = "determined" in (given if isinstance(given, str) else " ".join(map(str, given)))
    if program.config_path is not None and not needs_task:
        launcher = ["torchrun", "--standalone", f"--nproc-per-node={slots}"]
        if program.passes_local_rank:
            launcher = ["deepspeed", "--num_gpus", str(slots)]
        script = ["--module", program.module] if program.module else [program.script]
        config = summary.best_config(run) or {}
        script_args = run.best.script_args if run.best is not None else {}
        found = program.for_config(str(best), config, script_args, ready.experiment.arg_mappings)
        command = shlex.join([*launcher, *script, *found.args])
        # The user's own variables may be credentials: named, not written down.
        words = [*(f'{name}="${name}"' for name in program.env), command]
        return f"cd {shlex.quote(str(ready.experiment.model_dir.resolve()))} && {' '.join(words)}"
    words, again = list(ready.words), ["--run-dir", str(folder)]
    if "--run-dir" in words:
        position = words.index("--run-dir")
        del words[position : position + 2]
    again += ["--resume", "--run-full-experiment"]
    words = [word for word in words if word not in again]
    return shlex.join(["python3", "-m", "dsat", *words, *again])


def _print_where_to(
    ready: _Prepared, run: Run, view: LiveView, folder: Path, interrupted: bool
) -> None:
    if run.best is not None:
        view.say(f"Configuration: {folder / summary.BEST_CONFIG_FILE}")
        view.say(f"Train with it: {_train_line(ready, run, folder)}")
    if interrupted:
        view.say(f"Continue with the same command and: --run-dir {folder} --resume")


def _report_failure(run: Run, folder: Path) -> int:
    """Nothing ran: shows the user's own error, not a guess about it."""
    failures = [run.trials[i] for i, outcome in run.outcomes.items() if not outcome.ok]
    if not failures:
        print(f"dsat: error: {run.stop_reason}", file=sys.stderr)
        return EXIT_FAILED
    trial = failures[-1 if run.profile is None else 0]
    outcome = run.outcomes[trial.id]
    if outcome.kind is OutcomeKind.INVALID:
        print(f"dsat: error: {outcome.message}", file=sys.stderr)
        return EXIT_USAGE
    if outcome.detail and outcome.kind is not OutcomeKind.OOM:
        print(outcome.detail.rstrip(), file=sys.stderr)
    hints = {
        OutcomeKind.OOM: " The model does not fit even at the smallest micro batch: use a higher "
        "ZeRO stage or offloading in your DeepSpeed configuration, or more slots.",
        OutcomeKind.ERROR: " This is your script's own error, under your own configuration.",
    }
    hint = "" if trial.kind is TrialKind.SEARCH else hints.get(outcome.kind, "")
    which = "the profile trial" if trial.kind is TrialKind.PROFILE else f"trial {trial.id}"
    print(
        f"dsat: error: {which} failed: {outcome.kind.value}: {outcome.message}.{hint} "
        f"Its logs are in {folder / 'trials' / trial.name}.",
        file=sys.stderr,
    )
    return EXIT_FAILED
