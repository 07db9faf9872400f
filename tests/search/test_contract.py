"""What holds for every search, whatever it proposes first."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from dsat.search import SEARCHES, RandomSearch
from dsat.search.base import Costs
from dsat.space.space import Freedom, Space
from dsat.values.outcome import Outcome
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import plain
from testing.helpers import failed, ran
from testing.search_contract import Driven, Proposed, play, proposals_of, space_of

# The model-based search takes milliseconds per decision, and these tests need hundreds.
MODEL_IS_SLOW = [
    pytest.param(method, marks=pytest.mark.slow) if method == "model" else method
    for method in SEARCHES
]
DRAWING = set(SEARCHES) - {"gridsearch", "model"}  # these two need no seed


def wide_space() -> Space:
    return Space(
        strategies=plain(0, 1, 2, 3),
        micro_batches=range(2, 129, 2),
        slots=2,
        gas=1,
        num_params=10**8,
    )


def settings_of(proposal: Proposed) -> str:
    return json.dumps(proposal.settings, sort_keys=True)


def scripted(proposal: Proposed, salt: int) -> Outcome:
    """Return an outcome that depends only on the configuration."""

    def draw(of: str) -> int:
        return int(hashlib.sha256(f"{salt} {of}".encode()).hexdigest()[:8], 16)

    section = settings_of(proposal)
    kind = draw(f"{section} {proposal.micro_batch}") % 100
    if kind < 4:
        return failed("ERROR")
    if kind < 10:
        return failed("TIMEOUT")
    if proposal.micro_batch > 20 + draw(section) % 90:
        return failed("OOM" if kind % 2 else "HOST_OOM")
    return ran(proposal.micro_batch + kind / 10)


class Rules:
    """Rules that a search must follow for each choice of settings, in any order of ends."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.seen: set[tuple[str, int]] = set()
        self.told: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.arms: dict[str, int | None] = {}
        self.running: Counter[str] = Counter()

    def begin(self, proposal: Proposed) -> None:
        size, arm = proposal.micro_batch, settings_of(proposal)
        assert (arm, size) not in self.seen, "measured twice"
        assert self.arms.setdefault(arm, proposal.arm) == proposal.arm
        self.seen.add((arm, size))
        if self.method != "model":
            assert not self.running[arm], "the next micro batch depends on the last"
        kinds = [kind for _, kind in self.told[arm]]
        assert "ERROR" not in kinds and kinds.count("TIMEOUT") < 2
        assert all(size < other for other, kind in self.told[arm] if kind != "OK")
        if self.method in DRAWING:
            assert all(size > other for other, kind in self.told[arm] if kind == "OK")
        self.running[arm] += 1

    def end(self, proposal: Proposed, outcome: Outcome) -> None:
        self.running[settings_of(proposal)] -= 1
        self.told[settings_of(proposal)].append((proposal.micro_batch, outcome.kind.value))


@pytest.mark.slow
@pytest.mark.parametrize("concurrency", [1, 5])
@pytest.mark.parametrize("method", MODEL_IS_SLOW)
def test_no_schedule_breaks_the_rules(method: str, concurrency: int) -> None:
    draws_at_random = issubclass(SEARCHES[method], RandomSearch)
    for seed in range(1 if method == "model" else 6):
        search, rules = Driven(method, wide_space(), ceiling=60, seed=seed), Rules(method)
        rng = np.random.default_rng([seed, concurrency])
        running: list[Proposed] = []
        for _ in range(250):
            if len(running) < concurrency and rng.random() < 0.7:
                proposal = search.propose()
                if proposal is None:
                    assert running or (draws_at_random and len(rules.arms) >= 65), "far"
                    continue
                assert proposal.micro_batch in search.space.micro_batches
                rules.begin(proposal)
                running.append(proposal)
            elif running:
                proposal = running.pop(int(rng.integers(len(running))))
                outcome = scripted(proposal, seed)
                search.end(proposal, outcome)
                rules.end(proposal, outcome)
        assert len(rules.arms) > 3
        assert method == "model" or len(set(rules.arms.values())) == len(rules.arms)


