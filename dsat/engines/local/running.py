"""Trials that have been asked for, and trials that run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from dsat.in_trial.meter_spec import MeterSpec
from dsat.values.trial import Trial


@dataclass
class Running:
    trial: Trial
    folder: Path
    meter: MeterSpec | None
    slots: list[int]
    began_s: float
    cold: bool
    alone: bool = False
    again_alone: bool = False
    beside: bool = False  # whether another trial ran at the same time
    swap: list[Path] = field(default_factory=list)
    in_view: bool = False  # in a view of the working folder
    canceled: bool = False
    timed_out: bool = False


@dataclass(frozen=True)
class Start:
    """What has been asked for; it may have to wait for slots."""

    trial: Trial
    folder: Path
    meter: MeterSpec | None
    simulation_socket: Path | None
    alone: bool = False  # because it failed beside others
    asked_s: float = field(default_factory=time.monotonic)
