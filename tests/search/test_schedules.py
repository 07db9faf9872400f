from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest

from dsat.search import SEARCHES, RandomSearch
from dsat.search.asha import _Rung
from dsat.search.base import _Undrawn
from dsat.space.space import Freedom, Space
from dsat.values.outcome import Outcome
from dsat.values.trial import Proposal
from dsat.values.zero_strategy import plain
from testing.helpers import failed, play, proposals_of, ran, search_of, space_of

# -- binary


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            """
            ask 0@8
            tell 0@8 OK 1
            ask 0@12
            tell 0@12 OK 1
            ask 0@14
            tell 0@14 OK 1
            ask 0@15
            tell 0@15 OK 1
            ask nothing
            """,
            id="all fit",
        ),
        pytest.param(
            """
            ask 0@8
            tell 0@8 OOM
            ask 0@4
            tell 0@4 OOM
            ask 0@2
            tell 0@2 OOM
            ask 0@1
            tell 0@1 OOM
            ask nothing
            """,
            id="none fits",
        ),
        pytest.param(
            """
            ask 0@8
            tell 0@8 OK 1
            ask 0@12
            tell 0@12 OOM
            ask 0@10
            tell 0@10 OK 1
            ask 0@11
            tell 0@11 OOM
            ask nothing
            """,
            id="ten fit",
        ),
        pytest.param(
            """
            ask 0@8
            tell 0@8 HOST_OOM
            ask 0@4
            tell 0@4 OK 1
            ask 0@6
            tell 0@6 HOST_OOM
            ask 0@5
            tell 0@5 OK 1
            ask nothing
            """,
            id="host memory shrinks like device memory",
        ),
        pytest.param(
            """
            ask 0@8
            tell 0@8 OK 9
            ask 0@12
            tell 0@12 OK 1   # slower, yet what is larger stays open: only memory bounds it
            ask 0@14
            tell 0@14 OOM
            ask 0@13
            """,
            id="a worse value does not end it",
        ),
        pytest.param(
            """
            ask 0@8
            tell 0@8 TIMEOUT
            ask 0@4
            tell 0@4 OK 1
            ask 0@6
            tell 0@6 OK 1
            ask 0@7
            tell 0@7 OK 1
            ask nothing
            """,
            id="nothing slower than a time-out",
        ),
        pytest.param(
            """
            ask 0@8
            tell 0@8 OK 1
            ask 0@12
            tell 0@12 TIMEOUT
            ask 0@10
            tell 0@10 OOM
            ask 0@9
            tell 0@9 OK 1
            ask nothing
            """,
            id="time-out above, then memory",
        ),
        pytest.param(
            """
            ask 0@8
            tell 0@8 TIMEOUT
            ask 0@4
            tell 0@4 TIMEOUT
            ask nothing
            """,
            id="the second time-out ends it",
        ),
        pytest.param("ask 0@8\ntell 0@8 ERROR\nask nothing", id="error"),
        pytest.param("ask 0@8\ntell 0@8 INVALID\nask nothing", id="invalid"),
        pytest.param("ask 0@8\ntell 0@8 CANCELED\nask nothing", id="canceled"),
    ],
)
def test_binary_bisects_one_configuration(script: str) -> None:
    play(search_of("binary", space_of(1)), script)


def test_binary_replaces_what_is_finished_until_all_is_drawn() -> None:
    play(
        search_of("binary", space_of(3), ceiling=2),
        """
        ask 0@1
        tell 0@1 ERROR
        ask 1@1
        tell 1@1 OK 1
        ask 1@2
        tell 1@2 OOM
        ask 2@1
        tell 2@1 OOM
        ask nothing
        ask nothing
        """,
    )


def test_binary_asked_ahead_of_tells() -> None:
    play(
        search_of("binary", space_of(3)),
        """
        ask 0@8
        ask 1@8
        ask 2@8
        ask nothing
        tell 1@8 OK 1
        ask 1@12
        ask nothing
        tell 2@8 OOM
        tell 0@8 OK 1
        ask 2@4     # waits the longest
        ask 0@12
        ask nothing
        tell 0@12 ERROR
        ask nothing
        """,
    )


