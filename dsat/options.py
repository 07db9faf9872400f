"""Options: declared once, for the command line, the Python API and the documentation.

A field of a command's settings class holds its `Option`: flags, type, default, help and group.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.command import switches
from dsat.command.document import LARGEST_INTEGER
from dsat.errors import UserInputError

_MEMORY_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_MEMORY_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_MEMORY_UNITS |= {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}  # as in Slurm and Docker
_LEAST_MEMORY = 2**20
_TIME_UNITS = {"": 1, "S": 1, "M": 60, "MIN": 60, "H": 3600}
_AMOUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_LARGEST_AMOUNT = 1e18
_LONGEST_S = 1e9  # a longer timeout overflows in system calls
OWN, ANY = "own", "any"  # accepted instead of a global batch size


def _unique(values: Iterable[Any]) -> Any:
    return tuple(dict.fromkeys(values))


@dataclass(frozen=True)
class Kind:
    """The type of an option's values.

    Attributes:
        read: converts a word of the command line, or a Python value, to the setting's value. It
            raises ValueError for an invalid value.
        collect: combines the values of an option that accepts several.
    """

    read: Callable[[Any], Any]
    metavar: str | None = None
    collect: Callable[[Iterable[Any]], Any] = _unique


class Group(enum.Enum):
    """Headings of `--help` and of the options reference, in order."""

    FIRST = "most used"
    TARGET = "target"
    SPACE = "search space"
    SEARCH = "search"
    MEASURING = "measurement"
    RUNNING = "execution of trials"
    RESULT = "results"
    METHOD = "options of single methods"
    PLACE = "on a Ray cluster"
    CLUSTER = "on a Determined cluster only"


@dataclass(frozen=True)
class Option:
    """An option of the command line, and a keyword argument of the Python API.

    Attributes:
        flags: names on the command line; a positional argument has one name, without dashes.
        kind: type of the values; None for a flag without a value.
        default: the default, as a user would write it.
        metavar: the placeholder of a value in `--help`; by default the kind's.
        choices: all allowed values, if they are few.
        many: whether the option accepts several values.
        once: whether a second, different value is an error; by default, the last value counts.
        goes_with: flag of another option that must also be set.
        excludes: flags of options that must not be set.
        shell_only: whether the option exists only on the command line.
        old: earlier names, which work but are not documented.
        name: field of the settings class; empty for an option of a method or a place.
    """

    flags: tuple[str, ...]
    help: str
    kind: Kind | None = None
    default: Any = None
    metavar: str | None = None
    choices: tuple[Any, ...] | None = None
    many: bool = False
    once: bool = False
    goes_with: str = ""
    excludes: tuple[str, ...] = ()
    group: Group = Group.RUNNING
    shell_only: bool = False
    old: tuple[str, ...] = ()
    name: str = ""

    @property
    def is_argument(self) -> bool:
        return not self.flags[0].startswith("-")

    @property
    def keyword(self) -> str:
        return _keyword(self.flags[-1])

    @property
    def keywords(self) -> set[str]:
        """All keywords of the Python API that set this option, including earlier names."""
        return {self.keyword, *(_keyword(flag) for flag in self.old if flag.startswith("--"))}

    @property
    def placeholder(self) -> str | None:
        return self.metavar or (self.kind.metavar if self.kind and not self.choices else None)

    @property
    def has_plain_default(self) -> bool:
        """Return whether the help should append the default."""
        is_value = self.default not in (None, False) and not self.many
        return is_value and "(default" not in self.help

    @property
    def help_text(self) -> str:
        default = str(self.default).replace("%", "%%")
        return self.help + (f" (default: {default})" if self.has_plain_default else "")

    @property
    def initial(self) -> Any:
        """The setting's default value."""
        if self.kind is None or self.default is None:
            return self.default
        if self.many:
            return self.kind.collect(self.default)
        return self.kind.read(self.default)

    def takes(self, word: str) -> bool:
        """Return whether a word is certainly a value, not the start of the user's command."""
        if not self.many or self.kind in (None, PATH, SWITCH):  # any word may be a path
            return False
        try:
            self.read(word)
        except ValueError:
            return False
        return True

    def read(self, value: Any) -> Any:
        """Read one value.

        Raises:
            ValueError: the value is wrong; the message says how.
        """
        if self.kind is None:
            if not isinstance(value, bool):
                raise ValueError(f"{value!r} is not True or False")
            return value
        result = self.kind.read(value)
        if self.choices is not None and result not in self.choices:
            choices = ", ".join(map(str, self.choices))
            raise ValueError(f"invalid choice: {result!r} (choose from {choices})")
        return result

    def from_python(self, value: Any) -> Any:
        """Read the value of a keyword argument: one value, or a list or mapping of several.

        Raises:
            ValueError: the value is wrong; the message says how.
        """
        if value is None and self.default is None:
            return None
        if self.kind is None or not self.many:
            return self.read(value)
        return self.kind.collect(map(self.read, _to_list(value)))

    def to_words(self, value: Any) -> list[str] | None:
        """Return the words of the command line for a Python value; None if no words express it."""
        flag = self.flags[-1]
        if value is None or self.kind is None:
            return [flag] if value else []
        listed = _to_list(value) if self.many else [value]
        texts = [switches.write(*v) if isinstance(v, tuple) else str(v) for v in listed]
        result = self.from_python(texts if self.many else texts[0])
        return [f"{flag}={text}" for text in texts] if result == self.from_python(value) else None


