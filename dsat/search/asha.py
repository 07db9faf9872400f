"""Asynchronous successive halving (Li et al., arXiv:1810.05934) over lineages."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Any, ClassVar

from dsat.inputs.option import Option, at_least, search_option
from dsat.search.base import RANGE_FACTOR, Search
from dsat.search.lineage import Lineage
from dsat.values.outcome import Outcome
from dsat.values.trial import Proposal


class ASHASearch(Search):
    """The lineage is the arm, its number of bisection trials the resource.

    A lineage may use `min_trials * divisor ** (early_stopping + rung)` trials, counted from its
    beginning, until it has completed a rung; the best 1/divisor of the lineages that completed a
    rung are promoted to the next. Whatever can go on in the highest rung goes first; lineages that
    wait in one rung go on in the order of their length, the longest first.

    Args:
        max_rungs: number of rungs.
        min_trials: trials until the first rung is completed (`r` of the paper).
        divisor: growth of resources and thinning of lineages from rung to rung (`eta`).
        early_stopping: the smallest rate of early stopping (`s`).
    """

    summary = "successive halving: many configurations get a few trials, the best ones more"
    options: ClassVar[Mapping[str, Option]] = {
        "max_rungs": search_option(
            "--max-rungs", "number of rungs", kind=at_least(1), default=5, metavar="N"
        ),
        "min_trials": search_option(
            "--min-binary-search-trials",
            "trials that every drawn configuration gets",
            kind=at_least(1),
            default=3,
            metavar="N",
        ),
        "early_stopping": search_option(
            "--asha-early-stopping",
            "smallest rate of early stopping (`s` in arXiv:1810.05934)",
            kind=at_least(0),
            default=0,
            metavar="N",
        ),
        "divisor": search_option(
            "--divisor",
            "1/divisor of the configurations go on to the next rung, with divisor times as many "
            "trials (`eta` in arXiv:1810.05934)",
            kind=at_least(2),
            default=2,
            metavar="N",
        ),
        "search_range_factor": RANGE_FACTOR,
    }
    ramps = True
    draws = True

    def __init__(
        self,
        *args: Any,
        max_rungs: int = 5,
        min_trials: int = 3,
        divisor: int = 2,
        early_stopping: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._resources = [min_trials * divisor ** (early_stopping + r) for r in range(max_rungs)]
        self._rungs = [Rung(divisor) for _ in range(max_rungs)]
        self._rung_of: dict[int, int] = {}
        self._ready: list[tuple[int, int, int]] = []

    def ask(self) -> Proposal | None:
        rung_waiting = -self._ready[0][0] if self._ready else -1
        lineage = self._promote(above=rung_waiting) or self._next_ready()
        if lineage is None:
            lineage = self._draw_lineage()
            if lineage is None:
                return None
            self._rung_of[lineage.id] = 0
        return self._propose(lineage, lineage.middle(), rung=self._rung_of[lineage.id])

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        lineage = self._told(proposal, outcome)
        rung = self._rung_of[lineage.id]
        if lineage.finished or lineage.trials >= self._resources[rung]:
            self._complete(lineage, rung)
        else:
            heapq.heappush(self._ready, (-rung, -lineage.trials, lineage.id))

    def _next_ready(self) -> Lineage | None:
        return self._lineages[heapq.heappop(self._ready)[2]] if self._ready else None

    def _complete(self, lineage: Lineage, rung: int) -> None:
        loss = None if lineage.best is None else self.objective.loss(lineage.best)
        self._rungs[rung].complete(lineage.id, loss)

    def _promote(self, *, above: int) -> Lineage | None:
        """The next lineage to promote to a rung above the given one, to the highest first.

        A lineage whose bisection is over cannot use what it is promoted to: it completes the next
        rung at once, and the place is free for the next one.
        """
        promoted = True
        while promoted:
            promoted = False
            for rung in reversed(range(max(above, 0), len(self._rungs) - 1)):
                lineage_id = self._rungs[rung].promote()
                if lineage_id is None:
                    continue
                lineage = self._lineages[lineage_id]
                self._rung_of[lineage_id] = rung + 1
                if not lineage.finished:
                    return lineage
                self._complete(lineage, rung + 1)
                promoted = True
                break
        return None


class Rung:
    """The lineages that completed a rung; finds the next to promote in O(log n).

    The best `completed // divisor` lineages are kept apart from the rest by two heaps, so that each
    completion moves at most one lineage up.
    """

    def __init__(self, divisor: int) -> None:
        self._divisor = divisor
        self._completed = 0
        self._top: list[tuple[float, int]] = []  # (-loss, -id): the worst of the best first
        self._rest: list[tuple[float, int]] = []  # (loss, id): the best of the rest first
        self._in_top: set[int] = set()
        self._promoted: set[int] = set()
        self._candidates: list[tuple[float, int]] = []  # of the top, perhaps outdated

    def complete(self, lineage_id: int, loss: float | None) -> None:
        """Enters a lineage; `loss` is None if none of its trials ran."""
        self._completed += 1
        if loss is not None:
            if self._top and loss < -self._top[0][0]:
                self._raise((loss, lineage_id))
                self._lower()
            else:
                heapq.heappush(self._rest, (loss, lineage_id))
        while self._rest and len(self._top) < self._completed // self._divisor:
            self._raise(heapq.heappop(self._rest))

    def promote(self) -> int | None:
        """The best lineage of the top that was not promoted yet, which it is from now on."""
        while self._candidates:
            _, lineage_id = heapq.heappop(self._candidates)
            if lineage_id in self._in_top and lineage_id not in self._promoted:
                self._promoted.add(lineage_id)
                return lineage_id
        return None

    def _raise(self, entry: tuple[float, int]) -> None:
        loss, lineage_id = entry
        heapq.heappush(self._top, (-loss, -lineage_id))
        self._in_top.add(lineage_id)
        heapq.heappush(self._candidates, entry)

    def _lower(self) -> None:
        negative_loss, negative_id = heapq.heappop(self._top)
        self._in_top.discard(-negative_id)
        heapq.heappush(self._rest, (-negative_loss, -negative_id))
