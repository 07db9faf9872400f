"""An arm: one choice of settings, with a bisection of its micro batch."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsat.search.base import Observation, Proposal
from dsat.space.locate import Point
from dsat.values.objective import Objective
from dsat.values.outcome import OutcomeKind

_FINE_ENOUGH = 1.03  # micro batches that are nearer to each other are as good as the same


@dataclass
class Arm:
    """One choice of settings, and the micro batches that are still open.

    Attributes:
        branch, index: the settings' place in the space.
        settings: flat, without the micro batch.
        sizes: allowed micro batches, ascending; `lo` and `hi` are positions in them.
        hi, lo: the open range, both ends included; empty if `lo > hi`.
        ceiling: the highest position but for outcomes of the arm's trials.
        number: position among the arms that the search began; None before.
        ours: observations of trials that the search made of it, in their order.
        tried: positions of all its trials, running ones included.
        best, best_size: best value of the objective, and its micro batch.
        abandoned: it failed in a way that no other micro batch avoids, or timed out twice.
        latest: when its latest trial began, as a position among all observations.
    """

    branch: int
    index: int
    settings: Mapping[str, Any]
    sizes: Sequence[int]
    hi: int
    lo: int = 0
    ceiling: int = field(init=False)
    number: int | None = None
    ours: list[Observation] = field(default_factory=list)
    tried: set[int] = field(default_factory=set)
    best: float | None = None
    best_size: int = 0
    abandoned: bool = False
    latest: int = 0
    _slow_from: int | None = None

    def __post_init__(self) -> None:
        self.ceiling = self.hi

    @property
    def trials(self) -> int:
        """Number of trials that the search made of it and that have ended."""
        return sum(each.outcome is not None for each in self.ours)

    @property
    def is_running(self) -> bool:
        return any(each.outcome is None for each in self.ours)

    @property
    def rung(self) -> int:
        """The highest rung of its trials; see `ASHASearch`."""
        return max((each.note.get("rung", 0) for each in self.ours), default=0)

    @property
    def out_of_memory(self) -> bool:
        """Return whether a trial of the search ran out of memory."""
        ended = [each.outcome for each in self.ours if each.outcome is not None]
        return any(outcome.kind.is_out_of_memory for outcome in ended)

    @property
    def open_hi(self) -> int:
        """The upper end of what is open, below everything that timed out."""
        return self.hi if self._slow_from is None else min(self.hi, self._slow_from - 1)

    @property
    def is_exhausted(self) -> bool:
        return self.abandoned or self.lo > self.open_hi

    def observe(self, observation: Observation, objective: Objective) -> None:
        """Narrow the open range by a trial of these settings.

        A success raises the lower end: more samples that fit are expected to be as fast. Running
        out of memory or data lowers the upper end. After a time-out, nothing slower is tried,
        although memory may suffice. Any other failure of a trial of the search abandons the arm.
        """
        size, outcome = observation.batch.micro_batch, observation.outcome
        is_ours = observation.arm is not None
        position = bisect.bisect_left(self.sizes, size)
        self.tried.add(position)
        if is_ours:
            self.ours.append(observation)
        if outcome is None:
            return
        value = outcome.value(objective)
        if value is not None and objective.is_better(value, self.best):
            self.best, self.best_size = value, size
        if outcome.ok:
            self.lo = max(self.lo, bisect.bisect_right(self.sizes, size))
        elif outcome.kind.is_out_of_memory or outcome.smaller_may_run:
            self.hi = min(self.hi, position - 1)
        elif is_ours and outcome.kind is OutcomeKind.TIMEOUT:
            self.abandoned |= self._slow_from is not None
            self._slow_from = min(position, self.open_hi + 1)
        elif is_ours:
            self.abandoned = True

    def limit(self, micro_batch: float) -> None:
        """Exclude larger micro batches."""
        self.ceiling = min(self.ceiling, bisect.bisect_right(self.sizes, micro_batch) - 1)
        self.hi = min(self.hi, self.ceiling)

    def propose(self, position: int, **note: int) -> Proposal:
        """Propose a micro batch, by its position.

        Args:
            note: facts that the search needs to know of the trial later.
        """
        return Proposal(Point(self.branch, self.index, self.sizes[position]), self.number, note)

    def halfway(self) -> list[int]:
        """Return positions halfway between the best and its neighbours, the farther first."""
        sizes, best = self.sizes, self.best_size
        tried = [sizes[position] for position in self.tried]
        below = [size for size in tried if size < best]
        above = [size for size in tried if size > best]
        gaps = [(best / max(below), max(below))] if below else []
        gaps += [(min(above) / best, min(above))] if above else []
        middles = (
            bisect.bisect_left(sizes, math.sqrt(best * neighbour))
            for ratio, neighbour in sorted(gaps, reverse=True)
            if ratio > _FINE_ENOUGH
        )
        return [at for at in middles if at < len(sizes) and at not in self.tried]
