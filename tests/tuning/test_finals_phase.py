"""Finals as a part of a run: when they begin, what they cost, that they resume."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dsat.engines import cached
from dsat.report.verdict import verdict
from dsat.search import SEARCHES, Search
from dsat.space.plan import Plan
from dsat.tuning.history import known_outcomes
from dsat.tuning.journal import MemoryJournal
from dsat.tuning.run import Run
from dsat.tuning.tuner import Tuner
from dsat.values.outcome import Outcome, TrainingCurve
from dsat.values.trial import BatchTriple, Proposal, Trial, TrialKind
from testing.helpers import (
    Event,
    FakeClock,
    World,
    drive,
    failed,
    first_profiled,
    plan_of,
    profiled,
    ran,
    weightless,
)
from testing.made_up_runs import measured

OWN_BUCKET = 1


class Buckets(World):
    """Speed depends on the bucket, and a little on chance; a larger micro batch is faster.

    Args:
        speeds: by bucket size, of what is not 1.0.
        luck: in the search, by bucket size: what it was measured too fast.
        spread: of chance.
    """

    def __init__(
        self,
        speeds: Mapping[int, float],
        luck: Mapping[int, float] | None = None,
        spread: float = 0.002,
    ) -> None:
        self._speeds, self._luck, self._spread = speeds, luck or {}, spread

    def outcome(self, trial: Trial) -> Outcome:
        if trial.kind is TrialKind.PROFILE:
            return profiled(weightless(64))
        zero = trial.overrides.get("zero_optimization", {})
        bucket = zero.get("reduce_bucket_size", OWN_BUCKET)
        digest = hashlib.sha256(f"{trial.id} {trial.name}".encode()).digest()
        chance = 1 + self._spread * (digest[0] / 128 - 1)
        lucky = 1.0 if trial.kind is TrialKind.FINAL else self._luck.get(bucket, 1.0)
        samples = trial.batch.micro_batch / (trial.batch.micro_batch + 1)
        value = 1000 * samples * self._speeds.get(bucket, 1.0) * chance * lucky
        return first_profiled(trial, ran(value), weightless(64))


def finals_plan(*, batches: bool = False, method: str = "random", **changes: Any) -> Plan:
    """One stage with ten buckets to choose from; the smallest is the user's own."""
    base = {"stage": 1, "reduce_bucket_size": OWN_BUCKET, "contiguous_gradients": True}
    plan = plan_of(
        method,
        max_trials=30,
        zero_stages=(1,),
        base_config={"zero_optimization": base, "optimizer": {"type": "Adam"}},
        own_batch=BatchTriple(8, 8, 1),
        micro_batches=(8, 16, 32) if batches else (8,),
        choices={"reduce_bucket_size": list(range(1, 11))},
        memory_model="none",
        finals=None,
    )
    return replace(plan, **changes)


def tuner_of(plan: Plan, events: list[Event] | None = None) -> tuple[Tuner, MemoryJournal]:
    journal = MemoryJournal(events or [])
    return Tuner(plan, journal, events=list(events or []), clock=FakeClock()), journal


def ran_to_the_end(
    speeds: Mapping[int, float],
    luck: Mapping[int, float] | None = None,
    *,
    slots: int = 1,
    **changes: Any,
) -> Run:
    tuner, _ = tuner_of(finals_plan(**changes))
    drive(tuner, Buckets(speeds, luck), slots=slots)
    return tuner.run


def finals_of(run: Run) -> list[Trial]:
    return [trial for trial in run.trials.values() if trial.kind is TrialKind.FINAL]


def test_finals_follow_the_search_and_count_as_trials() -> None:
    for max_trials, finals, most in ((30, None, 7), (16, 9, 9), (30, 0, 0), (8, None, 2)):
        run = ran_to_the_end({}, {3: 1.01}, max_trials=max_trials, finals=finals)
        kinds = [trial.kind for trial in run.trials.values()]
        assert kinds[: len(kinds) - len(finals_of(run))].count(TrialKind.FINAL) == 0
        assert len(finals_of(run)) <= most and bool(finals_of(run)) == bool(most)
        assert len(run.trials) <= max_trials
        assert run.stop_reason is not None


