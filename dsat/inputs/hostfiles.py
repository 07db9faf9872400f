"""Hostfiles, and the choice of machines and devices by the options of DeepSpeed's launcher.

The rules are those of deepspeed/launcher/runner.py (0.19.8, `parse_resource_filter`).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from dsat.errors import UserInputError

_WHERE = "entrypoint"
_COUNT = re.compile("[0-9]{1,4}")
_EXCLUDE = ("--exclude", "-e")
_NODES, _GPUS = ("--num_nodes",), ("--num_gpus", "--num_accelerators")


def read(path: Path) -> dict[str, int | None]:
    """Return the machines of a hostfile (`NAME slots=N`) and their slots; none without such a file.

    Raises:
        UserInputError: it names a machine twice, or no number of slots after `slots=`.
    """
    found: dict[str, int | None] = {}
    if not path.is_file():
        return found
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, *rest = words
        slots = [word.removeprefix("slots=") for word in rest if word.startswith("slots=")]
        if name in found:
            raise UserInputError(f"names {name} twice", where=str(path))
        if slots and not _COUNT.fullmatch(slots[0]):
            raise UserInputError(
                f"{name} has slots={slots[0]}", where=str(path), hint="As NAME slots=8"
            )
        found[name] = int(slots[0]) if slots else None
    return found


def chosen(
    path: Path, machines: Mapping[str, int | None], options: Mapping[str, str]
) -> dict[str, tuple[int, ...]]:
    """Return the chosen machines, each with the positions of its devices; none for all.

    Args:
        path: of the hostfile.
        machines: its contents.
        options: of the launcher.

    Raises:
        UserInputError: an option names a missing machine or device, or the numbers of devices
            differ.
    """
    there = {name: tuple(range(slots or 0)) for name, slots in machines.items()}
    included = _filter(path, there, options, "--include", "-i")
    excluded = _filter(path, there, options, *_EXCLUDE)
    found = {name: slots or there[name] for name, slots in (included or there).items()}
    found = {
        name: tuple(slot for slot in slots if slot not in excluded.get(name, ()))
        for name, slots in found.items()
        if excluded.get(name) != ()
    }
    found = {name: slots for name, slots in found.items() if slots or not there[name]}
    nodes, gpus = (_number(options, *names) for names in (_NODES, _GPUS))
    if nodes is not None:
        if nodes > len(found):
            raise UserInputError(
                f"{_NODES[0]} {nodes}: {path} has {len(found)} machines for it", where=_WHERE
            )
        found = dict(itertools.islice(found.items(), nodes))
    if gpus is not None:
        found = {name: tuple(range(gpus)) for name in found}
    if not found:
        raise UserInputError(f"of {path} no machine is left", where=_WHERE)
    first, *others = found
    for name in others:
        if len(found[name]) != len(found[first]):
            raise UserInputError(
                f"{path} gives {_count(found[first])} of {first} and {_count(found[name])} of "
                f"{name}: trials on unequal machines cannot be compared",
                where=_WHERE,
                hint="Choose equally many of each, with slots=N, --include or --num_gpus.",
            )
    return found


def positions(option: str, given: str) -> tuple[str, tuple[int, ...]]:
    """Parse `NAME[:SLOT[,SLOT ..]]`: a machine and positions of its devices, perhaps none.

    Raises:
        UserInputError: it is not of this form.
    """
    name, colon, slots = given.partition(":")
    numbers = [number.strip() for number in slots.split(",")] if colon else []
    if not all(map(_COUNT.fullmatch, numbers)):
        raise UserInputError(
            f"{option} {given}: expected NAME:SLOT,SLOT", where=_WHERE, hint="As localhost:0,1"
        )
    return name.strip(), tuple(sorted({int(number) for number in numbers}))


def _filter(
    path: Path, there: Mapping[str, tuple[int, ...]], options: Mapping[str, str], *names: str
) -> dict[str, tuple[int, ...]]:
    """Parse `--include` or `--exclude`: `NAME[:SLOT,..][@NAME ..]`."""
    found: dict[str, tuple[int, ...]] = {}
    for option in names:
        for given in filter(None, options.get(option, "").split("@")):
            name, slots = positions(option, given)
            if name not in there:
                raise UserInputError(f"{option} {given}: {path} has no {name}", where=_WHERE)
            unknown = option in _EXCLUDE and not there[name]
            missing = [
                slot for slot in slots if slot not in there[name] and (there[name] or unknown)
            ]
            if missing:
                raise UserInputError(
                    f"{option} {given}: {path} gives no slot {missing[0]} of {name}", where=_WHERE
                )
            found[name] = slots
    return found


def _number(options: Mapping[str, str], *names: str) -> int | None:
    given = [options[name] for name in names if _COUNT.fullmatch(options.get(name, ""))]
    return int(given[0]) if given and int(given[0]) > 0 else None


def _count(slots: tuple[int, ...]) -> str:
    return f"{len(slots)} slots" if slots else "all slots"