@pytest.mark.parametrize("method", SEARCHES)
def test_the_whole_space_is_tried_when_there_is_time(method: str) -> None:
    """Nothing runs, so no search may skip settings because of others. Then it ends."""
    space = Space(
        strategies=plain(0, 1, 2, 3), micro_batches=(1, 2), slots=1, gas=1, num_params=4 * 10**6
    )
    search = Driven(method, space, ceiling=1)
    proposed = proposals_of(search, lambda _: failed("OOM"))
    assert search.propose() is None and search.stop_reason is None
    # Two bucket sizes, and contiguous_gradients from stage 1 on.
    assert len({settings_of(p) for p in proposed}) == len(proposed) == 1 + 4 + 4 + 4


@pytest.mark.parametrize("method", MODEL_IS_SLOW)
def test_one_seed_one_schedule(method: str) -> None:
    def schedule(seed: int) -> list[Proposed]:
        search = Driven(method, wide_space(), ceiling=60, seed=seed)
        limit = 25 if method == "model" else 60
        return proposals_of(search, lambda p: scripted(p, 1), concurrency=3, limit=limit)

    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    schedules = [schedule(seed) for seed in range(2 if method == "model" else 5)]
    assert schedules[0] == schedule(0)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]
    for one, other in itertools.combinations(schedules, 2):
        assert (one != other) == (method in DRAWING)


@pytest.mark.parametrize("method", SEARCHES)
@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_a_small_space_is_found(method: str, seed: int) -> None:
    """Brute force finds the best of a world in which settings, stages and memory matter."""
    space = Space(
        strategies=plain(1, 2),
        micro_batches=(1, 2, 4, 8, 16, 32),
        slots=1,
        freedom=Freedom(fix=("contiguous_gradients",)),
        num_params=5 * 10**6,
    )
    rng = np.random.default_rng(seed)
    effects = {settings: 1 + 0.2 * rng.random() for settings in _all_settings(space)}
    ends = {settings: int(rng.integers(2, 6)) for settings in effects}

    def value(settings: str, size: int) -> float | None:
        fits = size <= space.micro_batches[ends[settings]]
        return effects[settings] * size / (size + 3) if fits else None

    def outcome(proposal: Proposed) -> Outcome:
        found = value(settings_of(proposal), proposal.micro_batch)
        return failed("OOM") if found is None else ran(found)

    truth = max(value(s, size) or 0.0 for s in effects for size in space.micro_batches)
    asked = proposals_of(Driven(method, space, ceiling=64, seed=seed), outcome, limit=60)
    reached = max(value(settings_of(p), p.micro_batch) or 0.0 for p in asked)
    # A random search leaves settings that can only equal what ran.
    assert reached >= (0.9 if method == "random" else 0.999) * truth


def _all_settings(space: Space) -> list[str]:
    return [
        json.dumps(branch.settings(number), sort_keys=True)
        for branch in space.branches
        for number in range(branch.count)
    ]


# -- memory and data


@pytest.mark.parametrize("predicted", [None, 15.0, 300.0], ids=["unpredicted", "near", "far off"])
@pytest.mark.parametrize("room", [2, 10])
@pytest.mark.parametrize("method", SEARCHES)
def test_what_runs_out_of_memory_leads_to_what_needs_less(
    method: str, room: int, predicted: float | None
) -> None:
    """Only stage 3 has room, for few samples only. The prediction, if any, is wrong for all."""
    space = Space(
        strategies=plain(1, 2, 3), micro_batches=range(1, 2**20 + 1), slots=4, num_params=10**9
    )
    given: dict[str, Any] = {}
    if predicted is not None:
        given = {"predict": lambda settings: predicted}
    search = Driven(method, space, ceiling=200, **given)
    tried: list[tuple[int, int]] = []
    while len(tried) < 30:
        proposal = search.propose()
        assert proposal is not None
        tried.append((proposal.settings["stage"], proposal.micro_batch))
        if proposal.settings["stage"] == 3 and proposal.micro_batch <= room:
            return
        search.end(proposal, failed("OOM"))
    raise AssertionError(f"in 30 trials, nothing ran of {tried}")


