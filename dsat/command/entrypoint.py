"""The user's entrypoint: the Python program of the ranks, and the options of its launcher.

dsat starts the ranks itself. From a launcher's command it reads the program, its arguments, and the
choice of machines, devices and cores.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dsat.command import accelerate_env, placement, script_args, script_source
from dsat.command import switches as script_switches
from dsat.command.placement import Launch
from dsat.errors import UserInputError
from dsat.values.codec import Recorded

_WHERE = "entrypoint"
_FORMS = (
    "Use one of: python3 -m determined.launch.deepspeed [--trial module:Class | python3 script.py "
    "...], python3 -m determined.launch.torch_distributed ..., deepspeed script.py ..., torchrun "
    "script.py ..., python3 script.py ..."
)
SHELL_SYNTAX = re.compile(r"&&|\|\||[|;<>`]|\$\(|\$\{?\w")
_QUOTED = re.compile(r"\\.|'[^']*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")

DEEPSPEED, TORCHRUN = "deepspeed", "torchrun"
_PYTHON = re.compile(r"python(\d+(?:\.\d+)?)?")
_JOINED_OPTIONS = re.compile(r"(-[bBdOPqsSuvx]+)([cm])")  # of python


class UnknownStart(UserInputError):
    """Error for an entrypoint whose program is unknown until the command runs."""


@dataclass(frozen=True)
class Entrypoint(Recorded):
    """A Python program, and how a launcher would start it.

    Attributes:
        script: path relative to the model folder; empty with `module` or `trial_class`.
        module: name after `python3 -m`.
        trial_class: `module:Class` of a Determined Trial.
        env: variables that are set in front of the command, by the command, or by its launcher.
        launcher: `DEEPSPEED` or `TORCHRUN`; empty without a launcher, or if dsat ran the command.
        slots: number of ranks that the command names or started; None if it names none.
        takes_hf_flags: whether the program accepts every flag of transformers' TrainingArguments.
        launch: the launcher's choice of machines, devices and cores.
        interpreter: Python of the ranks; empty for the Python that runs dsat.
        started_by: the user's command; empty if dsat did not run it.
        started_in: the command's working folder; empty if dsat did not run it.
        needs_command: why each trial must run the user's whole command; empty if dsat can start the
            ranks directly.
        config_word: argument that names the DeepSpeed configuration, if no known flag does, such as
            `ds.json` or `--config=ds.json`; empty if there is none.
    """

    script: str = ""
    module: str = ""
    trial_class: str = ""
    args: tuple[str, ...] = ()
    python_options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    launcher: str = ""
    slots: int | None = None
    takes_hf_flags: bool = False
    launch: Launch = field(default_factory=Launch)
    interpreter: str = ""
    started_by: tuple[str, ...] = ()
    started_in: str = ""
    needs_command: str = ""
    config_word: str = ""

    @property
    def config_path(self) -> str | None:
        """Path of the DeepSpeed configuration in the arguments; None if they name no path."""
        if self.config_word:
            return script_args.path_in(self.config_word)
        flag = None if self.launch.config_is_word else script_args.config_flag(self.args)
        return None if flag is None else script_args.value_of(self.args, flag)

    def use_config(
        self,
        path: str,
        config: Mapping[str, Any],
        switches: Mapping[str, Any],
        arg_mappings: Mapping[str, str],
        *,
        flags: Mapping[str, str] = MappingProxyType({}),
        flag_leads: bool = False,
    ) -> Entrypoint:
        """Return this program with a trial's configuration (in the file `path`) and switches.

        `flags` maps keys of settings to further flags that take their values. Missing flags are
        added at the end, or with `flag_leads` in front.
        """

        def adapt(own: Sequence[str]) -> tuple[str, ...]:
            if not self.launch.config_is_word:
                own = script_args.replace_config(own, path, self.config_word)
            add = self.takes_hf_flags
            args = script_args.adapt_to_trial(own, config, switches, arg_mappings, add=add)
            for key, flag in flags.items():
                if flag_leads and script_args.value_of(args, flag) is None:
                    args = (flag, str(config[key]), *args)
            return script_args.rewrite(args, config, flags, add=True)

        env = {**self.env, **script_switches.variables(switches)}
        binds = self.launch.binds_cores or switches.get(script_switches.BIND_CORES) is True
        return replace(
            self,
            args=adapt(self.args),
            env=accelerate_env.use_config(env, path, config),
            launch=replace(
                self.launch, binds_cores=binds, other_args=tuple(map(adapt, self.launch.other_args))
            ),
        )

    def command(self) -> list[str]:
        """Return the program as a plain command, without a launcher."""
        if self.trial_class:
            program = ["-m", "determined.exec.harness", self.trial_class]
        elif self.module:
            program = ["-m", self.module]
        else:
            program = [self.script]
        return [self.interpreter or sys.executable, *self.python_options, *program, *self.args]


def parse(entrypoint: str | Sequence[str], model_dir: Path, python: str = "") -> Entrypoint:
    """Parse an entrypoint.

    Args:
        entrypoint: command line or list of arguments, as in the experiment configuration.
        python: the Python that the entrypoint starts; empty for the Python that runs dsat.

    Raises:
        UserInputError: the entrypoint is empty, needs a shell, or has no script or a missing one.
        UnknownStart: its form is unknown.
    """
    words = drop_autotuning(_words(entrypoint))
    env = take_assignments(words)
    if not words or not words[0].strip():
        raise UserInputError("names no program", where=_WHERE, hint=_FORMS)
    if python and _PYTHON.fullmatch(Path(words[0]).name):
        words[0] = "python3"
    found = replace(_command(words), interpreter=python)
    if found.launch.hosts:
        env |= placement.read_exported_variables(model_dir)
    if found.script and not (model_dir / found.script).is_file():
        raise UserInputError(
            f"there is no file {found.script!r} in the folder {str(model_dir)!r}",
            where=_WHERE,
            hint="Go to the folder where it is, or give its path from here.",
        )
    return replace(found, env=env, takes_hf_flags=parses_hf_arguments(found, model_dir))


def drop_autotuning(words: Sequence[str]) -> list[str]:
    """Return a command without `--autotuning` of DeepSpeed's launcher, which dsat replaces."""
    names = [Path(word).name for word in words]
    script = next((at for at, name in enumerate(names) if name.endswith(".py")), len(words))
    options = list(words[:script])
    if DEEPSPEED in names[:script]:
        for at in reversed(range(script)):
            if options[at] == "--autotuning":
                del options[at : at + 2]
            elif options[at].startswith("--autotuning="):
                del options[at]
    return [*options, *words[script:]]


