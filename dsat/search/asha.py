"""Asynchronous successive halving (Li et al., arXiv:1810.05934) over lineages."""

from __future__ import annotations

import bisect
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
        self._ready: list[tuple[int, int, int]] = []  # the next first

    def ask(self) -> Proposal | None:
        lineage = self._promote(above=-self._ready[0][0] if self._ready else -1)
        if lineage is None and self._ready:
            lineage = self._lineages[self._ready.pop(0)[2]]
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
            bisect.insort(self._ready, (-rung, -lineage.trials, lineage.id))

    def _complete(self, lineage: Lineage, rung: int) -> None:
        loss = None if lineage.best is None else self.objective.loss(lineage.best)
        self._rungs[rung].complete(lineage.id, loss)

    def _promote(self, *, above: int) -> Lineage | None:
        """The next lineage to promote to a rung above the given one, to the highest first.

        A lineage whose bisection is over cannot use what it is promoted to: it completes the next
        rung at once, and the place is free for the next one.
        """
        while True:
            for rung in reversed(range(max(above, 0), len(self._rungs) - 1)):
                lineage_id = self._rungs[rung].promote()
                if lineage_id is not None:
                    break
            else:
                return None
            lineage = self._lineages[lineage_id]
            self._rung_of[lineage_id] = rung + 1
            if not lineage.finished:
                return lineage
            self._complete(lineage, rung + 1)


class Rung:
    """The lineages that completed a rung, and the next one to promote."""

    def __init__(self, divisor: int) -> None:
        self._divisor = divisor
        self._completed = 0
        self._ranked: list[tuple[float, int]] = []  # loss and number of a lineage, the best first
        self._promoted: set[int] = set()

    def complete(self, lineage_id: int, loss: float | None) -> None:
        """Enter a lineage; `loss` is None if none of its trials ran."""
        self._completed += 1
        if loss is not None:
            bisect.insort(self._ranked, (loss, lineage_id))

    def promote(self) -> int | None:
        """Return the best lineage of the top that was not promoted yet, and mark it as promoted."""
        for _, lineage_id in self._ranked[: self._completed // self._divisor]:
            if lineage_id not in self._promoted:
                self._promoted.add(lineage_id)
                return lineage_id
        return None
