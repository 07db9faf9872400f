"""What every search must do, and the one place that knows how a search is driven.

Tests of searches speak of proposals and of what became of them. How a search is asked and told is
in `Driven` alone: whoever changes the interface of searches changes this class, and no test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dsat.search import SEARCHES, Search
from dsat.space.space import Freedom, Space
from dsat.values.objective import Objective
from dsat.values.outcome import ModelProfile, Outcome
from dsat.values.trial import Proposal
from dsat.values.zero_strategy import plain
from testing.helpers import failed, ran, weightless

BUCKETS = (10**6, 5 * 10**6, 10**7, 5 * 10**7, 10**8, 5 * 10**8, 10**9, 5 * 10**9)


class Driven:
    """A search, with what it has proposed and what has become of that.

    Args:
        method: its name, or its class.
        space: what may be tried.
        ceiling: samples that fit by the profile of a model without parameters.
        profile: of another model.
        metric: to optimise.
        options: of the search, its seed among them.
    """

    def __init__(
        self,
        method: str | type[Search],
        space: Space,
        *,
        ceiling: int = 15,
        profile: ModelProfile | None = None,
        metric: str = "throughput",
        **options: Any,
    ) -> None:
        self.space = space
        self.objective = Objective(metric)
        kind = SEARCHES[method] if isinstance(method, str) else method
        given = {"seed": 0, **options}
        self._search = kind(profile or weightless(ceiling), self.objective, space, **given)

    def propose(self) -> Proposal | None:
        """Return the next configuration; None if there is none before another one has ended."""
        return self._search.ask()

    def end(self, proposal: Proposal, outcome: Outcome) -> None:
        """Let a proposal end; those that run at once end in any order."""
        if outcome.ok and outcome.most_samples is not None:
            self._search.limit(outcome.most_samples)
        self._search.tell(proposal, outcome)

    def observe(self, micro_batch: int, outcome: Outcome, *, branch: int = 0) -> None:
        """Show the trial of a branch's first settings that the search did not propose."""
        self._search.learn(branch, micro_batch, outcome)

    @property
    def stop_reason(self) -> str | None:
        return self._search.stop_reason

    @property
    def outlook(self) -> Any:
        """What the search expects of its next proposal."""
        return self._search.outlook


def space_of(
    lineages: int = 8, *, micro_batches: Sequence[int] = range(1, 65), stage: int = 1
) -> Space:
    """Return one stage with up to 8 ZeRO sections, which differ in their bucket size."""
    return Space(
        strategies=plain(stage),
        micro_batches=micro_batches,
        slots=1,
        freedom=Freedom(fix=("contiguous_gradients",)),
        num_params=BUCKETS[lineages - 1],
    )


def play(search: Driven, script: str, *, metric: str = "throughput") -> None:
    """Drive a search through a schedule written by hand and compare it line by line.

    Lines of a script, where `L` is the number of a choice of settings and `M` a micro batch:

        ask L@M              the search proposes this; then, where there are any, the stage (of
                             several) and the note, as in `ask 0@8 stage 1 rung 0`
        ask nothing          the search has nothing to propose now
        tell L@M OOM         what became of a proposal
        tell L@M OK 12.5     the same, with the objective's value
    """
    running: dict[str, Proposal] = {}
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


def _words(search: Driven, proposal: Proposal) -> list[str]:
    words = [f"{proposal.lineage}@{proposal.micro_batch}"]
    if len(search.space.branches) > 1:
        words += ["stage", str(proposal.settings["stage"])]
    for name, number in proposal.note.items():
        words += [name, str(number)]
    return words


def walk(search: Driven, trials: str) -> None:
    """Play one trial after the other: `8 OK, 12 OOM, end`, `end` if that was the last.

    The larger a micro batch, the slower it is. A choice of settings may be given: `1@7 OK`.
    """
    for trial in trials.split(", "):
        proposal = search.propose()
        if trial == "end":
            assert proposal is None
            return
        what, kind = trial.split()
        *lineage, size = map(int, what.split("@"))
        assert proposal is not None and proposal.micro_batch == size, trial
        assert lineage in ([], [proposal.lineage]), trial
        search.end(proposal, ran(1 / size) if kind == "OK" else failed(kind))


def proposals_of(
    search: Driven,
    outcome: Callable[[Proposal], Outcome],
    *,
    concurrency: int = 1,
    order: int = 0,
    limit: int = 300,
) -> list[Proposal]:
    """Return all proposals of a search; `order` seeds which of the running ones ends next."""
    rng = np.random.default_rng(order)
    proposed: list[Proposal] = []
    running: list[Proposal] = []
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
