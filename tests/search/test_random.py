"""Random search: properties of its draws over many seeds."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from dsat.space.space import Freedom, Space
from dsat.values.outcome import Outcome
from dsat.values.zero_strategy import plain
from testing.helpers import failed, ran
from testing.search_contract import Driven, Proposed, proposals_of, space_of

SEEDS = range(12)


def stages(*numbers: int) -> Space:
    return Space(
        strategies=plain(*numbers),
        micro_batches=range(1, 65),
        slots=1,
        freedom=Freedom(fix=("contiguous_gradients", "sub_group_size")),
        num_params=5 * 10**6,
    )


def test_the_first_micro_batch_is_drawn_around_the_middle() -> None:
    firsts: Counter[int] = Counter()
    for seed in range(300):
        proposal = Driven("random", space_of(1), ceiling=15, seed=seed).propose()
        assert proposal is not None
        firsts[proposal.micro_batch] += 1
    assert 7.5 < sum(size * count for size, count in firsts.items()) / 300 < 8.5
    assert len(firsts) >= 7, "a binomial spreads"
    assert sum(firsts[size] for size in range(6, 11)) > 200, "and keeps near the middle"


@pytest.mark.parametrize("most", [1, 3, 5])
def test_settings_get_a_limited_number_of_trials(most: int) -> None:
    """Their micro batches come in an order that fits the earlier outcomes."""
    for seed in SEEDS:
        search = Driven("random", space_of(8), ceiling=40, seed=seed, trials_per_config=most)
        asked = proposals_of(
            search, lambda p: ran(p.micro_batch) if p.micro_batch <= 30 else failed("OOM"), limit=60
        )
        counts = Counter(p.arm for p in asked)
        assert max(counts.values()) <= most and (most == 1 or max(counts.values()) > 1)
        for arm in counts:
            sizes = [p.micro_batch for p in asked if p.arm == arm]
            fits = [size for size in sizes if size <= 30]
            assert fits == sorted(fits)


@pytest.mark.parametrize("metric", ["throughput", "latency"])
def test_new_settings_start_above_the_best_of_their_stage(metric: str) -> None:
    """The best is at 8: every larger micro batch is worse."""
    starts = defaultdict(list)
    for seed in SEEDS:

        def outcome(proposal: Proposed) -> Outcome:
            distance = abs(proposal.micro_batch - 8)
            return ran(100.0 + distance if metric == "latency" else 100.0 - distance, metric)

        search = Driven("random", space_of(8), ceiling=15, metric=metric, seed=seed)
        asked = proposals_of(search, outcome, limit=40)
        best = min(asked[:5], key=lambda p: abs(p.micro_batch - 8)).micro_batch
        for first in {p.arm: p for p in reversed(asked)}.values():
            if first.arm > 0:
                starts[seed].append(first.micro_batch > min(best, 8))
    assert all(all(found) for found in starts.values()) and len(starts) > 6


@pytest.mark.parametrize("stage", [1, 2])
def test_stage_3_is_left_once_a_lower_stage_ran(stage: int) -> None:
    for seed in SEEDS:
        search = Driven("random", stages(stage, 3), seed=seed)
        asked = proposals_of(search, lambda _: ran(1.0), limit=40)
        last = (
            max(n for n, p in enumerate(asked) if p.settings["stage"] == 3)
            if any(p.settings["stage"] == 3 for p in asked)
            else -1
        )
        first = min(n for n, p in enumerate(asked) if p.settings["stage"] == stage)
        assert last < first


def test_stage_3_is_kept_while_lower_stages_fail_or_only_stage_0_ran() -> None:
    for seed in SEEDS:
        failing = proposals_of(
            Driven("random", stages(1, 3), seed=seed),
            lambda p: ran(p.micro_batch) if p.settings["stage"] == 3 else failed("OOM"),
            limit=40,
        )
        assert sum(p.settings["stage"] == 3 for p in failing) > 3
        with_0 = proposals_of(
            Driven("random", stages(0, 3), seed=seed), lambda p: ran(p.micro_batch), limit=40
        )
        assert {p.settings["stage"] for p in with_0} == {0, 3}


def test_other_settings_are_tried_where_the_data_set_ends() -> None:
    few = replace(failed("INVALID"), smaller_may_run=True, most_samples=6)

    def outcome(proposal: Proposed) -> Outcome:
        return few if proposal.micro_batch > 6 else ran(proposal.micro_batch)

    asked = proposals_of(Driven("random", space_of(8)), outcome)
    at_the_end = {str(p.settings) for p in asked if p.micro_batch == 6}
    assert len(at_the_end) > 4
