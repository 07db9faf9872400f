from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from dsat.search import SEARCHES, ModelSearch
from dsat.search.candidates import compared_positions
from dsat.space.space import Freedom, Space
from dsat.values.objective import Objective
from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind, ScriptSwitch
from dsat.values.trial import Proposal
from dsat.values.zero_strategy import plain
from testing.helpers import failed, proposals_of, ran, space_of, weightless
from testing.machines import THROUGHPUT, Machine


def model_of(
    space: Space, *, ceiling: int = 15, metric: str = "throughput", **options: Any
) -> ModelSearch:
    """A search whose prediction is that so many samples fit, whatever the settings."""
    options.setdefault("predict", lambda settings: ceiling)
    profile = replace(weightless(ceiling), num_params=10**8, trainable_params=10**8)
    return ModelSearch(profile, Objective(metric), space, **{"seed": 0, **options})


def stages(*numbers: int, micro_batches: Sequence[int] = range(1, 65)) -> Space:
    """The strategies alone: no knob is free."""
    return Space(
        strategies=plain(*numbers),
        micro_batches=micro_batches,
        slots=4,
        freedom=Freedom(fix=_ALL),
    )


_ALL = tuple(
    {
        key
        for b in Space(strategies=plain(0, 1, 2, 3), micro_batches=(1,), slots=4).branches
        for key, _ in b.knobs
    }
)

# -- the opening


def test_it_begins_with_each_strategy_near_the_end_of_memory() -> None:
    """Stage 2 should not fit."""
    fit = {0: 40, 1: 40, 2: 0, 3: 40}
    search = model_of(stages(3, 0, 1, 2), ceiling=40, predict=lambda s: fit[s["stage"]])
    first = proposals_of(search, lambda p: ran(p.micro_batch / (p.micro_batch + 5)), limit=3)
    assert {p.settings["stage"] for p in first} == {0, 1, 3}
    assert all(32 <= p.micro_batch <= 40 for p in first)


def test_it_knows_the_users_own_configuration() -> None:
    search = model_of(space_of(1), ceiling=40)
    search.learn(0, 8, ran(70.0))
    asked = proposals_of(search, lambda _: ran(1.0), limit=20)
    assert asked[0].micro_batch > 20
    assert 8 not in {proposal.micro_batch for proposal in asked}


def test_a_trial_that_costs_more_than_a_verdict_may_is_not_proposed() -> None:
    space = stages(1, micro_batches=range(1, 2**20))
    search = model_of(space, ceiling=10**6, stop_when=0.001, costs=Price(1.0, most_s=10.0))
    search.learn(0, 4, timed(4))
    asked = proposals_of(search, lambda p: timed(p.micro_batch), limit=40)
    assert 60 < max(p.micro_batch for p in asked[1:]) < 200, "once a step is known"


def test_a_larger_size_comes_before_other_strategies_where_time_is_short() -> None:
    """On a single slot partitioning only costs time."""
    space = Space(
        strategies=plain(0, 1, 2), micro_batches=range(1, 256), slots=1, freedom=Freedom(fix=_ALL)
    )

    def asked(left_s: float) -> list[Proposal]:
        search = model_of(space, ceiling=40, costs=Price(1.0, left_s=left_s))
        return proposals_of(search, lambda p: timed(p.micro_batch), limit=3)

    assert {proposal.settings["stage"] for proposal in asked(math.inf)} == {0, 1, 2}
    first, second, _ = asked(1.0)
    assert first.settings == second.settings and second.micro_batch > first.micro_batch


def test_the_opening_goes_smaller_after_all_kinds_of_failures() -> None:
    for kind in ("OOM", "HOST_OOM", "TIMEOUT"):
        search = model_of(space_of(1), ceiling=40)
        first = search.ask()
        assert first is not None
        search.tell(first, failed(kind))
        second = search.ask()
        assert second is not None and second.micro_batch < first.micro_batch, kind
    search = model_of(space_of(2), ceiling=40)
    first = search.ask()
    assert first is not None
    search.tell(first, failed("ERROR"))
    second = search.ask()
    assert second is not None and second.settings != first.settings