def test_a_later_search_reuses_what_the_search_measured_and_no_final() -> None:
    run = ran_to_the_end({}, {3: 1.01})
    known = known_outcomes([run], run.plan, {})
    finals = finals_of(run)
    assert finals and len(known) == len(run.trials) - len(finals)
    for trial in run.trials.values():
        if trial not in finals:
            assert known[cached.key(trial, run.plan)] is run.outcomes[trial.id]


def test_a_final_runs_alone_and_to_its_full_length() -> None:
    tuner, _ = tuner_of(finals_plan(max_trials=13, finals=4))
    world = Buckets({10: 1.5})
    while not tuner.finished:
        for trial in tuner.next_trials(3):
            if trial.kind is TrialKind.FINAL:
                assert tuner.run.running == [trial]
                assert trial.to_beat == {}
        running = world.next_to_end(tuner.run.running)
        tuner.record(running.id, world.outcome(running))
    names = [trial.name for trial in finals_of(tuner.run)]
    assert [name.split("_")[0] for name in names] == ["final1", "final2", "final3", "final4"]
    assert len(set(names)) == 4


@pytest.mark.parametrize("batches", [False, True])
def test_a_run_cut_off_in_its_finals_continues(batches: bool) -> None:
    plan = finals_plan(batches=batches)
    world = Buckets({10: 1.1}, spread=0.05)
    tuner, journal = tuner_of(plan)
    drive(tuner, world, slots=3)
    whole = journal.events
    begin = next(n for n, event in enumerate(whole) if event["event"] == "finals")
    assert len(whole) > begin + 8
    for count in (begin, begin + 1, begin + 4, begin + 7, len(whole)):
        resumed, again = tuner_of(plan, whole[:count])
        drive(resumed, world, slots=3)
        assert again.events == whole


def test_finals_at_the_own_batch_do_not_depend_on_how_many_sizes_are_allowed() -> None:
    plan = replace(finals_plan(method="model"), micro_batches=(), max_micro_batch=10**18)
    tuner, _ = tuner_of(plan)
    drive(tuner, Buckets({10: 1.1}))
    assert any(trial.kind is TrialKind.FINAL for trial in tuner.run.trials.values())


def test_a_run_without_finals_goes_on_into_them() -> None:
    tuner, journal = tuner_of(finals_plan(finals=0))
    drive(tuner, Buckets({10: 1.5}))
    assert not finals_of(tuner.run)
    old = [dict(event) for event in journal.events]
    old[0] = {**old[0], "plan": {**old[0]["plan"]}}
    for unknown in ("finals", "indifference"):  # written before there were any
        del old[0]["plan"][unknown]
    resumed, _ = tuner_of(finals_plan(), old)
    assert not resumed.finished
    drive(resumed, Buckets({10: 1.5}))
    assert len(finals_of(resumed.run)) == 4
    assert resumed.run.trials.keys() > tuner.run.trials.keys()


def test_with_more_trials_the_search_goes_on_and_has_finals_anew() -> None:
    plan = finals_plan(max_trials=12, finals=4)
    tuner, journal = tuner_of(plan)
    drive(tuner, Buckets({3: 1.1}, spread=0.05))
    before, noise = len(finals_of(tuner.run)), tuner.run.noise
    resumed, _ = tuner_of(replace(plan, max_trials=24), journal.events)
    assert resumed.run.finals is None
    assert noise is not None and resumed.run.noise == noise, (
        "by which the search judges from now on"
    )
    drive(resumed, Buckets({3: 1.1}, spread=0.05))
    kinds = [trial.kind for trial in resumed.run.trials.values()]
    after = kinds[kinds.index(TrialKind.FINAL) + before :]
    assert TrialKind.SEARCH in after and after[-1] is TrialKind.FINAL
    assert len(kinds) <= 24
    names = [trial.name for trial in resumed.run.trials.values()]
    assert len(set(names)) == len(names)


