"""The words of the user's command: what can be started, and what dsat cannot see."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsat.command import entrypoint as entrypoints
from dsat.command.entrypoint import Entrypoint
from dsat.errors import UserInputError

CONFIG_SUFFIXES = (".json", ".hjson")
# Options of Python that ignore PYTHONPATH or `sitecustomize`, alone or joined with others (-sE).
_HIDES_THE_HOOK = re.compile("-[^-WXcm]*[IES]")
# Metadata of an installed DeepSpeed in an environment, even if installed from a source folder.
_DEEPSPEED = "lib*/python*/*-packages/deepspeed[-.]*"
_PYTHON = re.compile(r"python[\d.]*")
_TOO_OLD = re.compile(r"python3\.\d")  # for the hook, as the first run will show
_EXPORT = re.compile(r"(--export|SLURM_EXPORT_ENV)[= ](\S+)")  # of srun
_OF_SHELLS = frozenset(
    "! { ( case cd eval exec export for if pushd set source trap ulimit until while".split()
)
_IN_JOB = "Put `dsat tune` before the training command in the job script."
_IN_CONTAINER = "Run dsat inside the container."
# Programs that start a training out of dsat's reach.
_ELSEWHERE = {
    **dict.fromkeys(("sbatch", "qsub", "bsub"), _IN_JOB),
    **dict.fromkeys(("docker", "podman", "kubectl"), _IN_CONTAINER),
    "ssh": "Run dsat on that machine.",
    "sudo": "Run dsat itself with sudo.",
}


def check_options(program: Entrypoint) -> None:
    """Raise UserInputError if options of the interpreter hide dsat from the script."""
    for word in program.python_options:
        if _HIDES_THE_HOOK.match(word):
            raise UserInputError(
                f"{word} hides dsat from the script's Python, so trials cannot be measured",
                where="entrypoint",
                hint="Remove this option.",
            )


def check_form(words: Sequence[str]) -> None:
    """Raise UserInputError for a whole command in one word, and for one that needs a shell."""
    word = words[0]
    is_line = len(words) == 1 and len(word.split()) > 1 and not os.path.exists(word)
    is_syntax = is_line and entrypoints.SHELL_SYNTAX.search(word) is not None
    if is_syntax or word.partition(" ")[0] in _OF_SHELLS:
        raise UserInputError(
            "needs a shell",
            where=word,
            hint="Run the whole line in a shell: dsat tune bash -c '...'.",
        )
    if is_line:
        raise UserInputError(
            "there is no such command",
            where=word,
            hint="Remove the quotes around the whole command.",
        )


def make_startable(words: Sequence[str], *, is_known: bool) -> tuple[str, ...]:
    """Return a command in a form that can be started; a `.py` file runs with dsat's Python.

    `is_known` says whether dsat recognised the command's form.

    Raises:
        UserInputError: the program does not exist, or starts the training out of dsat's reach.
    """
    command = list(words)
    env = entrypoints.take_assignments(command)
    program = command[0]
    _check_reach(command, {**os.environ, **env})
    if is_known and command[0].endswith(".py"):
        command = [sys.executable, *command]
    elif is_known and command[0].startswith("python"):  # use the Python of dsat's environment
        command = [sys.executable, *command[1:]]
    elif shutil.which(command[0]) is None:
        command = [str(Path(sys.executable).parent / command[0]), *command[1:]]
    if shutil.which(command[0]) is None:
        problem, hint = "there is no such command", "Give the command as you type it in a shell."
        if os.path.isfile(program) and not program.endswith(CONFIG_SUFFIXES):
            problem, hint = "is not executable", f"Run chmod +x {shlex.quote(program)}."
        elif program.endswith(CONFIG_SUFFIXES):
            problem = "is a configuration, not a command"
            hint = f"Put the command before it: deepspeed train.py --deepspeed_config {program}"
        raise UserInputError(problem, where=program, hint=hint)
    if env:  # as a shell sets them
        command = ["env", *(f"{name}={value}" for name, value in env.items()), *command]
    return tuple(command)


def other_python(words: Sequence[str]) -> str | None:
    """Return the path of the Python that starts a command's script; empty if it is dsat's own.

    The command, PATH or the script's `#!` line names the Python. If its environment has no
    DeepSpeed, it is ignored: PATH names such a Python if dsat's environment is not active. None if
    only a run shows the Python: the `#!` line has another program, or the Python is too old.
    """
    command = list(words)
    path = entrypoints.take_assignments(command).get("PATH")
    program = next(iter(command), "")
    is_script = os.sep in program and program.endswith(".py") and bool(shutil.which(program))
    if is_script:
        [program, *_] = _interpreter_of(Path(program)) or [sys.executable]
    if not _PYTHON.fullmatch(Path(program).name):
        return None if is_script else ""
    python = os.path.abspath(shutil.which(program, path=path) or sys.executable)
    is_own = os.path.samefile(Path(python).parent, Path(sys.executable).parent)
    package = next(Path(python).parents[1].glob(_DEEPSPEED), None)
    if is_own or package is None:
        return ""
    return None if _TOO_OLD.fullmatch(package.parents[1].name) else python


def _interpreter_of(script: Path) -> list[str]:
    """Return the words of a script's `#!` line, without `env` and its options."""
    with open(script, "rb") as file:
        line = file.readline().decode(errors="replace")
    words = line.removeprefix("#!").split() if line.startswith("#!") else []
    if words and Path(words[0]).name == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return words


def _check_reach(command: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise UserInputError if a command starts the training where dsat cannot see it."""
    name = Path(command[0]).name
    if hint := _ELSEWHERE.get(name, ""):
        raise UserInputError(
            "starts the training where dsat can neither measure it nor protect your files",
            where=name,
            hint=hint,
        )
    if name == "srun" and (setting := _clears(command[1:], env)):
        raise UserInputError(
            "hides dsat's variables, so dsat can neither measure it nor protect your files",
            where=setting,
            hint="Write --export=ALL,NAME=VALUE with your own variables.",
        )


def _clears(words: Sequence[str], env: Mapping[str, str]) -> str:
    """Return the setting of srun that hides variables from the ranks; empty if there is none."""
    options = itertools.takewhile(
        lambda word: word.startswith("-") or shutil.which(word) is None, words
    )
    variable = f"SLURM_EXPORT_ENV={env.get('SLURM_EXPORT_ENV') or 'ALL'}"
    # The option overrides the variable.
    *_, (setting, names) = _EXPORT.findall(" ".join([variable, *options]))
    return "" if "ALL" in names.upper().split(",") else f"{setting}={names}"
