"""Grid search: schedules written by hand, and completeness."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence

import pytest

from dsat.space.space import Freedom, Space
from dsat.values.outcome import Outcome
from dsat.values.zero_strategy import plain
from testing.helpers import failed, ran
from testing.search_contract import Driven, Proposed, play, proposals_of, space_of, walk

# -- the micro batches of one choice of settings


@pytest.mark.parametrize(
    ("ceiling", "trials"),
    [
        (15, "8 OK, 16 OK, 32 OOM, 4 OK, 2 OK, 1 OK, end"),  # the prediction may be too low
        (63, "32 OK, 64 OK, 16 OK"),  # 64 is the largest that is allowed
        (1000, "64 OK"),
        (16, "16 OK"),
        (15, "8 OOM, 4 HOST_OOM, 2 OK, 1 OK, end"),
        (1, "1 OOM, end"),
        (15, "8 OK, 16 TIMEOUT, 4 TIMEOUT, end"),  # nothing slower, and the second one ends it
        (15, "8 OK, 16 OOM, 4 OOM, 2 OK, 1 OK"),  # other use of the GPU may have grown
        (15, "8 ERROR, end"),
        (15, "8 INVALID, end"),
        (15, "8 OK, 16 CANCELED, end"),
    ],
)
def test_powers_of_two_of_a_range(ceiling: int, trials: str) -> None:
    walk(Driven("gridsearch", space_of(1), ceiling=ceiling), trials)


@pytest.mark.parametrize(
    ("micro_batches", "tried"),
    [
        (range(1, 65), [8, 16, 32, 64, 4, 2, 1]),
        (range(6, 61, 6), [12, 24, 48, 6]),
        (range(12, 61, 6), [12, 24, 48]),  # at least 12, in multiples of 6
        (range(3, 23), [8, 16, 4]),
        (range(17, 31), [17]),  # no power of two, yet one is tried
        ((1, 3, 64), [1, 3, 64]),
    ],
)
def test_which_micro_batches_and_in_which_order(
    micro_batches: Sequence[int], tried: list[int]
) -> None:
    search = Driven("gridsearch", space_of(1, micro_batches=micro_batches), ceiling=15)
    assert [p.micro_batch for p in proposals_of(search, lambda _: ran())] == tried


def test_a_list_is_tried_from_its_smallest_on_until_memory_ends() -> None:
    search = Driven("gridsearch", space_of(2, micro_batches=(1, 2, 24, 48)))
    walk(search, "1 OK, 2 OK, 24 OOM, 1 OOM, end")


def test_settings_end_after_so_many_micro_batches_that_ran() -> None:
    search = Driven("gridsearch", space_of(2), num_micro_batches=2)
    walk(search, "8 OK, 16 OOM, 4 OK, 8 OOM, 4 OK, 2 OK, end")


# -- the order of settings


def _branches(*stages: int, micro_batches: Sequence[int] = (1, 2)) -> Space:
    """Return a space in which stage 0 has one choice of settings, and every other stage two."""
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
    asked = proposals_of(Driven("gridsearch", space), lambda _: ran())
    # Buckets larger than the model are all equivalent.
    assert [dict(p.settings) for p in asked] == [
        {"stage": 2, "reduce_bucket_size": 5 * 10**6, "contiguous_gradients": True},
        {"stage": 2, "reduce_bucket_size": 10**6, "contiguous_gradients": True},
        {"stage": 2, "reduce_bucket_size": 5 * 10**6, "contiguous_gradients": False},
        {"stage": 2, "reduce_bucket_size": 10**6, "contiguous_gradients": False},
        {"stage": 0},
    ]
    assert [p.arm for p in asked] == [0, 1, 2, 3, 4]


def test_a_branch_ends_after_trials_without_a_better_one() -> None:
    play(
        Driven("gridsearch", _branches(1, 2, micro_batches=(1, 2, 3, 4)), early_stopping=2),
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


def _outcome(proposal: Proposed) -> Outcome:
    """Return an outcome that depends only on the configuration: memory, speed and some failures.

    Settings that fail do so with every micro batch, so that no order hides anything.
    """

    def draw(of: str) -> int:
        return int(hashlib.sha256(of.encode()).hexdigest()[:8], 16)

    settings = json.dumps(proposal.settings, sort_keys=True)
    if draw(settings) % 10 == 0:
        return failed("ERROR")
    if proposal.micro_batch > draw(f"{settings} memory") % 150:
        return failed("OOM")
    return ran(draw(f"{settings} {proposal.micro_batch}"))


@pytest.mark.parametrize("num_micro_batches", [None, 2])
def test_the_order_of_outcomes_changes_nothing_but_the_order(num_micro_batches: int | None) -> None:
    space = Space(
        strategies=plain(0, 1, 3),
        micro_batches=range(2, 129, 2),
        slots=1,
        num_params=2 * 10**7,
    )

    def points(concurrency: int, order: int) -> Counter[tuple[str, int]]:
        search = Driven(
            "gridsearch", space, ceiling=40, num_micro_batches=num_micro_batches, seed=order
        )
        asked = proposals_of(search, _outcome, concurrency=concurrency, order=order, limit=10**6)
        return Counter((json.dumps(p.settings, sort_keys=True), p.micro_batch) for p in asked)

    one_by_one = points(1, 0)
    assert set(one_by_one.values()) == {1}
    assert len({settings for settings, _ in one_by_one}) == sum(b.count for b in space.branches)
    for concurrency, order in ((2, 1), (50, 0)):
        assert points(concurrency, order) == one_by_one