# -- how good it is


def _reached(seed: int, slots: int, trials: int = 10) -> tuple[float, int]:
    machine = Machine(seed, slots=slots)
    search = SEARCHES["model"](
        machine.profile, THROUGHPUT, machine.space, seed=seed, predict=machine.predicted
    )
    best, failures = 0.0, 0
    for _ in range(trials):
        proposal = search.ask()
        assert proposal is not None
        outcome = machine.outcome(proposal)
        search.tell(proposal, outcome)
        failures += not outcome.ok
        if outcome.ok:
            found = float(machine.throughput(proposal.settings, proposal.micro_batch))
            best = max(best, found / machine.best())
    return best, failures


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "trials"), [(1, 10), (8, 12)])
def test_some_ten_trials_reach_the_best_of_a_large_space(slots: int, trials: int) -> None:
    """Several slots have seven knobs more, of which two matter by a few percent."""
    results = [_reached(seed, slots, trials) for seed in range(8)]
    assert np.median([best for best, _ in results]) > 0.985
    assert min(best for best, _ in results) > 0.95
    assert np.mean([failures for _, failures in results]) < 1.0


def test_smaller_micro_batches_are_found_where_they_are_faster() -> None:
    """Caches: beyond eight samples each one costs twice as much."""

    def outcome(proposal: Proposal) -> Outcome:
        size = proposal.micro_batch
        return ran(size / (1.0 + size + max(0, size - 8)))

    search = model_of(stages(1, 2), ceiling=60)
    asked = proposals_of(search, outcome, limit=24)
    best = max(asked, key=lambda p: outcome(p).value(THROUGHPUT) or 0.0)
    assert outcome(best).value(THROUGHPUT) == pytest.approx(8 / 9, rel=0.05)


@pytest.mark.parametrize("metric", ["latency", "step"])
def test_times_are_made_short(metric: str) -> None:
    """Of an exact global batch: fewer, larger micro steps, up to where memory ends."""
    sizes = (1, 2, 4, 8, 16, 32, 64)
    space = Space(
        strategies=plain(1, 2),
        micro_batches=sizes,
        slots=1,
        train_batch_size=64,
        freedom=Freedom(fix=_ALL),
    )

    def outcome(proposal: Proposal) -> Outcome:
        if proposal.micro_batch > 32:
            return failed("OOM")
        gas = 64 // proposal.micro_batch
        slower = 1.1 if proposal.settings["stage"] == 1 else 1.0
        return ran(slower * gas * (10 + proposal.micro_batch), metric)

    search = model_of(space, ceiling=40, metric=metric)
    asked = proposals_of(search, outcome, limit=6)
    assert ("z2", 32) in {(f"z{p.settings['stage']}", p.micro_batch) for p in asked}


def test_accumulation_is_part_of_the_search_where_it_is_free() -> None:
    space = Space(
        strategies=plain(1),
        micro_batches=range(1, 65),
        slots=2,
        freedom=Freedom(fix=_ALL, choices={"gradient_accumulation_steps": [1, 2, 4, 8]}),
    )

    def outcome(proposal: Proposal) -> Outcome:
        gas, size = proposal.settings["gradient_accumulation_steps"], proposal.micro_batch
        return failed("OOM") if size > 16 else ran(gas * size / (gas * (1 + size) + 20))

    asked = proposals_of(model_of(space, ceiling=16), outcome, limit=8)
    best = max(asked, key=lambda p: outcome(p).value(THROUGHPUT) or 0.0)
    assert (best.settings["gradient_accumulation_steps"], best.micro_batch) == (8, 16)


# -- memory


def test_running_out_of_memory_lowers_what_others_are_believed_to_allow() -> None:
    search = model_of(stages(1, 2), ceiling=60)
    asked: list[Proposal] = []
    for _ in range(8):
        proposal = search.ask()
        assert proposal is not None
        asked.append(proposal)
        fits = proposal.micro_batch <= 30
        search.tell(
            proposal,
            ran(proposal.micro_batch / (proposal.micro_batch + 4)) if fits else failed("OOM"),
        )
    failures = [p for p in asked if p.micro_batch > 30]
    assert 1 <= len(failures) <= 4, [p.micro_batch for p in asked]
    assert max(p.micro_batch for p in asked if p.micro_batch <= 30) >= 28


