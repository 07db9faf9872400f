"""ZeRO stages with offloading, and the ladder on which a fitting one is looked for."""

from __future__ import annotations

from typing import Any

import pytest

from dsat.space.plan import Plan
from dsat.tuning import strategies as ladder
from dsat.values.zero_strategy import CPU, NVME, Strategy, of_config, plain
from testing.helpers import plan_of

ON_CPU = {"device": "cpu"}


def names(strategies: tuple[Strategy, ...]) -> list[str]:
    return [strategy.name for strategy in strategies]


def offloading(slots: int = 1, zero: dict[str, Any] | None = None, **changes: Any) -> Plan:
    """A plan for slots that have memory of their own."""
    base = {"zero_optimization": {"stage": 1, **(zero or {})}}
    return plan_of(**{"base_config": base, "offload_helps": True, **changes}, slots_per_trial=slots)


@pytest.mark.parametrize(
    ("zero", "strategy", "name"),
    [
        (None, Strategy(0), "z0"),
        ({"stage": 2, "offload_optimizer": ON_CPU}, Strategy(2, CPU), "z2_offload"),
        (
            {"stage": 3, "offload_optimizer": ON_CPU, "offload_param": ON_CPU},
            Strategy(3, CPU, CPU),
            "z3_offload_param",
        ),
        ({"stage": 3, "offload_param": ON_CPU}, Strategy(3, "none", CPU), "z3_offparam"),
        ({"stage": 3, "offload_optimizer": {"device": "nvme"}}, Strategy(3, NVME), "z3_nvme"),
        # What a stage does not have is left out.
        ({"stage": 2, "offload_param": ON_CPU}, Strategy(2), "z2"),
        ({"stage": 0, "offload_optimizer": ON_CPU}, Strategy(0), "z0"),
        ({"stage": 2, "offload_optimizer": None}, Strategy(2), "z2"),
    ],
)
def test_the_strategy_of_a_configuration(
    zero: dict[str, Any] | None, strategy: Strategy, name: str
) -> None:
    assert of_config({"zero_optimization": zero}) == strategy
    assert strategy.name == name


def test_a_strategy_burdens_more_the_more_it_moves() -> None:
    ladder = [*plain(0, 1, 2), Strategy(2, CPU), Strategy(3), Strategy(3, CPU)]
    assert [s.burden for s in [*ladder, Strategy(3, CPU, CPU), Strategy(3, NVME, NVME)]] == [
        *(0, 0, 0, 1, 1, 2, 3, 4)
    ]


# -- the ladder


@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
def test_the_ladder_of_several_slots(precision: dict[str, Any]) -> None:
    def rungs(slots: int, stage: int) -> list[str]:
        base = {"zero_optimization": {"stage": stage}, **precision}
        return names(ladder.rungs(offloading(slots=slots, base_config=base)))

    # Stage 1 holds all gradients before it reduces them.
    assert rungs(8, stage=1) == ["z2", "z2_offload", "z3", "z3_offload", "z3_offload_param"]
    assert rungs(8, stage=0) == ["z1", "z2", "z2_offload", "z3", "z3_offload", "z3_offload_param"]
    # Two slots share so little that stage 3 needs more than the optimizer on the host saves.
    # In bf16 the optimizer step needs more than the gradients of stage 1.
    beyond = ["z2_offload", "z3_offload", "z3_offload_param"]
    assert rungs(2, stage=1) == (beyond if precision else ["z2", *beyond])


def test_the_ladder_keeps_to_the_stages_asked_for_and_begins_where_the_user_is() -> None:
    assert names(ladder.rungs(offloading(slots=4, zero_stages=(1, 2)))) == ["z2", "z2_offload"]
    own = {"stage": 3, "offload_optimizer": ON_CPU}
    assert names(ladder.rungs(offloading(slots=8, zero=own))) == ["z3_offload_param"]
    both = {**own, "offload_param": ON_CPU}
    assert names(ladder.rungs(offloading(slots=8, zero=both))) == []


def test_where_the_ladder_may_lead() -> None:
    """To NVMe if there is a path, and to no offloading where the slot is the host."""
    *above, last = names(ladder.rungs(offloading(slots=1, nvme_path="/nvme")))
    assert above == ["z2_offload", "z3_offload_param"]
    assert last == "z3_nvme_param"
    plan = offloading(slots=2, zero={"stage": 0}, offload_helps=False)
    assert names(ladder.rungs(plan)) == ["z1", "z2", "z3"]


def test_what_the_user_fixed_stays_on_every_rung() -> None:
    plan = offloading(slots=1, zero={"offload_optimizer": {"device": "none"}})
    # The step of stage 3 takes the optimizer's state group by group.
    assert names(ladder.rungs(plan)) == ["z3"]
    assert names(ladder.rungs(offloading(fix=("offload_optimizer", "offload_param")))) == ["z3"]


# -- what is searched


def test_what_is_searched() -> None:
    """No offloading when the model fits without; the user's own in every stage that has it."""
    assert names(ladder.searched(offloading(slots=2))) == ["z1", "z2", "z3"]
    own = {"stage": 3, "offload_optimizer": ON_CPU, "offload_param": ON_CPU}
    plan = offloading(zero=own, zero_stages=(0, 1, 3))
    assert names(ladder.searched(plan)) == ["z0", "z1_offload", "z3_offload_param"]


def test_offloading_is_searched_when_it_is_asked_for() -> None:
    plan = offloading(slots=2, tune=("offload_optimizer",), offload_helps=False)
    assert names(ladder.searched(plan)) == ["z1", "z2", "z3", "z2_offload", "z3_offload"]
    plan = offloading(slots=2, tune=("offload_optimizer", "offload_param"), zero_stages=(3,))
    assert names(ladder.searched(plan)) == ["z3", "z3_offload", "z3_offload_param"]


def test_after_a_rung_fitted_those_above_it_are_searched_too() -> None:
    plan = offloading(slots=8, nvme_path="/nvme")
    assert names(ladder.searched_from(plan, 2)) == ["z3", "z3_offload", "z3_offload_param"]
    assert names(ladder.searched_from(plan, 5)) == ["z3_nvme_param"]
