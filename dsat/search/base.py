"""Base class of searches: pure, seeded, behind `ask` and `tell`."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from dsat.inputs.option import POSITIVE_NUMBER, Option, at_least, search_option
from dsat.search.lineage import Lineage
from dsat.space.space import Space
from dsat.values.objective import Objective
from dsat.values.outcome import ModelProfile, Outcome
from dsat.values.trial import Proposal

Predict = Callable[[Mapping[str, Any]], float]

_STEP_DOWN = 4  # nothing runs: so many times fewer samples than ran out of memory
_DRAWS = 4096  # settings that are drawn one after the other until some fit


RANGE_FACTOR = search_option(
    "--search-range-factor",
    "search up to the largest micro batch that is predicted to fit, times X; by default up to "
    "where doubling your own micro batch is no longer worth it",
    kind=POSITIVE_NUMBER,
    metavar="X",
)


def early_stopping(help: str) -> Option:
    """An option `--early-stopping N`."""
    return search_option("--early-stopping", help, kind=at_least(1), metavar="N")


NO_NEW_BEST = early_stopping("end the search after N trials without a new best")


class Costs(Protocol):
    """Predicted cost of trials, which finished trials correct from call to call."""

    def trial_s(self, step_s: Any) -> Any:
        """Seconds of whole trials, by the seconds of their optimizer steps (also an array)."""

    @property
    def left_s(self) -> float:
        """Seconds that the search may still take."""

    def are_too_long(self, step_s: Any) -> Any:
        """Return which trials would exceed the time limit, by the seconds of their steps."""

    def are_unaffordable(self, step_s: Any) -> Any:
        """Return which trials cost more than a verdict may take, by the seconds of their steps."""


@dataclass(frozen=True)
class Outlook:
    """Prediction for the next proposal, for people.

    Attributes:
        strategy: its name.
        micro_batch: its samples per slot.
        value: of the objective, as predicted.
        chance: that it is 1 % better than the best so far.
    """

    strategy: str
    micro_batch: int
    value: float
    chance: float


class Search(abc.ABC):
    """Base class of all searches: chooses the next configuration from earlier outcomes.

    A search knows no clock, no files and no global random numbers: the same seed and the same order
    of asks and tells give the same proposals.

    Args:
        profile: what the profile trial found.
        objective: the metric to optimise.
        space: what may be tried.
        seed: of every random choice.
        search_range_factor: multiplies the largest micro batch that is predicted to fit, up to
            which is searched.
        predict: predicts the largest micro batch of some settings, 0 if none fits, and may know
            better from one call to the next. Without it a search begins from the micro batch whose
            activations alone would fill a slot, which no strategy can exceed.
        gated: nothing above that is launched, so nothing above it need be proposed.
        costs: predicts how long trials take, for searches that predict steps.

    Attributes:
        summary: one line for `--help`.
        options: its own options, by the parameters of its constructor that take their values.
        ramps: the user's own micro batch is doubled before it begins, and more micro batches of the
            best settings are tried once it proposes nothing new.
        patience: end the search after so many trials without a new best; None for never.
        weighs_costs: it proposes nothing that would take too long as long as there is anything
            else; of others such a proposal is answered as one that timed out.
    """

    summary: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Option]] = {}
    ramps: ClassVar[bool] = False
    patience: int | None = None
    weighs_costs: ClassVar[bool] = False

    def __init__(
        self,
        profile: ModelProfile,
        objective: Objective,
        space: Space,
        *,
        seed: int,
        search_range_factor: float | None = None,
        predict: Predict | None = None,
        gated: bool = False,
        costs: Costs | None = None,
    ) -> None:
        self.objective = objective
        self.space = space
        self._seed = seed
        self._draws = 0
        self._undrawn = [Undrawn(branch.count) for branch in space.branches]
        self._search_range_factor = search_range_factor or 1.0
        self._predict = predict
        self._gated = gated
        self._costs = costs
        self._upper_bound = profile.slot_memory_bytes // max(1, profile.activation_bytes_per_sample)
        self._lineages: list[Lineage] = []
        self._most_samples = math.inf  # that there are data for, on each slot
        self._oom_history = [OomHistory() for _ in space.branches]
        # Trials that it did not ask for, of the first settings of each branch.
        self._unasked: list[list[tuple[int, Outcome]]] = [[] for _ in space.branches]

    @property
    def outlook(self) -> Outlook | None:
        """Prediction for the next proposal, if already computed; None without predictions."""
        return None

    @abc.abstractmethod
    def ask(self) -> Proposal | None:
        """Return the next configuration to try.

        Returns:
            None when there is nothing to try before another `tell`; if nothing is running then,
            the search is exhausted.
        """

    @abc.abstractmethod
    def tell(self, proposal: Proposal, outcome: Outcome) -> None:
        """Process the outcome of a proposal; concurrent ones end in any order."""

    def learn(self, branch: int | None, micro_batch: int, outcome: Outcome) -> None:
        """Process the outcome of a trial that the search did not propose.

        Args:
            branch: the number of the branch whose first settings it had; None if it had others.
            micro_batch: its samples per slot and micro step.
            outcome: how it ended; predictions may use it as well.
        """
        if branch is not None and micro_batch <= self.space.micro_batches[-1]:
            self._unasked[branch].append((micro_batch, outcome))

    def limit(self, micro_batch: int) -> None:
        """Exclude larger micro batches."""
        self._most_samples = min(self._most_samples, micro_batch)
        for lineage in self._lineages:
            lineage.limit(self._most_samples)

    def predicted(self, settings: Mapping[str, Any], micro_batch: int) -> float | None:
        """The logarithm of the value of what was tried, up to a constant, larger is better.

        Returns:
            The same for all without a model of speed; None if the model does not know of it.
        """
        return 0.0

    @property
    def stop_reason(self) -> str | None:
        """The reason to end the search although there is more to try, or None."""
        return None

    def _rng(self) -> np.random.Generator:
        """A fresh generator derived from the seed and the number of draws so far."""
        self._draws += 1
        return np.random.default_rng([self._seed, self._draws])

    def _largest(self, settings: Mapping[str, Any]) -> float:
        """The largest micro batch that settings should allow; 0 if none."""
        found = self._upper_bound if self._predict is None else self._predict(settings)
        return min(found, 2.0 * self.space.micro_batches[-1])

    def _draw_lineage(self, branches: Sequence[int] | None = None) -> Lineage | None:
        """A lineage with settings that were not drawn before; None when all were, or none fits.

        Args:
            branches: the numbers of the branches to draw from; by default all.

        The first of every branch come first, as the branches are listed: DeepSpeed's defaults (or
        what the user chose), but for buckets that would crowd a slot. The rest is drawn.
        """
        candidates = range(len(self._undrawn)) if branches is None else branches
        for _ in range(_DRAWS):
            open_branches = [number for number in candidates if self._undrawn[number].count]
            if not open_branches:
                return None
            rng = self._rng()
            number = open_branches[int(rng.integers(len(open_branches)))]
            most_failed = max(self._oom_history[n].failures for n in open_branches)
            least = min(self._oom_history[n].failures for n in open_branches)
            if most_failed > least:  # what needs less memory is behind those that run dry
                open_branches = [n for n in open_branches if self._oom_history[n].failures == least]
                number = open_branches[int(rng.integers(len(open_branches)))]
            new = [n for n in open_branches if self._undrawn[n].is_whole]
            if new:
                number = new[0]  # as listed: what costs least traffic first
            index = self._undrawn[number].take(rng)
            settings = self.space.branches[number].settings(index)
            largest = self._largest(settings)
            if self._predict is not None and largest < self.space.micro_batches[0]:
                continue
            lineage = Lineage(
                id=len(self._lineages),
                branch=number,
                settings=settings,
                micro_batches=self.space.micro_batches,
                ceiling=max(1, int(self._search_range_factor * largest)),
            )
            lineage.limit(self._most_samples)
            lineage.limit(self._oom_limit(number))
            if index == 0:
                for micro_batch, outcome in self._unasked[number]:
                    lineage.learn(micro_batch, outcome, self.objective)
            if lineage.finished:
                continue
            self._lineages.append(lineage)
            return lineage
        return None

    def _propose(self, lineage: Lineage, index: int, **note: int) -> Proposal:
        return Proposal(
            settings=lineage.settings,
            micro_batch=lineage.micro_batches[index],
            lineage=lineage.id,
            note=note,
        )

    def _told(self, proposal: Proposal, outcome: Outcome) -> Lineage:
        """Record an outcome in its lineage and return the lineage."""
        lineage = self._lineages[proposal.lineage]
        self._record(lineage, proposal.micro_batch, outcome)
        return lineage

    def _record(self, lineage: Lineage, micro_batch: int, outcome: Outcome) -> None:
        """Record an outcome in a lineage, and if memory was enough in its branch."""
        history = self._oom_history[lineage.branch]
        if outcome.ok:
            history.anything_ran = True
        elif outcome.kind.is_out_of_memory:
            history.least = min(history.least, micro_batch)
            history.at_smallest += micro_batch == self.space.micro_batches[0]
        lineage.record(micro_batch, outcome, self.objective)
        if outcome.most_samples is not None:
            self._most_samples = min(outcome.most_samples, self._most_samples)
            lineage.limit(self._most_samples)

    def _oom_limit(self, branch: int) -> float:
        """Return the largest micro batch for new settings while nothing ran in their branch.

        It is less than ran out of memory there, and far less if nothing runs at all. The smallest
        is always allowed: other settings may need less.
        """
        history = self._oom_history[branch]
        if history.anything_ran or math.isinf(history.least):
            return math.inf
        anything_ran = any(other.anything_ran for other in self._oom_history)
        below = history.least - 1 if anything_ran else history.least // _STEP_DOWN
        return max(self.space.micro_batches[0], below)


@dataclass
class OomHistory:
    """Memory failures of one branch.

    Attributes:
        anything_ran: something ran.
        least: the smallest micro batch that ran out of memory.
        at_smallest: how many trials did so with the smallest that there is.
    """

    anything_ran: bool = False
    least: float = math.inf
    at_smallest: int = 0

    @property
    def failures(self) -> int:
        """Number of settings that failed at the smallest micro batch, while none ran."""
        return 0 if self.anything_ran else self.at_smallest


class Undrawn:
    """Draws without replacement from 0..count-1, 0 first.

    A Fisher-Yates shuffle in a sparse dict: a draw costs O(1) however large the space.

    Attributes:
        count: how many are left.
        is_whole: nothing was taken yet.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.is_whole = True
        self._moved: dict[int, int] = {}

    def take(self, rng: np.random.Generator) -> int:
        position = 0 if self.is_whole else int(rng.integers(self.count))
        self.is_whole = False
        self.count -= 1
        last = self._moved.pop(self.count, self.count)
        if position == self.count:
            return last
        number = self._moved.get(position, position)
        self._moved[position] = last
        return number
