"""The closed form against DeepSpeed's simulated engine, for large models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import formula
from dsat.estimating.options import EstimateSettings
from dsat.memory import closed_form
from dsat.prepare.simulated_model import simulate
from dsat.simulation.protocol import Question
from testing import warm_command, warm_host
from testing.versions import of_closed_form


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "checkpointing", "gas", "lora"),
    [
        ("0.1 B", "off", 1, False),
        ("0.1 B", "on", 4, False),
        ("1 B", "on", 1, False),
        ("1 B", "off", 1, True),
        ("8 B", "on", 1, False),
        ("8 B", "on", 4, False),
    ],
)
def test_the_formula_says_what_the_simulation_says(
    name: str, checkpointing: str, gas: int, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_command.use(warm_host.prefix(), monkeypatch.setattr)
    found = list(formula.rows(name, checkpointing, [1, 8], [gas], lora=lora))
    assert len(found) == 14
    assert [bar for bar in formula.bars(found) if not bar.met] == []


_ON_HOST = {"device": "cpu"}
_WITH_FEW_LIVE = {"stage3_max_live_parameters": 10**6, "stage3_max_reuse_distance": 10**6}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "tensor", "tolerance"),
    [
        # It is freed before the norm of its part: else the formula would be 25 % too high.
        pytest.param(
            {"offload_optimizer": _ON_HOST, "offload_param": _ON_HOST, "reduce_bucket_size": 10**6},
            1,
            0.1,
            marks=of_closed_form,
            id="gradient",
        ),
        # It is gathered whole, whatever the limit: else the formula would be 8 % too low.
        pytest.param(
            {**_WITH_FEW_LIVE, "reduce_bucket_size": 10**6},
            1,
            0.02,
            marks=of_closed_form,
            id="parameter",
        ),
        # Optimizer state that stays on the device: else the formula would be a third too low.
        pytest.param(
            {"offload_optimizer": {"device": "cpu", "ratio": 0.5}, "sub_group_size": 10**6},
            1,
            0.06,
            id="ratio",
        ),
        # AutoTP divides linear layers alone: else the formula would be a quarter too low.
        pytest.param({"stage": 1}, 2, 0.06, marks=of_closed_form, id="with AutoTP"),
    ],
)
def test_what_is_larger_than_its_limit_is_held_whole(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    zero: Mapping[str, Any],
    tensor: int,
    tolerance: float,
) -> None:
    """Such are embeddings of 16 M parameters, here on several devices."""
    warm_command.use(warm_host.prefix(), monkeypatch.setattr)
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4}
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64_000}
    text = json.dumps({**model, **sizes, "intermediate_size": 688})
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    asked = EstimateSettings(model=str(tmp_path), seq_length=64, activation_checkpointing="on")
    with simulate(asked) as found:
        facts = found.simulator.facts(found.config)
        own = {"zero_optimization": {"stage": 3, **zero}}
        config = {**found.config, **own, "tensor_parallel": {"autotp_size": tensor}}
        [simulated] = found.simulator.estimates([Question(config, 1, 2)])
    assert not isinstance(simulated, str), simulated
    predicted = closed_form.estimate(facts, config, slots=2, micro_batch=1)
    assert predicted.backward == pytest.approx(simulated.backward, rel=tolerance)


@pytest.mark.slow
def test_autotp_divides_tied_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed compares the parts of the vocabulary over ranks, which a simulation lacks."""
    pytest.importorskip("deepspeed.sequence.vocab_parallel_ops")
    warm_command.use(warm_host.prefix(), monkeypatch.setattr)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8_000}
    text = json.dumps({**model, **sizes, "intermediate_size": 128, "tie_word_embeddings": True})
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    with simulate(EstimateSettings(model=str(tmp_path), seq_length=64)) as found:
        facts = replace(found.simulator.facts(found.config), kept_params=0)
        stage = {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}
        config = {**found.config, **stage}
        [simulated] = found.simulator.estimates([Question(config, 1, 2)])
    assert not isinstance(simulated, str), simulated
    divided = closed_form.estimate(facts, config, slots=2, micro_batch=1)
    assert divided.init == pytest.approx(simulated.init, rel=0.02)
