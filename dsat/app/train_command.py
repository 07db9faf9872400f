"""Commands that train with the best configuration."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.app import accelerate_launch
from dsat.app.accelerate_launch import AccelerateLaunch
from dsat.app.prepare import Prepared
from dsat.engines.local.hosts import without_segments
from dsat.engines.local.launch import working_folder
from dsat.engines.local.machine import Machine
from dsat.engines.local.rank_settings import (
    ALLOCATOR_SETTINGS,
    allocator_is_set,
    binding_options,
    settings_of_ranks,
)
from dsat.engines.local.retries import COMMAND_AGAIN, FRESH_PROCESSES_ONLY, NO_SEGMENTS
from dsat.in_trial.memory_limit import MALLOC_VARIABLES
from dsat.inputs import accelerate_env
from dsat.inputs import entrypoint as entrypoints
from dsat.inputs.entrypoint import Entrypoint
from dsat.report import summary
from dsat.report.run_view import best_config
from dsat.tuning.run import Run
from dsat.values.files import write_atomically
from dsat.values.text import without_secrets


def as_shown(ready: Prepared, run: Run) -> Prepared:
    """Return what is run, where and how, by what earlier trials have shown of it."""
    shown = {warning for outcome in run.outcomes.values() for warning in outcome.warnings}
    if FRESH_PROCESSES_ONLY in shown:
        ready = replace(ready, settings=replace(ready.settings, cold=True))
    if NO_SEGMENTS in shown:
        ready = replace(ready, hosts=tuple(without_segments(ready.hosts)))
    if COMMAND_AGAIN in shown:
        why = "they failed, started by dsat, in an earlier trial"
        ready = replace(ready, program=replace(ready.program, needs_command=why))
    return ready


def line(ready: Prepared, run: Run, folder: Path) -> str:
    """Return the command that trains with the best configuration from any folder."""
    command = text(ready, run, folder / summary.BEST_CONFIG_FILE)
    if command is not None:
        program = as_shown(ready, run).program
        cwd = working_folder(ready.experiment, folder)
        if runs_own_command(program, ready.plan.slots_per_trial) and program.started_in:
            cwd = Path(program.started_in)
        return f"cd {shlex.quote(str(cwd.resolve()))} && {command}"
    if ready.argv is None:
        return (
            f"dsat.tune(..., run_dir={str(folder)!r}, resume=True, run_full_experiment=True), the "
            "rest as before"
        )
    argv = list(ready.argv)
    end = argv.index("--") if "--" in argv else len(argv)
    kept, rest = argv[:end], argv[end:]
    if "--run-dir" in kept:
        position = kept.index("--run-dir")
        del kept[position : position + 2]
    again = ["--resume", "--run-full-experiment", "--run-dir", str(folder)]
    kept = [word for word in kept if word not in again and not word.startswith("--run-dir=")]
    return shlex.join(["python3", "-m", "dsat", *kept, *again, *rest])


def text(ready: Prepared, run: Run, config: Path) -> str | None:
    """Return the command that trains with the best configuration in the model's folder.

    Args:
        config: the file that holds the best configuration.

    Returns:
        None if the script cannot be given the file, or runs as a Determined task or on several
        hosts only.
    """
    ready, best = as_shown(ready, run), best_config(run) or {}
    words = _words(ready, run, config, best)
    if words is None:
        return None
    limited = ready.plan.slot_memory_bytes is not None
    return " ".join(
        [
            *(f"{name}={value}" for name, value in _variables(ready, best).items()),
            *conditions(ready.machine, ready.plan.slots_per_trial, memory_is_limited=limited),
            shlex.join(words),
        ]
    )


def write_accelerate_file(ready: Prepared, run: Run, folder: Path) -> None:
    """Write the user's own file of accelerate, if there is one, with the best configuration."""
    accelerate = _accelerate(as_shown(ready, run).program, ready.plan.slots_per_trial)
    if accelerate is None or run.best is None:
        return
    copy = accelerate.copy(folder / summary.BEST_CONFIG_FILE)
    if copy is not None:
        write_atomically(folder / accelerate_launch.CONFIG_FILE, copy)


def _words(ready: Prepared, run: Run, config: Path, best: Mapping[str, Any]) -> list[str] | None:
    program, slots = ready.program, ready.plan.slots_per_trial
    entrypoint = ready.experiment.entrypoint
    accelerate = _accelerate(program, slots)
    takes_file = program.config_path is not None or accelerate is not None
    needs_task = "determined" in (
        entrypoint if isinstance(entrypoint, str) else " ".join(map(str, entrypoint))
    )
    if not takes_file or needs_task or slots > ready.machine.num_slots or run.best is None:
        return None
    found = program.for_config(
        str(config.resolve()), best, run.best.script_args, ready.experiment.arg_mappings
    )
    if accelerate is not None:
        again = replace(accelerate, program=(accelerate.program[0], *found.args))
        return again.command(config, best)
    if runs_own_command(program, slots):
        command = program.started_by
        if not _ends_with(command, program.args):
            return None
        return [*command[: len(command) - len(program.args)], *found.args]
    return [*_launcher(ready, best), *_script(program), *found.args]


