"""The simulations before a search, with a script that answers at once."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from dsat.memory import closed_form
from dsat.memory.estimate import SIMULATED, MemoryEstimate
from dsat.memory.predictor import Basis, MemoryModel
from dsat.simulation import anchors
from dsat.simulation.client import Simulator
from dsat.simulation.protocol import Question
from dsat.values.outcome import ModelProfile, ScriptSwitch
from dsat.values.zero_strategy import read_strategy
from testing.helpers import plan_of
from testing.simulation_host import (
    MIB,
    FakeSimulationHost,
    by_formula,
    facts_of,
    failing_in,
)

GIB = 2**30
FACTS = facts_of(50 * MIB)
CONFIGS = [
    {"zero_optimization": {"stage": stage, "reduce_bucket_size": 10**6}} for stage in (0, 1, 2, 3)
]
PROFILE = ModelProfile(
    num_params=FACTS.num_params,
    trainable_params=FACTS.trainable_params,
    param_bytes=FACTS.param_bytes,
    activation_bytes_per_sample=20 * MIB,
    flops_per_sample=1e12,
    slot_memory_bytes=4 * GIB,
)


def basis_of(
    host: FakeSimulationHost,
    configs: Sequence[Mapping[str, Any]] = CONFIGS,
    profile: ModelProfile = PROFILE,
    **of_plan: Any,
) -> Basis:
    plan = plan_of("asha", zero_stages=(0, 1, 2, 3), slot_memory_bytes=4 * GIB, **of_plan)
    return anchors.simulate_strategies(
        host, plan, profile, configs, as_cpu=False, say=lambda line: None
    )


@pytest.mark.parametrize("lost", [set(), {3}, {2, 3}, {0, 1}])
def test_a_strategy_that_cannot_be_simulated_costs_the_others_nothing(lost: set[int]) -> None:
    said: list[str] = []
    host = FakeSimulationHost(FACTS, failing_in(lost, by_formula(FACTS)))
    with Simulator(host, as_cpu=False) as simulator:
        found = anchors.variant_of(
            simulator, CONFIGS, {}, slots=1, limit_bytes=4 * GIB, on_device=True, say=said.append
        )
    workspace = closed_form.MATMUL_WORKSPACE_BYTES
    assert found.facts == replace(FACTS, matmul_bytes=workspace, workspace_bytes=workspace)
    stages = [read_strategy(anchor.config).stage for anchor in found.anchors]
    assert stages == [stage for stage in range(4) if stage not in lost]
    assert all(anchor.estimate.source == SIMULATED for anchor in found.anchors)
    why = "not simulated, so predicted by formula: NotImplementedError: no fake kernel"
    assert said == [f"stage {stage}: {why}" for stage in sorted(lost)]


@pytest.mark.parametrize(
    ("largest", "bytes_per_sample", "note"),
    [
        (16, 20 * MIB, "up to 16 clearly fit"),
        (1000, 1, "no GPU here"),
        (10**5, 20 * MIB, "no GPU here"),
    ],
)
def test_what_has_plenty_of_room_is_not_simulated(
    largest: int, bytes_per_sample: int, note: str
) -> None:
    """Other cases ask for a simulation, as a script may need more memory far from what ran."""
    profile = replace(PROFILE, activation_bytes_per_sample=bytes_per_sample)
    host = FakeSimulationHost(FACTS, by_formula(FACTS), fails_early="no GPU here")
    basis = basis_of(host, profile=profile, max_micro_batch=largest)
    assert note in basis.note and basis == Basis.of_profile(profile, {}, basis.note)


def test_where_memory_is_no_line_it_is_simulated_where_it_ends() -> None:
    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        plain = closed_form.estimate(
            FACTS, request["config"], slots=1, micro_batch=request["micro_batch"]
        )
        backward = plain.backward + 4 * MIB * request["micro_batch"] ** 2
        return {"estimate": replace(plain, backward=backward).to_json()}

    basis = basis_of(FakeSimulationHost(FACTS, answer), max_micro_batch=10**5)
    asked = [anchor.micro_batch for anchor in basis.variants[0].anchors]
    assert len(asked) == 2 * len(CONFIGS) and max(asked[4:]) < min(asked[:4])
    model = MemoryModel(basis, slots=1, limit_bytes=4 * GIB)
    for config in CONFIGS:
        largest = int(model.largest(model.shape(config, {})))
        needed = MemoryEstimate.from_json(
            answer({"config": config, "micro_batch": largest})["estimate"]
        )
        assert 0.85 * 4 * GIB < needed.peak < 4 * GIB


@pytest.mark.slow
def test_a_late_answer_is_not_taken_for_that_to_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stage 3 is answered only after the next question has arrived."""
    monkeypatch.setattr("dsat.simulation.client._PATIENCE_S", 0.0)
    plain, next_came = by_formula(FACTS), threading.Event()

    def late(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if read_strategy(request["config"]).stage == 3:
            next_came.wait(60.0)
        return plain(request)

    host = FakeSimulationHost(FACTS, late)
    with Simulator(host, as_cpu=False, timeout_s=0.2) as simulator:
        [first] = simulator.estimates([Question(CONFIGS[3], 2, 1)])
        assert "no answer from the script" in str(first)
        next_came.set()
        [second] = simulator.estimates([Question(CONFIGS[1], 2, 1)])
    assert "no answer from the script" in str(second)


def test_questions_and_answers_are_of_any_size() -> None:
    plain = by_formula(FACTS)

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**plain(request), "padding": "x" * MIB}

    host = FakeSimulationHost(FACTS, answer)
    large = {**CONFIGS[1], "words": "x" * MIB}
    with Simulator(host, as_cpu=False) as simulator:
        found = simulator.estimates([Question(large, size, 1) for size in (1, 2, 3)])
    assert [request["config"]["words"] for request in host.asked] == ["x" * MIB] * 3
    assert found == [simulated_of(CONFIGS[1], size) for size in (1, 2, 3)]


