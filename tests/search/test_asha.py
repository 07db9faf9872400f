"""Successive halving: schedules written by hand."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from dsat.space.space import Space
from dsat.values.zero_strategy import plain
from testing.helpers import ran
from testing.search_contract import Driven, play, proposals_of, space_of


def test_asha_promotes_the_best_half() -> None:
    play(
        Driven("asha", space_of(8), ceiling=63, max_rungs=3, min_trials=1, divisor=2),
        """
        ask 0@32 rung 0
        tell 0@32 OK 10
        ask 1@32 rung 0
        tell 1@32 OK 20
        ask 1@48 rung 1     # 1 of 2
        tell 1@48 OK 21
        ask 2@32 rung 0
        tell 2@32 OK 5
        ask 3@32 rung 0     # 1 of 3 is promoted already
        tell 3@32 OK 15
        ask 3@48 rung 1     # 2 of 4
        tell 3@48 OK 30
        ask 3@56 rung 2     # 1 of 2
        tell 3@56 OK 31
        ask 3@60 rung 2     # four trials in the last rung
        tell 3@60 OK 29
        ask 4@32 rung 0     # and none above it
        tell 4@32 OK 1
        ask 5@32 rung 0
        tell 5@32 OK 12
        ask 5@48 rung 1     # 3 of 6
        tell 5@48 OOM
        ask 6@32 rung 0
        tell 6@32 OK 40
        ask 6@48 rung 1     # it pushes the third of the best out, which was promoted before
        """,
    )


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("throughput", (50, 1, 20, 30)),
        ("latency", (10, 99, 30, 20)),
        ("step", (0, 99, 30, 20)),  # a value of 0 is one
    ],
)
def test_asha_ranks_by_the_best_value_of_a_lineage(metric: str, values: tuple[int, ...]) -> None:
    first, last, *others = values  # the last of lineage 0 is the worst of all
    options: dict[str, Any] = {"max_rungs": 2, "min_trials": 2, "divisor": 2}
    play(
        Driven("asha", space_of(3), ceiling=63, metric=metric, **options),
        f"""
        ask 0@32 rung 0
        tell 0@32 OK {first}
        ask 0@48 rung 0
        tell 0@48 OK {last}
        ask 1@32 rung 0
        tell 1@32 OK {others[0]}
        ask 1@48 rung 0
        tell 1@48 OK {others[1]}
        ask 0@56 rung 1
        """,
        metric=metric,
    )


def test_of_those_that_wait_in_a_rung_the_longest_goes_first() -> None:
    play(
        Driven("asha", space_of(8), ceiling=63, max_rungs=3, min_trials=3, divisor=2),
        """
        ask 0@32 rung 0
        ask 1@32 rung 0
        tell 1@32 OK 5
        ask 1@48 rung 0
        tell 1@48 OK 6
        tell 0@32 OK 50
        ask 1@56 rung 0     # two trials, although lineage 0 is better and came first
        ask 0@48 rung 0
        """,
    )


def test_asha_promotes_from_the_highest_rung_first() -> None:
    play(
        Driven("asha", space_of(8), ceiling=63, max_rungs=3, min_trials=1, divisor=2),
        """
        ask 0@32 rung 0
        ask 1@32 rung 0
        ask 2@32 rung 0
        ask 3@32 rung 0
        tell 0@32 OK 10
        tell 1@32 OK 20
        tell 2@32 OK 30
        tell 3@32 OK 40
        ask 3@48 rung 1
        ask 2@48 rung 1
        ask 4@32 rung 0
        ask 5@32 rung 0
        tell 4@32 OK 50
        tell 5@32 OK 60
        tell 3@48 OK 41
        tell 2@48 OK 31
        ask 3@56 rung 2     # although lineages 5 and 4 did better below
        ask 5@48 rung 1
        ask 4@48 rung 1
        ask 6@32 rung 0
        """,
    )


def test_asha_counts_a_lineage_that_never_ran_but_promotes_it_never() -> None:
    play(
        Driven("asha", space_of(5), ceiling=63, max_rungs=3, min_trials=1, divisor=2),
        """
        ask 0@32 rung 0
        tell 0@32 ERROR
        ask 1@32 rung 0
        tell 1@32 ERROR
        ask 2@32 rung 0     # 1 of 2 may rise, but none ran
        tell 2@32 OK 5
        ask 2@48 rung 1     # 1 of 3: those that failed count
        tell 2@48 OOM
        ask 3@32 rung 0
        tell 3@32 OOM
        ask 4@32 rung 0
        tell 4@32 OK 1
        ask 4@48 rung 1     # 2 of 5
        tell 4@48 OK 6
        ask 4@56 rung 2
        """,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "resources"),
    [
        ({"min_trials": 3, "divisor": 2, "early_stopping": 0, "max_rungs": 3}, [3, 6, 12]),
        ({"min_trials": 2, "divisor": 3, "early_stopping": 0, "max_rungs": 3}, [2, 6, 18]),
        ({"min_trials": 1, "divisor": 2, "early_stopping": 1, "max_rungs": 3}, [2, 4, 8]),
        ({"min_trials": 1, "divisor": 4, "early_stopping": 1, "max_rungs": 2}, [4, 16]),
        ({"min_trials": 5, "divisor": 2, "early_stopping": 0, "max_rungs": 1}, [5]),
        ({}, [3, 6, 12, 24, 48]),
    ],
)
def test_asha_resources_of_each_rung(options: dict[str, Any], resources: list[int]) -> None:
    wide = Space(strategies=plain(1, 2), micro_batches=range(1, 2**60), slots=2, gas=1)
    search = Driven("asha", wide, ceiling=2**60, **options)
    asked = proposals_of(search, lambda p: ran(p.arm), limit=150)

    trials_until: dict[int, dict[int, int]] = defaultdict(dict)
    counts: Counter[int] = Counter()
    for proposal in asked:
        counts[proposal.arm] += 1
        trials_until[proposal.arm][proposal.note["rung"]] = counts[proposal.arm]
    assert max(max(rungs) for rungs in trials_until.values()) == len(resources) - 1
    for lineage, rungs in trials_until.items():
        assert list(rungs) == list(range(len(rungs)))
        if lineage != asked[-1].arm:
            assert list(rungs.values()) == resources[: len(rungs)]
