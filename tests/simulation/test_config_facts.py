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
from dsat.simulation.config_facts import Decoder, Formula
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


def test_tied_embeddings_are_one_matrix() -> None:
    """Qwen2-0.5B has 494,032,768 parameters, by the weights that were published."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    }
    assert Decoder.of(config, "").params == 494_032_768
    untied = Decoder.of({**config, "tie_word_embeddings": False}, "").params
    assert untied == 494_032_768 + 151936 * 896


def test_a_model_of_the_hubs_cache_has_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsat.command.hf_config.missing_packages", lambda: ["torch"])
    model = tmp_path / "models--of-somebody--tiny-model-1b"
    blob, link = model / "blobs" / "0123", model / "snapshots" / "4567" / "config.json"
    for path in (blob, link):
        path.parent.mkdir(parents=True)
    blob.write_text(json.dumps(LLAMA))
    link.symlink_to(blob)
    with simulated(EstimateSettings(hf_config=str(link.parent))) as (name, *_):
        assert name == "tiny-model-1b"


def test_a_size_whose_default_is_the_familys_must_be_given() -> None:
    without = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert Decoder.of(without, "").keys == Decoder.of(without, "").queries
    with pytest.raises(UserInputError, match="num_key_value_heads is missing"):
        Decoder.of({**without, "model_type": "mistral"}, "")
    without |= {"num_key_value_heads": None, "model_type": "mistral"}  # as many as heads
    assert Decoder.of(without, "").keys == Decoder.of(without, "").queries


# The widths of the layers that have adapters.
@pytest.mark.parametrize(
    ("config", "target", "widths"),
    [
        (LLAMA, "q_proj+v_proj", 2048 + (1024 + 256)),
        (LLAMA, "all-linear", 2 * 2048 + 2 * (1024 + 256) + 3 * (1024 + 2816)),
        (
            {**LLAMA, "model_type": "phi3"},
            "all-linear",
            1024 + 1536 + 2048 + 1024 + 5632 + 2816 + 1024,
        ),
        (EXPERTS, "all-linear", 2 * 2048 + 2 * (1024 + 256)),  # experts are no linear layers
    ],
)
def test_adapters_are_all_that_is_trained(
    config: Mapping[str, Any], target: str, widths: int
) -> None:
    settings = EstimateSettings(hf_config="x", lora={"r": "8", "target": target})
    facts = Formula(config, settings, "config.json").facts({})
    assert facts.trainable_params == 4 * 8 * widths
    assert facts.num_params == Decoder.of(config, "").params + facts.trainable_params


CORRECT, SIMULATE = "Correct it in the file.", "For a simulation of any model"


@pytest.mark.parametrize(
    ("change", "said", "hint"),
    [
        ({"model_type": "mamba"}, "no formula knows the model type 'mamba'", SIMULATE),
        ({"architectures": ["LlamaForTokenClassification"]}, "knows LlamaForTokenCl", SIMULATE),
        ({**EXPERTS, "decoder_sparse_step": 2}, "only some layers have experts", SIMULATE),
        ({**EXPERTS, "mlp_only_layers": [0]}, "only some layers have experts", SIMULATE),
        ({"vocab_size": None}, "vocab_size is missing", SIMULATE),
        ({"model_type": "qwen3"}, "head_dim is missing", SIMULATE),
        ({"hidden_size": "1024"}, 'hidden_size is "1024", and no whole number', CORRECT),
        ({"num_attention_heads": 0}, "heads is 0, and no whole number above 0", CORRECT),
        ({"head_dim": -1}, "head_dim is -1", CORRECT),
        ({**EXPERTS, "num_experts_per_tok": 0}, "num_experts_per_tok is 0", CORRECT),
        ({"max_position_embeddings": 4096.5}, "max_position_embeddings is 4096.5", CORRECT),
        ({"num_attention_heads": 7}, "1024, which 7 heads cannot share evenly", CORRECT),
        ({"num_key_value_heads": 3}, "no multiple of the 3 of keys and values", CORRECT),
    ],
)
def test_other_models_are_refused(change: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(UserInputError, match=said) as caught:
        Formula({**LLAMA, **change}, EstimateSettings(), "config.json")
    assert str(caught.value.hint).startswith(hint)


def test_samples_beyond_the_models_positions_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dsat.command.hf_config.missing_packages", lambda: ["torch"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, "max_position_embeddings": 4096}))
    for length, said in ((4096, 0), (4097, 1)):
        with simulated(EstimateSettings(hf_config=str(path), seq_length=length)):
            assert caplog.text.count("more than the 4,096 tokens that the model takes") == said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "options"),
    [
        pytest.param(
            EXPERTS,
            {"activation_checkpointing": "on"},
            id="experts, recomputed",
            marks=needs("transformers", "5", "experts' shapes depend on data"),
        ),
        *(
            pytest.param(LLAMA, options, marks=pytest.mark.nightly)
            for options in (
                {},
                {"lora": LORA},
                {"lora": {**LORA, "target": "all-linear"}},
                {"dtype": "fp32"},
            )
        ),
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
