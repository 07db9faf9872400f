"""Simulated memory against real DeepSpeed ranks, and the closed form against the simulation."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

from dsat.command import ds_config
from dsat.memory import closed_form
from dsat.memory.estimate import PHASES, SIMULATED, MemoryEstimate
from dsat.simulation.client import SimulationUnavailable, Simulator
from dsat.simulation.protocol import Question
from dsat.values.step_trace import BACKWARD, FORWARD, MEMORY, STEP
from testing.allocator import configuration, counting_library, real_peaks
from testing.local import PATIENCE_S, PROGRAMS, engine_of
from testing.versions import needs, of_closed_form

pytestmark = pytest.mark.slow


def simulator_of(
    model: str, folder: Path, *, as_cpu: bool, program: str = "memory", workspace: bool = True
) -> Iterator[Simulator]:
    entry = f"python3 train.py --model {model} --deepspeed_config ds_config.json"
    folder.mkdir(exist_ok=True)
    engine = engine_of(program, folder, entry=entry, imported=True)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if not workspace:
                patch.setattr(closed_form, "MATMUL_WORKSPACE_BYTES", 0)
            simulator = Simulator(engine, as_cpu=as_cpu, timeout_s=PATIENCE_S)
        with simulator:
            yield simulator
    finally:
        engine.close()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return counting_library(tmp_path_factory.mktemp("heap"))


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    yield from simulator_of("gpt", tmp_path_factory.mktemp("gpt"), as_cpu=True)


@pytest.fixture(scope="module")
def gpt_on_a_device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Simulator]:
    folder = tmp_path_factory.mktemp("device")
    # For this small model, cuBLAS's workspace would exceed most of the compared memory.
    yield from simulator_of("gpt", folder, as_cpu=False, workspace=False)


def answers(simulator: Simulator, *questions: Question) -> list[MemoryEstimate]:
    found = simulator.estimates(questions)
    failed = [answer for answer in found if isinstance(answer, str)]
    assert not failed, failed
    return [answer for answer in found if not isinstance(answer, str)]


def simulated(simulator: Simulator, *cases: dict[str, Any]) -> list[MemoryEstimate]:
    questions = []
    for case in cases:
        config = configuration(**case)
        micro_batch = config["train_micro_batch_size_per_gpu"]
        questions.append(Question(config, micro_batch, int(case.get("slots", 1))))
    return answers(simulator, *questions)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"stage": 0, "dtype": "fp32"}, marks=pytest.mark.nightly),
        {"stage": 3},
        pytest.param(
            {"stage": 2, "slots": 2, "micro_batch": 5, "gas": 2}, marks=pytest.mark.nightly
        ),
    ],
    ids=str,
)
def test_a_transformer_needs_what_was_simulated(
    gpt: Simulator, library: Path, case: dict[str, Any]
) -> None:
    case = {**case, "torch_adam": True}  # DeepSpeed's own takes minutes to compile
    real = real_peaks(library, "gpt", configuration(**case), int(case.get("slots", 1)))
    [estimate] = simulated(gpt, case)
    assert estimate.peak == pytest.approx(max(real[phase] for phase in PHASES), rel=0.002)
    for phase in ("forward", "backward", "step"):
        assert getattr(estimate, phase) == pytest.approx(real[phase], rel=0.002), phase
    assert estimate.init == pytest.approx(real["init"], rel=0.01)


def test_a_batch_that_requires_gradients_is_simulated(library: Path, tmp_path: Path) -> None:
    """Otherwise, reentrant checkpointing does not train its first layer."""
    case: dict[str, Any] = {"stage": 2, "micro_batch": 4, "torch_adam": True}
    real = real_peaks(library, "recomputed", configuration(**case), 1)
    for simulator in simulator_of("recomputed", tmp_path, as_cpu=True):
        [estimate] = simulated(simulator, case)
    for phase in ("forward", "backward", "step"):
        # The script still has the last step's batch, which is not simulated.
        assert getattr(estimate, phase) == pytest.approx(real[phase], rel=0.01), phase


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(
            [
                {"stage": 0},
                {"stage": 3, "offload": "optimizer param"},
                {"stage": 3, "offload": "param"},
                {"stage": 3, "offload": "param", "slots": 4},
                # More than a bucket; all of it exists before any of it is reduced.
                {"stage": 1, "bucket": 1_000_000, "micro_batch": 1, "slots": 4},
                # The bucket is allocated while most activations exist.
                {"stage": 2, "bucket": 60_000_000, "slots": 8},
            ],
            marks=of_closed_form,
            id="newest",
        ),
        pytest.param(
            [{"stage": 3, "slots": 4, "micro_batch": 1}],
            marks=needs("deepspeed", "0.18.6", "holds more when the engine is made"),
            id="any version",
        ),
        pytest.param(
            [
                {"stage": 1, "accumulate": "fp32"},
                {"stage": 1, "accumulate": "fp32", "gas": 2},
                {"stage": 1, "dtype": "fp16", "accumulate": "fp32", "slots": 4},
                {"stage": 2, "offload": "optimizer"},
                {"stage": 2, "low_state": True},
                {"stage": 3, "low_state": True},
                {"stage": 3, "offload": "optimizer param", "slots": 4},
                {"stage": 2, "bucket": 60_000_000, "offload": "optimizer"},
            ],
            marks=[of_closed_form, pytest.mark.nightly],
            id="more of the newest",
        ),
        pytest.param(
            [
                {"stage": 2, "micro_batch": 1},
                {"stage": 0, "dtype": "fp32"},
                {"stage": 1, "dtype": "fp32", "slots": 4},
                {"stage": 2},
                {"stage": 2, "accumulate": "fp32"},
                {"stage": 2, "gas": 2, "slots": 8},
                {"stage": 3},
                {"stage": 3, "slots": 4},
                {"stage": 3, "accumulate": "fp32"},
                {"stage": 1, "bucket": 60_000_000},
            ],
            marks=pytest.mark.nightly,
            id="more of any version",
        ),
    ],
)
def test_the_closed_form_agrees(gpt_on_a_device: Simulator, cases: list[dict[str, Any]]) -> None:
    """A change of allocations in another version of DeepSpeed shows here."""
    cases = [{"micro_batch": 32, "dtype": "bf16", **case} for case in cases]
    facts = {}
    for dtype in {case["dtype"] for case in cases}:
        found = gpt_on_a_device.facts(configuration(0, dtype=dtype))
        assert found.num_params == found.trainable_params == 4_224_512
        # The script's own configuration enables bf16.
        facts[dtype] = replace(found, param_bytes=4) if dtype == "fp32" else found
    for case, estimate in zip(cases, simulated(gpt_on_a_device, *cases), strict=True):
        own, slots, micro_batch = facts[case["dtype"]], case.get("slots", 1), case["micro_batch"]
        config = configuration(**case)
        formula = closed_form.estimate(own, config, slots=slots, micro_batch=micro_batch)
        # The formula is less exact if a partition is smaller than the largest parameter.
        coarse = own.num_params / slots < own.largest_param
        assert formula.peak == pytest.approx(estimate.peak, rel=0.04 if coarse else 0.02), case
        if case["stage"] == 3:  # and the script has all parameters once
            assert formula.init == pytest.approx(estimate.init, rel=0.02), case
        if "offload" in case:
            assert formula.host_pinned == pytest.approx(estimate.host_pinned, rel=0.02), case
            assert formula.host_pageable == pytest.approx(
                estimate.host_pageable, rel=0.02, abs=16
            ), case


def test_a_host_holds_states_and_not_the_parameters_before_them(
    gpt_on_a_device: Simulator,
) -> None:
    """ZeRO-3 with the optimizer on the host: 12 bytes per parameter, divided among the ranks."""
    [found] = simulated(
        gpt_on_a_device, {"stage": 3, "slots": 16, "offload": "optimizer", "dtype": "bf16"}
    )
    assert found.host_pageable == pytest.approx(12 * 4_224_512 / 16, rel=0.05)


def test_the_closed_form_knows_what_a_setting_adds(gpt_on_a_device: Simulator) -> None:
    plain = configuration(3, slots=4, micro_batch=32)
    settings = {"zero_hpz_partition_size": 2}, {"stage3_use_all_reduce_for_fetch_params": True}
    changed = [ds_config.merge(plain, {"zero_optimization": setting}) for setting in settings]
    configs = [plain, *changed]
    facts = gpt_on_a_device.facts(plain)
    estimates = answers(gpt_on_a_device, *(Question(each, 32, 4) for each in configs))
    simulated = [estimate.peak for estimate in estimates]
    by_formula = [
        closed_form.estimate(facts, each, slots=4, micro_batch=32).peak for each in configs
    ]
    for setting, peak, formula in zip(settings, simulated[1:], by_formula[1:], strict=True):
        added = peak - simulated[0]
        assert added == pytest.approx(formula - by_formula[0], abs=0.01 * simulated[0]), setting


def test_a_secondary_copy_of_the_parameters_is_counted(gpt_on_a_device: Simulator) -> None:
    """A size above the number of slots means all of them."""
    plain = configuration(3, slots=4)
    sizes = [{"zero_hpz_partition_size": size} for size in (1, 2, 8)]
    configs = [ds_config.merge(plain, {"zero_optimization": size}) for size in sizes]
    facts = gpt_on_a_device.facts(plain)
    simulated = answers(gpt_on_a_device, *(Question(each, 2, 4) for each in configs))
    by_formula = [closed_form.estimate(facts, each, slots=4, micro_batch=2) for each in configs]
    for size, estimate, formula in zip(sizes, simulated, by_formula, strict=True):
        for phase in ("init", "step"):
            added, expected = (
                getattr(its, phase) - getattr(without, phase)
                for its, without in ((estimate, simulated[0]), (formula, by_formula[0]))
            )
            assert added == pytest.approx(expected, rel=0.02), (size, phase)
        assert formula.peak == pytest.approx(estimate.peak, rel=0.04), size
    assert by_formula[0].step < by_formula[2].step < by_formula[1].step


@of_closed_form
def test_frozen_parameters_have_no_state(tmp_path: Path) -> None:
    config, roomy = configuration(1), configuration(2, bucket=60_000_000)
    for simulator in simulator_of("lora", tmp_path, as_cpu=False, workspace=False):
        facts = simulator.facts(config)
        estimate, filled = answers(simulator, Question(config, 1, 1), Question(roomy, 32, 1))
    formula = closed_form.estimate(facts, roomy, slots=1, micro_batch=32)
    assert formula.peak == pytest.approx(filled.peak, rel=0.02)
    assert facts.trainable_params < facts.num_params / 4
    trained_state = 12 * facts.trainable_params
    assert estimate.forward - trained_state < 2.2 * facts.num_params + 10 * 2**20


def test_one_engine_simulates_again_and_again(tmp_path: Path) -> None:
    """This is done for each value of the script's switches; nothing of the last time may remain."""
    entry = "python3 train.py --model gpt --deepspeed_config ds_config.json"
    with contextlib.closing(engine_of("memory", tmp_path, entry=entry, imported=True)) as engine:
        for _ in range(2):
            with Simulator(engine, as_cpu=True, timeout_s=PATIENCE_S) as simulator:
                assert simulated(simulator, {"stage": 1})[0].source == SIMULATED
            assert not engine.has_simulation_server()
        assert engine.poll(0) == []


