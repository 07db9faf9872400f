"""The ramp doubles the user's own micro batch as long as that is worth it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dsat.search import SEARCHES
from dsat.space.knobs import KNOB_NAMES
from dsat.space.overrides import GAS
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import Metrics, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import World, drive, failed, first_profiled, plan_of, profiled, weightless

ROOM = 10**6  # samples for which there is memory: it says nothing here


class Machine(World):
    """A micro step costs some time whatever is in it, and each sample the rest of a millisecond."""

    def __init__(
        self, overhead_ms: float, sample_ms: float, other: Callable[[int], Outcome | None]
    ) -> None:
        self._overhead_ms, self._sample_ms, self._other = overhead_ms, sample_ms, other

    def outcome(self, trial: Trial) -> Outcome:
        if trial.kind is TrialKind.PROFILE:
            return profiled(weightless(ROOM))
        size = trial.batch.micro_batch
        step_ms = self._overhead_ms + self._sample_ms * size
        value = 1000 * size / step_ms
        found = Metrics(value, step_ms, 0, 0, 0, None, num_steps=5, ci95=0.001)
        outcome = self._other(size) or Outcome(OutcomeKind.OK, metrics=found)
        return first_profiled(trial, outcome, weightless(ROOM))


class Dear(World):
    """Samples and accumulation steps take a tenth of a second each, stages above 1 twice."""

    def outcome(self, trial: Trial) -> Outcome:
        if trial.kind is TrialKind.PROFILE:
            return profiled(weightless(ROOM))
        step_s = 0.1 * trial.batch.gas * trial.batch.micro_batch * (2 if trial.stage > 1 else 1)
        value = trial.batch.train_batch_size / step_s
        found = Metrics(value, 1000 * step_s, 0, 0, 0, None, num_steps=5, ci95=0.001)
        outcome = Outcome(OutcomeKind.OK, metrics=found, duration_s=1 + 7 * step_s)
        return first_profiled(trial, outcome, weightless(ROOM))


@pytest.mark.parametrize("method", SEARCHES)
def test_what_would_take_long_by_what_is_known_is_not_tried(method: str) -> None:
    plan = plan_of(
        method,
        ramp=method != "gridsearch",
        longest_s=60.0,
        max_trials=40,
        fix=tuple(set(KNOB_NAMES) - {GAS}),
        choices={GAS: [1, 4, 64]},
        micro_batches=tuple(2**n for n in range(10)),
        own_batch=BatchTriple(4, 4, 1),
        base_config={"zero_optimization": {"stage": 1}},
        zero_stages=(1, 2),
    )
    tuner = Tuner(plan, MemoryJournal())
    drive(tuner, Dear())
    run = tuner.run
    seen: set[str] = set()
    for trial in run.trials.values():
        metrics = run.outcomes[trial.id].metrics
        assert metrics is not None
        # Of a strategy that is twice as slow as it should be, it takes a few trials to know.
        known = trial.strategy in seen
        assert 5 * metrics.latency / 1000 <= 120 or not known, trial.name
        assert trial.kind is not TrialKind.SEARCH or trial.longest_s == 60.0
        seen.add(trial.strategy)
    gas = {trial.batch.gas for trial in run.trials.values()}
    assert 4 in gas and len(run.trials) > 5


def test_what_the_users_own_takes_long_others_may_too() -> None:
    plan = plan_of(longest_s=60.0, own_batch=BatchTriple(200, 200, 1), max_trials=4)
    tuner = Tuner(plan, MemoryJournal())
    drive(tuner, Dear())
    limits = {trial.longest_s for trial in tuner.run.trials.values()}
    own = tuner.run.baseline
    assert own is not None and tuner.run.outcomes[own.id].metrics is not None
    assert limits == {None, 20 * 0.1 * 200 * (2 if own.stage > 1 else 1)}


def sizes_tried(
    method: str,
    *,
    own: int = 4,
    overhead_ms: float = 10.0,
    sample_ms: float = 1.0,
    other: Callable[[int], Outcome | None] = lambda size: None,
) -> list[int]:
    """The micro batches of a run's trials."""
    plan = plan_of(
        method,
        ramp=True,
        max_trials=14,
        own_batch=BatchTriple(own, own, 1),
        base_config={"zero_optimization": {"stage": 1}},
        search_options={"stop_when": 0.02} if method == "model" else {},
    )
    tuner = Tuner(plan, MemoryJournal())
    drive(tuner, Machine(overhead_ms, sample_ms, other), slots=3)
    return [trial.batch.micro_batch for trial in tuner.run.trials.values()]