def take_assignments(words: list[str]) -> dict[str, str]:
    """Remove the assignments in front of a command from `words`, and return the variables."""
    env = {}
    while words and _ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    return env


def parses_hf_arguments(program: Entrypoint, model_dir: Path) -> bool:
    """Return whether the script's source parses its arguments into TrainingArguments or a subclass.

    False if the command has no such flags, because the script may read TrainingArguments from a
    file, and refuse flags.
    """
    args = program.args
    has_flags = script_args.looks_like_hf(args) or script_args.value_of(args, "--output_dir")
    if not program.script or not has_flags:
        return False
    return script_source.parses_hf_arguments(_source(model_dir / program.script))


def starts_its_ranks(command: Sequence[str], model_dir: Path) -> bool:
    """Return whether a command is a script that starts its ranks itself."""
    words = list(command)
    take_assignments(words)
    if _PYTHON.fullmatch(Path(words[0]).name):
        _, words = split_interpreter(words[1:])
    if not words[0].endswith(".py"):
        return False
    script = model_dir / words[0]
    return script_source.starts_ranks(_source(script), script.name)


def parse_python_words(words: Sequence[str]) -> Entrypoint:
    """Parse the words after `python` into a program and options of the interpreter."""
    options, rest = split_interpreter(words)
    # Trials are always unbuffered (PYTHONUNBUFFERED), so -u changes nothing.
    return replace(_program(rest), python_options=tuple(word for word in options if word != "-u"))


def split_interpreter(words: Sequence[str]) -> tuple[Sequence[str], list[str]]:
    """Split the words after `python` into the interpreter's options and the rest.

    `-um module` becomes `-u` and `-m module`.
    """
    end = 0
    while end < len(words) and words[end].startswith("-") and words[end] not in ("-c", "-m", "-"):
        if joined := _JOINED_OPTIONS.fullmatch(words[end]):
            return [*words[:end], joined[1]], [f"-{joined[2]}", *words[end + 1 :]]
        end += 2 if words[end] in ("-W", "-X", "--check-hash-based-pycs") else 1
    return words[:end], list(words[end:])


def _source(script: Path) -> str:
    return script.read_text(encoding="utf-8", errors="replace")


def _program(words: Sequence[str]) -> Entrypoint:
    if words[0] == "-m":
        return Entrypoint(module=words[1], args=tuple(words[2:]))
    return Entrypoint(script=words[0], args=tuple(words[1:]))


def _keep_expansions(quoted: re.Match[str]) -> str:
    """Return quoted text if a shell would expand it; empty for other quoted text."""
    text = quoted[0]
    return text if text[0] == '"' and ("$" in text or "`" in text) else ""


def _words(entrypoint: str | Sequence[str]) -> list[str]:
    if not isinstance(entrypoint, str):
        return [str(word) for word in entrypoint]
    if SHELL_SYNTAX.search(_QUOTED.sub(_keep_expansions, entrypoint)):
        raise UserInputError(
            f"{entrypoint!r} needs a shell, but dsat starts the ranks without one",
            where=_WHERE,
            hint="Move the shell's work into the script.",
        )
    try:
        return shlex.split(entrypoint)
    except ValueError as error:
        raise UserInputError(
            f"{entrypoint!r} cannot be split into words: {error}",
            where=_WHERE,
            hint="Correct the quotes.",
        ) from None


