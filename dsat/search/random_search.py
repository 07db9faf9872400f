"""Random settings with an approximate, random bisection of their micro batch."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar

from dsat.inputs.option import Option, at_least, search_option
from dsat.search.base import NO_NEW_BEST, RANGE_FACTOR, Search
from dsat.search.lineage import Lineage
from dsat.values.outcome import Outcome
from dsat.values.trial import Proposal


class RandomSearch(Search):
    """Draws micro batches from a binomial around the middle of what is open, and gives up early.

    A lineage ends when it ran out of memory at its smallest micro batch, when it used up its
    trials, when its strategy only adds traffic to one that shards and runs (stage 3 to stage 1 or
    2, say, or offloading), or when it ran out of memory and a larger micro batch than it can still
    reach ran in its branch. A new lineage starts above the best micro batch of its branch.

    Args:
        trials_per_config: the most trials that one choice of settings gets.
        early_stopping: end the search after so many trials without a new best.
    """

    summary = "random configurations and micro batches, with early stopping"
    options: ClassVar[Mapping[str, Option]] = {
        "trials_per_config": search_option(
            "--trials-per-random-config",
            "maximum number of trials of one drawn configuration",
            kind=at_least(1),
            default=5,
            metavar="N",
        ),
        "early_stopping": NO_NEW_BEST,
        "search_range_factor": RANGE_FACTOR,
    }
    ramps = True

    def __init__(
        self,
        *args: Any,
        trials_per_config: int = 5,
        early_stopping: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._trials_per_config = trials_per_config
        self.patience = early_stopping
        self._ready: deque[Lineage] = deque()
        self._largest_ran: dict[int, int] = {}
        self._best_in_branch: dict[int, tuple[float, int, int]] = {}

    def ask(self) -> Proposal | None:
        while self._ready:
            lineage = self._ready.popleft()
            if not self._should_end(lineage):
                return self._random_step(lineage)
        worthwhile = [n for n in range(len(self.space.branches)) if self._is_worthwhile(n)]
        drawn = self._draw_lineage(worthwhile)
        if drawn is None:
            return None
        self._start_above_best(drawn)
        return self._random_step(drawn)

    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        lineage = self._told(proposal, outcome)
        value = outcome.value(self.objective)
        if value is not None:
            position = lineage.position(proposal.micro_batch)
            self._note_success(lineage.branch, position, lineage.hi, value)
        is_at_the_top = outcome.ok and lineage.lo > lineage.hi and not lineage.out_of_memory
        if is_at_the_top and self._predict is None:
            # The rough ceiling was too low: look as far again.
            lineage.hi = min(max(lineage.lo, 2 * lineage.hi + 1), len(lineage.micro_batches) - 1)
            lineage.limit(self._most_samples)
        self._ready.append(lineage)

    def learn(self, branch: int | None, micro_batch: int, outcome: Outcome) -> None:
        super().learn(branch, micro_batch, outcome)
        value = outcome.value(self.objective)
        if branch is not None and value is not None and micro_batch <= self.space.micro_batches[-1]:
            position = bisect.bisect_left(self.space.micro_batches, micro_batch)
            self._note_success(branch, position, position, value)

    def _random_step(self, lineage: Lineage) -> Proposal:
        width = lineage.open_hi - lineage.lo
        return self._propose(lineage, lineage.lo + int(self._rng().binomial(width, 0.5)))

    def _note_success(self, branch: int, position: int, hi: int, value: float) -> None:
        """Enters a micro batch that ran in a branch, by its position, where `hi` was still open."""
        micro_batch = self.space.micro_batches[position]
        self._largest_ran[branch] = max(micro_batch, self._largest_ran.get(branch, 0))
        best = self._best_in_branch.get(branch)
        if best is None or self.objective.is_better(value, best[0]):
            self._best_in_branch[branch] = (value, position, hi)

    def _is_worthwhile(self, branch: int) -> bool:
        """Check that no sharding strategy with less traffic has run."""
        strategies = self.space.strategies
        burden = strategies[branch].burden
        return not any(
            strategies[ran].stage > 0 and strategies[ran].burden < burden
            for ran in self._largest_ran
        )

    def _should_end(self, lineage: Lineage) -> bool:
        return (
            lineage.finished
            or lineage.trials >= self._trials_per_config
            or not self._is_worthwhile(lineage.branch)
            or (
                lineage.out_of_memory
                and self._largest_ran.get(lineage.branch, 0)
                >= lineage.micro_batches[max(lineage.hi, 0)]
            )
        )

    def _start_above_best(self, lineage: Lineage) -> None:
        best = self._best_in_branch.get(lineage.branch)
        if best is None:
            return
        _, position, hi = best
        if self._predict is None:
            largest = lineage.position(self._largest_ran[lineage.branch])
            last = len(lineage.micro_batches) - 1
            lineage.hi = min(max(largest, hi, 2 * (position + 1)), last)
            lineage.limit(self._most_samples)
        # Up to what should fit; that itself is worth a trial with any settings.
        lineage.lo = min(position + 1, lineage.hi)