def test_noise_that_finals_have_shown_reaches_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, told = finals_plan(max_trials=12, finals=4), list[float | None]()
    tuner, journal = tuner_of(plan)
    drive(tuner, Buckets({3: 1.1}, spread=0.05))
    resumed, _ = tuner_of(replace(plan, max_trials=24), journal.events)
    tell = SEARCHES["random"].tell

    def spy(search: Search, proposal: Proposal, outcome: Outcome) -> None:
        assert outcome.metrics is not None
        told.append(outcome.metrics.standard_error)
        tell(search, proposal, outcome)

    monkeypatch.setattr(SEARCHES["random"], "tell", spy)
    [trial] = resumed.next_trials(1)
    resumed.record(trial.id, Buckets({}).outcome(trial))
    resumed.next_trials(1)
    assert told[0] == pytest.approx(tuner.run.noise)


def test_a_run_whose_budget_was_raised_during_its_finals_is_resumed() -> None:
    plan = finals_plan(method="model", batches=True, max_trials=12, finals=4)
    tuner, journal = tuner_of(plan)
    world = Buckets({3: 1.1}, spread=0.1)
    while not tuner.finished:
        if len(finals_of(tuner.run)) == 2 and not tuner.run.running:
            tuner.raise_budget(24)
        assert tuner.decisions.search_began or not tuner.run.outcomes  # as the loop asks each time
        for trial in tuner.next_trials(1):
            tuner.record(trial.id, world.outcome(trial))
    resumed, _ = tuner_of(plan, journal.events)
    assert list(resumed.run.trials) == list(tuner.run.trials) and resumed.finished


@pytest.mark.slow
def test_more_trials_are_nothing_to_a_search_that_expects_nothing_of_them() -> None:
    plan = finals_plan(method="model", batches=True, max_trials=60)
    tuner, journal = tuner_of(plan)
    drive(tuner, Buckets({3: 1.1}))
    assert len(tuner.run.trials) < 60 and finals_of(tuner.run)
    resumed, after = tuner_of(replace(plan, max_trials=90), journal.events)
    assert resumed.finished and resumed.run.best is not None
    drive(resumed, Buckets({3: 1.1}))
    assert list(resumed.run.trials) == list(tuner.run.trials)
    again, _ = tuner_of(replace(plan, max_trials=90), after.events)
    assert again.finished and Run(after.events).best == tuner.run.best


def test_a_pair_that_speaks_against_the_leader_counts_although_more_were_to_follow() -> None:
    world = Buckets({}, luck={10: 1.5})
    tuner, _ = tuner_of(finals_plan())
    bests = []
    while not tuner.finished:
        [trial] = tuner.next_trials(1)
        tuner.record(trial.id, world.outcome(trial))
        if len(finals_of(tuner.run)) == 2:
            bests.append(tuner.run.best)
    run = tuner.run
    assert run.leader is not None and run.leader != run.baseline
    assert bests == [run.baseline], "after the first pair"


def test_there_is_nothing_to_decide_without_something_to_compare() -> None:
    assert not finals_of(ran_to_the_end(dict.fromkeys(range(2, 11), 0.5)))

    class OwnFails(Buckets):
        def outcome(self, trial: Trial) -> Outcome:
            own = trial.kind is TrialKind.BASELINE
            return failed("OOM") if own else super().outcome(trial)

    tuner, _ = tuner_of(finals_plan())
    drive(tuner, OwnFails({}))
    assert not finals_of(tuner.run)
    assert tuner.run.best is not None


@pytest.mark.parametrize(("ci95", "are_due"), [(0.01, False), (1.3, True)])
def test_a_lucky_baseline_does_not_decide_by_a_noisy_measurement(
    ci95: float, are_due: bool
) -> None:
    class Lucky(Buckets):
        def outcome(self, trial: Trial) -> Outcome:
            outcome = super().outcome(trial)
            if trial.kind is not TrialKind.BASELINE or outcome.metrics is None:
                return outcome
            metrics = replace(outcome.metrics, ci95=ci95)
            return replace(outcome, metrics=replace(metrics, throughput=2 * metrics.throughput))

    for finals in (None, 0):
        tuner, _ = tuner_of(finals_plan(finals=finals))
        drive(tuner, Lucky({10: 1.5}))
        run, said = tuner.run, verdict(tuner.run)
        assert run.leader is run.baseline
        assert bool(finals_of(run)) == (are_due and finals is None)
        if finals_of(run):
            assert said.headline.startswith("Gain 1.5")
        elif are_due:
            assert " is not significantly faster, 0.7" in said.headline
            assert said.confidence.startswith("low, because each was measured once")
        else:
            assert said.headline.endswith(": nothing faster was found.")


