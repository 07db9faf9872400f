"""What DeepSpeed refuses is not searched; DeepSpeed is one that the test makes up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dsat.errors import JournalMismatch
from dsat.space.plan import WHOLE_STRATEGY, Plan
from dsat.tuning import refused, strategies
from dsat.values.zero_strategy import CPU, Strategy
from testing.helpers import World, plan_of
from testing.tuners import events_of, tuner_of

Rule = Callable[[Mapping[str, Any]], str | None]


def asked(rule: Rule) -> refused.Objections:
    def objections(configs: Sequence[Mapping[str, Any]]) -> list[str | None]:
        return [rule(config) for config in configs]

    return objections


def scatters(config: Mapping[str, Any]) -> str | None:
    """As ZeRO's optimizers of 0.19.8 say with `prescale_gradients`."""
    zero = config["zero_optimization"]
    is_refused = zero["stage"] == 2 and zero.get("reduce_scatter", True)
    return "not with reduce scatter enabled" if is_refused else None


def knobs_of(plan: Plan) -> dict[str, dict[str, tuple[Any, ...]]]:
    space = strategies.make_space(plan)
    return {branch.strategy.name: dict(branch.knobs) for branch in space.branches}


def test_values_are_left_out_where_they_are_refused() -> None:
    plan = plan_of(slots_per_trial=2)
    found = refused.of_plan(plan, asked(scatters))
    assert found.settings == {"z2": {"reduce_scatter": (True,)}}
    assert found.lines == [
        "stage 2 with reduce_scatter true is not tried: not with reduce scatter enabled"
    ]
    knobs = knobs_of(replace(plan, refused=found.settings))
    assert [knobs[name]["reduce_scatter"] for name in ("z1", "z2", "z3")] == [
        (True, False),
        (False,),
        (True, False),
    ]


def test_a_strategy_is_left_out_where_nothing_helps() -> None:
    own = {"zero_optimization": {"reduce_scatter": True}}
    plan = plan_of(slots_per_trial=2, base_config=own)
    found = refused.of_plan(plan, asked(scatters))
    assert found.settings == {"z2": {WHOLE_STRATEGY: (2,)}}
    assert found.lines == ["stage 2 is not tried: not with reduce scatter enabled"]
    assert set(knobs_of(replace(plan, refused=found.settings))) == {"z1", "z3"}


def test_the_ladder_has_no_rung_that_is_refused() -> None:
    def rule(config: Mapping[str, Any]) -> str | None:
        zero = config["zero_optimization"]
        offloads = zero.get("offload_optimizer", {}).get("device", "none") != "none"
        return "no offloading" if offloads and zero["stage"] < 3 else None

    base = {"optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1}}
    plan = plan_of(base_config=base, offload_helps=True, slots_per_trial=2)
    assert Strategy(2, CPU) in strategies.rungs(plan)
    found = refused.of_plan(plan, asked(rule))
    assert found.settings == {"z2_offload": {WHOLE_STRATEGY: (2,)}}
    rungs = strategies.rungs(replace(plan, refused=found.settings))
    assert Strategy(2, CPU) not in rungs
    assert Strategy(3, CPU) in rungs


@pytest.mark.parametrize("method", ["model", "asha", "binary", "random", "gridsearch"])
def test_no_search_draws_it(method: str) -> None:
    plan = plan_of(method, slots_per_trial=2, zero_stages=(2, 3))
    plan = replace(plan, refused=refused.of_plan(plan, asked(scatters)).settings)
    tried = 0
    for event in events_of(plan, World(), slots=2):
        if event["event"] == "proposed" and event["trial"]["kind"] == "search":
            config = plan.config(event["trial"]["overrides"])
            assert scatters(config) is None
            tried += config["zero_optimization"]["stage"] == 2
    assert tried


def test_a_run_from_before_is_resumed_without_it() -> None:
    events = events_of(plan_of(max_trials=3), World(), slots=1)
    del events[0]["plan"]["refused"]
    refusing = plan_of(max_trials=5, refused={"z2": {WHOLE_STRATEGY: (2,)}})
    assert tuner_of(refusing, events)[0].plan.refused == {}
    since = events_of(plan_of(max_trials=3, refused={"z3": {"x": (1,)}}), World(), slots=1)
    with pytest.raises(JournalMismatch, match="what DeepSpeed refuses of"):
        tuner_of(refusing, since)
