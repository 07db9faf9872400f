"""What the command says before and after a run."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

from dsat.app.exit_status import EXIT_FAILED, EXIT_USAGE
from dsat.app.prepare import Prepared
from dsat.report import summary
from dsat.report.live_view import LiveView
from dsat.tuning.run import Run
from dsat.tuning.strategies import make_space, rungs
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import TrialKind


def print_plan(ready: Prepared) -> None:
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
    fixed = [key for key in plan.fixed if key not in plan.fix]
    if fixed:
        print(f"fixed by your configuration: {', '.join(fixed)}")
    ladder = [strategy.label for strategy in rungs(plan)]
    if ladder:
        print(f"if that does not fit, one after the other: {'; '.join(ladder)}")
    print(
        f"your own batch: {own.train_batch_size} = micro batch {own.micro_batch} x gradient "
        f"accumulation {own.gas} x {plan.slots_per_trial} slots"
    )
    print(f"trial 0 ({first.name}), {plan.slots_per_trial} ranks of: {shlex.join(command)}")
    print(f"with {json.dumps(first.overrides)} over {ready.experiment.ds_config_name}")


def notes(ready: Prepared) -> list[str]:
    """What a person should know before the run begins."""
    plan, found = ready.plan, []
    any_batch = plan.train_batch_size is None and plan.max_train_batch_size is None
    if plan.objective.smaller_is_better and any_batch:
        found.append(
            f"{plan.metric} is a time per optimizer step, which small batches make short; add "
            "--train-batch-size to compare like with like"
        )
    if ready.native is not None:
        found += ready.native.notes
    return found


class _Nowhere:
    """A journal for decisions that nobody will act on."""

    def append(self, event: object) -> None:
        pass


def train_command(ready: Prepared, run: Run, config: Path) -> list[str] | None:
    """The command that trains with the best configuration, which is in the file `config`.

    None if its script cannot be told the file, or runs as a Determined task only.
    """
    program, slots = ready.program, ready.plan.slots_per_trial
    given = ready.experiment.entrypoint
    needs_task = "determined" in (given if isinstance(given, str) else " ".join(map(str, given)))
    if program.config_path is None or needs_task or run.best is None:
        return None
    launcher = ["torchrun", "--standalone", f"--nproc-per-node={slots}"]
    if program.passes_local_rank:
        launcher = ["deepspeed", "--num_gpus", str(slots)]
    script = ["--module", program.module] if program.module else [program.script]
    found = program.for_config(
        str(config.resolve()),
        summary.best_config(run) or {},
        run.best.script_args,
        ready.experiment.arg_mappings,
    )
    return [*launcher, *script, *found.args]


def train_line(ready: Prepared, run: Run, folder: Path) -> str:
    """What to type to train with the best configuration."""
    command = train_command(ready, run, folder / summary.BEST_CONFIG_FILE)
    if command is not None:
        # The user's own variables may be credentials: named, not written down.
        words = [*(f'{name}="${name}"' for name in ready.program.env), shlex.join(command)]
        return f"cd {shlex.quote(str(ready.experiment.model_dir.resolve()))} && {' '.join(words)}"
    words, again = list(ready.words), ["--resume", "--run-full-experiment"]
    if "--run-dir" in words:
        position = words.index("--run-dir")
        del words[position : position + 2]
    again += ["--run-dir", str(folder)]
    end = words.index("--") if "--" in words else len(words)
    kept = [word for word in words[:end] if word not in again]
    return shlex.join(["python3", "-m", "dsat", *kept, *again, *words[end:]])


def print_where_to(
    ready: Prepared, run: Run, view: LiveView, folder: Path, interrupted: bool
) -> None:
    if run.best is not None:
        view.say(f"Configuration: {folder / summary.BEST_CONFIG_FILE}")
        view.say(f"Train with it: {train_line(ready, run, folder)}")
    if interrupted:
        view.say(f"Continue with the same command and: --run-dir {folder} --resume")


def _does_not_fit(run: Run) -> str:
    tried = [t.strategy for t in run.trials.values() if t.kind is TrialKind.PROFILE]
    allowed = "" if run.plan is None or 3 in run.plan.zero_stages else ", higher --zero-stages"
    return (
        f" The model does not fit at the smallest micro batch, tried with {', '.join(tried)}: use "
        f"more slots{allowed}, or --nvme-path."
    )


def report_failure(run: Run, trials: Path) -> int:
    """Nothing ran: shows the user's own error, not a guess about it."""
    failures = [run.trials[i] for i, outcome in run.outcomes.items() if not outcome.ok]
    if not failures:
        print(f"dsat: error: {run.stop_reason}", file=sys.stderr)
        return EXIT_FAILED
    if run.profile is None:
        trial = failures[-1]
    else:  # profile trials may have failed before one ran
        trial = next((t for t in failures if t.kind is not TrialKind.PROFILE), failures[-1])
    outcome = run.outcomes[trial.id]
    if outcome.kind is OutcomeKind.INVALID:
        print(f"dsat: error: {outcome.message}", file=sys.stderr)
        return EXIT_USAGE
    if outcome.detail and outcome.kind is not OutcomeKind.OOM:
        print(outcome.detail.rstrip(), file=sys.stderr)
    hints = {
        OutcomeKind.OOM: _does_not_fit(run),
        OutcomeKind.ERROR: " This is your script's own error, under your own configuration.",
    }
    hint = "" if trial.kind is TrialKind.SEARCH else hints.get(outcome.kind, "")
    which = "the profile trial" if trial.kind is TrialKind.PROFILE else f"trial {trial.id}"
    print(
        f"dsat: error: {which} failed: {outcome.kind.value}: {outcome.message}.{hint} "
        f"Its logs are in {trials / trial.name}.",
        file=sys.stderr,
    )
    return EXIT_FAILED