def test_a_prediction_that_was_too_low_is_left_behind() -> None:
    search = model_of(stages(1), ceiling=15)
    asked = proposals_of(
        search,
        lambda p: (
            ran(p.micro_batch / (p.micro_batch + 30)) if p.micro_batch <= 40 else failed("OOM")
        ),
        limit=12,
    )
    assert max(p.micro_batch for p in asked if p.micro_batch <= 40) >= 32


def test_nothing_above_what_wanted_more_data_is_tried() -> None:
    starved = Outcome(OutcomeKind.INVALID, smaller_may_run=True)
    search = model_of(space_of(4), ceiling=40)
    asked = proposals_of(search, lambda p: ran(1.0) if p.micro_batch < 20 else starved, limit=15)
    assert sum(p.micro_batch >= 20 for p in asked) <= 4
    assert all(p.micro_batch < 38 for p in asked[1:])


def test_a_strategy_that_only_fails_is_left() -> None:
    def outcome(proposal: Proposal) -> Outcome:
        if proposal.settings["stage"] == 1:
            return failed("ERROR")
        return ran(proposal.micro_batch / (5.0 + proposal.micro_batch))

    space = Space(strategies=plain(1, 2, 3), micro_batches=range(1, 65), slots=4, num_params=10**9)
    asked = proposals_of(model_of(space, ceiling=60), outcome, limit=20)
    assert 1 <= sum(p.settings["stage"] == 1 for p in asked) <= 10


@pytest.mark.parametrize("method", SEARCHES)
def test_a_search_begins_below_what_is_predicted_or_activations_leave_room_for(
    method: str,
) -> None:
    profile = _profile(activations=1000, memory=52_000)
    bounded = SEARCHES[method](profile, THROUGHPUT, stages(1), seed=0)
    predicted = SEARCHES[method](profile, THROUGHPUT, stages(1), seed=0, predict=lambda _: 9.5)
    first, second = bounded.ask(), predicted.ask()
    assert first is not None and second is not None
    assert first.micro_batch <= 64
    assert second.micro_batch <= 9


# -- when to end


@pytest.mark.slow
def test_it_ends_when_nothing_is_likely_to_be_better() -> None:
    def outcome(proposal: Proposal) -> Outcome:
        return (
            failed("OOM")
            if proposal.micro_batch > 15
            else ran(proposal.micro_batch / (9 + proposal.micro_batch))
        )

    counts = {}
    for threshold in (0.1, 0.01, 0.0):
        search = model_of(stages(1, 2, 3), ceiling=15, stop_when=threshold)
        counts[threshold] = len(proposals_of(search, outcome, limit=60))
        said = f"no further trial is expected to gain more than {100 * threshold:g} %"
        assert search.stop_reason == (said if threshold else None)
    assert 3 <= counts[0.1] <= counts[0.01] < 20 < 30 < counts[0.0]


@dataclass
class Price:
    """Costs of trials that take some seconds whatever their steps, which may be too long."""

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


def timed(size: int) -> Outcome:
    """A micro batch whose samples take 10 ms each, beside 90 ms that it takes anyway."""
    step_s = 0.09 + 0.01 * size
    found = Metrics(size / step_s, 1000 * step_s, 0, 0, 0, None, num_steps=5, ci95=0.001)
    return Outcome(OutcomeKind.OK, metrics=found)


def test_it_ends_only_after_every_strategy_was_measured() -> None:
    """The model expects all to be as fast as the first, which here they are not."""

    def slow_but_for_stage_3(proposal: Proposal) -> Outcome:
        stage = proposal.settings["stage"]
        found = timed(proposal.micro_batch)
        assert found.metrics is not None
        rate = found.metrics.throughput * (2.0 if stage == 3 else 1.0)
        return replace(found, metrics=replace(found.metrics, throughput=rate))

    search = model_of(stages(1, 2, 3), ceiling=60, stop_when=0.5, costs=Price(1000.0))
    asked = proposals_of(search, slow_but_for_stage_3, limit=60)
    tried = {proposal.settings["stage"] for proposal in asked}
    assert tried == {1, 2, 3} and len(asked) < 8