def _to_list(value: Any) -> Sequence[Any]:
    """Return the values of an option as a list; a mapping becomes tuples of key and value."""
    if isinstance(value, Mapping):
        return list(value.items())
    return value if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _keyword(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def option(*flags: str, help: str, **attributes: Any) -> Any:
    """Declare a field of a settings class with its `Option`."""
    declared = Option(flags, help, **attributes)
    if declared.kind is None:
        declared = dataclasses.replace(declared, default=False)
    metadata = {"option": declared}
    if isinstance(declared.initial, dict):
        return dataclasses.field(default_factory=dict, metadata=metadata)
    return dataclasses.field(default=declared.initial, metadata=metadata)


def search_option(flag: str, help: str, **attributes: Any) -> Option:
    """Declare an option of one search; see `Option` and `dsat.search.base.Search.options`."""
    return Option((flag,), help, group=Group.METHOD, **attributes)


def options_of(settings: Any) -> Iterator[Option]:
    """Yield the options of a settings class, in the order of `--help`."""
    for field in dataclasses.fields(settings):
        if "option" in field.metadata:
            yield dataclasses.replace(field.metadata["option"], name=field.name)


def check_together(settings: Any) -> None:
    """Raise UserInputError if an option requires one that is missing, or excludes a given one."""
    options = options_of(settings)
    options_by_flag = {o.flags[-1]: o for o in options if getattr(settings, o.name) != o.initial}
    for flag, declared in options_by_flag.items():
        if declared.goes_with and declared.goes_with not in options_by_flag:
            raise UserInputError(f"needs {declared.goes_with}", where=flag)
        for other in declared.excludes:
            if other in options_by_flag:
                raise UserInputError(f"cannot be combined with {other}", where=flag)


# -- kinds of values


def _measure(value: Any, units: Mapping[str, int]) -> float:
    """Convert `1.5GiB`, `10m` or `300B` with a table of factors by unit; 0 for any other text."""
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([A-Za-z]*)", _text(value).strip(), re.ASCII
    )
    return float(match[1]) * units.get(match[2].upper(), 0) if match else 0.0


def memory_size(value: str | int) -> int:
    """Return the bytes of `24GiB`, `512MB` or a plain number; raise ValueError if invalid."""
    size = _measure(value, _MEMORY_UNITS)
    if not 1 <= size <= LARGEST_INTEGER:
        raise ValueError(f"invalid memory size {value!r}: write, for example, 24GiB")
    if size < _LEAST_MEMORY:
        likely = f"{value}GiB" if str(value).isdigit() else "24GiB"
        raise ValueError(f"{value!r} is only {int(size)} bytes: write, for example, {likely}")
    return int(size)


