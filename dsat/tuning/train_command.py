"""Commands that train with the best configuration."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.command import accelerate_env, own_files, switches
from dsat.command import entrypoint as entrypoints
from dsat.command.entrypoint import Entrypoint
from dsat.command.own_files import Answer, Form, Rewriting
from dsat.command.switches import BIND_CORES
from dsat.engines.machines.machine import Machine
from dsat.engines.rank_settings import binding_options, make_command_settings, make_rank_settings
from dsat.engines.trial_folder import working_folder
from dsat.in_trial.memory_limit import MALLOC_VARIABLES
from dsat.run.run import Run, own_switches
from dsat.show import summary
from dsat.tuning.preparation import FAILED_BY_THEMSELVES, Prepared
from dsat.values.files import PRIVATE_FOLDER, write_atomically
from dsat.values.text import assignment, shell_line, shell_word
from dsat.values.trial import Trial


def make_line(ready: Prepared, run: Run, folder: Path) -> str:
    """Return a shell command with `cd` that trains with the best configuration.

    Empty if training needs the user's Python program, which registered a search or an engine.
    """
    command = make_command(ready, run, folder / summary.BEST_CONFIG_FILE)
    if command is not None:
        program = ready.after(run).program
        cwd = working_folder(ready.experiment, folder)
        if runs_own_command(program, ready.plan.slots_per_trial) and program.started_in:
            cwd = Path(program.started_in)
        return f"cd {shell_word(str(cwd.resolve()))} && {command}"
    if ready.line is None:
        return ""
    more = ["--run-full-experiment"]
    if run.stop_reason is None:  # interrupted: train, and do not search on
        more += [f"--max-trials={max(2, len(run.outcomes))}", "--finals=0"]
    words = [find_program("python3"), "-m", "dsat", *ready.line.resumed(folder, *more)]
    return f"cd {shell_word(str(Path.cwd()))} && {shell_line(words, folder)}"


def find_program(name: str) -> str:
    """Return a program's name, or its path in dsat's environment if PATH leads to another one."""
    here, found = Path(sys.executable).parent, shutil.which(name)
    if not (here / name).exists():
        return name
    leads_here = found is not None and os.path.samefile(Path(found).parent, here)
    return name if leads_here else str(here / name)


def make_command(ready: Prepared, run: Run, config: Path) -> str | None:
    """Return the command, to run in the model's folder, that trains with the best configuration.

    None without a best trial, or if only dsat can train it: a switch has no flag, the command takes
    no configuration, or training needs Determined or several hosts.
    """
    ready, best = ready.after(run), run.best
    slots, needs_task = ready.plan.slots_per_trial, "determined" in str(ready.experiment.entrypoint)
    if best is None or slots > ready.machine.num_slots or needs_task:
        return None
    found = None if _needs_dsat(ready, run, best) else _own_form(ready, run, best, config)
    if found is None:
        return None
    limited = ready.plan.slot_memory_bytes is not None
    return " ".join(
        [
            *_variables(ready, best, run.plan.config(best.overrides)),
            *reproduce_conditions(ready.machine, slots, memory_is_limited=limited),
            shell_line(found.words, config.parent),
        ]
    )


def write_own_files(ready: Prepared, run: Run, folder: Path) -> None:
    """Write copies of the user's configuration files that contain the best configuration."""
    if run.best is None:
        return
    config, copies = folder / summary.BEST_CONFIG_FILE, folder / own_files.COPIES_FOLDER
    found = _own_form(ready.after(run), run, run.best, config)
    for name, text in (found.copies if found else {}).items():
        copies.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        write_atomically(copies / name, text)


def _own_form(ready: Prepared, run: Run, best: Trial, path: Path) -> Rewriting | None:
    """Return the command with copies of the user's files; None if it takes no configuration."""
    program, config = ready.program, run.plan.config(best.overrides)
    words = _base_words(ready, best, config, path)
    if words is None:
        return None
    answer = Answer(
        path.resolve(),
        config,
        switches.fields(best.script_args),
        in_arguments=program.config_path is not None,
        by_accelerate=program.config_path is None and accelerate_env.uses_deepspeed(program.env),
        variables={**ready.experiment.env, **_own_command(program)[0]},
    )
    return own_files.rewrite_command(words, _started_in(program), answer)