def test_nothing_that_takes_too_long_is_proposed_once_a_step_is_known() -> None:
    search = model_of(stages(1, 2, 3), ceiling=60, costs=Price(1.0, longest_step_s=0.3))
    asked = proposals_of(search, lambda p: timed(p.micro_batch), limit=60)
    assert len(asked) > 10 and all(p.micro_batch <= 44 for p in asked[3:])


@pytest.mark.slow
def test_what_would_not_be_launched_is_not_proposed() -> None:
    machine = Machine(1, slots=2)
    most = {}
    for gated in (False, True):
        search = SEARCHES["model"](
            machine.profile,
            THROUGHPUT,
            machine.space,
            seed=0,
            predict=lambda settings: 100.0,
            gated=gated,
        )
        asked = proposals_of(search, lambda p: ran(p.micro_batch), limit=8)
        most[gated] = max(proposal.micro_batch for proposal in asked)
    assert most[True] <= 100 and most[True] <= most[False]


def test_to_look_at_it_changes_nothing() -> None:
    """Who asks for its reason to stop, and when, is not decided by a journal."""
    machine = Machine(0, slots=2)
    options: dict[str, Any] = {"seed": 0, "predict": machine.predicted, "stop_when": 0.3}
    unseen, seen = (
        SEARCHES["model"](machine.profile, THROUGHPUT, machine.space, **options) for _ in range(2)
    )
    rng = np.random.default_rng(0)
    running: list[Proposal] = []
    for _ in range(6):
        while len(running) < 3:
            proposal = seen.ask()
            assert proposal == unseen.ask()
            assert proposal is not None
            running.append(proposal)
        for _ in range(int(rng.integers(1, 3))):
            ended = running.pop(int(rng.integers(len(running))))
            outcome = machine.outcome(ended)
            for search in (unseen, seen):
                search.tell(ended, outcome)
            seen.stop_reason  # noqa: B018
    assert seen.stop_reason == unseen.stop_reason


def test_it_does_not_end_before_anything_ran() -> None:
    search = model_of(space_of(8), ceiling=15, stop_when=0.9)
    for _ in range(8):
        assert search.stop_reason is None
        proposal = search.ask()
        assert proposal is not None
        search.tell(proposal, failed("OOM"))


@pytest.mark.parametrize("predict", [None, lambda settings: 64])
@pytest.mark.parametrize("largest", [1, 2])
def test_what_ran_out_of_memory_leaves_the_smaller_micro_batches(
    largest: int, predict: Any
) -> None:
    def outcome(proposal: Proposal) -> Outcome:
        size = proposal.micro_batch
        return ran(size) if size <= largest else failed("OOM")

    search = model_of(stages(1, micro_batches=(1, 2, 4, 8)), ceiling=64, predict=predict)
    assert largest in {proposal.micro_batch for proposal in proposals_of(search, outcome)}


def test_many_may_run_at_once() -> None:
    machine = Machine(3, slots=2)
    search = SEARCHES["model"](machine.profile, THROUGHPUT, machine.space, seed=3)
    running = [search.ask() for _ in range(16)]
    assert None not in running
    kinds = Counter(p.settings["stage"] for p in running if p)
    assert len(kinds) >= 3, "not all the same"
    for proposal in reversed(running):
        assert proposal is not None
        search.tell(proposal, machine.outcome(proposal))
    assert len({(json.dumps(p.settings), p.micro_batch) for p in running if p}) == 16
    lost = 0
    for _ in range(4):
        following = search.ask()
        assert following is not None
        outcome = machine.outcome(following)
        search.tell(following, outcome)
        lost += not outcome.ok
        value = float(machine.throughput(following.settings, following.micro_batch))
        assert value > 0.95 * machine.best()
    assert lost <= 1, "what all of them told of memory is known"