@pytest.mark.parametrize("method", ["asha", "binary", "random"])
def test_new_settings_begin_below_what_ran_out_of_memory(method: str) -> None:
    space = Space(strategies=plain(1, 2), micro_batches=range(1, 65), slots=1, num_params=10**9)
    for other_runs in (False, True):
        sizes = []
        for seed in range(8):
            search = Driven(method, space, ceiling=64, seed=seed)
            first, second = search.propose(), search.propose()
            assert first is not None and second is not None
            search.end(first, failed("OOM"))
            search.end(second, ran(1.0) if other_runs else failed("OOM"))
            for proposal in (search.propose() for _ in range(6)):
                assert proposal is not None
                is_new = proposal.arm not in (first.arm, second.arm)
                if is_new and proposal.settings["stage"] == first.settings["stage"]:
                    sizes.append(proposal.micro_batch / first.micro_batch)
        assert sizes and max(sizes) < 1


@pytest.mark.parametrize("told", ["ran", "failed"])
@pytest.mark.parametrize("method", SEARCHES)
def test_nothing_above_the_end_of_the_data_is_proposed_again(method: str, told: str) -> None:
    """A trial reports the end: one that ran, or one for which the data were too few."""
    few = replace(failed("INVALID"), smaller_may_run=True, most_samples=6)
    outcome = replace(ran(5.0), most_samples=6) if told == "ran" else few
    search = Driven(method, wide_space(), ceiling=60, predict=lambda settings: 60.0)
    first = search.propose()
    assert first is not None and first.micro_batch > 6
    search.end(first, outcome)
    search.observe(1, replace(ran(1.0), most_samples=40))
    later = proposals_of(search, lambda p: ran(float(p.micro_batch)), limit=25)
    assert len(later) > 3 and all(p.micro_batch <= 6 for p in later)


@pytest.mark.parametrize("method", ["asha", "binary"])
def test_settings_are_drawn_until_some_fit(method: str) -> None:
    space = Space(strategies=plain(3), micro_batches=range(1, 65), slots=2, num_params=10**9)
    settings = [space.branches[0].settings(n) for n in range(space.branches[0].count)]
    assert len(settings) > 300

    def predict(wanted: Mapping[str, Any]) -> float:
        return 5.0 if wanted == settings[-1] else 0.0

    search = Driven(method, space, predict=predict)
    proposal = search.propose()
    assert proposal is not None and proposal.settings == settings[-1]
    search.end(proposal, failed("ERROR"))
    assert search.propose() is None


@pytest.mark.parametrize("method", SEARCHES)
def test_a_search_begins_below_what_is_predicted_for_each_stage(method: str) -> None:
    space = Space(strategies=plain(1, 3), micro_batches=range(1, 100), slots=4, num_params=1000)
    fit = {1: 16.0, 3: 19.0}
    search = Driven(method, space, ceiling=64, predict=lambda settings: fit[settings["stage"]])
    first: dict[int, int] = {}
    for proposal in (search.propose() for _ in range(8)):
        if proposal is not None:
            first.setdefault(proposal.settings["stage"], proposal.micro_batch)
    if method == "binary":
        assert first == {1: 8, 3: 10}
    assert first and all(size <= fit[stage] for stage, size in first.items())
    unpredicted = Driven(method, space, ceiling=52).propose()
    assert unpredicted is not None and unpredicted.micro_batch <= 64


