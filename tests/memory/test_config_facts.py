"""The formula for a model known by its configuration, against models and the simulation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gallery import CONFIGS, MODELS
from dsat.app.estimate import simulated
from dsat.errors import UserInputError
from dsat.inputs.estimate_settings import EstimateSettings
from dsat.memory.config_facts import Decoder, Formula
from testing import warm_command, warm_host
from testing.versions import needs

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
EXPERTS: Mapping[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 64,
    "moe_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 4,
}
LORA = {"r": "16", "target": "q_proj+v_proj"}


@pytest.mark.parametrize("name", [n for n in MODELS if not n.startswith("LLaVA")])
def test_parameters_are_those_of_the_published_weights(name: str) -> None:
    model = MODELS[name]
    config = json.loads((CONFIGS / f"{model.file}.json").read_text())
    assert Decoder.of(config, model.file).params == model.params


def test_a_model_of_the_hubs_cache_has_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsat.inputs.hf_config.missing_packages", lambda: ["torch"])
    model = tmp_path / "models--of-somebody--tiny-model-1b"
    blob, link = model / "blobs" / "0123", model / "snapshots" / "4567" / "config.json"
    for path in (blob, link):
        path.parent.mkdir(parents=True)
    blob.write_text(json.dumps(LLAMA))
    link.symlink_to(blob)
    with simulated(EstimateSettings(hf_config=str(link.parent))) as (name, *_):
        assert name == "tiny-model-1b"


def test_adapters_are_all_that_is_trained() -> None:
    facts = Formula(LLAMA, EstimateSettings(hf_config="x", lora=LORA), "config.json").facts({})
    of_a_layer = 16 * (1024 + 1024) + 16 * (1024 + 256)
    assert facts.trainable_params == 4 * of_a_layer
    assert facts.num_params == Decoder.of(LLAMA, "").params + 4 * of_a_layer


def test_a_size_whose_default_is_the_familys_must_be_given() -> None:
    without = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert Decoder.of(without, "").keys == Decoder.of(without, "").queries
    with pytest.raises(UserInputError, match="num_key_value_heads is missing"):
        Decoder.of({**without, "model_type": "mistral"}, "")


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (LLAMA, 2 * 2048 + 2 * (1024 + 256) + 3 * (1024 + 2816)),
        ({**LLAMA, "model_type": "phi3"}, 1024 + 1536 + 2048 + 1024 + 5632 + 2816 + 1024),
        (EXPERTS, 2 * 2048 + 2 * (1024 + 256)),
    ],
)
def test_adapters_of_all_linear_layers(config: Mapping[str, Any], layers: int) -> None:
    """But the output embedding, and the experts, which are no linear layers."""
    settings = EstimateSettings(hf_config="x", lora={"r": "8", "target": "all-linear"})
    facts = Formula(config, settings, "config.json").facts({})
    assert facts.trainable_params == 4 * 8 * layers


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, "no formula knows the model type 'mamba'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "1024"}, 'hidden_size is "1024", and no whole number'),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, and no whole number above 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is true"),
        ({"num_key_value_heads": "8"}, 'num_key_value_heads is "8"'),
        ({"head_dim": "64"}, 'head_dim is "64"'),
        ({**EXPERTS, "num_experts": "8"}, 'num_experts is "8"'),
        ({**EXPERTS, "num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({"max_position_embeddings": 4096.5}, "max_position_embeddings is 4096.5"),
        ({"num_attention_heads": 7}, "hidden_size is 1024, which 7 heads cannot share evenly"),
        ({"num_key_value_heads": 3}, "heads is 16, and no multiple of the 3 of keys and values"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is no list of classes"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "knows LlamaForSequenceClass"),
        ({"model_type": "qwen3"}, "head_dim is missing"),
        ({"model_type": "mixtral"}, "num_local_experts is missing"),
        ({**EXPERTS, "decoder_sparse_step": 2}, "only some layers have experts"),
        ({**EXPERTS, "mlp_only_layers": [0]}, "only some layers have experts"),
    ],
)
def test_other_models_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserInputError, match=said):
        Formula({**LLAMA, **change}, EstimateSettings(), "config.json")


def test_sizes_that_the_family_does_not_use_may_have_any_value() -> None:
    unused = {"num_experts": 0, "num_local_experts": 8, "num_experts_per_tok": "2"}
    unused |= {"moe_intermediate_size": 0, "max_position_embeddings": 0, "head_dim": 0}
    assert Decoder.of({**LLAMA, **unused}, "") == Decoder.of(LLAMA, "")
    config = {**LLAMA, "hidden_size": 1024.0, "max_position_embeddings": 512.0}
    script = Formula(config, EstimateSettings(), "config.json").script
    assert json.dumps([script.hidden_size, script.model_takes]) == "[1024, 512]"


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        ({"model_type": "mamba"}, "For a simulation of any model"),
        ({"vocab_size": None}, "For a simulation of any model"),
        ({"num_attention_heads": 0}, "Correct it in the file."),
    ],
)
def test_a_simulation_is_advised_only_where_it_would_help(
    change: dict[str, Any], hint: str
) -> None:
    with pytest.raises(UserInputError) as caught:
        Decoder.of({**LLAMA, **change}, "config.json")
    assert caught.value.hint is not None and caught.value.hint.startswith(hint)


def test_samples_beyond_the_models_positions_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dsat.inputs.hf_config.missing_packages", lambda: ["torch"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "max_position_embeddings": 4096}))
    for length, said in ((4096, 0), (4097, 1)):
        with simulated(EstimateSettings(hf_config=str(path), seq_length=length)):
            assert caplog.text.count("more than the 4,096 tokens that the model takes") == said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param(LLAMA, {}, id="all activations", marks=pytest.mark.nightly),
        pytest.param(
            EXPERTS,
            {"activation_checkpointing": "on"},
            id="experts, recomputed",
            marks=needs("transformers", "5", "experts' shapes depend on data"),
        ),
        pytest.param(LLAMA, {"lora": LORA}, id="LoRA", marks=pytest.mark.nightly),
        pytest.param(
            LLAMA,
            {"lora": {**LORA, "target": "all-linear"}},
            id="LoRA of all layers",
            marks=pytest.mark.nightly,
        ),
        pytest.param(LLAMA, {"dtype": "fp32"}, id="fp32", marks=pytest.mark.nightly),
    ],
)
def test_activations_are_those_of_the_simulation(
    config: Mapping[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warm_command.use(warm_host.prefix(), monkeypatch.setattr)
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = EstimateSettings(hf_config=str(tmp_path), seq_length=512, **options)
    with simulated(settings) as (_, base, simulator):
        simulation = simulator.facts(base)
    formula = Formula(config, settings, "config.json").facts(base)
    assert formula.num_params == simulation.num_params
    assert formula.trainable_params == simulation.trainable_params
    assert formula.largest_param == simulation.largest_param
    for name in ("forward_bytes_per_sample", "backward_bytes_per_sample"):
        assert getattr(formula, name) == pytest.approx(getattr(simulation, name), rel=0.02)
