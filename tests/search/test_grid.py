"""Grid search: schedules written by hand, and that it leaves nothing out."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dsat.space.space import Branch, Freedom, Space
from dsat.values.outcome import Outcome
from dsat.values.trial import Proposal
from dsat.values.zero_strategy import plain
from testing.helpers import failed, play, proposals_of, ran, search_of, space_of

# -- the micro batches of one choice of settings


@pytest.mark.parametrize(
    ("ceiling", "script"),
    [
        pytest.param(
            15,
            """
            ask 0@8
            tell 0@8 OK 1
            ask 0@16            # the prediction may be too low
            tell 0@16 OK 2
            ask 0@32
            tell 0@32 OOM
            ask 0@4
            tell 0@4 OK 3
            ask 0@2
            tell 0@2 OK 4
            ask 0@1
            tell 0@1 OK 5
            ask nothing
            """,
            id="up, then down",
        ),
        pytest.param(
            63,
            """
            ask 0@32
            tell 0@32 OK 1
            ask 0@64
            tell 0@64 OK 1      # the largest that is allowed
            ask 0@16
            """,
            id="up to the end",
        ),
        pytest.param(1000, "ask 0@64", id="a prediction beyond the end"),
        pytest.param(16, "ask 0@16", id="the prediction itself"),
        pytest.param(
            15,
            """
            ask 0@8
            tell 0@8 OOM
            ask 0@4
            tell 0@4 HOST_OOM
            ask 0@2
            tell 0@2 OK 1
            ask 0@1
            tell 0@1 OK 1
            ask nothing
            """,
            id="down from the start",
        ),
        pytest.param(
            1,
            """
            ask 0@1
            tell 0@1 OOM
            ask nothing
            """,
            id="not even the smallest",
        ),
        pytest.param(
            15,
            """
            ask 0@8
            tell 0@8 OK 1
            ask 0@16
            tell 0@16 TIMEOUT
            ask 0@4
            tell 0@4 TIMEOUT
            ask nothing
            """,
            id="nothing slower than a time-out, and the second one ends it",
        ),
        pytest.param(
            15,
            """
            ask 0@8
            tell 0@8 OK 1
            ask 0@16
            tell 0@16 OOM
            ask 0@4
            tell 0@4 OOM        # what else is on the card may have grown
            ask 0@2
            tell 0@2 OK 1
            ask 0@1
            """,
            id="memory that was there and is not",
        ),
        pytest.param(15, "ask 0@8\ntell 0@8 ERROR\nask nothing", id="error"),
        pytest.param(15, "ask 0@8\ntell 0@8 INVALID\nask nothing", id="invalid"),
        pytest.param(
            15,
            "ask 0@8\ntell 0@8 OK 1\nask 0@16\ntell 0@16 CANCELED\nask nothing",
            id="canceled",
        ),
    ],
)
def test_powers_of_two_of_a_range(ceiling: int, script: str) -> None:
    play(search_of("gridsearch", space_of(1), ceiling=ceiling), script)


@pytest.mark.parametrize(
    ("micro_batches", "tried"),
    [
        (range(1, 65), [8, 16, 32, 64, 4, 2, 1]),
        (range(6, 61, 6), [12, 24, 48, 6]),
        (range(12, 61, 6), [12, 24, 48]),  # at least 12, in multiples of 6
        (range(3, 23), [8, 16, 4]),
        (range(3, 4), [3]),
        (range(17, 31), [17]),  # no power of two: something all the same
        ((1, 3, 64), [1, 3, 64]),
        ((64,), [64]),
        ((), []),
    ],
)
def test_which_micro_batches_and_in_which_order(
    micro_batches: Sequence[int], tried: list[int]
) -> None:
    search = search_of("gridsearch", space_of(1, micro_batches=micro_batches), ceiling=15)
    assert [p.micro_batch for p in proposals_of(search, lambda _: ran())] == tried


def test_a_list_is_tried_from_its_smallest_on_until_memory_ends() -> None:
    play(
        search_of("gridsearch", space_of(2, micro_batches=(1, 2, 24, 48))),
        """
        ask 0@1
        tell 0@1 OK 3
        ask 0@2
        tell 0@2 OK 2
        ask 0@24
        tell 0@24 OOM
        ask 1@1
        tell 1@1 OOM
        ask nothing
        """,
    )


def test_too_little_data_is_as_too_little_memory() -> None:
    search = search_of("gridsearch", space_of(1))
    asked = proposals_of(
        search,
        lambda p: (
            ran() if p.micro_batch <= 2 else Outcome(failed("ERROR").kind, smaller_may_run=True)
        ),
    )
    assert [p.micro_batch for p in asked] == [8, 4, 2, 1]


def test_settings_end_after_so_many_micro_batches_that_ran() -> None:
    play(
        search_of("gridsearch", space_of(2), num_micro_batches=2),
        """
        ask 0@8
        tell 0@8 OK 1
        ask 0@16
        tell 0@16 OOM       # did not run
        ask 0@4
        tell 0@4 OK 1
        ask 1@8
        tell 1@8 OOM
        ask 1@4
        tell 1@4 OK 1
        ask 1@2
        tell 1@2 OK 1
        ask nothing
        """,
    )


# -- the order of settings


def _branches(*stages: int, micro_batches: Sequence[int] = (1, 2)) -> Space:
    """Stage 0 has one choice of settings, every other one has two."""
    return Space(
        strategies=plain(*stages),
        micro_batches=micro_batches,
        slots=1,
        freedom=Freedom(
            choices={"contiguous_gradients": [False, True]},
            fix=("reduce_bucket_size", "sub_group_size"),
        ),
    )


def test_branches_as_listed_and_in_each_the_defaults_first() -> None:
    space = Space(strategies=plain(2, 0), micro_batches=(4,), slots=1, num_params=4 * 10**6)
    asked = proposals_of(search_of("gridsearch", space), lambda _: ran())
    # Buckets beyond the model's parameters are all alike.
    assert [dict(p.settings) for p in asked] == [
        {"stage": 2, "reduce_bucket_size": 5 * 10**6, "contiguous_gradients": True},
        {"stage": 2, "reduce_bucket_size": 10**6, "contiguous_gradients": True},
        {"stage": 2, "reduce_bucket_size": 5 * 10**6, "contiguous_gradients": False},
        {"stage": 2, "reduce_bucket_size": 10**6, "contiguous_gradients": False},
        {"stage": 0},
    ]
    assert [p.lineage for p in asked] == [0, 1, 2, 3, 4]


def test_while_one_runs_the_next_is_begun_and_what_was_begun_goes_first() -> None:
    play(
        search_of("gridsearch", _branches(0, 1)),
        """
        ask 0@1 stage 0
        ask 1@1 stage 1
        ask 2@1 stage 1
        ask nothing
        tell 2@1 OK 1
        tell 0@1 OK 1
        ask 0@2 stage 0
        ask 2@2 stage 1
        tell 1@1 OOM
        ask nothing
        tell 2@2 OK 1
        tell 0@2 OK 1
        ask nothing
        """,
    )


def test_a_branch_ends_after_trials_without_a_better_one() -> None:
    play(
        search_of("gridsearch", _branches(1, 2, micro_batches=(1, 2, 3, 4)), early_stopping=2),
        """
        ask 0@1 stage 1
        tell 0@1 OK 5
        ask 0@2 stage 1
        tell 0@2 OK 4
        ask 0@3 stage 1
        tell 0@3 OK 6       # better: counted from here
        ask 0@4 stage 1
        tell 0@4 OOM
        ask 1@1 stage 1     # the count goes on over settings
        tell 1@1 OK 6       # equal is no better
        ask 2@1 stage 2     # and is the branch's own, as is its best
        tell 2@1 OK 1
        ask 2@2 stage 2
        tell 2@2 OK 2
        ask 2@3 stage 2
        tell 2@3 OK 1
        ask 2@4 stage 2
        tell 2@4 OK 1
        ask nothing
        """,
    )


# -- whatever happens


def _space(micro_batches: Sequence[int] = range(2, 129, 2)) -> Space:
    return Space(
        strategies=plain(0, 1, 3), micro_batches=micro_batches, slots=1, num_params=2 * 10**7
    )


def _outcome(proposal: Proposal) -> Outcome:
    """A function of the configuration alone: what fits, how fast it is, and now and then a failure.

    A configuration that fails does so with every micro batch, so that no order hides anything.
    """

    def draw(of: str) -> int:
        return int(hashlib.sha256(of.encode()).hexdigest()[:8], 16)

    settings = json.dumps(proposal.settings, sort_keys=True)
    if draw(settings) % 10 == 0:
        return failed("ERROR")
    if proposal.micro_batch > draw(f"{settings} memory") % 150:
        return failed("OOM")
    return ran(draw(f"{settings} {proposal.micro_batch}"))


def _points(asked: Sequence[Proposal]) -> Counter[tuple[str, int]]:
    return Counter((json.dumps(p.settings, sort_keys=True), p.micro_batch) for p in asked)


@pytest.mark.parametrize("micro_batches", [range(1, 65), range(4, 65, 4), (1, 2, 5, 60)])
@pytest.mark.parametrize("concurrency", [1, 3, 50])
def test_everything_that_runs_is_tried_once(micro_batches: Sequence[int], concurrency: int) -> None:
    space = _space(micro_batches)
    asked = proposals_of(
        search_of("gridsearch", space), lambda _: ran(), concurrency=concurrency, limit=10**6
    )
    if isinstance(micro_batches, range):
        micro_batches = [size for size in (1, 2, 4, 8, 16, 32, 64) if size in micro_batches]
    expected = {
        (json.dumps(branch.settings(index), sort_keys=True), size)
        for branch in space.branches
        for index in range(branch.count)
        for size in micro_batches
    }
    assert len(expected) == len(micro_batches) * sum(branch.count for branch in space.branches)
    assert _points(asked) == Counter(expected)


@pytest.mark.parametrize("num_micro_batches", [None, 2])
def test_the_order_of_outcomes_changes_nothing_but_the_order(num_micro_batches: int | None) -> None:
    def asked(concurrency: int, order: int) -> list[Proposal]:
        search = search_of(
            "gridsearch", _space(), ceiling=40, num_micro_batches=num_micro_batches, seed=order
        )
        return proposals_of(search, _outcome, concurrency=concurrency, order=order, limit=10**6)

    one_by_one = asked(1, 0)
    assert max(_points(one_by_one).values()) == 1
    sections = [p.lineage for p in one_by_one]
    assert sections == sorted(sections), "one after the other"
    for concurrency, order in itertools.product((2, 7), range(5)):
        several = asked(concurrency, order)
        assert several == asked(concurrency, order)
        assert _points(several) == _points(one_by_one)


@pytest.mark.parametrize("seed", range(30))
def test_no_schedule_breaks_the_rules(seed: int) -> None:
    """With early stopping and outcomes of chance, asked and told in any order."""
    rng = np.random.default_rng(seed)
    search = search_of(
        "gridsearch",
        _space(),
        ceiling=int(rng.integers(1, 200)),
        early_stopping=int(rng.integers(1, 8)),
        num_micro_batches=[None, 1, 3][int(rng.integers(3))],
    )
    running: list[Proposal] = []
    asked: list[Proposal] = []
    limit: dict[int, float] = {}
    while True:
        proposal = search.ask() if rng.random() < 0.6 or not running else None
        if proposal is not None:
            assert proposal.micro_batch < limit.get(proposal.lineage, float("inf"))
            asked.append(proposal)
            running.append(proposal)
        elif running:
            ended = running.pop(int(rng.integers(len(running))))
            kind = ["OK", "OK", "OOM", "HOST_OOM", "TIMEOUT", "ERROR"][int(rng.integers(6))]
            outcome = ran(float(rng.integers(9))) if kind == "OK" else failed(kind)
            if kind == "ERROR":
                limit[ended.lineage] = 0
            elif kind != "OK":
                known = limit.get(ended.lineage, float("inf"))
                limit[ended.lineage] = min(known, ended.micro_batch)
            search.tell(ended, outcome)
        else:
            break
    assert max(_points(asked).values()) == 1
    assert {p.settings["stage"] for p in asked} == {0, 1, 3}, "no branch is left out"


def test_a_large_space_is_not_enumerated(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(strategies=plain(3), micro_batches=range(1, 65), slots=8, num_params=10**11)
    assert space.branches[0].count > 10**4
    made: list[int] = []
    settings = Branch.settings

    def counted(branch: Branch, index: int) -> dict[str, Any]:
        made.append(index)
        return settings(branch, index)

    monkeypatch.setattr(Branch, "settings", counted)
    search = search_of("gridsearch", space)
    for _ in range(50):
        proposal = search.ask()
        assert proposal is not None
        search.tell(proposal, failed("ERROR"))
    assert 50 <= len(made) < 200, "settings are made as they are asked for"
