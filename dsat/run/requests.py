"""Requests of users to a run in progress."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from dsat.values.codec import Recorded


class RequestKind(str, enum.Enum):
    """Kind of a request."""

    STOP = "stop"
    CANCEL = "cancel"
    BUDGET = "budget"


@dataclass(frozen=True)
class Request(Recorded):
    """One request.

    Attributes:
        kind: `STOP` starts no further trial, `CANCEL` ends one that runs, `BUDGET` allows more.
        trial_id: of the trial to cancel.
        max_trials: how many trials there may be.
    """

    kind: RequestKind
    trial_id: int | None = None
    max_trials: int | None = None