def test_a_script_that_never_gets_there_says_why(tmp_path: Path) -> None:
    with pytest.raises(SimulationUnavailable, match="argument --model: expected one argument"):
        next(simulator_of("--no-such-model", tmp_path, as_cpu=False))


def test_a_script_whose_process_dies_is_not_waited_for(tmp_path: Path) -> None:
    program = tmp_path / "program"
    shutil.copytree(PROGRAMS / "memory", program)
    (program / "train.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    with pytest.raises(SimulationUnavailable, match="ended before its first step"):
        next(simulator_of("gpt", tmp_path / "run", as_cpu=False, program=str(program)))


@pytest.mark.parametrize(("stage", "uses_it"), [(2, False), (3, True)])
def test_a_script_may_open_zero_init_in_stage_3_only(
    tmp_path: Path, stage: int, uses_it: bool
) -> None:
    entry = "python3 train.py --variant 'zero.Init in stage 3' --deepspeed_config ds_config.json"
    config = configuration(stage)
    with (
        contextlib.closing(
            engine_of("memory", tmp_path, entry=entry, ds_config=config, imported=True)
        ) as engine,
        Simulator(engine, as_cpu=False, timeout_s=PATIENCE_S) as simulator,
    ):
        assert simulator.script.sizes["uses_zero_init"] is uses_it
        assert simulated(simulator, {"stage": 3})[0].source == SIMULATED


@pytest.mark.nightly
def test_a_trace_counts_the_flops_of_the_model_and_the_traffic_of_each_stage(
    gpt_on_a_device: Simulator,
) -> None:
    config = configuration(2)
    facts, model = gpt_on_a_device.traced_facts(config)
    assert [k.flops for k in model.at(256)] == pytest.approx([k.flops for k in model.small.kernels])
    whole = facts.param_bytes * facts.num_params
    stages = {0: configuration(0), 2: configuration(2, gas=2), 3: configuration(3)}
    stages[3]["zero_optimization"] |= {
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 0,  # otherwise, this small model would be gathered only once
        "stage3_max_reuse_distance": 0,
    }
    asked = [Question(stages[stage], 2, 4) for stage in stages]
    found = [answer for _, answer in sorted(gpt_on_a_device.trace_each(asked), key=itemgetter(0))]
    traces = {}
    estimates = gpt_on_a_device.estimates(asked)
    for stage, answer, estimate in zip(stages, found, estimates, strict=True):
        assert not isinstance(answer, str), answer
        assert answer[0] == estimate, "the memory of the rank that needs most"
        traces[stage] = answer[1]
        # The same products as in the model's own passes.
        assert answer[1].model_flops == pytest.approx(2 * model.model_flops_per_sample)
        assert answer[1].bytes_of(MEMORY, (STEP,)) > 12 * facts.num_params / (4 if stage else 1)

    def moved(stage: int, kind: str, phase: str, **only: bool) -> float:
        return sum(
            c.bytes
            for c in traces[stage].collectives
            if (c.kind, c.phase) == (kind, phase)
            and all(getattr(c, key) == value for key, value in only.items())
        )

    exactly = pytest.approx(whole, rel=0.01)
    assert moved(0, "all_reduce", BACKWARD, overlapped=False) == exactly
    # Stage 2 reduces in every micro step, and gathers once.
    assert moved(2, "all_reduce", BACKWARD, last=True) == exactly
    assert moved(2, "all_reduce", BACKWARD, last=False) == exactly
    assert moved(2, "all_gather", STEP) == exactly
    # Stage 3 gathers in both passes, in parallel to kernels, and a shared parameter twice in each.
    assert moved(3, "reduce_scatter", BACKWARD, overlapped=True) == exactly
    for phase in (FORWARD, BACKWARD):
        assert 0.7 * whole < moved(3, "all_gather", phase, overlapped=True) < 1.5 * whole