@pytest.mark.parametrize("demand", ["train_batch_size", "max_train_batch_size"])
def test_a_faster_own_batch_outside_of_what_was_demanded_does_not_end_the_search(
    demand: str,
) -> None:
    class Larger(World):
        def outcome(self, trial: Trial) -> Outcome:
            if trial.kind is TrialKind.PROFILE:
                return profiled(weightless(64))
            size = trial.batch.micro_batch
            found = measured(ran(100.0 * size / (size + 10)), trial)
            return first_profiled(trial, found, weightless(64))

    changes: dict[str, Any] = {"own_batch": BatchTriple(64, 64, 1), "micro_batches": (), demand: 16}
    options = {"stop_when": 0.003}
    tuner, _ = tuner_of(finals_plan(method="model", search_options=options, **changes))
    drive(tuner, Larger())
    run = tuner.run
    kinds = [trial.kind for trial in run.trials.values()]
    assert kinds.count(TrialKind.SEARCH) > 1
    assert run.best is not None and run.best.batch.train_batch_size <= 16
    assert "Yours is faster, but outside the batch sizes" in verdict(run).confidence


# -- the training


class Training(Buckets):
    """Some configurations lose what others learn.

    Args:
        broken: their bucket sizes.
        seeded: whether a run repeats another.
    """

    def __init__(self, *broken: int, seeded: bool = True, **speeds: float) -> None:
        super().__init__({int(bucket[1:]): speed for bucket, speed in speeds.items()})
        self._broken, self._seeded = broken, seeded

    def outcome(self, trial: Trial) -> Outcome:
        outcome = super().outcome(trial)
        bucket = trial.overrides.get("zero_optimization", {}).get("reduce_bucket_size", OWN_BUCKET)
        rate = 0.02 if bucket in self._broken else 0.05
        start = 5.0 if self._seeded else 5.0 + 0.01 * trial.id
        losses = tuple(start - rate * step for step in range(10))
        curve = TrainingCurve(tuple(range(1, 11)), losses)
        return replace(outcome, training=curve)


def test_what_trains_otherwise_cannot_win_and_the_setting_is_named() -> None:
    tuner, journal = tuner_of(finals_plan(finals=12))
    drive(tuner, Training(10, b10=1.52, b9=1.5))
    run = tuner.run
    assert run.leader is not None and run.best is not None
    assert run.leader.overrides["zero_optimization"]["reduce_bucket_size"] == 10
    assert run.best.overrides["zero_optimization"]["reduce_bucket_size"] == 9
    [said] = verdict(run).warnings
    assert said.startswith(f"{run.leader.name} is excluded: ")
    assert said.endswith("What differs: zero_optimization.reduce_bucket_size=10.")
    assert "On the same data the losses agree" in verdict(run).confidence
    resumed, _ = tuner_of(tuner.plan, journal.events)
    assert resumed.run.disqualified == run.disqualified


def test_if_all_leaders_train_otherwise_the_users_own_is_kept() -> None:
    tuner, _ = tuner_of(finals_plan())
    drive(tuner, Training(*range(2, 11), b10=1.5))
    assert tuner.run.best is tuner.run.baseline
    assert verdict(tuner.run).headline.startswith("Keep your configuration")


def test_what_trains_otherwise_does_not_win_while_the_search_goes_on() -> None:
    plan = finals_plan(max_trials=14, finals=4)
    tuner, journal = tuner_of(plan)
    drive(tuner, Training(10, b10=1.5))
    assert tuner.run.disqualified
    resumed, _ = tuner_of(replace(plan, max_trials=30), journal.events)
    assert resumed.run.finals is None and resumed.run.best is resumed.run.baseline


def test_losses_of_a_script_without_a_seed_are_not_compared() -> None:
    tuner, _ = tuner_of(finals_plan())
    drive(tuner, Training(10, seeded=False, b10=1.5))
    assert tuner.run.best is tuner.run.leader
    assert "the script is not seeded" in verdict(tuner.run).confidence
