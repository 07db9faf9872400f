"""The model-based search: what it tries first, and when it ends."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from dsat.search import predictions, speed
from dsat.search.base import Context, Observation, Problem
from dsat.search.feasibility import Ended, Feasibility
from dsat.search.model import ModelSearch
from dsat.space.deepspeed_settings import SETTING_NAMES
from dsat.space.locate import Point
from dsat.space.space import Freedom, Space
from dsat.values.objective import Objective
from dsat.values.outcome import Metrics, Outcome, OutcomeKind, ScriptSwitch
from dsat.values.zero_strategy import plain
from testing.helpers import failed, ran, weightless
from testing.search_contract import Driven, Proposed, proposals_of, space_of

THROUGHPUT = Objective("throughput")


def model_of(space: Space, *, ceiling: int = 15, **options: Any) -> Driven:
    """Return a search with the prediction that `ceiling` samples fit with any settings."""
    options.setdefault("predict", lambda settings: ceiling)
    profile = replace(weightless(ceiling), num_params=10**8, trainable_params=10**8)
    return Driven("model", space, profile=profile, **options)


def stages(
    *numbers: int, micro_batches: Sequence[int] = range(1, 65), slots: int = 4, **limits: Any
) -> Space:
    """Return a space of strategies in which no other setting may change."""
    limits.setdefault("freedom", Freedom(fix=SETTING_NAMES))
    return Space(strategies=plain(*numbers), micro_batches=micro_batches, slots=slots, **limits)


def timed(size: int, factor: float = 1.0) -> Outcome:
    """Return the outcome of a micro batch: 90 ms, and 10 ms per sample."""
    step_s = factor * (0.09 + 0.01 * size)
    found = Metrics(size / step_s, 1000 * step_s, 0, 0, 0, None, num_steps=5, ci95=0.001)
    return Outcome(OutcomeKind.OK, metrics=found)


def best_of(asked: Sequence[Proposed], outcome: Any) -> Proposed:
    return max(asked, key=lambda p: outcome(p).value(THROUGHPUT) or 0.0)


# -- what it tries first


def test_it_begins_with_each_strategy_near_the_end_of_memory() -> None:
    """By prediction, stage 2 does not fit."""
    fit = {0: 40, 1: 40, 2: 0, 3: 40}
    search = model_of(stages(3, 0, 1, 2), ceiling=40, predict=lambda s: fit[s["stage"]])
    first = proposals_of(search, lambda p: ran(p.micro_batch / (p.micro_batch + 5)), limit=3)
    assert {p.settings["stage"] for p in first} == {0, 1, 3}
    assert all(32 <= p.micro_batch <= 40 for p in first)


def test_it_knows_the_users_own_configuration() -> None:
    search = model_of(space_of(1), ceiling=40)
    search.observe(8, ran(70.0))
    asked = proposals_of(search, lambda _: ran(1.0), limit=20)
    assert asked[0].micro_batch > 20
    assert 8 not in {proposal.micro_batch for proposal in asked}


@pytest.mark.parametrize("kind", ["OOM", "HOST_OOM", "TIMEOUT", "ERROR"])
def test_after_a_failure_it_goes_smaller_or_elsewhere(kind: str) -> None:
    search = model_of(space_of(2 if kind == "ERROR" else 1), ceiling=40)
    first = search.propose()
    assert first is not None
    search.end(first, failed(kind))
    second = search.propose()
    assert second is not None
    is_smaller = second.micro_batch < first.micro_batch
    assert second.settings != first.settings if kind == "ERROR" else is_smaller


# By switch: the factor of the step time of each value; other switches have little effect.
Switches = dict[str, dict[Any, float]]
OPTIMIZERS: Switches = {"optim": {"adamw_torch_fused": 1.0, "adamw_torch": 1.02}}
FASTER: Switches = {
    "attn_implementation": {"sdpa": 1.0, "eager": 1.3, "flash_attention_2": 0.85},
    "dataloader_num_workers": {0: 1.0, 2: 0.8, 4: 0.7},
    "torch_compile": {False: 1.0, True: 0.9},
}
TWICE: Switches = {  # a fast value after one that is already much faster than the user's own
    "attn_implementation": {"eager": 1.0, "sdpa": 0.8, "flash_attention_2": 0.75},
    "dataloader_num_workers": {0: 1.0, 2: 0.98, 4: 0.97},
    "torch_compile": {False: 1.0, True: 1.1},
}
SLOWER_FIRST: Switches = {
    "attn_implementation": {"sdpa": 1.0, "eager": 1.3},
    "dataloader_num_workers": {0: 1.0, 2: 1.05, 4: 0.9},
    "torch_compile": {False: 1.0, True: 0.9},
}

AFTER_SLOWER: Switches = {  # the only gain comes after a slower value
    "attn_implementation": {"sdpa": 1.0, "eager": 1.3, "flash_attention_2": 1.16},
    "dataloader_num_workers": {0: 1.0, 2: 1.18, 4: 0.79},
    "torch_compile": {False: 1.0, True: 1.03},
}
LAST: Switches = {  # the last value has the largest gain
    "attn_implementation": {"sdpa": 1.0, "eager": 0.95, "flash_attention_2": 0.7},
    "dataloader_num_workers": {0: 1.0, 2: 0.98, 4: 1.0},
    "torch_compile": {False: 1.0, True: 1.02},
}


@pytest.mark.parametrize(
    ("own", "slots"),
    [(FASTER, 4), (TWICE, 1), (SLOWER_FIRST, 1), (AFTER_SLOWER, 4), (LAST, 1)],
    ids=["faster", "twice", "slower first", "after slower", "last"],
)
def test_switches_of_the_script_are_each_tried_soon(own: Switches, slots: int) -> None:
    """A switch affects the whole step, which the physical model does not know."""
    factors = {**own, **OPTIMIZERS}
    found = {name: ScriptSwitch(tuple(values)) for name, values in factors.items()}
    freedom = Freedom(offload_helps=True)
    space = stages(1, 2, 3, slots=slots, freedom=freedom, found_switches=found, num_params=10**9)

    def factor_of(proposal: Proposed) -> float:
        return math.prod(values[proposal.settings[name]] for name, values in factors.items())

    def measured(proposal: Proposed) -> Outcome:
        if proposal.micro_batch > 40:
            return failed("OOM")
        return timed(proposal.micro_batch, factor_of(proposal))

    asked = proposals_of(model_of(space, ceiling=44, stop_when=0.003), measured, limit=30)
    best = math.prod(min(values.values()) for values in factors.values())
    assert min(factor_of(p) for p in asked if measured(p).ok) <= 1.03 * best
    firsts = [{name: p.settings[name] for name in factors} for p in asked[:15]]
    for name, values in factors.items():
        assert {settings[name] for settings in firsts} >= set(list(values)[:2])


# -- what it learns


def test_smaller_micro_batches_are_found_where_they_are_faster() -> None:
    """As with caches, samples beyond the eighth cost twice as much."""

    def outcome(proposal: Proposed) -> Outcome:
        size = proposal.micro_batch
        return ran(size / (1.0 + size + max(0, size - 8)))

    asked = proposals_of(model_of(stages(1, 2), ceiling=60), outcome, limit=28)
    best = outcome(best_of(asked, outcome)).value(THROUGHPUT)
    assert best == pytest.approx(8 / 9, rel=0.05)


def test_accumulation_is_part_of_the_search_where_it_is_free() -> None:
    gas_name = "gradient_accumulation_steps"
    freedom = Freedom(fix=SETTING_NAMES, choices={gas_name: [1, 2, 4, 8]})

    def outcome(proposal: Proposed) -> Outcome:
        gas, size = proposal.settings[gas_name], proposal.micro_batch
        return failed("OOM") if size > 16 else ran(gas * size / (gas * (1 + size) + 20))

    space = stages(1, slots=2, freedom=freedom)
    best = best_of(proposals_of(model_of(space, ceiling=16), outcome, limit=8), outcome)
    assert (best.settings[gas_name], best.micro_batch) == (8, 16)


def known_of(*ended: Ended) -> Feasibility:
    return Feasibility(ended, 2, predicted=True, on_device=True)


def test_a_micro_batch_that_ran_corrects_an_earlier_failure() -> None:
    """A concurrent trial had used the memory."""
    lost, won = Ended(0, (), -1.0, failed("OOM")), Ended(0, (), 0.0, ran())
    assert known_of(lost).fits(0, np.array([-0.5]))[0] < 0.01
    assert known_of(lost, won).fits(0, np.array([-0.5]))[0] == 1.0


def test_a_failure_is_blamed_on_what_has_never_run() -> None:
    proven, new = ("overlap_comm", "true"), ("compile", "true")
    for kind in ("ERROR", "DIVERGED", "CANCELED", "TIMEOUT"):
        good = [Ended(0, (proven,), 0.0, ran())] * 3
        chances = known_of(*good, Ended(0, (proven, new), 0.0, failed(kind)))
        assert chances.runs((proven,)) == 1.0 > 0.3 > chances.runs((proven, new)), kind


def test_each_failure_of_memory_doubles_the_next_step_down() -> None:
    """The more memory was mispredicted, the likelier it is that only half of the rest fits."""
    at = np.linspace(-12.0, 0.0, 1201)
    steps, ended = [], [Ended(0, (), 0.0, failed("OOM"))]
    for _ in range(4):
        next_one = float(at[known_of(*ended).fits(0, at) > 0.5].max())
        steps.append(ended[-1].octaves - next_one)
        ended.append(Ended(0, (), next_one, failed("OOM")))
    assert all(later > 1.9 * earlier for earlier, later in itertools.pairwise(steps))


def test_host_memory_that_one_strategy_lacks_closes_no_other() -> None:
    at = np.array([-2.0, -0.2])
    lost = known_of(Ended(0, (), -2.5, failed("HOST_OOM")))
    assert (lost.fits(0, at) < 0.01).all()
    assert np.allclose(lost.fits(1, at), known_of().fits(1, at))


@pytest.mark.slow
def test_noise_does_not_prolong_a_search() -> None:
    """Only the micro batch matters, and measurements vary by a few percent."""

    def count(sd: float, seed: int) -> int:
        rng = np.random.default_rng(seed)
        freedom = Freedom(fix=("contiguous_gradients",))
        search = model_of(stages(1, 2, freedom=freedom), ceiling=60, stop_when=0.003)
        search.observe(8, timed(8))
        return len(
            proposals_of(search, lambda p: timed(p.micro_batch, rng.lognormal(0, sd)), limit=45)
        )

    for sd in (0.03, 0.06, 0.1):
        assert np.mean([count(sd, seed) for seed in range(4)]) <= 15, sd


def test_a_long_search_fits_its_best_and_its_latest_measurements(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fitted: list[float] = []

    def fit(prior: speed.Prior, points: speed.Points, *rest: Any) -> speed.Posterior:
        fitted[:] = points.micro_batch
        return speed.fit(prior, points, *rest)

    monkeypatch.setattr(predictions, "fit_speed", fit)
    search = model_of(space_of(1), ceiling=400)
    for size in range(1, 201):
        search.observe(size, ran(1000.0 - size))
    search.propose()
    assert fitted == [*range(1, 33), *range(169, 201)]


def test_what_ran_beside_others_is_not_compared_as_if_it_had_run_alone() -> None:
    """Neighbours slow each trial by a third; alone, stage 2 is 2 % slower than stage 1."""
    space = stages(1, 2)
    profile = replace(weightless(40), num_params=10**8, trainable_params=10**8)
    search = ModelSearch(Problem(profile, THROUGHPUT, space))
    seen = [
        Observation(
            Point(branch, 0, size), space.batch(size), timed(size, factor), neighbours=beside
        )
        for branch, size, beside, factor in (
            (0, 16, 0, 1.0), (0, 16, 1, 1.33), (0, 32, 1, 1.33), (1, 16, 0, 1.02), (1, 32, 0, 1.02)
        )
    ]  # fmt: skip
    search.propose(seen, Context())
    first, second = (search.predicted(Point(branch, 0, 32)) for branch in (0, 1))
    assert first is not None and second is not None
    assert math.exp(first - second) == pytest.approx(1.02, abs=0.04)


# -- when it ends, and what trials cost


@dataclass
class Price:
    """Costs of trials that take `besides_s` in addition to their steps; they may be too long."""

    besides_s: float
    longest_step_s: float = math.inf
    most_s: float = math.inf
    left_s: float = math.inf

    def trial_s(self, step_s: Any) -> Any:
        return self.besides_s + 7 * step_s

    def are_too_long(self, step_s: Any) -> Any:
        return step_s > self.longest_step_s

    def are_unaffordable(self, step_s: Any) -> Any:
        return self.trial_s(step_s) > self.most_s


@pytest.mark.parametrize(
    ("costs", "stop_when", "limits"),
    [
        (Price(1.0, longest_step_s=0.3), 0.0, (10, 44)),
        (Price(1.0, most_s=10.0), 0.001, (60, 200)),
    ],
    ids=["too long", "too dear"],
)
def test_nothing_that_costs_too_much_is_proposed_once_a_step_is_known(
    costs: Price, stop_when: float, limits: tuple[int, int]
) -> None:
    space = stages(1, micro_batches=range(1, 2**20))
    search = model_of(space, ceiling=10**6, costs=costs, stop_when=stop_when)
    search.observe(4, timed(4))
    asked = proposals_of(search, lambda p: timed(p.micro_batch), limit=40)
    assert limits[0] < max(p.micro_batch for p in asked[1:]) <= limits[1]


def test_a_larger_size_comes_before_other_strategies_where_time_is_short() -> None:
    """On a single slot, partitioning only costs time."""
    space = stages(0, 1, 2, micro_batches=range(1, 256), slots=1)

    def asked(left_s: float) -> list[Proposed]:
        search = model_of(space, ceiling=40, costs=Price(1.0, left_s=left_s))
        return proposals_of(search, lambda p: timed(p.micro_batch), limit=3)

    assert {proposal.settings["stage"] for proposal in asked(math.inf)} == {0, 1, 2}
    first, second, _ = asked(1.0)
    assert first.settings == second.settings and second.micro_batch > first.micro_batch


def test_it_ends_only_after_every_strategy_was_measured() -> None:
    """The model expects all to be as fast as the first, but stage 3 is twice as fast."""

    def outcome(proposal: Proposed) -> Outcome:
        return timed(proposal.micro_batch, 0.5 if proposal.settings["stage"] == 3 else 1.0)

    search = model_of(stages(1, 2, 3), ceiling=60, stop_when=0.5, costs=Price(1000.0))
    asked = proposals_of(search, outcome, limit=60)
    assert {p.settings["stage"] for p in asked} == {1, 2, 3} and len(asked) < 8
    assert "expected to gain more than 50 %" in str(search.stop_reason)


def test_it_does_not_end_before_anything_ran() -> None:
    search = model_of(space_of(8), ceiling=15, stop_when=0.9)
    for outcome in (*[failed("OOM")] * 6, ran(0.0), ran(-1.0)):  # values that are not rates
        assert search.stop_reason is None
        proposal = search.propose()
        assert proposal is not None
        search.end(proposal, outcome)