def _base_words(
    ready: Prepared, best: Trial, config: Mapping[str, Any], path: Path
) -> list[str] | None:
    program, mappings = ready.program, ready.experiment.arg_mappings
    tuned = program.use_config(
        str(path.resolve()),
        config,
        best.script_args,
        mappings,
        flags=best.flags,
        flag_leads=best.flag_leads,
    )
    args, program = tuned.args, replace(program, launch=tuned.launch)
    if not runs_own_command(program, ready.plan.slots_per_trial):
        return [*_launcher(ready, program, config), *_script(program), *args]
    _, command = _own_command(program)
    if not _ends_with(command, program.args):
        return command if _form_of(program) else None
    command = command[: len(command) - len(program.args)]
    if program.launch.binds_cores and _is_deepspeed(command):
        options = binding_options(ready.machine, program, config, ready.plan.slots_per_trial)
        command = _bind_cores(command, options)
    return [*command, *args]


def _bind_cores(command: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return a command of DeepSpeed's launcher with other options that bind ranks to cores."""
    launcher, *words = command
    if "--bind_core_list" in words:
        at = words.index("--bind_core_list")
        del words[at : at + 2]
    own = [
        word for word in words if not word.startswith(("--bind_cores_to_rank", "--bind_core_list="))
    ]
    return [launcher, *options, *own]


def _needs_dsat(ready: Prepared, run: Run, best: Trial) -> bool:
    """Return whether a change of the best trial needs more than a flag, a file or a variable."""
    own, program = own_switches(run), ready.program
    if switches.OF_CODE.keys() & set(run.outcomes[best.id].warnings):
        return True
    found = {} if run.profile is None else run.profile.switches
    file = _form_of(program)
    for name, value in best.script_args.items():
        if value == own.get(name) or name in ready.experiment.arg_mappings:
            continue
        flag = switches.flag_of(name, program.args, takes_hf_flags=program.takes_hf_flags)
        field = switches.field_of(name)
        in_file = file is not None and field is not None and file.key_of(field) is not None
        elsewhere = name == BIND_CORES or name.startswith(switches.VARIABLE)
        has_opposite = file is not None and name in file.opposites
        if switches.is_of_code(name, found) and not has_opposite:
            return True
        if flag is None and not in_file and not elsewhere:
            return True
    return False


def _launcher(ready: Prepared, program: Entrypoint, best: Mapping[str, Any]) -> list[str]:
    slots = str(ready.plan.slots_per_trial)
    own = program.interpreter  # the launchers of its environment are not on PATH
    if not program.launch.passes_local_rank:
        launcher = [own, "-m", "torch.distributed.run"] if own else [find_program("torchrun")]
        return [*launcher, "--standalone", f"--nproc-per-node={slots}"]
    launcher = [own, "-m", "deepspeed.launcher.runner"] if own else [find_program("deepspeed")]
    chosen, without = program.launch.devices, program.launch.not_devices
    if without:
        there = range(ready.machine.num_slots + len(without))
        chosen = tuple(position for position in there if position not in without)
    names = tuple(map(str, chosen))
    given = {**os.environ, **program.env}
    numbered = all(name.isdecimal() for name in ready.machine.devices)  # no UUIDs
    if numbered and any(given.get(name) for name in ready.machine.visible_devices):
        names = names or ready.machine.devices  # with --num_gpus, DeepSpeed ignores the variable
    if names:
        devices = ",".join(names[: ready.plan.slots_per_trial])
        launcher += ["--include", f"localhost:{devices}"]
    else:
        launcher += ["--num_gpus", slots]
    if program.launch.binds_cores:
        launcher += binding_options(ready.machine, program, best, ready.plan.slots_per_trial)
    return launcher


def _script(program: Entrypoint) -> list[str]:
    """Return a script or module as words of a launcher's command."""
    if program.python_options:
        no_python = "--no_python" if program.launch.passes_local_rank else "--no-python"
        script = ["-m", program.module] if program.module else [program.script]
        return [no_python, program.interpreter or "python3", *program.python_options, *script]
    return ["--module", program.module] if program.module else [program.script]


def _own_command(program: Entrypoint) -> tuple[dict[str, str], list[str]]:
    """Return the variables in front of the user's command, and its other words."""
    command = list(program.started_by)
    words = command[1:] if command[:1] == ["env"] else []
    variables = entrypoints.take_assignments(words)
    return (variables, words) if variables else ({}, command)


def _form_of(program: Entrypoint) -> Form | None:
    """Return the kind of the user's file that sets batch sizes; None without one."""
    return own_files.form_of_training(_own_command(program)[1], _started_in(program))


def runs_own_command(program: Entrypoint, slots: int) -> bool:
    """Return whether the printed command is the user's own, with other arguments.

    Otherwise, the printed command is a launcher with the script. The user's command is printed if
    each trial runs it again. It is also printed if it starts all ranks, takes arguments at its end
    or from a file, and is more than `python` with the script.
    """
    _, command = _own_command(program)
    if program.needs_command not in ("", FAILED_BY_THEMSELVES):
        return True
    if command and Path(command[0]).name.startswith("python"):
        started = entrypoints.parse_python_words(command[1:])
        if (started.script, started.module) == (program.script, program.module):
            return False  # without a launcher, DeepSpeed would need mpi4py
    if program.needs_command or not command:
        return bool(program.needs_command)
    if program.slots != slots:
        return False
    ends_with_args = _ends_with(command, program.args)
    if program.launch.binds_cores:
        return ends_with_args and _is_deepspeed(command)
    return ends_with_args or bool(_form_of(program))


def _started_in(program: Entrypoint) -> Path:
    return Path(program.started_in or Path.cwd())


def _is_deepspeed(command: Sequence[str]) -> bool:
    return Path(command[0]).name == entrypoints.DEEPSPEED


def _ends_with(command: Sequence[str], args: tuple[str, ...]) -> bool:
    return tuple(command[max(len(command) - len(args), 0) :]) == args


def reproduce_conditions(machine: Machine, slots: int, *, memory_is_limited: bool) -> list[str]:
    """Return words before a command that reproduce the conditions of trials on a CPU.

    These set one thread per rank, the same cores, and malloc's settings under a memory limit.
    """
    if not machine.is_cpu:
        return []
    words = ["OMP_NUM_THREADS=1"]
    if memory_is_limited:
        words += [f"{name}={value}" for name, value in MALLOC_VARIABLES.items()]
    if slots < machine.num_slots and not machine.has_quota and shutil.which("taskset"):
        words += ["taskset", "--cpu-list", ",".join(machine.devices[:slots])]
    return words


def _variables(ready: Prepared, best: Trial, config: Mapping[str, Any]) -> list[str]:
    """Return shell assignments of variables that trials have and this shell may lack."""
    machine, program, slots = ready.machine, ready.program, ready.plan.slots_per_trial
    given = {**os.environ, **ready.experiment.env, **program.env}
    own = _own_command(program)[0] if runs_own_command(program, slots) else program.env
    parallelism = accelerate_env.make_parallelism_variables(given, config, slots)
    found = {**ready.experiment.env, **own, **parallelism}
    if not machine.is_cpu and program.needs_command:  # on a CPU see `reproduce_conditions`
        found |= make_command_settings(machine, given)
    elif not machine.is_cpu:
        found |= make_rank_settings(machine, program, config, slots, given)
    found |= switches.variables(best.script_args)
    return [
        assignment(name, value, "your command" if name in own else "environment_variables")
        for name, value in found.items()
    ]
