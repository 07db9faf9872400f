"""Contract of every search, and the only place that knows how to drive one.

Tests of searches speak of proposals and their outcomes. Only `Driven` calls a search: if the
interface of searches changes, this class changes and no test does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsat.search import SEARCHES, Context, Observation, Problem, Proposal, Search, Stop, Wait
from dsat.search.base import EXHAUSTED, Costs
from dsat.space.locate import Point
from dsat.space.space import Freedom, Space
from dsat.values.objective import Objective
from dsat.values.outcome import ModelProfile, Outcome
from dsat.values.zero_strategy import plain
from testing.helpers import failed, ran, weightless

BUCKETS = (10**6, 5 * 10**6, 10**7, 5 * 10**7, 10**8, 5 * 10**8, 10**9, 5 * 10**9)


@dataclass(frozen=True)
class Proposed:
    """A proposal in the terms of tests.

    Attributes:
        settings: values by name of the setting, without nesting.
        micro_batch: samples per device and micro step.
        arm: the search's number for these settings; -1 if it gave none.
        note: further numbers that the search attached.
        place: index among all observations.
    """

    settings: Mapping[str, Any]
    micro_batch: int
    arm: int
    note: Mapping[str, int]
    place: int


@dataclass(frozen=True)
class Predicted:
    """A memory prediction: `predict` maps settings to the largest micro batch that fits."""

    predict: Callable[[Mapping[str, Any]], float]

    def largest(self, settings: Mapping[str, Any]) -> float:
        return self.predict(settings)

    def fits(self, settings: Mapping[str, Any], micro_batch: int) -> bool:
        return micro_batch <= self.predict(settings)


class Driven:
    """A search with its proposals and their outcomes.

    Args:
        method: the search's name or class.
        space: the search space.
        ceiling: number of samples that fit, for the default model, which has no parameters.
        profile: profile of another model.
        metric: the metric to optimise.
        predict: maps settings to the largest micro batch that fits.
        costs: predicts durations.
        ramp: raise micro batches step by step.
        options: options of the search.
    """

    def __init__(
        self,
        method: str | type[Search],
        space: Space,
        *,
        ceiling: int = 15,
        profile: ModelProfile | None = None,
        metric: str = "throughput",
        seed: int = 0,
        predict: Callable[[Mapping[str, Any]], float] | None = None,
        costs: Costs | None = None,
        ramp: bool = False,
        **options: Any,
    ) -> None:
        self.space = space
        self.objective = Objective(metric)
        kind = SEARCHES[method] if isinstance(method, str) else method
        problem = Problem(profile or weightless(ceiling), self.objective, space, seed, ramp)
        self._search = kind(problem, **options)
        self._context = Context(None if predict is None else Predicted(predict), costs)
        self._observations: list[Observation] = []

    def propose(self) -> Proposed | None:
        """Return the next configuration, which then counts as running; None if there is none
        now."""
        answer = self._ask()
        if not isinstance(answer, Proposal):
            return None
        point = answer.point
        settings = self.space.branches[point.branch].settings(point.index)
        batch = self.space.batch(point.micro_batch, settings)
        beside = sum(each.outcome is None for each in self._observations)
        self._observations.append(
            Observation(point, batch, None, neighbours=beside, arm=answer.arm, note=answer.note)
        )
        place = len(self._observations) - 1
        arm = -1 if answer.arm is None else answer.arm
        return Proposed(settings, point.micro_batch, arm, answer.note, place)

    def end(self, proposal: Proposed, outcome: Outcome) -> None:
        """Report the outcome of a proposal; proposals may end in any order."""
        place = proposal.place
        self._observations[place] = replace(self._observations[place], outcome=outcome)

    def observe(self, micro_batch: int, outcome: Outcome) -> None:
        """Report the baseline, with the first settings of the first branch."""
        batch = self.space.batch(micro_batch, self.space.branches[0].settings(0))
        self._observations.append(
            Observation(
                Point(0, 0, micro_batch),
                batch,
                outcome,
                is_exact=micro_batch in self.space.micro_batches,
            )
        )

    @property
    def stop_reason(self) -> str | None:
        """Why the search has stopped; None if it has not, or has nothing more to try."""
        answer = self._ask()
        return answer.reason if isinstance(answer, Stop) and answer.reason != EXHAUSTED else None

    def _ask(self) -> Proposal | Wait | Stop:
        return self._search.propose(tuple(self._observations), self._context)


def space_of(lineages: int = 8, *, micro_batches: Sequence[int] = range(1, 65)) -> Space:
    """Return a space of stage 1 with up to 8 ZeRO sections, which differ in their bucket size."""
    return Space(
        strategies=plain(1),
        micro_batches=micro_batches,
        slots=1,
        freedom=Freedom(fix=("contiguous_gradients",)),
        num_params=BUCKETS[lineages - 1],
    )


def play(search: Driven, script: str, *, metric: str = "throughput") -> None:
    """Drive a search through a schedule written by hand, and compare it line by line.

    Lines of a schedule, where `L` is the arm (the number of a choice of settings) and `M` a micro
    batch:

        ask L@M              the search must propose this; the stage (if there are several) and
                             the note follow, as in `ask 0@8 stage 1 rung 0`
        ask nothing          the search must propose nothing now
        tell L@M OOM         report an outcome of a proposal
        tell L@M OK 12.5     report success, with the value of the objective
    """
    running: dict[str, Proposed] = {}
    for number, line in enumerate(script.strip().splitlines(), start=1):
        verb, what, *rest = line.split("#")[0].split()
        if verb == "ask":
            proposal = search.propose()
            said = ["nothing"]
            if proposal is not None:
                said = _words(search, proposal)
                assert said[0] not in running, f"line {number}: {said[0]} runs already"
                running[said[0]] = proposal
            assert said == [what, *rest], f"line {number}: {line.strip()!r}, but proposed {said}"
        else:
            kind, *value = rest
            outcome = ran(float(value[0]), metric) if value else failed(kind)
            search.end(running.pop(what), outcome)


def _words(search: Driven, proposal: Proposed) -> list[str]:
    words = [f"{proposal.arm}@{proposal.micro_batch}"]
    if len(search.space.branches) > 1:
        words += ["stage", str(proposal.settings["stage"])]
    for name, number in proposal.note.items():
        words += [name, str(number)]
    return words


def walk(search: Driven, trials: str) -> None:
    """Play trials one by one: `8 OK, 12 OOM, end`, where `end` means no further proposal.

    A larger micro batch is slower. A trial may also name the arm: `1@7 OK`.
    """
    for trial in trials.split(", "):
        proposal = search.propose()
        if trial == "end":
            assert proposal is None
            return
        what, kind = trial.split()
        *lineage, size = map(int, what.split("@"))
        assert proposal is not None and proposal.micro_batch == size, trial
        assert lineage in ([], [proposal.arm]), trial
        search.end(proposal, ran(1 / size) if kind == "OK" else failed(kind))


def proposals_of(
    search: Driven,
    outcome: Callable[[Proposed], Outcome],
    *,
    concurrency: int = 1,
    order: int = 0,
    limit: int = 300,
) -> list[Proposed]:
    """Return all proposals of a search; `order` seeds the choice of the next trial that ends."""
    rng = np.random.default_rng(order)
    proposed: list[Proposed] = []
    running: list[Proposed] = []
    while True:
        while len(running) < concurrency and len(proposed) < limit and search.stop_reason is None:
            proposal = search.propose()
            if proposal is None:
                break
            proposed.append(proposal)
            running.append(proposal)
        if not running:
            return proposed
        ended = running.pop(int(rng.integers(len(running))))
        search.end(ended, outcome(ended))
