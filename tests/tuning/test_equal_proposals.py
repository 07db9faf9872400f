"""No configuration runs twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsat.inputs import ds_config
from dsat.search import SEARCHES
from dsat.search.model import ModelSearch
from dsat.space.space import Suggestion
from dsat.values.outcome import Outcome
from dsat.values.trial import BatchTriple, TrialKind
from testing.helpers import World, drive, failed, plan_of, ran
from testing.tuners import ONE_LINEAGE, begun, configs_of, tuner_of


def test_an_earlier_outcome_stands_in_for_an_equal_proposal() -> None:
    # The bisection of 1..15 begins with the user's own micro batch of 8.
    plan = plan_of(**ONE_LINEAGE, own_batch=BatchTriple(8, 8, 1))
    tuner, _ = begun(plan, failed("OOM"))
    (below,) = tuner.next_trials(1)
    assert below.batch.micro_batch == 4
    tuner.record(below.id, ran())
    (above,) = tuner.next_trials(1)
    assert above.batch.micro_batch == 6
    assert len(configs_of(tuner.run)) == len(set(configs_of(tuner.run))) == 3


@pytest.mark.parametrize("outcome", [ran(2.0), failed("OOM")])
def test_an_equal_proposal_waits_for_the_trial_that_runs(outcome: Outcome) -> None:
    plan = plan_of(**ONE_LINEAGE, own_batch=BatchTriple(3, 3, 1))
    (first,) = begun(plan)[0].next_trials(1)
    size = first.batch.micro_batch
    of_others = Suggestion(0, 0, "z1", {"train_micro_batch_size_per_gpu": size}, {})
    tuner, _ = begun(replace(plan, suggested=(of_others,)))
    (suggested,) = tuner.next_trials(3)
    assert suggested.batch == first.batch and suggested.lineage is None
    assert tuner.decisions.stop_reason is None
    tuner.record(suggested.id, outcome)
    (following,) = tuner.next_trials(3)
    assert (following.batch.micro_batch > size) is outcome.ok


@pytest.mark.parametrize("method", SEARCHES)
@pytest.mark.parametrize("own", [4, 20])
def test_no_configuration_runs_twice(method: str, own: int) -> None:
    changes = {**ONE_LINEAGE, "zero_stages": (1, 2), "own_batch": BatchTriple(own, own, 1)}
    plan = plan_of(method, **changes, max_trials=40)
    tuner, _ = tuner_of(plan)
    drive(tuner, World(), slots=3)
    merged = [
        ds_config.fingerprint(ds_config.merge(plan.base_config, trial.overrides))
        for trial in tuner.run.trials.values()
        if trial.kind is not TrialKind.PROFILE
    ]
    assert len(merged) == len(set(merged)) >= 5


def test_the_profile_is_no_measurement_of_its_configuration() -> None:
    buckets = {"reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
    zero = {"stage": 1, **buckets, "contiguous_gradients": True}
    plan = plan_of(
        zero_stages=(1,), base_config={"zero_optimization": zero}, own_batch=BatchTriple(3, 3, 1)
    )
    tuner, _ = begun(plan, failed("OOM"), ceiling=1)
    profile = tuner.run.trials[1]
    (searched,) = tuner.next_trials(1)
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
    tuner.next_trials(1)
    assert told == [1]
