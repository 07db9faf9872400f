"""Where the time of a step goes, and what is advised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dsat.report.step_parts import advice, gains_of_switch, milliseconds
from dsat.report.verdict import verdict
from dsat.tuning.run import Run
from dsat.values.outcome import Metrics, Outcome, OutcomeKind, ScriptSwitch
from dsat.values.trial import BatchTriple, Trial, TrialKind
from testing.helpers import World, plan_of

BATCH = BatchTriple(8, 8, 1)
PROFILE = replace(
    World.profile, switches={"dataloader_num_workers": ScriptSwitch((0, 2), in_arguments=True)}
)


def _measured(latency: float, *, data: float = 0.0, step: float = 10.0) -> Outcome:
    metrics = Metrics(8e3 / latency, latency, 20.0, 30.0, step, None, 20, 0.002, data=data)
    return Outcome(OutcomeKind.OK, metrics=metrics, profile=PROFILE)


def _run(
    own: Outcome, *others: tuple[Mapping[str, Any], Outcome], config: Mapping[str, Any] = {}
) -> Run:
    """A run of the user's own configuration, and trials with switches of the script."""
    plan = plan_of(metric="throughput", finals=0, base_config=config)
    plan = replace(plan, own_batch=BATCH, slots_per_trial=1)
    start = {"event": "start", "plan": plan.to_json(), "info": {"name": "x"}}
    events: list[dict[str, Any]] = [start]
    for number, (switches, outcome) in enumerate([({}, own), *others]):
        kind = TrialKind.SEARCH if number else TrialKind.BASELINE
        trial = Trial(number, kind, f"t{number}", 0, BATCH, BATCH.config(), script_args=switches)
        events.append({"event": "proposed", "trial": trial.to_json(), "elapsed_s": 0.0})
        finished = {"event": "finished", "trial_id": number, "outcome": outcome.to_json()}
        events.append({**finished, "elapsed_s": 1.0})
    return Run(events)


def test_the_parts_make_up_the_step() -> None:
    metrics = _measured(100.0, data=31.0).metrics
    assert metrics is not None
    assert milliseconds(metrics) == (20.0, 30.0, 10.0, 31.0, 9.0)


def test_a_slow_loader_is_named_with_what_workers_gained() -> None:
    run = _run(_measured(100.0, data=31.0), ({"dataloader_num_workers": 2}, _measured(80.0)))
    assert gains_of_switch(run, "dataloader_num_workers") == {2: pytest.approx(1.25)}
    said = "Time: 31.0 % of your step waits for data: dataloader_num_workers=2 gave 1.25x."
    assert advice(run) == [said]
    needed = "Script: the best needs TrainingArguments(dataloader_num_workers=2). "
    assert verdict(run).advice == (f"{needed}The training command sets it.", said)


def test_what_was_not_measured_alone_is_told_without_a_gain() -> None:
    both = {"dataloader_num_workers": 2, "attn_implementation": "eager"}
    run = _run(_measured(100.0, data=31.0), (both, _measured(80.0, data=4.0)))
    assert advice(run) == ["Time: 31.0 % of your step waits for data, 5.0 % of the best."]


def test_a_loader_that_stays_slow_is_named_with_a_remedy() -> None:
    run = _run(_measured(100.0, data=31.0))
    [said] = advice(run)
    assert said.startswith("Time: 31.0 % of the best step waits for data: ")
    assert "--switch --num_workers=0,4,8" in said


@pytest.mark.parametrize(
    ("latency", "gained"), [(80.0, "bind_cores_to_rank gave 1.25x; "), (99.9, "")]
)
def test_a_large_optimizer_step_on_the_host_is_named(latency: float, gained: str) -> None:
    """A gain is named if it exceeds the noise of both trials."""
    bound = ({"bind_cores_to_rank": True}, _measured(latency, step=0.38 * latency))
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    [said] = advice(_run(_measured(100.0, step=38.0), bound, config={"zero_optimization": zero}))
    large = "Time: 38.0 % of the best step is the optimizer step on the host: "
    assert said.startswith(f"{large}{gained}more slots")


def test_a_step_without_a_large_part_needs_no_advice() -> None:
    assert advice(_run(_measured(100.0, data=2.0))) == []