def test_binary_finishes_what_it_began_before_it_draws() -> None:
    play(
        search_of("binary", space_of(2)),
        """
        ask 0@8
        tell 0@8 OK 1
        ask 0@12
        ask 1@8
        """,
    )


def test_binary_tries_only_allowed_micro_batches() -> None:
    play(
        search_of("binary", space_of(1, micro_batches=(2, 6, 10, 30)), ceiling=29),
        """
        ask 0@6
        tell 0@6 OK 1
        ask 0@10
        tell 0@10 OK 1
        ask nothing     # 30 is more than can fit
        """,
    )


def test_a_search_tries_the_smallest_micro_batch_when_nothing_should_fit() -> None:
    play(
        search_of("binary", space_of(1, micro_batches=(4, 8)), ceiling=1),
        """
        ask 0@4
        tell 0@4 OK 1
        ask nothing
        """,
    )


@pytest.mark.parametrize("method", ["asha", "binary"])
def test_settings_are_drawn_until_some_fit(method: str) -> None:
    space = Space(strategies=plain(2), micro_batches=range(1, 65), slots=2, num_params=10**9)
    settings = [space.branches[0].settings(n) for n in range(space.branches[0].count)]
    assert len(settings) > 300

    def predict(wanted: Mapping[str, Any]) -> float:
        return 5.0 if wanted == settings[-1] else 0.0

    for seed in range(5):
        search = search_of(method, space, seed=seed, predict=predict)
        proposal = search.ask()
        assert proposal is not None and proposal.settings == settings[-1]
        search.tell(proposal, failed("ERROR"))
        assert search.ask() is None


@pytest.mark.parametrize(("factor", "first"), [(0.5, 4), (1.0, 8), (2.0, 15), (0.01, 1)])
@pytest.mark.parametrize("method", ["asha", "binary"])
def test_search_range_factor_scales_where_a_search_begins(
    method: str, factor: float, first: int
) -> None:
    for predict in (None, lambda _: 15.0):
        options: dict[str, Any] = {"search_range_factor": factor, "predict": predict}
        proposal = search_of(method, space_of(1), ceiling=15, **options).ask()
        assert proposal is not None and proposal.micro_batch == first


def test_each_stage_begins_from_what_fits_in_it() -> None:
    space = Space(strategies=plain(1, 3), micro_batches=range(1, 100), slots=4, num_params=1000)
    fit = {1: 16, 3: 19}
    search = search_of("binary", space, predict=lambda settings: fit[settings["stage"]])
    first = {}
    for _ in range(12):
        proposal = search.ask()
        if proposal is None:
            break
        first[proposal.settings["stage"]] = proposal.micro_batch
    assert first == {1: 8, 3: 10}


# -- asha