def simulated_of(config: Mapping[str, Any], micro_batch: int) -> MemoryEstimate | str:
    with Simulator(FakeSimulationHost(FACTS, by_formula(FACTS)), as_cpu=False) as simulator:
        return simulator.estimates([Question(config, micro_batch, 1)])[0]


@pytest.mark.parametrize("failing", ["fails", "fails_early"])
def test_what_cannot_be_simulated_is_predicted_by_formula(failing: str) -> None:
    message = "AttributeError: module 'torch' has no attribute 'of_another_version'"
    how: dict[str, Any] = {failing: message}
    basis = basis_of(FakeSimulationHost(FACTS, by_formula(FACTS), **how))
    assert basis.note.endswith(message) and not basis.simulated


def test_switches_of_the_model_cost_two_passes_each() -> None:
    """With recomputation, a model keeps a quarter; the other switches do not change memory."""
    host = FakeSimulationHost(FACTS, by_formula(FACTS))
    found = {
        "gradient_checkpointing": ScriptSwitch((False, True), in_arguments=True),
        "attn_implementation": ScriptSwitch(("sdpa", "eager")),
        "optim": ScriptSwitch(("adamw_torch_fused", "adamw_torch"), in_arguments=True),
    }
    basis = basis_of(host, CONFIGS[:2], replace(PROFILE, switches=found))
    recomputed, eager = {"gradient_checkpointing": True}, {"attn_implementation": "eager"}
    wanted = [{}, eager, recomputed, {**recomputed, **eager}]
    assert [dict(variant.script_args) for variant in basis.variants] == wanted
    assert len(host.asked) == 2 + len(CONFIGS[:2]) + 2 * 3
    model = MemoryModel(basis, slots=1, limit_bytes=4 * GIB)
    own = model.shape(CONFIGS[1], eager)
    same = model.shape(CONFIGS[1], {**eager, "optim": "adafactor"})
    less = model.shape(CONFIGS[1], recomputed)
    assert not (own.is_guess or same.is_guess or less.is_guess)
    assert own.source == less.source == SIMULATED
    assert model.largest(own) == model.largest(same) < model.largest(less) / 3