def write_memory_size(size_bytes: int) -> str:
    """Write a number of bytes in the largest unit that divides it (1024-based)."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes % _MEMORY_UNITS[unit.upper()] == 0:
            return f"{size_bytes // _MEMORY_UNITS[unit.upper()]}{unit}"
    return str(size_bytes)


def amount(value: str | float) -> float:
    """Return the number of `1T`, `300B`, `40M` or a plain number; raise ValueError if invalid."""
    number = _measure(value, _AMOUNTS)
    if not 0 < number < _LARGEST_AMOUNT:
        raise ValueError(f"invalid amount {value!r}: write, for example, 300B or 1T")
    return number


def duration_s(value: str | float) -> float:
    """Return the seconds of `90`, `90s`, `10m` or `1h`; raise ValueError if invalid."""
    duration = _measure(value, _TIME_UNITS)
    if not 0 < duration <= _LONGEST_S:
        raise ValueError(f"invalid duration {value!r}: write, for example, 90s, 10m or 1h")
    return duration


def at_least(least: int, most: int = LARGEST_INTEGER) -> Kind:
    """Return the `Kind` of option whose values are whole numbers from `least` to `most`."""

    def read(value: str | int) -> int:
        try:
            number = int(_text(value))
        except ValueError:
            raise ValueError(f"{value!r} is not a whole number") from None
        if number < least:
            raise ValueError(f"{number} is less than {least}")
        if number > most:
            raise ValueError(f"{number} is too large")
        return number

    return Kind(read, metavar="N")


def _global_batch(value: str | int) -> int | str:
    return str(value) if value in (OWN, ANY) else int(at_least(1).read(value))


def _positive_number(value: str | float) -> float:
    number = _number(value)
    if not 0 < number < float("inf"):
        raise ValueError(f"{value} is not a positive number")
    return number


def _fraction(value: str | float) -> float:
    percent = isinstance(value, str) and value.strip().endswith("%")
    number = _number(str(value).strip()[:-1]) / 100 if percent else _number(value)
    if not 0 <= number < 1:
        raise ValueError(f"{value} is not a fraction below 1, such as 0.02 or 2%")
    return number


def _number(value: str | float) -> float:
    try:
        return float(_text(value))
    except ValueError:
        raise ValueError(f"{value!r} is not a number") from None


def _text(value: Any) -> str:
    """Return text or a number as the command line would write it; raise ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(f"{value!r} is neither text nor a number")
    return str(value)


def _word(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"{value!r} is not text")
    return os.fspath(value)


def _path(value: Any) -> Path:
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError(f"{value!r} is not a path")
    return Path(value)


def _arg_mapping(text: Any) -> tuple[str, str]:
    """Return key and flag of `KEY=FLAG`, adding dashes to a bare flag; raise ValueError if bad."""
    if isinstance(text, tuple):
        text = "=".join(map(_word, text))
    key, _, flag = (part.strip() for part in _word(text).partition("="))
    if not key or not flag:
        raise ValueError(
            f"{text!r} is not of the form KEY=FLAG, for example "
            "train_micro_batch_size_per_gpu=--batch-size"
        )
    return key, flag if flag.startswith("-") else f"--{flag}"


def _values_by_switch(pairs: Iterable[tuple[str, tuple[Any, ...]]]) -> dict[str, tuple[Any, ...]]:
    joined: dict[str, tuple[Any, ...]] = {}
    for name, values in pairs:
        joined[name] = _unique((*joined.get(name, ()), *values))
    return joined


ALL_LINEAR = "all-linear"  # PEFT's word for all linear layers except the output embedding


def _lora(value: Any) -> dict[str, str]:
    """Return `r=16,target=q_proj+v_proj,dropout=0.05` as texts by name; raise ValueError if bad."""
    if not isinstance(value, Mapping):
        value = dict(part.partition("=")[::2] for part in _word(value).split(","))
    parts = {str(key).strip(): _join(part).strip() for key, part in value.items()}
    if set(parts) - {"r", "target", "dropout"} or not all(parts.values()):
        raise ValueError(
            f"invalid adapters {value!r}: write, for example, r=16,target=q_proj+v_proj"
        )
    at_least(1).read(parts.get("r", "8"))
    _fraction(parts.get("dropout", "0"))
    return parts


def _join(part: Any) -> str:
    return "+".join(map(str, part)) if isinstance(part, (list, tuple, set)) else str(part)


MEMORY_SIZE = Kind(memory_size, metavar="SIZE")
AMOUNT = Kind(amount, metavar="N")
DURATION = Kind(duration_s, metavar="TIME")
WHOLE_NUMBER = at_least(0)
NUMBER_OF_GPUS = at_least(1, 2**20)
GLOBAL_BATCH = Kind(_global_batch, metavar="N|own|any")
POSITIVE_NUMBER = Kind(_positive_number, metavar="X")
FRACTION = Kind(_fraction, metavar="PART")
WORD = Kind(_word)
PATH = Kind(_path, metavar="PATH")
LORA = Kind(_lora, metavar="r=N,target=NAME+NAME")
ARG_MAPPING = Kind(_arg_mapping, metavar="KEY=FLAG", collect=dict)
SWITCH = Kind(switches.parse, metavar="NAME=V1,V2", collect=_values_by_switch)
