"""Options of `dsat estimate`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from dsat.options import MEMORY_SIZE, NUMBER_OF_GPUS, WORD, Kind, memory_size, option
from dsat.prepare.target import ModelSettings
from dsat.search import gpus

_GIB = 2**30
_COUNT = re.compile(r"([^a-z]*)x", re.IGNORECASE)  # of `8x80GiB`


def _gpus(value: str) -> tuple[int, int, int | None]:
    """Parse `8x80GiB/1TiB` or `8xH100` into number of devices, bytes of each, bytes of a host.

    The number is 1 by default; the host is None if it is not given.
    """
    devices, slash, host = WORD.read(value).partition("/")
    counted = _COUNT.match(devices)
    size = (devices[counted.end() :] if counted else devices).strip()
    gpu = None if "," in size else gpus.named(size)
    try:
        memory_bytes = memory_size(size) if gpu is None else gpu.memory_bytes
    except ValueError as error:
        if size[:1].isdigit():
            raise
        raise ValueError(f"{error}; GPUs known by name: {', '.join(gpus.table())}") from None
    return (
        NUMBER_OF_GPUS.read(counted[1].strip()) if counted else 1,
        memory_bytes,
        memory_size(host) if slash else None,
    )


GPUS = Kind(_gpus, metavar="NxSIZE/HOST")


@dataclass(frozen=True, kw_only=True)
class EstimateSettings(ModelSettings):
    """Settings of `dsat estimate`.

    Attributes:
        host_memory: bytes of a host, which has up to 8 devices; None if unknown.
        fits: number of devices, bytes of each, and bytes of a host (None if unknown) to compare
            with; if None as a whole, print tables of all strategies.
    """

    summary: ClassVar[str] = (
        "predict memory for each ZeRO stage and offloading, without running a trial"
    )
    slot_memories: tuple[int, ...] = option(
        "--slot-memory",
        kind=MEMORY_SIZE,
        many=True,
        default=tuple(size * _GIB for size in (16, 24, 40, 80, 141)),
        help="memory of a device (default: 16GiB 24GiB 40GiB 80GiB 141GiB)",
    )
    slot_counts: tuple[int, ...] = option(
        "--devices",
        old=("--slots",),
        kind=NUMBER_OF_GPUS,
        many=True,
        default=(1, 8, 64, 512),
        help="numbers of devices (default: 1 8 64 512)",
    )
    host_memory: int | None = option(
        "--host-memory",
        kind=MEMORY_SIZE,
        help="memory of a host of up to 8 devices; a strategy that needs more does not fit",
    )
    formula: bool = option(
        "--formula", help="answer by formula, at once: usually within 6 %% of the simulation"
    )
    exact: bool = option(
        "--exact",
        excludes=("--formula",),
        shell_only=True,
        help="for scripts that need exact numbers: end with exit status 1 instead of 0 if every "
        "simulation failed, so that all lines are by formula",
    )
    fits: tuple[int, int, int | None] | None = option(
        "--fits",
        excludes=("--devices", "--slot-memory"),
        kind=GPUS,
        once=True,
        shell_only=True,
        help="in place of the tables: does your own configuration fit these devices and their "
        "host, such as 8x80GiB, 8x80GiB/1TiB or 8xH100? exit status 0 if it does, 1 if not, 2 if "
        "that cannot be predicted",
    )
