"""The user's entrypoint, taken apart: which Python program the ranks run, and how.

The local engine starts the ranks itself, so of a launcher's command only the program, its arguments
and the number of slots matter.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsat.errors import UserInputError
from dsat.inputs import accelerate_env, hostfiles
from dsat.inputs import script_args as arguments

_WHERE = "entrypoint"
_FORMS = (
    "Use one of: python3 -m determined.launch.deepspeed [--trial module:Class | python3 script.py "
    "...], python3 -m determined.launch.torch_distributed ..., deepspeed script.py ..., torchrun "
    "script.py ..., python3 script.py ..."
)
_SHELL = re.compile(r"&&|\|\||[|;<>`]|\$\(|\$\{?\w")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")

# Options without a value, of the launchers that are known; every other option takes one.
_DEEPSPEED_SWITCHES = frozenset(
    "--module --no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --elastic_training "
    "--bind_cores_to_rank --save_pid -q --quiet".split()
)
_TORCHRUN_SWITCHES = frozenset(
    "--standalone -m --module --no-python --no_python --run-path --run_path --virtual-local-rank "
    "--virtual_local_rank --use-env --use_env".split()
)


_MOST_CORES = 2**16  # that a list of cores may reach


class UnknownStart(UserInputError):
    """The command does not say by itself which program the ranks run; running it does."""


_HF_PARSERS = ("HfArgumentParser", "TrlParser")
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_STARTS_RANKS = re.compile(
    r"\b(?:mp|multiprocessing)\.spawn\(|^\s*spawn\(|\bstart_processes\(|\b(?:notebook|debug)_launcher\(",
    re.MULTILINE,
)
_READS_ITS_RANK = re.compile(
    r"""(?:environ\.get|getenv)\(\s*["'](?:LOCAL_)?RANK|["'](?:LOCAL_)?RANK["']\s+in\s"""
    r"""|environ\[["'](?:LOCAL_)?RANK["']\](?!\s*=[^=])"""
)


@dataclass(frozen=True)
class Entrypoint:
    """A Python program and how a launcher would start it.

    Attributes:
        script: a path, relative to the model folder; empty if `module` or `trial_class` is given.
        module: as after `python3 -m`.
        trial_class: `module:Class` of a Determined Trial.
        args: the program's own arguments.
        python_options: options of the interpreter itself.
        env: assignments in front of the command.
        passes_local_rank: whether the launcher adds `--local_rank=N` to the arguments.
        binds_cores: whether the launcher binds each rank to its share of the processor cores.
        core_list: the cores that it shares out; all of the machine's where none are given.
        one_thread: whether the launcher sets OMP_NUM_THREADS to 1 for several ranks.
        slots: the number of ranks that the command itself asks for, if any.
        takes_all_slots: whether the launcher starts a rank on every device of the machine.
        takes_hf_flags: whether it surely knows every flag of transformers' TrainingArguments.
        devices, not_devices: positions of the machine's devices that the launcher is told to use,
            or not to use; all where neither is given.
        hosts: names of the machines that a hostfile gives the command, with the positions of the
            devices that it may use there, all where none are given; none where it gives one.
        ssh_port: of these machines, if the command names one.
        interpreter: another one than that which runs dsat, if its ranks need another.
        lacks_wrapt: whether a package is missing there that ranks need.
        started_by: the user's command; empty for an entrypoint.
        started_in: the folder that it was run in; empty if it was not run.
        needs_command: why its ranks cannot be started by themselves, so that each trial runs the
            user's command again; empty if they can be.
    """

    script: str = ""
    module: str = ""
    trial_class: str = ""
    args: tuple[str, ...] = ()
    python_options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    passes_local_rank: bool = False
    one_thread: bool = False
    binds_cores: bool = False
    core_list: tuple[int, ...] = ()
    slots: int | None = None
    takes_all_slots: bool = False
    takes_hf_flags: bool = False
    devices: tuple[int, ...] = ()
    not_devices: tuple[int, ...] = ()
    hosts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    ssh_port: int | None = None
    interpreter: str = ""
    lacks_wrapt: bool = False
    started_by: tuple[str, ...] = ()
    started_in: str = ""
    needs_command: str = ""

    @property
    def config_path(self) -> str | None:
        """The DeepSpeed configuration that the arguments name, if any."""
        position = self._config_position()
        if position is None:
            return None
        return self.args[position].partition("=")[2] or self.args[position]

    def for_config(
        self,
        path: str,
        config: Mapping[str, Any],
        script_args: Mapping[str, Any],
        arg_mappings: Mapping[str, str],
    ) -> Entrypoint:
        """The same with arguments that name a configuration and agree with it.

        Args:
            path: of the configuration.
            config: what is in it.
            script_args: values of the script's own switches.
            arg_mappings: which of the script's flags repeats which setting.
        """
        found = self.with_config_path(path)
        found = replace(found, env=accelerate_env.for_config(found.env, path, config))
        args = arguments.for_trial(
            found.args, config, script_args, arg_mappings, add=self.takes_hf_flags
        )
        return replace(found, args=args)

    def with_config_path(self, path: str) -> Entrypoint:
        """The same with another DeepSpeed configuration, if the arguments name one."""
        position = self._config_position()
        if position is None:
            return self
        args = list(self.args)
        flag, equals, _ = args[position].partition("=")
        args[position] = f"{flag}={path}" if equals else path
        return replace(self, args=tuple(args))

    def _config_position(self) -> int | None:
        position = self._value_position("--deepspeed_config")
        if position is not None:
            return position
        # `--deepspeed` is a switch in plain DeepSpeed scripts and takes a file in Hugging Face's.
        position = self._value_position("--deepspeed")
        is_file = position is not None and self.args[position].endswith(".json")
        return position if is_file else None

    def _value_position(self, option: str) -> int | None:
        """Return the index of the argument with an option's value; None if there is none."""
        for index, arg in enumerate(self.args):
            flag, equals, value = arg.partition("=")
            if flag != option:
                continue
            if equals and value:
                return index
            following = self.args[index + 1 : index + 2]
            if not equals and following and not following[0].startswith("-"):
                return index + 1
        return None

    def command(self) -> list[str]:
        """The program as a plain command, without a launcher."""
        if self.trial_class:
            program = ["-m", "determined.exec.harness", self.trial_class]
        elif self.module:
            program = ["-m", self.module]
        else:
            program = [self.script]
        return [self.interpreter or sys.executable, *self.python_options, *program, *self.args]


def parse(entrypoint: str | Sequence[str], model_dir: Path) -> Entrypoint:
    """Takes an entrypoint apart.

    Args:
        entrypoint: as in the experiment configuration: a command line or a list of arguments.
        model_dir: where its script is.

    Raises:
        UserInputError: it is empty, needs a shell, or is of a form that is not known.
    """
    words = _words(entrypoint)
    env = take_assignments(words)
    if not words or not words[0].strip():
        raise UserInputError("is empty", where=_WHERE, hint=_FORMS)
    found = replace(_command(words), env=env)
    if found.script and not (model_dir / found.script).is_file():
        raise UserInputError(
            f"there is no file {found.script!r} in {model_dir}",
            where=_WHERE,
            hint="Give the script's path relative to the model folder.",
        )
    return replace(found, takes_hf_flags=parses_hf_arguments(found, model_dir))


def take_assignments(words: list[str]) -> dict[str, str]:
    """The variables that are set in front of a command, which are taken from its words."""
    env = {}
    while words and _ASSIGNMENT.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    return env


def parses_hf_arguments(program: Entrypoint, model_dir: Path) -> bool:
    """Return whether the script makes a parser of TrainingArguments or a subclass.

    Another parser would refuse a flag that the user did not give.
    """
    if not program.script:
        return False
    source = (model_dir / program.script).read_text(encoding="utf-8", errors="replace")
    return any(parser in source for parser in _HF_PARSERS)


def starts_its_ranks(command: Sequence[str], model_dir: Path) -> bool:
    """Return whether a command is a script that starts its ranks' processes itself.

    One that asks for its rank may also be run by a launcher, and then starts none.

    Args:
        command: that `parse` understands.
        model_dir: where its script is.
    """
    words = list(command)
    take_assignments(words)
    if _PYTHON.fullmatch(Path(words[0]).name):
        _, words = _interpreter_options(words[1:])
    if not words[0].endswith(".py"):
        return False
    source = (model_dir / words[0]).read_text(encoding="utf-8", errors="replace")
    return bool(_STARTS_RANKS.search(source)) and not _READS_ITS_RANK.search(source)


def _words(entrypoint: str | Sequence[str]) -> list[str]:
    if isinstance(entrypoint, str):
        if _SHELL.search(entrypoint):
            raise UserInputError(
                f"{entrypoint!r} needs a shell, and dsat starts the ranks itself",
                where=_WHERE,
                hint="Put what the shell does into the script. " + _FORMS,
            )
        try:
            return shlex.split(entrypoint)
        except ValueError as error:
            raise UserInputError(f"{entrypoint!r}: {error}", where=_WHERE) from None
    words: list[str] = []
    for word in entrypoint:
        if not isinstance(word, (str, int, float)):
            raise UserInputError(f"{word!r} is not an argument", where=_WHERE)
        words.append(str(word))  # an empty one is an argument too
    return words


def _command(words: list[str]) -> Entrypoint:
    name = Path(words[0]).name
    if name == "deepspeed":
        return _deepspeed(words[1:])
    if name == "torchrun":
        return _torchrun(words[1:])
    if _PYTHON.fullmatch(name):
        _check_interpreter(words[0])
        return _python(words[1:])
    if name.endswith(".py"):
        return Entrypoint(script=words[0], args=tuple(words[1:]))
    raise UnknownStart(f"{words[0]!r} is not a launcher that dsat knows", where=_WHERE, hint=_FORMS)


def _check_interpreter(word: str) -> None:
    """A folder names an environment, which is more than the interpreter that it links to."""
    here = sys.executable
    if os.sep in word:
        found = shutil.which(word)
        other = found is None or not os.path.samefile(os.path.dirname(found), os.path.dirname(here))
    else:
        other = False
    version = re.search(r"\d[\d.]*$", os.path.basename(word))
    if other or not _has_version(version[0] if version else ""):
        raise UnknownStart(
            f"{word} is not the Python that runs dsat ({here})",
            where=_WHERE,
            hint="Run dsat with that Python, or write python3.",
        )


def _has_version(version: str) -> bool:
    mine = [str(number) for number in sys.version_info[:2]]
    given = version.split(".") if version else []
    return given == mine[: len(given)]


def of_interpreter(words: Sequence[str]) -> Entrypoint:
    """Return the program that a Python interpreter runs when given these words."""
    options, rest = _interpreter_options(list(words))
    if rest[0] == "-m":
        return Entrypoint(module=rest[1], args=tuple(rest[2:]), python_options=tuple(options))
    return Entrypoint(script=rest[0], args=tuple(rest[1:]), python_options=tuple(options))


def _interpreter_options(words: list[str]) -> tuple[list[str], list[str]]:
    options: list[str] = []
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        option = words.pop(0)
        if option != "-u":  # output is never held back
            options.append(option)
            if option in ("-W", "-X") and words:
                options.append(words.pop(0))
    return options, words


def _python(words: list[str]) -> Entrypoint:
    options, words = _interpreter_options(words)
    if not words:
        raise UserInputError("names no script", where=_WHERE, hint=_FORMS)
    if words[0] in ("-c", "-"):
        raise UnknownStart("names no script", where=_WHERE, hint=_FORMS)
    if words[0] != "-m":
        return Entrypoint(script=words[0], args=tuple(words[1:]), python_options=tuple(options))
    module, rest = words[1:2], words[2:]
    if not module:
        raise UserInputError("names no module after -m", where=_WHERE, hint=_FORMS)
    if module[0] == "determined.launch.deepspeed":
        _check_determined(module[0])
        return _determined(rest)
    if module[0] == "determined.launch.torch_distributed":
        _check_determined(module[0])
        return replace(_determined_torch(rest), one_thread=True)
    if module[0] in ("torch.distributed.run", "torch.distributed.launch"):
        return _torchrun(rest)
    if module[0] in ("deepspeed", "deepspeed.launcher.runner"):
        return _deepspeed(rest)
    if module[0].split(".")[0] in ("accelerate", "horovod", "mpi4py"):
        raise UnknownStart(
            f"{module[0]} is not a launcher that dsat knows", where=_WHERE, hint=_FORMS
        )
    return Entrypoint(module=module[0], args=tuple(rest), python_options=tuple(options))


def _check_determined(launcher: str) -> None:
    if importlib.util.find_spec("determined") is None:
        raise UserInputError(
            f"{launcher} is not installed",
            where=_WHERE,
            hint="Run pip install 'dsat[determined]', or leave the launcher out.",
        )


def _determined(words: list[str]) -> Entrypoint:
    """`(--trial MODULE:CLASS) | (SCRIPT...)`, as determined/launch/deepspeed.py takes it."""
    if words and (words[0] == "--trial" or words[0].startswith("--trial=")):
        rest = words[1:] if words[0] == "--trial" else [words[0].partition("=")[2], *words[1:]]
        if len(rest) != 1:
            raise UserInputError(
                "--trial takes exactly one module:Class", where=_WHERE, hint=_FORMS
            )
        return Entrypoint(trial_class=rest[0])
    if words and words[0] == "--":
        words = words[1:]
    if not words:
        raise UserInputError("the launcher is given no script", where=_WHERE, hint=_FORMS)
    return _command(words)


def _determined_torch(words: list[str]) -> Entrypoint:
    """`[TORCH OPTIONS --] (--trial MODULE:CLASS) | (SCRIPT...)`."""
    return _determined(words[words.index("--") + 1 :] if "--" in words else words)


def _deepspeed(words: list[str]) -> Entrypoint:
    options, rest = _split_options(words, _DEEPSPEED_SWITCHES)
    if "--autotuning" in options:
        raise UserInputError(
            "--autotuning is DeepSpeed's own tuner, which dsat replaces",
            where=_WHERE,
            hint="Leave it out.",
        )
    if not rest:
        raise UserInputError("deepspeed is given no script", where=_WHERE, hint=_FORMS)
    if "--no_python" in options:
        found = _command(rest)
    elif "--module" in options:
        found = Entrypoint(module=rest[0], args=tuple(rest[1:]))
    else:
        found = Entrypoint(script=rest[0], args=tuple(rest[1:]))
    found = replace(
        found,
        passes_local_rank="--no_local_rank" not in options,
        binds_cores="--bind_cores_to_rank" in options,
        core_list=_cores(options.get("--bind_core_list", "")),
    )
    hostfile = Path(options.get("--hostfile") or options.get("-H") or "")
    hosts = hostfiles.read(hostfile)
    if len(hosts) > 1:
        return replace(
            found,
            hosts=tuple(hostfiles.chosen(hostfile, hosts, options).items()),
            ssh_port=_count(options, "--ssh_port"),
            takes_all_slots=True,
        )
    _check_one_machine(options)
    devices = _devices(options, "--include", "-i")
    slots = _count(options, "--num_gpus", "--num_accelerators") or len(devices) or None
    return replace(
        found,
        slots=slots or next(iter(hosts.values()), None),
        takes_all_slots=slots is None and not any(hosts.values()),
        devices=devices,
        not_devices=_devices(options, "--exclude", "-e"),
    )


def _torchrun(words: list[str]) -> Entrypoint:
    options, rest = _split_options(words, _TORCHRUN_SWITCHES)
    _check_one_machine(options)
    if not rest:
        raise UserInputError("torchrun is given no script", where=_WHERE, hint=_FORMS)
    if {"--no-python", "--no_python"} & options.keys():
        found = _command(rest)
    elif {"-m", "--module"} & options.keys():
        found = Entrypoint(module=rest[0], args=tuple(rest[1:]))
    else:
        found = Entrypoint(script=rest[0], args=tuple(rest[1:]))
    return replace(
        found, one_thread=True, slots=_count(options, "--nproc_per_node", "--nproc-per-node")
    )


def _check_one_machine(options: dict[str, str]) -> None:
    """Raise UserInputError for options that ask for several machines."""
    for name in ("--num_nodes", "--nnodes"):
        if options.get(name, "1") not in ("1", "1:1"):
            raise UserInputError(
                f"{name} {options[name]}: trials run on this machine only",
                where=_WHERE,
                hint="On several machines: deepspeed --hostfile FILE, or a job of Slurm's.",
            )


def _several_machines(option: str, hosts: Collection[str]) -> UserInputError:
    return UserInputError(
        f"{option} names {len(hosts)} machines, and trials run on this one",
        where=_WHERE,
        hint="Leave it out, and give --num_gpus.",
    )


def _devices(options: dict[str, str], *names: str) -> tuple[int, ...]:
    """Return the devices of this machine that `NAME[:SLOT[,SLOT ..]]` names.

    None if it names the machine alone (deepspeed/launcher/runner.py, `parse_resource_filter`).
    """
    for name in names:
        given = options.get(name, "")
        if "@" in given:
            raise _several_machines(f"{name} {given}", given.split("@"))
        if given and (positions := hostfiles.positions(name, given)[1]):
            return positions
    return ()


def _cores(given: str) -> tuple[int, ...]:
    """Return the cores of `--bind_core_list`: numbers and ranges in ascending order, as `0,2-4`.

    As `parse_range_list` of deepspeed/utils/numa.py (0.19.8).
    """
    found: list[int] = []
    for part in given.split(",") if given else ():
        first, _, last = part.partition("-")
        ends = (first, last or first)
        if not all(end.isdigit() for end in ends) or not (
            max(found, default=-1) < int(first) <= int(ends[1]) < _MOST_CORES
        ):
            raise UserInputError(
                f"--bind_core_list {given}: expected ascending numbers and ranges",
                where=_WHERE,
                hint="As 0,2-4",
            )
        found += range(int(first), int(ends[1]) + 1)
    return tuple(found)


def _split_options(words: list[str], switches: frozenset[str]) -> tuple[dict[str, str], list[str]]:
    """A launcher's own options, and what follows them."""
    options: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if not equals and name not in switches and rest:
            value = rest.pop(0)
        options[name] = value
    return options, rest


def _count(options: dict[str, str], *names: str) -> int | None:
    for name in names:
        if re.fullmatch("[0-9]{1,18}", options.get(name, "")) and int(options[name]) > 0:
            return int(options[name])
    return None
