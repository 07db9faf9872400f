"""No configuration runs twice."""

from __future__ import annotations

import pytest

from dsat.inputs import ds_config
from dsat.search import SEARCHES
from dsat.search.model import ModelSearch
from dsat.values.trial import BatchTriple, TrialKind
from testing.helpers import (
    World,
    drive,
    failed,
    plan_of,
    ran,
)
from testing.tuners import ONE_LINEAGE, begun, configs_of, tuner_of


def test_an_earlier_outcome_stands_in_for_an_equal_proposal() -> None:
    # The bisection of 1..15 begins with the user's own micro batch of 8.
    tuner, journal = begun(plan_of(**ONE_LINEAGE, own_batch=BatchTriple(8, 8, 1)))
    (baseline,) = tuner.next_trials(1)
    tuner.record(baseline.id, failed("OOM"))
    (below,) = tuner.next_trials(1)
    assert below.batch.micro_batch == 4
    assert below.id == 2
    tuner.record(below.id, ran())
    (above,) = tuner.next_trials(1)
    assert above.batch.micro_batch == 6
    assert len(configs_of(tuner.run)) == len(set(configs_of(tuner.run))) == 3
    assert [event["event"] for event in journal.events[3:]] == ["proposed", "finished"] * 2 + [
        "proposed"
    ]


@pytest.mark.parametrize(("outcome", "next_micro_batch"), [("OK", 12), ("OOM", 4)])
def test_an_equal_proposal_waits_for_the_trial_that_runs(
    outcome: str, next_micro_batch: int
) -> None:
    tuner, _ = begun(plan_of(**ONE_LINEAGE, own_batch=BatchTriple(8, 8, 1)))
    (baseline,) = tuner.next_trials(3)
    assert tuner.decisions.stop_reason is None
    tuner.record(baseline.id, ran() if outcome == "OK" else failed(outcome))
    (following,) = tuner.next_trials(3)
    assert following.batch.micro_batch == next_micro_batch
    tuner.record(following.id, failed("ERROR"))
    assert tuner.next_trials(3) == []
    assert tuner.decisions.stop_reason == "every configuration was tried"


def test_other_lineages_go_on_while_an_equal_proposal_waits() -> None:
    # Stage 1 has nothing else to search; stage 3 has sub_group_size.
    changes = {**ONE_LINEAGE, "zero_stages": (1, 3), "choices": {"sub_group_size": (7, 8)}}
    plan = plan_of(**changes, own_batch=BatchTriple(8, 8, 1))
    tuner, _ = begun(plan)
    baseline, *others = tuner.next_trials(9)
    assert (baseline.kind, baseline.stage) == (TrialKind.BASELINE, 1)
    assert [(trial.stage, trial.batch.micro_batch) for trial in others] == [(3, 8), (3, 8)]
    tuner.record(baseline.id, ran())
    (following,) = tuner.next_trials(9)
    assert (following.stage, following.batch.micro_batch) == (1, 12)


@pytest.mark.parametrize("method", SEARCHES)
@pytest.mark.parametrize("own", [4, 8, 20])
def test_no_configuration_runs_twice(method: str, own: int) -> None:
    plan = plan_of(
        method,
        **{**ONE_LINEAGE, "zero_stages": (1, 2)},
        own_batch=BatchTriple(own, own, 1),
        max_trials=40,
    )
    tuner, _ = tuner_of(plan)
    drive(tuner, World(), slots=3)
    merged = [
        ds_config.fingerprint(ds_config.merge(plan.base_config, trial.overrides))
        for trial in tuner.run.trials.values()
        if trial.kind is not TrialKind.PROFILE
    ]
    assert len(merged) == len(set(merged)) > 5


def test_the_profile_is_no_measurement_of_its_configuration() -> None:
    buckets = {
        "reduce_bucket_size": 1000,
        "allgather_bucket_size": 1000,
        "contiguous_gradients": True,
    }
    plan = plan_of(
        zero_stages=(1,),
        base_config={"zero_optimization": {"stage": 1, **buckets}},
        own_batch=BatchTriple(3, 3, 1),
    )
    tuner, _ = begun(plan, ceiling=1)
    profile = tuner.run.trials[0]
    _, searched = tuner.next_trials(2)
    assert searched.batch == profile.batch
    assert ds_config.merge(plan.base_config, searched.overrides) == ds_config.merge(
        plan.base_config, profile.overrides
    )


def test_a_bucket_that_the_model_cannot_fill_is_like_any_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSpeed's default is larger than small models; the space has the smallest of these."""
    told: list[int | None] = []
    monkeypatch.setattr(ModelSearch, "learn", lambda _, branch, *__: told.append(branch))
    base = {"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 2}}
    tuner, _ = begun(plan_of("model", base_config=base))
    (baseline,) = tuner.next_trials(1)
    assert baseline.kind is TrialKind.BASELINE
    tuner.record(baseline.id, ran())
    assert told == [1]