def _command(words: list[str]) -> Entrypoint:
    name = Path(words[0]).name
    if name == "deepspeed":
        return _deepspeed(words[1:])
    if name == "torchrun":
        return _torchrun(words[1:])
    if _PYTHON.fullmatch(name):
        if not _is_this_python(words[0]):
            raise UnknownStart(
                f"dsat runs in {sys.executable}, not in {words[0]}",
                where=_WHERE,
                hint="Run dsat with the latter, or write python3.",
            )
        return _python(words[1:])
    if name.endswith(".py"):
        return _program(words)
    raise UnknownStart(f"{words[0]!r} is not a launcher that dsat knows", where=_WHERE, hint=_FORMS)


def _is_this_python(word: str) -> bool:
    """Return whether a word denotes the Python that runs dsat, in the same environment."""
    if os.sep in word:
        found, here = shutil.which(word), os.path.dirname(sys.executable)
        if found is None or not os.path.samefile(os.path.dirname(found), here):
            return False
    major, minor = sys.version_info[:2]
    version = os.path.basename(word).removeprefix("python")
    return version in ("", f"{major}", f"{major}.{minor}")


def _python(words: list[str]) -> Entrypoint:
    _, rest = split_interpreter(words)
    if not rest or rest == ["-m"]:
        raise UserInputError("names no script", where=_WHERE, hint=_FORMS)
    if rest[0] in ("-c", "-"):
        raise UnknownStart("names no script", where=_WHERE, hint=_FORMS)
    module, args = (rest[1], rest[2:]) if rest[0] == "-m" else ("", [])
    if module in ("determined.launch.deepspeed", "determined.launch.torch_distributed"):
        return _determined(module, args)
    if module in ("torch.distributed.run", "torch.distributed.launch"):
        return _torchrun(args)
    if module in ("deepspeed", "deepspeed.launcher.runner"):
        return _deepspeed(args)
    if module.split(".")[0] in ("accelerate", "horovod", "mpi4py"):
        raise UnknownStart(f"{module} is not a launcher that dsat knows", where=_WHERE, hint=_FORMS)
    return parse_python_words(words)


def _determined(launcher: str, words: list[str]) -> Entrypoint:
    """Parse the words after a launcher of Determined (determined/launch, 0.37).

    The form is `[[TORCH OPTIONS] --] (--trial MODULE:CLASS | SCRIPT...)`. Only `torch_distributed`
    takes options of torch.
    """
    if importlib.util.find_spec("determined") is None:
        raise UserInputError(
            f"{launcher} is not installed",
            where=_WHERE,
            hint="Run pip install 'determined>=0.28,<0.38', or remove the launcher.",
        )
    is_torch = launcher.endswith("torch_distributed")
    if "--" in words and (is_torch or words[0] == "--"):
        words = words[words.index("--") + 1 :]
    if not words:
        raise UserInputError("names no script after the launcher", where=_WHERE, hint=_FORMS)
    flag, equals, name = words[0].partition("=")
    rest = [name, *words[1:]] if equals else words[1:]
    if flag != "--trial":
        found = _command(words)
    elif len(rest) == 1:
        found = Entrypoint(trial_class=rest[0])
    else:
        raise UserInputError("--trial takes exactly one module:Class", where=_WHERE, hint=_FORMS)
    return replace(found, launcher=TORCHRUN) if is_torch else found


def _deepspeed(words: list[str]) -> Entrypoint:
    options, found = _split_launcher(DEEPSPEED, words)
    slots, launch = placement.read_options(options)
    return replace(found, slots=slots, launch=launch)


def _torchrun(words: list[str]) -> Entrypoint:
    options, found = _split_launcher(TORCHRUN, words)
    slots, launch = placement.read_torchrun_options(options)
    return replace(found, slots=slots, launch=launch)


def _split_launcher(launcher: str, words: list[str]) -> tuple[dict[str, str], Entrypoint]:
    """Split the words after a launcher into its options and the program.

    Raises UnknownStart for options that are joined (`-t3`), abbreviated, or of another version.
    """
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        spelled = name if launcher == DEEPSPEED else f"{name[:2]}{name[2:].replace('_', '-')}"
        if spelled not in (*placement.SWITCHES[launcher], *placement.VALUED[launcher]):
            raise UnknownStart(
                f"{launcher} {word}: dsat does not know this option",
                where=_WHERE,
                hint="Write options in full, with a space before the value.",
            )
        if not equals and spelled in placement.VALUED[launcher] and rest:
            value = rest.pop(0)
        options[name] = value
    if not rest:
        raise UserInputError(f"names no script after {launcher}", where=_WHERE, hint=_FORMS)
    if options.keys() & {"--no_python", "--no-python"}:
        found = _command(rest)
    else:
        found = _program(["-m", *rest] if options.keys() & {"--module", "-m"} else rest)
    return options, replace(found, launcher=launcher)
