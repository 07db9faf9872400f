"""Bisection of the micro batch of randomly drawn ZeRO sections."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

from dsat.inputs.option import Option
from dsat.search.base import RANGE_FACTOR, Search
from dsat.search.lineage import Lineage
from dsat.values.outcome import Outcome
from dsat.values.trial import Proposal


class BinarySearch(Search):
    """Each lineage is bisected to its end; a finished one makes room for a newly drawn one.

    A success raises the lower end above its micro batch, because a larger micro batch that fits is
    expected to be at least as fast; running out of memory lowers the upper end.
    """

    summary = "bisects the micro batch of randomly drawn configurations"
    options: ClassVar[Mapping[str, Option]] = {"search_range_factor": RANGE_FACTOR}
    ramps = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ready: deque[Lineage] = deque()  # nothing of theirs runs; the longest wait first

    def ask(self) -> Proposal | None:
        lineage = self._ready.popleft() if self._ready else self._draw_lineage()
        if lineage is None:
            return None
        return self._propose(lineage, lineage.middle())

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        lineage = self._told(proposal, outcome)
        if not lineage.finished:
            self._ready.append(lineage)