def _launcher(ready: Prepared, best: Mapping[str, Any]) -> list[str]:
    program, slots = ready.program, str(ready.plan.slots_per_trial)
    own = program.interpreter  # in whose environment the launchers of the PATH are not
    if not program.launch.passes_local_rank:
        launcher = [own, "-m", "torch.distributed.run"] if own else ["torchrun"]
        return [*launcher, "--standalone", f"--nproc-per-node={slots}"]
    launcher = [own, "-m", "deepspeed.launcher.runner"] if own else ["deepspeed"]
    launcher += ["--num_gpus", slots]
    if program.launch.binds_cores:
        launcher += binding_options(ready.machine, program, best, ready.plan.slots_per_trial)
    return launcher


def _script(program: Entrypoint) -> list[str]:
    """Return the words of a launcher that name the script or module."""
    if program.python_options:
        no_python = "--no_python" if program.launch.passes_local_rank else "--no-python"
        script = ["-m", program.module] if program.module else [program.script]
        return [no_python, program.interpreter or "python3", *program.python_options, *script]
    return ["--module", program.module] if program.module else [program.script]


def _accelerate(program: Entrypoint, slots: int) -> AccelerateLaunch | None:
    """Return the user's own `accelerate launch`; None if another tells the script its file."""
    if program.config_path is not None or not accelerate_env.uses_deepspeed(program.env):
        return None
    if program.needs_command or not runs_own_command(program, slots):
        return None
    return AccelerateLaunch.of(program.started_by, len(program.args), Path(program.started_in))


def runs_own_command(program: Entrypoint, slots: int) -> bool:
    """Return whether training with other arguments is the user's own command with these.

    It is where nothing else starts its ranks, and where it ends with the arguments of its script
    and has a launcher that starts as many ranks as a trial has.
    """
    command = program.started_by
    if program.needs_command or not command:
        return bool(program.needs_command)
    has_variables = command[0] == "env"  # which may be credentials
    if has_variables or program.slots != slots or program.launch.binds_cores:
        return False
    if not _ends_with(command, program.args):
        return False
    if not Path(command[0]).name.startswith("python"):
        return True
    started = entrypoints.of_interpreter(command[1:])
    return (started.script, started.module) != (program.script, program.module)


def _ends_with(command: tuple[str, ...], args: tuple[str, ...]) -> bool:
    return command[max(len(command) - len(args), 0) :] == args


def conditions(machine: Machine, slots: int, *, memory_is_limited: bool) -> list[str]:
    """Return the words in front of a command that give it a trial's conditions.

    On processor cores: one thread for each rank, no other cores than those of its slots, and with a
    limit on memory the settings of malloc that make the limit hold.
    """
    if not machine.is_cpu:
        return []
    words = ["OMP_NUM_THREADS=1"]
    if memory_is_limited:
        words += [f"{name}={value}" for name, value in MALLOC_VARIABLES.items()]
    if slots < machine.num_slots and shutil.which("taskset"):
        words += ["taskset", "--cpu-list", ",".join(machine.devices[:slots])]
    return words


def _variables(ready: Prepared, best: Mapping[str, Any]) -> dict[str, str]:
    """Return the trials' environment where it is not the shell's, as words of a shell.

    Credentials are named and not written down; the shell refuses to go on without them.
    """
    machine, program, slots = ready.machine, ready.program, ready.plan.slots_per_trial
    if program.needs_command:  # which sets what else it needs
        unset = machine.expandable_segments and not allocator_is_set(os.environ)
        return dict(ALLOCATOR_SETTINGS) if unset else {}
    own = {} if runs_own_command(program, slots) else program.env
    words = {}
    for name, value in {**ready.experiment.env, **own}.items():
        shown = f"{name}={value}"
        origin = "your command" if name in own else "environment_variables"
        is_open = without_secrets(shown) == shown
        words[name] = shlex.quote(value) if is_open else f'"${{{name}:?as in {origin}}}"'
    if not machine.is_cpu:  # on a CPU see `conditions`
        given = {**os.environ, **ready.experiment.env, **program.env}
        words |= settings_of_ranks(machine, program, best, slots, given)
    return words
