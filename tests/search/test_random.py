from __future__ import annotations

from collections import Counter
from typing import Any, cast

import numpy as np
import pytest

from dsat.search import RandomSearch
from dsat.space.space import Freedom, Space
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Proposal
from dsat.values.zero_strategy import plain
from testing.helpers import play, proposals_of, ran, search_of, space_of, walk


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
        freedom=Freedom(fix=("contiguous_gradients", "sub_group_size")),
        num_params=(10**6, 5 * 10**6)[lineages - 1],
    )


@pytest.mark.parametrize(
    ("lineages", "ceiling", "trials_per_config", "trials"),
    [
        (2, 3, 5, "0@2 OOM, 0@1 HOST_OOM, 1@1 OOM, end"),  # nothing runs: more is not tried
        (2, 15, 3, "0@8 OOM, 0@4 TIMEOUT, 0@2 OOM, 1@1 OK"),  # its trials are used up
        # The prediction was too low: all that should fit does, up to 6, then up to 12.
        (1, 3, 6, "2 OK, 3 OK, 5 OK, 6 OK, 9 OOM, 7 OK, end"),
        # The next one begins between 3 and 11, which ran.
        (2, 3, 6, "0@2 OK, 0@3 OK, 0@5 OK, 0@6 OK, 0@9 OK, 0@11 OK, 1@7 OK"),
    ],
)
def test_random_walks_through_micro_batches_until_a_lineage_ends(
    lineages: int, ceiling: int, trials_per_config: int, trials: str
) -> None:
    space = space_of(lineages)
    walk(_halfway(space, ceiling=ceiling, trials_per_config=trials_per_config), trials)


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


@pytest.mark.parametrize(
    ("metric", "values"), [("throughput", (10, 9, 8, 11)), ("latency", (10, 11, 12, 9))]
)
def test_random_starts_above_the_best_of_the_stage(metric: str, values: tuple[int, ...]) -> None:
    play(
        _halfway(space_of(3), metric=metric, trials_per_config=2),
        f"""
        ask 0@8
        tell 0@8 OK {values[0]}
        ask 0@12
        tell 0@12 OK {values[1]}
        ask 1@13            # 8 was the best: between 9 and 17
        tell 1@13 OK {values[2]}
        ask 1@15
        tell 1@15 OK {values[3]}
        ask 2@23            # between 16 and 31
        """,
        metric=metric,
    )


def test_random_does_not_look_further_than_the_allowed_micro_batches() -> None:
    walk(_halfway(space_of(1, micro_batches=(1, 2, 3)), ceiling=2), "1 OK, 2 OK, 3 OK, end")


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


def test_random_tries_other_settings_where_the_data_set_ends() -> None:
    def outcome(proposal: Proposal) -> Outcome:
        if proposal.micro_batch > 6:
            return Outcome(OutcomeKind.INVALID, smaller_may_run=True, most_samples=6)
        return ran(proposal.micro_batch)

    asked = proposals_of(search_of("random", space_of(8)), outcome)
    at_the_end = {str(p.settings) for p in asked if p.micro_batch == 6}
    assert len(at_the_end) > 4


def test_random_draws_around_the_middle() -> None:
    firsts = Counter(
        proposal.micro_batch
        for seed in range(300)
        if (proposal := search_of("random", space_of(1), ceiling=15, seed=seed).ask())
    )
    assert 7.5 < sum(mbs * n for mbs, n in firsts.items()) / 300 < 8.5
    assert len(firsts) >= 7, "a binomial spreads"
    assert sum(firsts[mbs] for mbs in range(6, 11)) > 200, "and keeps near the middle"
