"""The closed form against DeepSpeed's simulated engine, for large models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import formula
from dsat.estimating.options import EstimateSettings
from dsat.memory import closed_form
from dsat.prepare.simulated_model import simulate
from dsat.simulation.protocol import Question
from testing import warm_command, warm_host


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


@pytest.mark.slow
def test_a_gradient_larger_than_a_bucket_is_freed_before_the_norm_of_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On several devices; beside that gradient the formula would be 25 % too high."""
    warm_command.use(warm_host.prefix(), monkeypatch.setattr)
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4}
    model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64_000}
    text = json.dumps({**model, **sizes, "intermediate_size": 688})
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    settings = EstimateSettings(model=str(tmp_path), seq_length=64, activation_checkpointing="on")
    on_host = {"device": "cpu"}
    zero = {"stage": 3, "offload_optimizer": on_host, "offload_param": on_host}
    with simulate(settings) as found:
        facts = found.simulator.facts(found.config)
        config = {**found.config, "zero_optimization": {**zero, "reduce_bucket_size": 10**6}}
        [simulated] = found.simulator.estimates([Question(config, 1, 2)])
    assert not isinstance(simulated, str), simulated
    predicted = closed_form.estimate(facts, config, slots=2, micro_batch=1)
    assert predicted.backward == pytest.approx(simulated.backward, rel=0.1)
