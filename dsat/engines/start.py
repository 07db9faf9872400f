"""Description of one start of a trial's ranks, and the options that all starts share."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from dsat.in_trial.meter_spec import MeterSpec
from dsat.values.trial import Trial, TrialOptions

# Ids of runs that are not trials of the search.
FULL_RUN_ID = -1
SIMULATION_ID = -3


class StartMethod(enum.Enum):
    """Methods to start ranks; all but FORKED load dsat's hook in the user's processes."""

    FORKED = "forked from the supervisor"
    FRESH = "the same program in fresh processes, where forks fail"
    COMMAND = "the user's command again"


@dataclass(frozen=True)
class LocalOptions:
    """Options for running and measuring trials; `cold` excludes the start method FORKED."""

    trial: TrialOptions
    cold: bool = False
    seed: int = 42


@dataclass(frozen=True)
class Start:
    """A requested start of a trial, which may have to wait for slots.

    Attributes:
        meter: what to measure; None for a run that is not measured.
        simulation_folder: folder of questions and answers if this is a simulation; else None.
        own_ranks: in the run's first trial, which is the user's unchanged command, the number of
            processes to start, or 0 if the command starts its ranks itself; else None.
        alone: whether no other trial may run at the same time, because this is a retry.
    """

    trial: Trial
    folder: Path
    meter: MeterSpec | None
    simulation_folder: Path | None = None
    own_ranks: int | None = None
    alone: bool = False

    @property
    def is_own(self) -> bool:
        return self.own_ranks is not None