def test_asha_promotes_the_best_half() -> None:
    play(
        search_of("asha", space_of(8), ceiling=63, max_rungs=3, min_trials=1, divisor=2),
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


def test_asha_waits_for_a_third_with_divisor_three() -> None:
    play(
        search_of("asha", space_of(4), ceiling=63, max_rungs=2, min_trials=1, divisor=3),
        """
        ask 0@32 rung 0
        tell 0@32 OK 30
        ask 1@32 rung 0
        tell 1@32 OK 20
        ask 2@32 rung 0
        tell 2@32 OK 10
        ask 0@48 rung 1
        tell 0@48 OK 1
        ask 0@56 rung 1
        tell 0@56 OK 1
        ask 3@32 rung 0     # lineage 0 had its three trials
        tell 3@32 OK 1
        ask nothing
        """,
    )


def test_asha_ranks_by_the_best_value_of_a_lineage() -> None:
    play(
        search_of("asha", space_of(3), ceiling=63, max_rungs=2, min_trials=2, divisor=2),
        """
        ask 0@32 rung 0
        tell 0@32 OK 50
        ask 0@48 rung 0
        tell 0@48 OK 1      # its last value is the worst of all
        ask 1@32 rung 0
        tell 1@32 OK 20
        ask 1@48 rung 0
        tell 1@48 OK 30
        ask 0@56 rung 1
        """,
    )


def test_asha_minimises_a_latency() -> None:
    play(
        search_of(
            "asha", space_of(3), ceiling=63, metric="latency", max_rungs=2, min_trials=1, divisor=2
        ),
        """
        ask 0@32 rung 0
        tell 0@32 OK 10
        ask 1@32 rung 0
        tell 1@32 OK 20
        ask 0@48 rung 1
        """,
        metric="latency",
    )


def test_asha_gives_the_highest_rung_the_first_slot() -> None:
    play(
        search_of("asha", space_of(8), ceiling=63, max_rungs=3, min_trials=2, divisor=2),
        """
        ask 0@32 rung 0
        tell 0@32 OK 10
        ask 0@48 rung 0
        tell 0@48 OK 10
        ask 1@32 rung 0
        tell 1@32 OK 20
        ask 1@48 rung 0
        tell 1@48 OK 20
        ask 1@56 rung 1
        ask 2@32 rung 0
        tell 2@32 OK 99
        tell 1@56 OK 20
        ask 1@60 rung 1     # before lineage 2, which is better and waits longer
        ask 2@48 rung 0
        """,
    )


def test_asha_gives_the_longest_lineage_of_a_rung_the_first_slot() -> None:
    play(
        search_of("asha", space_of(8), ceiling=63, max_rungs=2, min_trials=3, divisor=2),
        """
        ask 0@32 rung 0
        ask 1@32 rung 0
        tell 1@32 OK 1
        ask 1@48 rung 0
        tell 0@32 OK 9
        tell 1@48 OK 1
        ask 1@56 rung 0
        ask 0@48 rung 0
        """,
    )


def test_asha_promotes_before_what_waits_in_a_lower_rung_goes_on() -> None:
    play(
        search_of("asha", space_of(8), ceiling=63, max_rungs=2, min_trials=2, divisor=2),
        """
        ask 0@32 rung 0
        ask 1@32 rung 0
        ask 2@32 rung 0
        tell 0@32 OK 10
        ask 0@48 rung 0
        tell 1@32 OK 20
        ask 1@48 rung 0
        tell 0@48 OK 10
        tell 1@48 OK 20
        tell 2@32 OK 1
        ask 1@56 rung 1
        ask 2@48 rung 0
        """,
    )


def test_asha_promotes_from_the_highest_rung_first() -> None:
    play(
        search_of("asha", space_of(8), ceiling=63, max_rungs=3, min_trials=1, divisor=2),
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


def test_asha_passes_a_finished_lineage_through_to_the_next_rung() -> None:
    begin = """
        ask 0@32 rung 0
        tell 0@32 OK 50
        ask 0@48 rung 0
        tell 0@48 ERROR     # finished, and the best so far
        ask 1@32 rung 0
        tell 1@32 OK 10
        ask 1@48 rung 0
        tell 1@48 OK 11
        ask 2@32 rung 0     # lineage 0 was promoted, with nothing to try there
        tell 2@32 OK 5
        ask 2@48 rung 0
        tell 2@48 ERROR
        ask 3@32 rung 0
        tell 3@32 OK 20
        ask 3@48 rung 0
        tell 3@48 OK 21
        ask 3@56 rung 1
        tell 3@56 OK 22
        ask 3@60 rung 1
        """
    rest = {
        # Lineage 0 stands in rung 1 too: the better of the two goes on.
        "tell 3@60 OK 61": "ask 3@62 rung 2",
        "tell 3@60 OK 40": "ask 4@32 rung 0",
    }
    for told, asked in rest.items():
        search = search_of("asha", space_of(8), ceiling=63, max_rungs=3, min_trials=2, divisor=2)
        play(search, f"{begin.strip()}\n{told}\n{asked}")


def test_asha_passes_several_finished_lineages_through_at_once() -> None:
    play(
        search_of("asha", space_of(4), ceiling=1, max_rungs=3, min_trials=1, divisor=2),
        """
        ask 0@1 rung 0
        ask 1@1 rung 0
        ask 2@1 rung 0
        ask 3@1 rung 0
        tell 0@1 OK 1
        tell 1@1 OK 2
        tell 2@1 OK 3
        tell 3@1 OK 4
        ask nothing
        """,
    )


def test_asha_promotes_another_when_a_finished_lineage_made_room() -> None:
    play(
        search_of("asha", space_of(8), ceiling=63, max_rungs=3, min_trials=2, divisor=2),
        """
        ask 0@32 rung 0
        ask 1@32 rung 0
        ask 2@32 rung 0
        ask 3@32 rung 0
        tell 0@32 OK 50
        tell 1@32 OK 40
        tell 2@32 OK 5
        tell 3@32 OK 7
        ask 0@48 rung 0
        ask 1@48 rung 0
        ask 2@48 rung 0
        ask 3@48 rung 0
        tell 0@48 ERROR
        tell 1@48 OK 41
        tell 2@48 OK 6
        tell 3@48 OK 8
        ask 1@56 rung 1     # 2 of 4, and the better one is finished
        ask 4@32 rung 0
        """,
    )


def test_asha_counts_a_lineage_that_never_ran_but_promotes_it_never() -> None:
    play(
        search_of("asha", space_of(5), ceiling=63, max_rungs=3, min_trials=1, divisor=2),
        """
        ask 0@32 rung 0
        tell 0@32 OOM
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


def test_asha_with_one_rung_only_draws() -> None:
    play(
        search_of("asha", space_of(3), ceiling=63, max_rungs=1, min_trials=2, divisor=2),
        """
        ask 0@32 rung 0
        tell 0@32 OK 1
        ask 0@48 rung 0
        tell 0@48 OK 1
        ask 1@32 rung 0
        tell 1@32 OOM
        ask 1@16 rung 0
        tell 1@16 OK 1
        ask 2@32 rung 0
        tell 2@32 ERROR
        ask nothing
        """,
    )


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
    search = search_of("asha", wide, ceiling=2**60, **options)
    asked = proposals_of(search, lambda p: ran(p.lineage), limit=400)

    trials_until: dict[int, dict[int, int]] = defaultdict(dict)
    counts: Counter[int] = Counter()
    for proposal in asked:
        counts[proposal.lineage] += 1
        trials_until[proposal.lineage][proposal.note["rung"]] = counts[proposal.lineage]
    assert max(max(rungs) for rungs in trials_until.values()) == len(resources) - 1
    for lineage, rungs in trials_until.items():
        assert list(rungs) == list(range(len(rungs)))
        if lineage != asked[-1].lineage:
            assert list(rungs.values()) == resources[: len(rungs)]


@pytest.mark.parametrize("divisor", [2, 3, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_rung_against_sorting_all_of_it(divisor: int, tied: bool) -> None:
    for seed in range(20):
        rng = np.random.default_rng([seed, divisor])
        count = 60
        # Among equals the one that was completed first stays: there ids follow the completions.
        ids = range(count) if tied else map(int, rng.permutation(count))
        losses = rng.integers(6, size=count) if tied else rng.permutation(count)
        rung = _Rung(divisor)
        completed: list[tuple[float, int] | None] = []
        promoted: set[int] = set()
        for lineage_id, loss in zip(ids, losses, strict=True):
            ran_at_all = rng.random() < 0.8
            rung.complete(lineage_id, float(loss) if ran_at_all else None)
            completed.append((float(loss), lineage_id) if ran_at_all else None)
            while rng.random() < 0.5:
                top = sorted(c for c in completed if c is not None)[: len(completed) // divisor]
                expected = next((i for _, i in top if i not in promoted), None)
                assert rung.promote() == expected
                if expected is None:
                    break
                promoted.add(expected)


# -- random


class _HalfwayDraws:
    """Draws that a person can predict: the first of what is open, the middle of a binomial."""

    def integers(self, count: int) -> int:
        return 0

    def binomial(self, count: int, _: float) -> int:
        assert count >= 0
        return count // 2


class HalfwayRandomSearch(RandomSearch):
    def _rng(self) -> np.random.Generator:
        return cast(np.random.Generator, _HalfwayDraws())


def _halfway(space: Space, *, ceiling: int = 15, **options: Any) -> RandomSearch:
    return cast(RandomSearch, search_of(HalfwayRandomSearch, space, ceiling=ceiling, **options))


def _two_stages(first: int, second: int, *, lineages: int = 1) -> Space:
    one = space_of(lineages)
    return Space(
        strategies=plain(first, second),
        micro_batches=one.micro_batches,
        slots=1,
        freedom=Freedom(fixed=("contiguous_gradients", "sub_group_size")),
        num_params=(10**6, 5 * 10**6)[lineages - 1],
    )


def test_random_ends_a_lineage_without_memory_at_its_smallest() -> None:
    play(
        _halfway(space_of(2), ceiling=3),
        """
        ask 0@2
        tell 0@2 OOM
        ask 0@1
        tell 0@1 HOST_OOM
        ask 1@2
        tell 1@2 OOM
        ask 1@1
        tell 1@1 OOM
        ask nothing
        """,
    )


def test_random_ends_a_lineage_that_used_up_its_trials() -> None:
    play(
        _halfway(space_of(2), trials_per_config=3),
        """
        ask 0@8
        tell 0@8 OOM
        ask 0@4
        tell 0@4 TIMEOUT
        ask 0@2
        tell 0@2 OOM
        ask 1@8
        """,
    )


def test_random_gives_a_configuration_five_trials_unless_told_otherwise() -> None:
    asked = proposals_of(search_of("random", space_of(3), ceiling=63), lambda p: ran(p.micro_batch))
    assert [p.lineage for p in asked[:6]] == [0, 0, 0, 0, 0, 1]


def test_random_ends_stage_3_once_a_lower_stage_ran() -> None:
    play(
        _halfway(_two_stages(3, 1)),
        """
        ask 0@8 stage 3
        ask 1@8 stage 1
        tell 1@8 OK 1
        tell 0@8 OK 99
        ask 1@12 stage 1
        ask nothing
        """,
    )


def test_random_ends_a_waiting_stage_3_once_a_lower_stage_ran() -> None:
    play(
        _halfway(_two_stages(3, 2)),
        """
        ask 0@8 stage 3
        ask 1@8 stage 2
        tell 0@8 OK 99
        tell 1@8 OK 1
        ask 1@12 stage 2
        ask nothing
        """,
    )


def test_random_keeps_stage_3_while_lower_stages_fail() -> None:
    play(
        _halfway(_two_stages(3, 1)),
        """
        ask 0@8 stage 3
        ask 1@8 stage 1
        tell 0@8 OK 1
        tell 1@8 OOM
        ask 0@12 stage 3
        ask 1@4 stage 1
        """,
    )


def test_random_keeps_stage_3_when_only_stage_0_ran() -> None:
    play(
        _halfway(_two_stages(0, 3), trials_per_config=1),
        """
        ask 0@8 stage 0
        tell 0@8 OK 1
        ask 1@8 stage 3
        """,
    )


@pytest.mark.parametrize("stage", [1, 2])
def test_random_does_not_draw_stage_3_once_a_lower_stage_ran(stage: int) -> None:
    play(
        _halfway(_two_stages(stage, 3, lineages=2), trials_per_config=1),
        f"""
        ask 0@8 stage {stage}
        tell 0@8 OK 1
        ask 1@13 stage {stage}
        tell 1@13 OK 1
        ask nothing
        """,
    )
    play(
        _halfway(_two_stages(stage, 3, lineages=2), trials_per_config=1),
        f"""
        ask 0@8 stage {stage}
        tell 0@8 OOM
        ask 1@8 stage 3
        """,
    )


def test_random_ends_a_lineage_below_what_ran_in_its_stage() -> None:
    play(
        _halfway(space_of(3)),
        """
        ask 0@8
        ask 1@8
        tell 0@8 OOM        # 7 at most from here on
        tell 1@8 OK 1
        ask 1@12
        ask 2@13
        ask nothing
        """,
    )


def test_random_ends_a_lineage_that_can_only_equal_what_ran_in_its_stage() -> None:
    play(
        _halfway(space_of(3)),
        """
        ask 0@8
        ask 1@8
        tell 0@8 OOM
        tell 1@8 OOM
        ask 0@4
        ask 1@4
        tell 0@4 OK 1
        ask 0@6
        tell 0@6 OK 1
        ask 0@7
        tell 0@7 OK 1
        tell 1@4 OK 1
        ask 2@7
        """,
    )


def test_random_remembers_the_largest_that_ran_not_the_last() -> None:
    play(
        _halfway(space_of(3)),
        """
        ask 0@8
        ask 1@8
        tell 0@8 OK 1
        ask 0@12
        tell 0@12 OK 1
        tell 1@8 OK 1
        ask 0@14
        ask 1@12
        tell 1@12 OOM       # 11 at most, and 12 ran
        ask 2@13
        """,
    )


def test_random_goes_on_below_what_ran_while_memory_suffices() -> None:
    play(
        _halfway(space_of(2), ceiling=3),
        """
        ask 0@2
        ask 1@2
        tell 1@2 OK 1
        ask 1@3
        tell 1@3 OK 1
        tell 0@2 OK 1
        ask 1@5
        ask 0@3
        """,
    )


def test_random_goes_on_while_it_can_reach_more_than_what_ran() -> None:
    play(
        _halfway(space_of(1)),
        """
        ask 0@8
        tell 0@8 OK 1
        ask 0@12
        tell 0@12 OOM       # 11 at most, and only 8 ran
        ask 0@10
        tell 0@10 OOM
        ask 0@9
        tell 0@9 OK 1
        ask nothing
        """,
    )


def test_random_compares_with_its_own_stage_only() -> None:
    play(
        _halfway(_two_stages(1, 2)),
        """
        ask 0@8 stage 1
        ask 1@8 stage 2
        tell 0@8 OOM
        tell 1@8 OK 1
        ask 0@4 stage 1
        """,
    )


def test_random_starts_above_the_best_of_the_stage() -> None:
    play(
        _halfway(space_of(3), trials_per_config=2),
        """
        ask 0@8
        tell 0@8 OK 10
        ask 0@12
        tell 0@12 OK 9
        ask 1@13            # 8 was the best: between 9 and 17
        tell 1@13 OK 8
        ask 1@15
        tell 1@15 OK 11
        ask 2@23            # between 16 and 31
        """,
    )


def test_random_starts_below_the_largest_of_the_stage() -> None:
    play(
        _halfway(space_of(2), ceiling=3, trials_per_config=6),
        """
        ask 0@2
        tell 0@2 OK 50
        ask 0@3
        tell 0@3 OK 1
        ask 0@5
        tell 0@5 OK 1
        ask 0@6
        tell 0@6 OK 1
        ask 0@9
        tell 0@9 OK 1
        ask 0@11
        tell 0@11 OK 1
        ask 1@7             # 3 to 11, which ran
        """,
    )


def test_random_starts_below_the_upper_end_that_the_best_had() -> None:
    play(
        _halfway(space_of(2), ceiling=63, trials_per_config=2),
        """
        ask 0@32
        tell 0@32 TIMEOUT
        ask 0@16
        tell 0@16 OK 1
        ask 1@40            # 17 to 63
        """,
    )


def test_random_starts_at_the_largest_micro_batch_when_that_was_the_best() -> None:
    play(
        _halfway(space_of(2, micro_batches=(1, 2))),
        """
        ask 0@1
        tell 0@1 OK 1
        ask 0@2
        tell 0@2 OK 2
        ask 1@2
        tell 1@2 OK 1
        ask nothing
        """,
    )


def test_random_minimises_a_latency() -> None:
    play(
        _halfway(space_of(2), metric="latency", trials_per_config=2),
        """
        ask 0@8
        tell 0@8 OK 10
        ask 0@12
        tell 0@12 OK 9
        ask 1@19            # 12 was the best: between 13 and 25
        """,
        metric="latency",
    )


def test_random_looks_further_when_the_prediction_was_too_low() -> None:
    play(
        _halfway(space_of(1), ceiling=3, trials_per_config=6),
        """
        ask 0@2
        tell 0@2 OK 1
        ask 0@3
        tell 0@3 OK 1       # all that should fit does: up to 6
        ask 0@5
        tell 0@5 OK 1
        ask 0@6
        tell 0@6 OK 1       # up to 12
        ask 0@9
        tell 0@9 OOM
        ask 0@7
        tell 0@7 OK 1
        ask nothing
        """,
    )


def test_random_does_not_look_further_than_the_allowed_micro_batches() -> None:
    play(
        _halfway(space_of(1, micro_batches=(1, 2, 3)), ceiling=2),
        """
        ask 0@1
        tell 0@1 OK 1
        ask 0@2
        tell 0@2 OK 1
        ask 0@3
        tell 0@3 OK 1
        ask nothing
        """,
    )


def test_random_does_not_look_further_than_what_ran_out_of_memory() -> None:
    play(
        _halfway(space_of(2), ceiling=7),
        """
        ask 0@4
        tell 0@4 OOM
        ask 0@2
        tell 0@2 OK 5
        ask 0@3
        tell 0@3 OK 6
        ask 1@5
        """,
    )


def test_random_does_not_look_further_than_a_time_out() -> None:
    play(
        _halfway(space_of(2), ceiling=4),
        """
        ask 0@2
        tell 0@2 OK 5
        ask 0@3
        tell 0@3 OK 5
        ask 0@4
        tell 0@4 TIMEOUT
        ask 1@4
        """,
    )


@pytest.mark.parametrize("method", SEARCHES)
def test_a_search_has_no_reason_to_stop_unless_told(method: str) -> None:
    search = search_of(method, space_of(8))
    proposals_of(search, lambda _: ran(1.0))
    assert search.stop_reason is None


def test_random_draws_around_the_middle() -> None:
    firsts = Counter(
        proposal.micro_batch
        for seed in range(300)
        if (proposal := search_of("random", space_of(1), ceiling=15, seed=seed).ask())
    )
    assert 7.5 < sum(mbs * n for mbs, n in firsts.items()) / 300 < 8.5
    assert len(firsts) >= 7, "a binomial spreads"
    assert sum(firsts[mbs] for mbs in range(6, 11)) > 200, "and keeps near the middle"


# -- what holds for all

DRAWING = [method for method in SEARCHES if method != "gridsearch"]  # the others need no seed
BISECTING = [method for method in DRAWING if method != "model"]


def _wide_space() -> Space:
    return Space(
        strategies=plain(0, 1, 2, 3),
        micro_batches=range(2, 129, 2),
        slots=2,
        gas=1,
        num_params=2 * 10**6,
    )


def _scripted(proposal: Proposal, salt: int) -> Outcome:
    """What becomes of a configuration is a function of the configuration alone."""

    def draw(of: str) -> int:
        return int(hashlib.sha256(f"{salt} {of}".encode()).hexdigest()[:8], 16)

    section = json.dumps(proposal.settings, sort_keys=True)
    kind = draw(f"{section} {proposal.micro_batch}") % 100
    if kind < 4:
        return failed("ERROR")
    if kind < 10:
        return failed("TIMEOUT")
    if proposal.micro_batch > 20 + draw(section) % 90:
        return failed("OOM" if kind % 2 else "HOST_OOM")
    return ran(proposal.micro_batch + kind / 10)


@pytest.mark.parametrize("concurrency", [1, 5])
@pytest.mark.parametrize("method", SEARCHES)
def test_no_schedule_breaks_the_rules_of_a_lineage(method: str, concurrency: int) -> None:
    for seed in range(3 if method == "model" else 12):  # which takes milliseconds a decision
        search = search_of(method, _wide_space(), ceiling=60, seed=seed)
        outcomes: dict[int, list[tuple[int, str]]] = defaultdict(list)
        running: Counter[int] = Counter()
        zero_of: dict[int, str] = {}
        seen: set[tuple[str, int]] = set()
        rng = np.random.default_rng([seed, concurrency])
        asked: list[Proposal] = []
        for _ in range(250):
            if len(asked) < concurrency and rng.random() < 0.7:
                proposal = search.ask()
                if proposal is None:
                    assert asked, "nothing runs and the space is far from exhausted"
                    continue
                section = json.dumps(proposal.settings, sort_keys=True)
                micro_batch, lineage = proposal.micro_batch, proposal.lineage
                assert micro_batch in search.space.micro_batches
                assert (section, micro_batch) not in seen
                assert zero_of.setdefault(lineage, section) == section
                if method != "model":
                    assert not running[lineage], "the next micro batch depends on the last"
                told = outcomes[lineage]
                assert not any(kind == "ERROR" for _, kind in told)
                assert [kind for _, kind in told].count("TIMEOUT") < 2
                if method in BISECTING:
                    assert all(micro_batch > other for other, kind in told if kind == "OK")
                assert all(micro_batch < other for other, kind in told if kind != "OK")
                seen.add((section, micro_batch))
                running[lineage] += 1
                asked.append(proposal)
            elif asked:
                proposal = asked.pop(int(rng.integers(len(asked))))
                outcome = _scripted(proposal, seed)
                search.tell(proposal, outcome)
                running[proposal.lineage] -= 1
                outcomes[proposal.lineage].append((proposal.micro_batch, outcome.kind.value))
        assert len(set(zero_of.values())) == len(zero_of) > 3


@pytest.mark.parametrize("method", SEARCHES)
def test_the_whole_space_is_tried_when_there_is_time(method: str) -> None:
    space = Space(
        strategies=plain(0, 1, 2, 3), micro_batches=(1, 2), slots=1, gas=1, num_params=4 * 10**6
    )
    # Nothing runs: no search may skip a ZeRO section because of another one.
    asked = proposals_of(search_of(method, space, ceiling=1), lambda _: failed("OOM"))
    sections = {json.dumps(p.settings, sort_keys=True) for p in asked}
    # Two bucket sizes, and contiguous_gradients from stage 1 on.
    assert len(sections) == len(asked) == 1 + 4 + 4 + 4


@pytest.mark.parametrize("method", SEARCHES)
def test_one_seed_one_schedule(method: str) -> None:
    def schedule(seed: int) -> list[Proposal]:
        search = search_of(method, _wide_space(), ceiling=60, seed=seed)
        return proposals_of(search, lambda p: _scripted(p, 1), concurrency=3, limit=60)

    seeds = range(3 if method == "model" else 5)
    schedules = [schedule(seed) for seed in seeds]
    assert schedules == [schedule(seed) for seed in seeds]
    for one, other in itertools.combinations(schedules, 2):
        assert (one != other) == (method in DRAWING)


@pytest.mark.parametrize("method", SEARCHES)
def test_a_search_leaves_the_global_random_numbers_alone(method: str) -> None:
    import random

    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    proposals_of(search_of(method, _wide_space()), lambda p: _scripted(p, 1), limit=40)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]


def test_draws_without_replacement_begin_with_the_first_and_go_on_at_random() -> None:
    orders: Counter[tuple[int, ...]] = Counter()
    for seed in range(1200):
        rng = np.random.default_rng(seed)
        undrawn = _Undrawn(4)
        first, *others = (undrawn.take(rng) for _ in range(4))
        orders[tuple(others)] += 1
        assert first == 0 == undrawn.count
    assert set(orders) == set(itertools.permutations((1, 2, 3)))
    assert all(150 < n < 250 for n in orders.values()), orders


def test_draws_without_replacement_take_everything_once() -> None:
    rng = np.random.default_rng(0)
    undrawn = _Undrawn(500)
    assert sorted(undrawn.take(rng) for _ in range(500)) == list(range(500))
