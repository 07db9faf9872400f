from __future__ import annotations

import json
from typing import Any

import pytest

from dsat.space.plan import Plan
from dsat.values.objective import METRIC_NAMES, Objective
from dsat.values.outcome import MemoryUse, Metrics, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import failed, plan_of, ran, weightless


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


@pytest.mark.parametrize("metric", METRIC_NAMES)
def test_the_direction_of_every_metric(metric: str) -> None:
    objective = Objective(metric)
    smaller = metric not in ("FLOPS_per_gpu", "throughput", "tokens_per_second")
    assert objective.smaller_is_better == smaller
    assert objective.is_better(1.0, 2.0) == smaller
    assert objective.is_better(2.0, 1.0) != smaller
    assert not objective.is_better(1.0, 1.0)
    assert objective.is_better(0.0, None)
    assert (objective.loss(1.0) < objective.loss(2.0)) == smaller
    assert objective.gain(2.0, 4.0) == (2.0 if smaller else 0.5)
    assert ran(0.0, metric).value(objective) == 0.0, "zero is a value"


def test_an_outcome_has_a_value_only_if_it_ran_and_measured_it() -> None:
    objective = Objective("FLOPS_per_gpu")
    uncounted = Metrics(1.0, 1.0, 1.0, 1.0, 1.0, None, 5, 0.0)
    assert failed("OOM").value(objective) is None
    assert Outcome(OutcomeKind.OK).value(objective) is None
    assert Outcome(OutcomeKind.OK, metrics=uncounted).value(objective) is None
    assert Outcome(OutcomeKind.TIMEOUT, metrics=ran().metrics).value(objective) is None


OUTCOME = Outcome(
    OutcomeKind.OK,
    metrics=Metrics(1.0, 2.0, 3.0, 4.0, 5.0, None, 6, 0.5),
    memory=MemoryUse({"init": 1}, {"step": 2}, {"forward": 3}),
    profile=weightless(3),
    detail="a\nb",
    duration_s=1.25,
    warnings=("slow disk", "few steps"),
)
TRIAL = Trial(
    5,
    TrialKind.SEARCH,
    "z2",
    2,
    BatchTriple(8, 2, 2),
    {"zero_optimization": {"stage": 2, "overlap_comm": True}, "train_batch_size": 8},
    lineage=3,
    note={"rung": 1},
    flops_per_sample=1.5e12,
    script_args={"gradient_checkpointing": True},
)


@pytest.mark.parametrize("value", [OUTCOME, failed("HOST_OOM", "killed"), TRIAL])
def test_what_is_recorded_is_read_again(value: Outcome | Trial) -> None:
    assert type(value).from_json(_through_json(value.to_json())) == value


def test_a_plan_survives_the_journal() -> None:
    plan = plan_of(
        "asha",
        search_options={"max_rungs": 3, "search_range_factor": 1.5},
        train_batch_size=32,
        slot_memory_bytes=2**30,
        base_config={"zero_optimization": {"stage": 2}, "optimizer": {"params": {"betas": [1]}}},
    )
    again = Plan.from_json(_through_json(plan.to_json()))
    assert again == plan
    assert plan.difference(again) is None
    assert plan_of(max_trials=5).difference(plan_of(max_trials=9)) is None
    assert plan_of(seed=5).difference(plan_of(seed=9)) == "random seed was 9, now 5"


def test_a_failure_is_described_without_a_final_period() -> None:
    outcome = Outcome(OutcomeKind.ERROR, message="ValueError: this is not supported.")
    assert outcome.describe("trial 1") == "trial 1 failed: ValueError: this is not supported"