@pytest.mark.parametrize("method", ["asha", "binary", "random"])
def test_doubles_from_the_users_own_until_throughput_no_longer_grows(method: str) -> None:
    tried = sizes_tried(method)
    # 4/14, 16/26, .. : 256 samples are 4 % faster than 128, and 128 still 8 % faster than 64.
    ramp = [4, 16, 64, 128, 256]
    assert tried[: len(ramp)] == ramp
    assert max(tried) <= 4 * 256, "memory alone has room for a million"


def test_ends_where_the_data_or_the_memory_do() -> None:
    def starved(size: int) -> Outcome | None:
        if size <= 50:
            return None
        return Outcome(OutcomeKind.INVALID, smaller_may_run=True, most_samples=50)

    tried = sizes_tried("binary", other=starved)
    assert tried[:3] == [4, 16, 64] and max(tried[3:]) <= 50
    tried = sizes_tried("binary", other=lambda size: failed("OOM") if size > 20 else None)
    assert tried[:3] == [4, 16, 64]


@pytest.mark.parametrize("method", ["model", "binary"])
def test_what_the_data_loader_tells_ends_it_without_a_failed_trial(method: str) -> None:
    machine = Machine(10.0, 1.0, lambda size: None)

    class Told(World):
        def outcome(self, trial: Trial) -> Outcome:
            found = machine.outcome(trial)
            return replace(found, most_samples=50)

    plan = plan_of(method, ramp=method != "gridsearch", max_trials=14)
    tuner = Tuner(plan, MemoryJournal())
    drive(tuner, Told())
    tried = [trial.batch.micro_batch for trial in tuner.run.trials.values()]
    assert max(tried) <= 50 and len(tried) > 5


def test_no_trial_takes_long_beside_the_users_own() -> None:
    # A step of 4 samples takes 4.8 s, five of them 24 s: 20 times that allows 80 samples.
    tried = sizes_tried("binary", overhead_ms=2000, sample_ms=700)
    assert max(tried) * 0.7 + 2 <= 20 * 4.8
    # Short steps may grow to a minute.
    tried = sizes_tried("model", overhead_ms=1.0, sample_ms=0.001)
    assert max(tried) * 0.001 * 5 / 1000 <= 60


@pytest.mark.parametrize("method", ["asha", "random"])
def test_what_the_ramp_showed_is_not_asked_again(method: str) -> None:
    plan = plan_of(
        method,
        ramp=True,
        max_trials=30,
        fix=KNOB_NAMES,
        zero_stages=(1, 2),
        base_config={"zero_optimization": {"stage": 1}},
    )
    tuner = Tuner(plan, MemoryJournal())
    drive(tuner, Machine(10.0, 1.0, lambda size: failed("OOM") if size > 100 else None))
    tried = [t.batch.micro_batch for t in tuner.run.trials.values() if t.stage == 1]
    ramp = [4, 16, 64, 128]
    assert tried[: len(ramp)] == ramp
    assert all(64 < size < 128 for size in tried[len(ramp) :])


@pytest.mark.parametrize("method", ["asha", "binary", "random"])
def test_a_search_with_one_lineage_goes_on_while_anything_may_be_learned(method: str) -> None:
    plan = plan_of(
        method,
        ramp=True,
        max_trials=40,
        fix=KNOB_NAMES,
        zero_stages=(1,),
        base_config={"zero_optimization": {"stage": 1}},
    )
    machine = Machine(10.0, 1.0, lambda size: failed("OOM") if size > 100 else None)
    tuner = Tuner(plan, MemoryJournal())
    drive(tuner, machine)
    tried = [trial.batch.micro_batch for trial in tuner.run.trials.values()]
    assert tuner.run.best is not None and 97 <= tuner.run.best.batch.micro_batch <= 100
    assert len(tried) == len(set(tried))
    assert tuner.run.stop_reason == "every configuration was tried"
