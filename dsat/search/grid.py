"""Every configuration, one after the other, in a sensible order."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dsat.inputs.option import Option, at_least, search_option
from dsat.search.base import Search, early_stopping
from dsat.search.lineage import Lineage
from dsat.values.outcome import Outcome
from dsat.values.trial import Proposal


class GridSearch(Search):
    """Goes through the branches as listed, and through the settings of each, its defaults first.

    With each settings, a short list of micro batches is tried from its smallest on. Of a range,
    the powers of two (times its step) are: first the largest that should fit, then doubled while
    that runs, then halved from there. Nothing above what ran out of memory or out of time is tried,
    nothing more after another failure.

    Settings are independent of each other: while a trial of one runs, the next one is begun. A
    branch whose settings all run out of memory lets the others go first.

    Args:
        num_micro_batches: go on to the next settings after so many micro batches that ran; by
            default none is left out.
        early_stopping: leave a branch after so many trials in a row without a new best of it. If
            nothing has run in it so far, what was begun is tried to its smallest micro batch.
    """

    summary = "every configuration in order: every setting, every micro batch"
    options: ClassVar[Mapping[str, Option]] = {
        "num_micro_batches": search_option(
            "--num-micro-batches",
            "leave a setting after N micro batches that ran: the smallest first where only some "
            "are allowed, as divisors of --train-batch-size are, else from the largest power of "
            "two that should fit (default: all)",
            kind=at_least(1),
            metavar="N",
        ),
        "early_stopping": early_stopping(
            "leave a ZeRO stage after N trials without a better one in it"
        ),
    }

    def __init__(
        self,
        *args: Any,
        num_micro_batches: int | None = None,
        early_stopping: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._num_micro_batches = num_micro_batches
        self._early_stopping = early_stopping
        self._sizes = _grid(self.space.micro_batches)
        self._branches = [_Progress() for _ in self.space.branches]
        self._open: dict[int, _Walk] = {}  # by lineage
        self._ready: list[int] = []  # the open ones that wait for nothing, ascending

    def ask(self) -> Proposal | None:
        while self._ready:
            walk = self._open[self._ready.pop(0)]
            proposal = self._step(walk)
            if proposal is not None:
                return proposal
            del self._open[walk.lineage.id]
        walk_begun = self._begin()
        return None if walk_begun is None else self._step(walk_begun)

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        lineage = self._told(proposal, outcome)
        self._open[lineage.id].ran += outcome.ok
        bisect.insort(self._ready, lineage.id)
        progress = self._branches[lineage.branch]
        value = outcome.value(self.objective)
        if value is not None and self.objective.is_better(value, progress.best):
            progress.best, progress.since_best = value, 0
        else:
            progress.since_best += 1

    def _begin(self) -> _Walk | None:
        """Open the next settings of the branch with the fewest memory failures, in their order."""
        if not self._sizes:
            return None
        order = sorted(range(len(self._branches)), key=lambda n: self._oom_history[n].failures)
        for number in order:
            branch, progress = self.space.branches[number], self._branches[number]
            while progress.begun < branch.count and not self._is_over(progress):
                settings = branch.settings(progress.begun)
                largest = self._largest(settings)
                progress.begun += 1
                if self._predict is not None and largest < self._sizes[0]:
                    continue
                lineage = Lineage(
                    id=len(self._lineages),
                    branch=number,
                    settings=settings,
                    micro_batches=self._sizes,
                    ceiling=int(largest) if self._predict is not None else self._sizes[-1],
                )
                lineage.limit(self._most_samples)
                self._lineages.append(lineage)
                walk = _Walk(lineage, self._first_size(largest))
                self._open[lineage.id] = walk
                return walk
        return None

    def _first_size(self, largest: float) -> int:
        if not isinstance(self.space.micro_batches, range):
            return 0
        return max(0, bisect.bisect_right(self._sizes, max(1, int(largest))) - 1)

    def _step(self, walk: _Walk) -> Proposal | None:
        """The next micro batch of an open walk; None at its end."""
        progress = self._branches[walk.lineage.branch]
        given_up = self._is_over(progress) and progress.best is not None
        if given_up or walk.ran == self._num_micro_batches:
            return None
        index = walk.take()
        return None if index is None else self._propose(walk.lineage, index)

    def _is_over(self, progress: _Progress) -> bool:
        return self._early_stopping is not None and progress.since_best >= self._early_stopping


@dataclass
class _Progress:
    """Progress of a branch: settings begun, the best value, and trials since that one."""

    begun: int = 0
    best: float | None = None
    since_best: int = 0


class _Walk:
    """The way through the micro batches of one lineage: up from a start, then down from there."""

    def __init__(self, lineage: Lineage, start: int) -> None:
        self.lineage = lineage
        self.ran = 0
        self._up = start
        self._down = start - 1

    def take(self) -> int | None:
        """The next position in the lineage's micro batches, or None."""
        if self.lineage.abandoned:
            return None
        if self._up <= self.lineage.open_hi:
            self._up += 1
            return self._up - 1
        self._down = min(self._down, self.lineage.open_hi) - 1
        return self._down + 1 if self._down >= -1 else None


def _grid(micro_batches: Sequence[int]) -> Sequence[int]:
    """The micro batches to try: a list as it is; of a range, the powers of two times its step."""
    if not isinstance(micro_batches, range) or not micro_batches:
        return micro_batches
    sizes = []
    size = micro_batches.step
    while size <= micro_batches[-1]:
        if size in micro_batches:
            sizes.append(size)
        size *= 2
    return tuple(sizes) or (micro_batches[0],)
