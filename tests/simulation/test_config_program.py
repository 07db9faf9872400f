"""Models made from transformers configurations, and their inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsat.errors import InvalidTrial
from dsat.simulation import config_program
from dsat.simulation.fake_parameters import FakeParameters
from dsat.simulation.server import SimulationServer

pytest.importorskip("transformers")

_TINY = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
_TINY |= {"intermediate_size": 16, "vocab_size": 64}
_VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
_SPEECH = {"d_model": 16, "num_mel_bins": 8, "vocab_size": 64, "pad_token_id": 0}
_SPEECH |= {
    f"{part}_{size}": n
    for part in ("encoder", "decoder")
    for size, n in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 16))
}
_SPEECH |= {"decoder_start_token_id": 1, "max_source_positions": 20, "max_target_positions": 12}


def build(folder: Path, config: dict[str, Any]) -> Any:
    path = folder / "config.json"
    path.write_text(json.dumps({**_TINY, **config}))
    return config_program.build(path, torch.float32)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"model_type": "of_next_year"},
            r"refuses config.json: .*`of_next_year`.*install",
        ),
        (
            {"model_type": "llama", "hidden_size": "wide"},
            "refuses config.json: .*install",
        ),
    ],
)
def test_a_refused_configuration(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidTrial, match=said):
        build(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            {"input_ids": (2, 512), "labels": (2, 512)},
        ),
        (_VIT, {"pixel_values": (2, 3, 224, 224), "labels": (2,)}),
        (
            {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
            | _SPEECH,
            {"input_features": (2, 8, 40), "labels": (2, 12)},
        ),
    ],
    ids=["text", "images", "speech"],
)
def test_a_model_trains_on_its_batches(
    tmp_path: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]]
) -> None:
    model = build(tmp_path, config)
    batch = config_program.batches(model, None, torch.float32)(2)
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == shapes
    loss = config_program.loss_of(model(**batch))
    loss.backward()  # type: ignore[no-untyped-call]
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("config", "length", "refused"),
    [
        ({"model_type": "gpt2", "n_positions": 64}, 65, "has embeddings for 64 positions"),
        ({"model_type": "opt", "max_position_embeddings": 48}, 49, "has embeddings for 48"),
        (_VIT, 64, "samples of ViTForImageClassification are images"),
        ({"model_type": "llama", "max_position_embeddings": 48}, 49, ""),
        ({"model_type": "llama", "max_position_embeddings": 64}, 65, ""),  # as many as tokens
        ({"model_type": "bloom", "vocab_size": 2048}, 2049, ""),  # no limit at all
    ],
)
def test_models_with_learned_positions_take_no_longer_samples(
    tmp_path: Path, config: dict[str, Any], length: int, refused: str
) -> None:
    model = build(tmp_path, config)
    if refused:
        with pytest.raises(InvalidTrial, match=f"--seq-length: .*{refused}"):
            config_program.batches(model, length, torch.float32)
    else:
        inputs = config_program.batches(model, length, torch.float32)(1)["input_ids"]
        assert inputs.shape == (1, length)


def test_a_refusal_does_not_blame_fake_parameters(tmp_path: Path) -> None:
    server = SimulationServer(tmp_path)
    server._fakes = FakeParameters()
    server._fakes.fake_bytes = 1
    assert server.failed(InvalidTrial("--seq-length: too long")) == ""
    assert "simulated without data" in server.failed(RuntimeError("a shape"))


@pytest.mark.parametrize("message", ["Resource temporarily unavailable", "out of memory"])
def test_a_limit_of_memory_is_named_whatever_meets_it(tmp_path: Path, message: str) -> None:
    """For example, a thread of autograd has no room for its stack."""
    server = SimulationServer(tmp_path)
    server._limit_bytes = 916 * 2**20
    error = RuntimeError(message) if "Resource" in message else MemoryError(message)
    assert "more than the 916.0 MiB" in server.failed(error)