def test_values_that_are_no_rates_are_no_measurements() -> None:
    search = model_of(space_of(2), ceiling=15)
    for value in (0.0, -1.0, 3.0):  # there are no infinite ones
        proposal = search.ask()
        assert proposal is not None
        search.tell(proposal, ran(value))
    assert search.speed.measured is not None and len(search.speed.measured) == 1


# -- its parts


def test_micro_batches_are_compared_closely_near_the_edge() -> None:
    positions = compared_positions(range(1, 2**20), edges=[1000.0], best=[400])
    sizes = [at + 1 for at in positions]
    assert sizes == sorted(set(sizes)) and max(sizes) <= 2000 and 1000 in sizes and 400 in sizes
    assert sum(900 <= size <= 1000 for size in sizes) >= 5
    assert sum(900 <= size <= 1000 and size % 8 == 0 for size in sizes) >= 3
    assert sizes[0] == 16, "none far below the best"
    assert compared_positions(range(1, 2**20), edges=[2.0**12], best=[])[:3] == [0, 1, 2]


def _profile(*, activations: int = 1000, memory: int = 100_000) -> ModelProfile:
    return replace(
        weightless(1),
        num_params=1000 // 4,
        trainable_params=1000 // 4,
        activation_bytes_per_sample=activations,
        slot_memory_bytes=memory,
    )


# What each value makes of a step, by the script's switch, beside those that do little.
Switches = dict[str, dict[Any, float]]
OPTIMIZERS: Switches = {"optim": {"adamw_torch_fused": 1.0, "adamw_torch": 1.02}}
FASTER: Switches = {
    "attn_implementation": {"sdpa": 1.0, "eager": 1.3, "flash_attention_2": 0.85},
    "dataloader_num_workers": {0: 1.0, 2: 0.8, 4: 0.7},
    "torch_compile": {False: 1.0, True: 0.9},
}
TWICE: Switches = {  # a value behind one that is already much faster than the user's own
    "attn_implementation": {"eager": 1.0, "sdpa": 0.8, "flash_attention_2": 0.75},
    "dataloader_num_workers": {0: 1.0, 2: 0.98, 4: 0.97},
    "torch_compile": {False: 1.0, True: 1.1},
}
SLOWER_FIRST: Switches = {
    "attn_implementation": {"sdpa": 1.0, "eager": 1.3},
    "dataloader_num_workers": {0: 1.0, 2: 1.05, 4: 0.9},
    "torch_compile": {False: 1.0, True: 0.9},
}


@pytest.mark.parametrize(
    ("own", "slots"),
    [(FASTER, 4), (TWICE, 1), (SLOWER_FIRST, 1)],
    ids=["faster", "twice", "slower first"],
)
def test_switches_of_the_script_are_each_tried_soon(own: Switches, slots: int) -> None:
    """A switch acts on the whole step, of which the physical model knows nothing."""
    factors = {**own, **OPTIMIZERS}
    found = {name: ScriptSwitch(tuple(values)) for name, values in factors.items()}
    space = Space(
        strategies=plain(1, 2, 3),
        micro_batches=range(1, 65),
        slots=slots,
        freedom=Freedom(offload_helps=True),
        found_switches=found,
        num_params=10**9,
    )

    def factor_of(proposal: Proposal) -> float:
        return math.prod(values[proposal.settings[name]] for name, values in factors.items())

    def measured(proposal: Proposal) -> Outcome:
        if proposal.micro_batch > 40:
            return failed("OOM")
        result = timed(proposal.micro_batch)
        factor = factor_of(proposal)
        assert result.metrics is not None
        rate = result.metrics.throughput / factor
        return replace(result, metrics=replace(result.metrics, throughput=rate))

    asked = proposals_of(model_of(space, ceiling=44, stop_when=0.003), measured, limit=30)
    best = math.prod(min(values.values()) for values in factors.values())
    assert min(factor_of(p) for p in asked if measured(p).ok) <= 1.03 * best
    firsts = [{name: p.settings[name] for name in factors} for p in asked[:15]]
    for name, values in factors.items():
        assert {settings[name] for settings in firsts} >= set(list(values)[:2])
