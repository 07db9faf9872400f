"""`dsat project`, from its arguments to its results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import testing
from dsat.command.ds_config import BATCH_KEYS, resolve_batch
from dsat.errors import UserInputError
from dsat.estimating.options import EstimateSettings
from dsat.memory import closed_form
from dsat.memory.estimate import MemoryEstimate
from dsat.memory.facts import ModelFacts
from dsat.memory.predictor import Anchor
from dsat.prepare.simulated_model import SimulatedModel, simulate
from dsat.projecting import projector
from dsat.projecting.options import ProjectSettings
from dsat.projecting.projector import Projector
from dsat.projecting.tracing import Traced, trace
from dsat.search import gpus
from dsat.show import past_runs
from dsat.simulation.protocol import Question
from dsat.values.step_trace import (
    ALL_GATHER,
    ATTENTION,
    BACKWARD,
    FORWARD,
    MATMUL,
    Collectives,
    Kernels,
    ModelTrace,
    StepTrace,
)
from dsat.values.zero_strategy import Strategy, read_strategy
from testing import warm_command, warm_host

CPU = {"device": "cpu"}
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 512,
}


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_command.use(warm_host.prefix(), monkeypatch.setattr)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    return path


@pytest.mark.nightly
@pytest.mark.usefixtures("imported")
def test_stage_3_partitions_the_model_of_a_configuration_while_it_is_made(
    config: Path, tmp_path: Path
) -> None:
    """A model of 70 billion parameters never fits whole on one GPU."""
    user: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000},
    }
    (tmp_path / "ds.json").write_text(json.dumps(user))
    settings = EstimateSettings(model=str(config), ds_config=tmp_path / "ds.json")
    with simulate(settings) as model:
        base, simulator = model.config, model.simulator
        facts = simulator.facts(base)
        zero = {**user["zero_optimization"], "offload_optimizer": CPU, "offload_param": CPU}
        offloaded = {**base, "zero_optimization": zero}
        asked = [Question(dict(base), 1, 64), Question(offloaded, 1, 1)]
        found, on_host = simulator.estimates(asked)
    assert not isinstance(found, str) and not isinstance(on_host, str)
    assert max(found.init, on_host.init) < facts.num_params  # half of their bytes
    formula = closed_form.estimate(facts, offloaded, slots=1, micro_batch=1)
    assert formula.init == pytest.approx(on_host.init, rel=0.02)


@pytest.mark.nightly
@pytest.mark.usefixtures("imported")
def test_long_samples_are_no_packed_ones_that_need_a_mask(tmp_path: Path) -> None:
    length, width = 16_384, 64
    sizes = {"n_embd": width, "n_head": 2, "n_layer": 1, "n_positions": length, "vocab_size": 64}
    model = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(model), encoding="utf-8")
    settings = EstimateSettings(model=str(path), seq_length=length)
    with simulate(settings) as simulated:
        _, trace = simulated.simulator.traced_facts(simulated.config)
    attention = [k for k in trace.at(1) if (k.kind, k.phase) == (ATTENTION, FORWARD)]
    # Two products over all pairs of tokens, half of which are causal.
    assert [k.flops for k in attention] == pytest.approx([4 * length**2 * width / 2])


def test_only_runs_of_the_same_model_correct_a_projection() -> None:
    past = past_runs.load(Path(testing.__file__).parent / "recorded_run")
    profile, plan = past.run.profile, past.run.plan
    assert profile is not None

    def traced(params: float = 1.0, flops: float = 1.0) -> Traced:
        facts = ModelFacts.of_profile(profile)
        facts = replace(facts, num_params=round(params * facts.num_params))
        step = StepTrace((), (), 256, 1, 1, 256 * flops * profile.flops_per_sample)
        model = ModelTrace(step, step)
        return Traced(plan.base_config, facts, model, {}, {}, 128)

    found = projector.measured(past, traced(params=1.01, flops=1.2))
    assert found and all(metrics.latency > 0 for _, _, metrics in found)
    with pytest.raises(UserInputError, match="another model"):
        projector.measured(past, traced(params=1.1))
    with pytest.raises(UserInputError, match="lengths differ"):
        projector.measured(past, traced(flops=3.0))


@pytest.mark.parametrize(
    ("device", "gpu"),
    [("NVIDIA A100-SXM4-80GB", "A100-80GB"), ("NVIDIA H100 96GB HBM3", "H100")],
)
def test_the_network_of_a_run_on_the_same_gpus_is_counted_once(device: str, gpu: str) -> None:
    """The measured times of trials on two hosts already include their slow network."""
    past = past_runs.load(Path(testing.__file__).parent / "recorded_run")
    run, network = past.run, 1e9
    assert run.profile is not None
    run.plan = replace(
        run.plan,
        slots_per_trial=16,
        slots_per_host=8,
        base_config={**run.plan.base_config, "zero_optimization": {"stage": 3}},
    )
    run.info = {**run.info, "machine": f"16 GPUs ({device}, 80 GiB)"}
    of_sample = run.profile.flops_per_sample

    def passes(micro_batch: int) -> StepTrace:
        kernels = tuple(
            Kernels(phase, True, MATMUL, 2, of_sample / 2 * micro_batch, 1e6, 100)
            for phase in (FORWARD, BACKWARD)
        )
        return StepTrace(kernels, (), micro_batch, 1, 1, of_sample * micro_batch)

    gathers = Collectives(FORWARD, True, ALL_GATHER, 16, 1, False, 2e9, 20)
    step = replace(passes(1), collectives=(gathers,), slots=16)
    facts, own = ModelFacts.of_profile(run.profile), read_strategy(run.plan.base_config)
    anchor = Anchor(run.plan.base_config, 1, MemoryEstimate(0, 0, 0, 0), 16)
    model = ModelTrace(passes(256), passes(512))
    traced = Traced(run.plan.base_config, facts, model, {own: (step, anchor)}, {}, 128)
    there = Projector(traced, gpus.find(gpu), network)
    for ds_config, rows in ((None, False), (Path("ds.json"), True)):  # the user's, or none
        asked_for = ProjectSettings(model="config.json", ds_config=ds_config)
        assert bool(there.projection("", asked_for).own) == rows
    before = there.step_time(own, 16, 4, 1)
    for trial, outcome in run.outcomes.items():
        if outcome.metrics is not None:
            asked = run.trials[trial].batch
            s = there.step_time(own, 16, asked.micro_batch, asked.gas).seconds
            metrics = replace(outcome.metrics, latency=1000 * s, ci95=0.01)
            run.outcomes[trial] = replace(outcome, metrics=metrics)
    there.calibrate(past)
    after = there.step_time(own, 16, 4, 1)
    assert after.seconds == pytest.approx(before.seconds, rel=0.1)
    assert after.parts["communication"] == pytest.approx(before.parts["communication"], rel=0.1)


@pytest.mark.parametrize(
    ("base", "length", "batches"),
    [
        ({"train_batch_size": 96}, 2048, (96, 96)),
        ({"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 2}, 2048, (48, 96)),
        ({}, 2048, (64, 128)),
        ({}, 3000, (64, 128)),
        ({}, 20_000, (8, 16)),
        ({}, None, (256, 512)),
        ({"tensor_parallel": {"autotp_size": 4}}, 2048, (64, 128)),
        ({"sequence_parallel_size": 8}, 131_072, (1, 2)),
        ({"tensor_parallel": {"autotp_size": 2}}, None, (256, 512)),
    ],
)
def test_all_strategies_have_the_same_global_batch(
    base: dict[str, Any], length: int | None, batches: tuple[int, int]
) -> None:
    """16,384 tokens are 8 samples of 2,048, and 5.5 of 3,000. With images, the batch is 32."""
    step = StepTrace((), (), 1, 1, 1, 1.0)
    facts = ModelFacts(1, 1, 1, 0.0, 0.0, 0.0)
    traced = Traced(base, facts, ModelTrace(step, step), {}, {}, length)
    assert (traced.global_batch(8), traced.global_batch(16)) == batches
    of_group = batches[0] / traced.parallelism.data(8)
    assert {m * traced.gas(8, m) for m in range(1, 300) if traced.gas(8, m)} == {of_group}


def test_stage_3_is_projected_only_to_gpus_that_groups_with_a_copy_divide() -> None:
    """DeepSpeed refuses 12 GPUs in groups of 8."""
    kernels = (Kernels(FORWARD, True, MATMUL, 2, 1e9, 1e6, 1),)
    step = StepTrace(kernels, (), 1, 16, 1, 1.0)
    model, facts = (
        ModelTrace(step, replace(step, micro_batch=2)),
        ModelFacts(1, 1, 1, 0.0, 0.0, 0.0),
    )
    zero = {"stage": 3, "zero_hpz_partition_size": 8}
    base: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    anchor = Anchor(base, 1, MemoryEstimate(1, 1, 1, 1), 16)
    traces = {Strategy(stage): (step, anchor) for stage in (2, 3)}
    traced = Traced(base, facts, model, traces, {}, 128)
    shown = Projector(traced, gpus.find("H100"), None)
    assert shown.row(Strategy(3), 12, 1) is None
    assert None not in (shown.row(Strategy(2), 12, 1), shown.row(Strategy(3), 16, 1))
    with pytest.raises(UserInputError, match="8 does not divide the 12 devices"):
        projector._check_slots(traced, 12)


def test_an_auto_size_of_groups_counts_as_none() -> None:
    """A script may be given this size although no Trainer replaces it."""
    step, facts = StepTrace((), (), 1, 8, 1, 1.0), ModelFacts(1, 1, 1, 0.0, 0.0, 0.0)
    simulator = mock.Mock()
    simulator.traced_facts.return_value = facts, ModelTrace(step, step)
    simulator.script.sequence_length = 128
    simulator.trace_each.return_value = {0: (MemoryEstimate(1, 1, 1, 1), step)}
    base = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": "auto"}}
    traced = trace(SimulatedModel("train", base, simulator), 8, lambda found: [Strategy(3)])
    assert list(traced.traces) == [Strategy(3)]


@pytest.mark.parametrize(
    "sizes",
    [(64, None, None), (64, None, 4), (64, 2, None), (None, 3, 2), (None, 3, None), (64, 2, 4)],
)
@pytest.mark.parametrize("shared", [{}, {"tensor_parallel": {"autotp_size": 2}}])
def test_own_batch_sizes_are_those_that_deepspeed_derives(
    sizes: tuple[int | None, ...], shared: dict[str, Any]
) -> None:
    base = dict(zip(BATCH_KEYS, sizes, strict=True)) | shared
    step = StepTrace((), (), 1, 1, 1, 1.0)
    facts = ModelFacts(1, 1, 1, 0.0, 0.0, 0.0)
    traced = Traced(base, facts, ModelTrace(step, step), {}, {}, 128)
    derived = resolve_batch(base, 8, where="")
    micro_batch = traced.own_micro_batch(8)
    assert (micro_batch, traced.gas(8, micro_batch)) == (derived.micro_batch, derived.gas)
    assert traced.global_batch(8) == derived.train_batch_size
