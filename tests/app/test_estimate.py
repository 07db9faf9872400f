"""`dsat estimate` without a script: which configurations it means, and what it makes of answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.app import estimate
from dsat.app.memory_tables import Estimate
from dsat.command import hf_config
from dsat.inputs.estimate_settings import EstimateSettings
from dsat.memory import CLOSED_FORM, SIMULATED, closed_form
from dsat.simulation.client import Simulator
from dsat.values import parallelism
from dsat.values.parallelism import Parallelism
from dsat.values.zero_strategy import Strategy
from testing.simulation_host import MIB, FakeSimulationHost, by_formula, facts_of, failing_in

GIB = 2**30
FACTS = facts_of(100 * MIB)
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "intermediate_size": 2048,
    "vocab_size": 1000,
}
BF16 = {"bf16": {"enabled": True}}


def answer_of(host: FakeSimulationHost, base: Mapping[str, Any], *, exact: bool = True) -> Estimate:
    settings = EstimateSettings(exact=exact, slot_counts=(1,), slot_memories=(8 * GIB,))
    with Simulator(host, as_cpu=False) as simulator:
        return estimate.tables("train.py", base, simulator, settings)


@pytest.mark.parametrize(
    ("base", "slots", "gas"),
    [
        ({}, 8, 1),
        ({"gradient_accumulation_steps": 4}, 8, 4),
        ({"gradient_accumulation_steps": "auto"}, 8, 1),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 8, 4),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, 1, 32),
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 128}, 1, 1),
        ({"train_batch_size": 64}, 1, 1),
    ],
)
def test_gradients_are_accumulated_as_the_user_does(
    base: Mapping[str, Any], slots: int, gas: int
) -> None:
    found = estimate.configuration(base, Strategy(1), slots)
    assert found["gradient_accumulation_steps"] == gas
    assert not {"train_batch_size", "train_micro_batch_size_per_gpu"} & set(found)


def test_slots_share_samples_as_the_users_do_where_they_can() -> None:
    own = {"sequence_parallel_size": 4, "train_micro_batch_size_per_gpu": 1}
    sizes = [estimate.configuration(own, Strategy(3), n)["sequence_parallel_size"] for n in (1, 8)]
    assert sizes == [1, 4]
    given = estimate.configuration(own, Strategy(3), 8, Parallelism(tensor=2))
    assert parallelism.of_config(given) == Parallelism(tensor=2)
    batch = {**own, "train_batch_size": 8}
    gas = [
        estimate.configuration(batch, Strategy(3), n)["gradient_accumulation_steps"] for n in (1, 8)
    ]
    assert gas == [8, 4]


@pytest.mark.parametrize(
    ("stage", "dtype", "accumulate", "held_bytes"),
    [
        (0, "bf16", "bf16", 2),
        (1, "bf16", "bf16", 2),
        (1, "bf16", "float32", 2),
        (1, "fp16", "fp16", 2),
        (1, "fp16", "torch.float32", 4),
    ],
)
def test_whole_gradients_are_held_while_they_accumulate(
    stage: int, dtype: str, accumulate: str, held_bytes: int
) -> None:
    held = {}
    for gas in (1, 2):
        base = {
            dtype: {"enabled": True},
            "data_types": {"grad_accum_dtype": accumulate},
            "zero_optimization": {"reduce_bucket_size": 1000},
            "gradient_accumulation_steps": gas,
        }
        found = answer_of(FakeSimulationHost(FACTS, by_formula(FACTS)), base)
        [line] = [each for each in found.lines if each.strategy == Strategy(stage)]
        held[gas] = line.estimate.forward
    per_parameter = (held[2] - held[1]) / FACTS.trainable_params
    assert per_parameter == pytest.approx(held_bytes, rel=0.01)


@pytest.mark.parametrize(
    ("config", "stage"),
    [
        ({}, 0),
        ({**BF16, "data_types": {"grad_accum_dtype": None}}, 0),
        ({**BF16, "data_types": {"grad_accum_dtype": "bfloat16"}}, 0),
        ({**BF16, "data_types": {"grad_accum_dtype": "fp32"}}, 1),
        ({"bf16": {"enabled": "auto"}, "data_types": {"grad_accum_dtype": "fp32"}}, 0),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, 1),
    ],
)
def test_stages_that_deepspeed_refuses_are_not_shown(config: Mapping[str, Any], stage: int) -> None:
    assert estimate.ladder(config)[0] == Strategy(stage)


def test_what_is_left_to_the_script_has_the_scripts_type() -> None:
    base = {"bf16": {"enabled": "auto"}}
    for size in (2, 4):
        facts = replace(FACTS, param_bytes=size)
        host = FakeSimulationHost(facts, by_formula(facts))
        for line in answer_of(host, base, exact=False).lines:
            said = {
                **estimate.configuration(base, line.strategy, 1),
                "bf16": {"enabled": size == 2},
            }
            with_library = replace(facts, workspace_bytes=closed_form.MATMUL_WORKSPACE_BYTES)
            plain = closed_form.estimate(with_library, said, slots=1, micro_batch=1)
            assert line.estimate.peak == plain.peak


def test_a_model_in_bf16_is_trained_as_it_is_if_no_type_is_enabled() -> None:
    """Its states have its type in stage 0, and gradients are accumulated in fp32 elsewhere."""
    facts = replace(FACTS, param_bytes=2)
    in_fp32 = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
    plain, other = (
        answer_of(FakeSimulationHost(facts, by_formula(facts)), base, exact=False).lines
        for base in ({}, in_fp32)
    )
    first, *rest = plain
    assert first.strategy == Strategy(0)
    assert first.estimate.forward == pytest.approx(6 * FACTS.num_params, abs=40 * MIB)
    sharded = [line for line in rest if line.strategy.stage > 1]
    expected = [line.estimate for line in other if line.strategy.stage > 1]
    assert [line.estimate for line in sharded] == expected


def test_a_rung_that_cannot_be_simulated_has_the_formulas_answer() -> None:
    found = answer_of(FakeSimulationHost(FACTS, failing_in({3}, by_formula(FACTS))), BF16)
    for line in found.lines:
        expected = CLOSED_FORM if line.strategy.stage == 3 else SIMULATED
        assert line.estimate.source == expected
    assert found.is_complete, "the table holds an answer for each line"
    [why] = [line for line in str(found).splitlines() if line.startswith("By formula, since")]
    assert "stage 3 on 1, stage 3, optimizer on cpu on 1" in why and "slots: " in why
    nothing = FakeSimulationHost(FACTS, failing_in({0, 1, 2, 3}, by_formula(FACTS)))
    assert not answer_of(nothing, BF16).is_complete


def test_an_optimizer_of_the_script_takes_the_place_of_the_configurations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = FakeSimulationHost(FACTS, by_formula(FACTS), optimizer={"type": "torch.optim.sgd.SGD"})

    @contextlib.contextmanager
    def simulator_of(_: EstimateSettings) -> Iterator[tuple[str, Mapping[str, Any], Simulator]]:
        with Simulator(host, as_cpu=False) as simulator:
            yield "train.py", {**BF16, "optimizer": {"type": "AdamW"}}, simulator

    monkeypatch.setattr(estimate, "simulator_of", simulator_of)
    settings = EstimateSettings(slot_counts=(1,), slot_memories=(8 * GIB,))
    assert {line.estimate.source for line in estimate.estimate(settings).lines} == {SIMULATED}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's configuration, where nothing but the formula can answer."""
    monkeypatch.setattr(hf_config, "missing_packages", lambda: ["torch"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "hidden_size": 1024}))
    return path


def test_auto_is_what_a_trainer_computes_for_the_model(model: Path, tmp_path: Path) -> None:
    def lines(size: Any) -> Any:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps({"zero_optimization": {"reduce_bucket_size": size}}))
        settings = EstimateSettings(hf_config=str(model), ds_config=path, slot_counts=(8,))
        return estimate.estimate(settings).lines

    assert lines("auto") == lines(2**20) != lines(5 * 10**8)