@pytest.mark.parametrize(("factor", "first"), [(0.5, 4), (1.0, 8), (2.0, 15), (0.01, 1)])
@pytest.mark.parametrize("method", ["asha", "binary"])
def test_search_range_factor_scales_where_a_search_begins(
    method: str, factor: float, first: int
) -> None:
    for predict in (None, lambda _: 15.0):
        search = Driven(method, space_of(1), search_range_factor=factor, predict=predict)
        proposal = search.propose()
        assert proposal is not None and proposal.micro_batch == first


def test_the_smallest_micro_batch_is_tried_when_nothing_should_fit() -> None:
    search = Driven("binary", space_of(1, micro_batches=(4, 8)), ceiling=1)
    play(search, "ask 0@4\ntell 0@4 OK 1\nask nothing")


@pytest.mark.parametrize("method", SEARCHES)
def test_an_own_micro_batch_above_the_largest_allowed_one_is_no_bound(method: str) -> None:
    search = Driven(method, space_of(4))
    search.observe(2 * search.space.micro_batches[-1], ran(10.0))
    proposal = search.propose()
    assert proposal is not None and proposal.micro_batch in search.space.micro_batches


@pytest.mark.parametrize("method", ["asha", "binary", "random"])
def test_the_next_allowed_size_above_ones_own_is_tried(method: str) -> None:
    tried = set()
    for seed in range(8):
        search = Driven(method, space_of(2, micro_batches=(1, 2, 4, 8)), ceiling=9, seed=seed)
        search.observe(3, ran(3.0))
        asked = proposals_of(
            search, lambda p: ran(p.micro_batch) if p.micro_batch < 8 else failed("OOM")
        )
        tried |= {proposal.micro_batch for proposal in asked}
    assert 4 in tried


@pytest.mark.parametrize("method", ["asha", "binary", "random"])
def test_a_time_out_closes_no_strategy(method: str) -> None:
    """At the only micro batch, it bounds nothing; above a micro batch that ran, it bounds the
    others."""
    one = Space(strategies=plain(1, 2), micro_batches=(4,), slots=1, num_params=10**9)
    search = Driven(method, one, ceiling=60, ramp=True)
    proposed = proposals_of(
        search, lambda each: failed("TIMEOUT") if each.place < 3 else ran(100), limit=20
    )
    assert len(proposed) == 20
    many = Space(strategies=plain(1), micro_batches=range(1, 65), slots=1, num_params=10**9)
    search = Driven(method, many, ceiling=60, ramp=True)
    proposed = proposals_of(
        search,
        lambda each: failed("TIMEOUT") if each.micro_batch >= 12 else ran(each.micro_batch),
        limit=20,
    )
    assert sum(each.micro_batch >= 12 for each in proposed) <= 6


@pytest.mark.parametrize("method", ["asha", "binary", "random"])
def test_micro_batches_end_soon_after_throughput_has_ended_to_grow(method: str) -> None:
    space = Space(strategies=plain(1), micro_batches=range(1, 2**20), slots=1, num_params=10**9)
    search = Driven(method, space, ceiling=10**6, ramp=True)
    search.observe(4, ran(4.0))
    asked = proposals_of(search, lambda each: ran(min(each.micro_batch, 64)), limit=20)
    assert 64 < max(each.micro_batch for each in asked) <= 4 * 256


def test_settings_that_are_too_slow_above_the_best_are_tried_below_it() -> None:
    class Slow:
        def step_s(self, strategy: object, batch: BatchTriple) -> float:
            return float(batch.micro_batch)

        def are_too_long(self, step_s: float) -> bool:
            return step_s > 8

    space = Space(strategies=plain(1), micro_batches=range(1, 65), slots=1, num_params=10**9)
    search = Driven("random", space, ceiling=60, costs=cast(Costs, Slow()), ramp=True)
    proposed = proposals_of(search, lambda each: ran(each.micro_batch), limit=20)
    assert len({settings_of(each) for each in proposed}) > 3
