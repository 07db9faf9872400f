"""The tables of `dsat estimate`, made from a simulation's answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from dsat.estimating.line import Line
from dsat.estimating.options import EstimateSettings
from dsat.estimating.tables import Estimate, LineByLine
from dsat.memory import closed_form
from dsat.memory.estimate import CLOSED_FORM, SIMULATED
from dsat.memory.strategies import apply_strategy
from dsat.prepare.simulated_model import SimulatedModel
from dsat.simulation.client import Simulator
from dsat.values.zero_strategy import USUAL_ORDER, Strategy, read_strategy
from testing.simulation_host import MIB, FakeSimulationHost, by_formula, facts_of, failing_in

GIB = 2**30
FACTS = facts_of(100 * MIB)
BF16 = {"bf16": {"enabled": True}}


def answer_of(
    host: FakeSimulationHost, base: Mapping[str, Any], *, formula: bool = False
) -> Estimate:
    settings = EstimateSettings(formula=formula, slot_counts=(1,), slot_memories=(8 * GIB,))
    with Simulator(host, as_cpu=False) as simulator:
        tables = LineByLine(SimulatedModel.build("train.py", base, simulator), settings)
        for _ in tables.simulate():
            pass
        return tables.estimate()


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


def test_what_is_left_to_the_script_has_the_scripts_type() -> None:
    base = {"bf16": {"enabled": "auto"}}
    for size in (2, 4):
        facts = replace(FACTS, param_bytes=size)
        host = FakeSimulationHost(facts, by_formula(facts))
        for line in answer_of(host, base, formula=True).lines:
            said = {
                **apply_strategy(base, line.strategy, 1),
                "bf16": {"enabled": size == 2},
            }
            with_library = replace(facts, workspace_bytes=closed_form.MATMUL_WORKSPACE_BYTES)
            plain = closed_form.estimate(with_library, said, slots=1, micro_batch=1)
            assert line.estimate.peak == plain.peak


def test_a_model_in_bf16_is_trained_as_it_is_if_no_type_is_enabled() -> None:
    """In stage 0 its states have its type; in other stages, gradients accumulate in fp32."""
    facts = replace(FACTS, param_bytes=2)
    in_fp32 = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
    plain, other = (
        answer_of(FakeSimulationHost(facts, by_formula(facts)), base, formula=True).lines
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
    [why] = [line for line in str(found).splitlines() if line.startswith("By formula, because")]
    assert "stage 3 on 1, stage 3, optimizer on cpu on 1" in why and "GPUs: " in why
    nothing = FakeSimulationHost(FACTS, failing_in({0, 1, 2, 3}, by_formula(FACTS)))
    assert not answer_of(nothing, BF16).is_complete


def test_one_sample_may_be_as_long_as_many_short_ones_together() -> None:
    host = FakeSimulationHost(FACTS, by_formula(FACTS), sequence_length=512)
    for line in answer_of(host, BF16).lines:
        [most], [longest] = line.largest.values(), line.longest.values()
        assert most * 512 <= longest < (most + 1) * 512
    learned = FakeSimulationHost(FACTS, by_formula(FACTS), sequence_length=512, model_takes=1024)
    assert {1024} == {t for line in answer_of(learned, BF16).lines for t in line.longest.values()}
    without = answer_of(FakeSimulationHost(FACTS, by_formula(FACTS)), BF16)
    _has_no_longest(without)


def test_the_longest_sequence_is_unknown_if_memory_grows_with_its_square() -> None:
    host = FakeSimulationHost(FACTS, by_formula(FACTS), sequence_length=512, is_quadratic=True)
    _has_no_longest(answer_of(host, BF16))


def _has_no_longest(without: Estimate) -> None:
    assert not any(line.longest for line in without.lines) and "longest" not in str(without)


def test_an_optimizer_of_the_script_takes_the_place_of_the_configurations() -> None:
    host = FakeSimulationHost(FACTS, by_formula(FACTS), optimizer={"type": "torch.optim.sgd.SGD"})
    found = answer_of(host, {**BF16, "optimizer": {"type": "AdamW"}}, formula=True)
    assert {line.estimate.source for line in found.lines} == {SIMULATED}


def test_the_ranks_of_a_host_share_its_memory() -> None:
    """The memory of eight ranks on a host is summed, and must fit the host's memory."""
    facts = replace(FACTS, num_params=4 * 10**9, trainable_params=4 * 10**9, param_bytes=2)

    def lines(host_memory: int | None) -> dict[str, Line]:
        settings = EstimateSettings(
            slot_counts=(8,), slot_memories=(80 * GIB,), host_memory=host_memory
        )
        simulated = FakeSimulationHost(facts, by_formula(facts))
        with Simulator(simulated, as_cpu=False) as simulator:
            found = LineByLine(SimulatedModel.build("train.py", BF16, simulator), settings).lines()
        return {line.strategy.name: line for line in found}

    found = lines(None)
    offloaded, loaded = found["z3_offload"].host, found["z2"].host
    assert 16 * 4e9 < offloaded < 32 * 4e9
    assert loaded == 8 * 2 * 4e9, "each rank loads all weights"
    assert found["z3_offload"].saved < offloaded
    enough, less = lines(round(1.06 * offloaded)), lines(offloaded)
    assert enough["z3_offload"].largest == found["z3_offload"].largest
    assert set(less["z3_offload"].largest.values()) == {0}
    assert less["z3"].largest == found["z3"].largest


def test_lines_are_marked_until_they_are_simulated() -> None:
    """The lines close to the formula's advice come first; after an interrupt, the rest stay as
    they are."""
    host = FakeSimulationHost(FACTS, by_formula(FACTS))
    settings = EstimateSettings(slot_counts=(1, 8), slot_memories=(2 * GIB,))
    with Simulator(host, as_cpu=False) as simulator:
        tables = LineByLine(SimulatedModel.build("train.py", BF16, simulator), settings)
        before = tables.estimate()
        [advised] = [each.strategy for each in before.advice if each.slots == 1]
        assert {line.estimate.source for line in before.lines} == {CLOSED_FORM}
        answers = tables.simulate()
        assert next(answers) == next(answers) == 1
        del answers
        after = tables.estimate()
    asked = [read_strategy(r["config"]) for r in host.asked if not r["activations_only"]]
    names = [strategy.name for strategy in USUAL_ORDER]
    assert abs(names.index(asked[0].name) - names.index(advised.name)) <= 1
    sources = [line.estimate.source for line in after.lines]
    assert sources.count(SIMULATED) == 1
    assert str(after).count("(formula)") == len(sources) - 1


def test_a_strategy_that_nearly_fits_names_what_is_missing() -> None:
    host = FakeSimulationHost(FACTS, by_formula(FACTS))
    [line] = [x for x in answer_of(host, BF16).lines if x.strategy == Strategy(0)]
    size = round(1.01 * line.needed)  # but 5 % must stay free
    settings = EstimateSettings(slot_counts=(1,), slot_memories=(size,))
    with Simulator(host, as_cpu=False) as simulator:
        found = LineByLine(SimulatedModel.build("train.py", BF16, simulator), settings).estimate()
    [edge] = found.edges
    assert edge.missing_bytes == pytest.approx(0.04 * line.needed, rel=0.01)
    assert 0 <= edge.saved_bytes < 30 * MIB
