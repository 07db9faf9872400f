"""Options of `dsat estimate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dsat.options import CARDS, MEMORY_SIZE, NUMBER_OF_CARDS, option
from dsat.prepare.simulated_model import ModelSettings

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class EstimateSettings(ModelSettings):
    """Settings of `dsat estimate`.

    Attributes:
        fits: number of devices and memory of each, in bytes; None for tables of all strategies.
    """

    function: ClassVar[str] = "estimate"
    summary: ClassVar[str] = (
        "predict memory for each ZeRO stage and offloading, without running a trial"
    )
    slot_memories: tuple[int, ...] = option(
        "--slot-memory",
        kind=MEMORY_SIZE,
        many=True,
        default=tuple(size * _GIB for size in (16, 24, 40, 80, 141)),
        metavar="SIZE",
        help="memory of a device (default: 16GiB 24GiB 40GiB 80GiB 141GiB)",
    )
    slot_counts: tuple[int, ...] = option(
        "--devices",
        old=("--slots",),
        kind=NUMBER_OF_CARDS,
        many=True,
        default=(1, 8, 64, 512),
        metavar="N",
        help="numbers of devices (default: 1 8 64 512)",
    )
    exact: bool = option(
        "--exact",
        help="simulate every line of the table, not the model alone: seconds for each; exit status "
        "1 if none of them can be simulated",
    )
    fits: tuple[int, int] | None = option(
        "--fits",
        excludes=("--devices", "--slot-memory"),
        kind=CARDS,
        shell_only=True,
        help="in place of the tables: does your own configuration fit these devices, such as "
        "8x80GiB? exit status 0 if it does, 1 if not, 2 if that cannot be predicted",
    )
