from __future__ import annotations

import hashlib
import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from dsat.search import SEARCHES
from dsat.search.base import Undrawn
from dsat.space.space import Space
from dsat.values.outcome import Outcome
from dsat.values.trial import Proposal
from dsat.values.zero_strategy import plain
from testing.helpers import failed, play, proposals_of, ran, search_of, space_of

# The model search takes milliseconds a decision, and these tests ask for hundreds.
MODEL_IS_SLOW = [
    pytest.param(method, marks=pytest.mark.slow) if method == "model" else method
    for method in SEARCHES
]
DRAWING = set(SEARCHES) - {"gridsearch", "model"}  # these two need no seed


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
@pytest.mark.parametrize("method", MODEL_IS_SLOW)
def test_no_schedule_breaks_the_rules_of_a_lineage(method: str, concurrency: int) -> None:
    for seed in range(2 if method == "model" else 12):  # which takes milliseconds a decision
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
                if method in DRAWING:
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
    search = search_of(method, space, ceiling=1)
    asked = proposals_of(search, lambda _: failed("OOM"))
    assert search.ask() is None and search.stop_reason is None
    sections = {json.dumps(p.settings, sort_keys=True) for p in asked}
    # Two bucket sizes, and contiguous_gradients from stage 1 on.
    assert len(sections) == len(asked) == 1 + 4 + 4 + 4


@pytest.mark.parametrize("method", MODEL_IS_SLOW)
def test_one_seed_one_schedule(method: str) -> None:
    def schedule(seed: int) -> list[Proposal]:
        search = search_of(method, _wide_space(), ceiling=60, seed=seed)
        return proposals_of(search, lambda p: _scripted(p, 1), concurrency=3, limit=60)

    before = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    schedules = [schedule(seed) for seed in range(2 if method == "model" else 5)]
    assert schedules[0] == schedule(0)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # type: ignore[index]
    for one, other in itertools.combinations(schedules, 2):
        assert (one != other) == (method in DRAWING)


def test_draws_without_replacement_begin_with_the_first_and_go_on_at_random() -> None:
    orders: Counter[tuple[int, ...]] = Counter()
    for seed in range(1200):
        rng = np.random.default_rng(seed)
        undrawn = Undrawn(4)
        first, *others = (undrawn.take(rng) for _ in range(4))
        orders[tuple(others)] += 1
        assert first == 0 == undrawn.count
    assert set(orders) == set(itertools.permutations((1, 2, 3)))
    assert all(150 < n < 250 for n in orders.values()), orders


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


@pytest.mark.parametrize("predicted", [None, 15.0, 300.0], ids=["unpredicted", "near", "far off"])
@pytest.mark.parametrize("room", [2, 10])
@pytest.mark.parametrize("method", ["gridsearch", "asha", "model", "random", "binary"])
def test_what_runs_out_of_memory_leads_to_what_needs_less(
    method: str, room: int, predicted: float | None
) -> None:
    """Only stage 3 has room, and for few samples only; the prediction, if any, is wrong of all."""
    space = Space(
        strategies=plain(1, 2, 3), micro_batches=range(1, 2**20 + 1), slots=4, num_params=10**9
    )
    given: dict[str, Any] = {}
    if predicted is not None:
        given = {"predict": lambda settings: predicted, "gated": True}
    search = search_of(method, space, ceiling=200, **given)
    tried: list[tuple[int, int]] = []
    while len(tried) < 30:
        proposal = search.ask()
        assert proposal is not None
        tried.append((proposal.settings["stage"], proposal.micro_batch))
        if proposal.settings["stage"] == 3 and proposal.micro_batch <= room:
            return
        search.tell(proposal, failed("OOM"))
    raise AssertionError(f"in 30 trials, nothing ran of {tried}")


@pytest.mark.parametrize("method", sorted(SEARCHES))
def test_an_own_micro_batch_above_the_largest_allowed_one_is_no_bound(method: str) -> None:
    search = search_of(method, space_of(4))
    search.learn(0, 2 * search.space.micro_batches[-1], ran(10.0))
    proposal = search.ask()
    assert proposal is not None and proposal.micro_batch in search.space.micro_batches
