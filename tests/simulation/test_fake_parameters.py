"""Models that are built without memory for their parameters."""

from __future__ import annotations

import copy
import importlib
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from dsat.simulation.fake_parameters import (
    FakeParameters,
    is_scripts,
)
from dsat.simulation.protocol import SimulationUnsupported
from dsat.simulation.versions.transformers_models import loads_float32, type_argument

WIDE, OWN = 2**15, 2**10  # matrices of so many rows and columns take 4 GiB and 4 MiB


pytestmark = pytest.mark.slow  # imports torch and DeepSpeed, some transformers


@pytest.fixture
def fakes() -> Iterator[FakeParameters]:
    found = FakeParameters()
    found.install()
    try:
        yield found
    finally:
        found.uninstall()


class Own(torch.nn.Module):
    """A module that creates its parameters and buffers itself."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn = torch.nn.Parameter(0.02 * torch.randn(WIDE, WIDE))
        self.scale = torch.nn.Parameter(torch.full((3,), 2.0))
        self.register_buffer("mask", torch.ones(OWN, OWN))


def test_a_model_of_many_gigabytes_takes_no_memory(fakes: FakeParameters) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    own = Own()
    model = torch.nn.Sequential(own, torch.nn.Linear(WIDE, WIDE), torch.nn.Embedding(WIDE, WIDE))
    torch.nn.init.trunc_normal_(own.drawn)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 300 * 1024
    assert fakes.fake_bytes == 4 * (3 * WIDE**2 + OWN**2)
    assert sum(p.numel() for p in model.parameters()) == 3 * WIDE**2 + WIDE + 3
    assert all(isinstance(p, torch.nn.Parameter) for p in model.parameters())
    # Small parameters and data are real, and a value of a fake one is of its type.
    assert is_scripts(own.drawn) and own.scale.tolist() == [2.0, 2.0, 2.0]
    assert torch.randn(100, 7).numpy().shape == (100, 7)
    assert isinstance(own.drawn.norm().item(), float) and not bool((own.drawn > 0).any())
    assert isinstance((own.drawn > 0).sum().item(), int)


@pytest.mark.parametrize("convert", ["bfloat16", "half", "double"])
def test_types_can_be_changed(fakes: FakeParameters, convert: str) -> None:
    layer, own = torch.nn.Linear(WIDE, WIDE), Own()
    weight = layer.weight
    getattr(torch.nn.Sequential(layer, own), convert)()
    assert layer.weight is weight, "an optimizer holds this very parameter"
    assert layer.weight.dtype == layer.bias.dtype == own.mask.dtype != torch.float32


def test_a_copy_has_parameters_of_its_own(fakes: FakeParameters) -> None:
    layer = torch.nn.Linear(WIDE, WIDE)
    layer.weight.requires_grad_(False)
    other = copy.deepcopy(torch.nn.ModuleList([layer, layer]))
    assert other[0] is other[1] and other[0].weight is not layer.weight
    assert isinstance(other[0].weight, torch.nn.Parameter) and is_scripts(other[0].weight)
    assert not other[0].weight.requires_grad and other[0].bias.requires_grad


def test_files_of_weights_are_not_read(fakes: FakeParameters, tmp_path: Path) -> None:
    real = {"weight": torch.zeros(4096, 4096, dtype=torch.bfloat16)}
    torch.save(real, tmp_path / "model.pt")
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert isinstance(found["weight"], FakeTensor)
    assert found["weight"].shape == (4096, 4096) and found["weight"].dtype == torch.bfloat16
    layer = torch.nn.Linear(4096, 4096, bias=False)
    layer.load_state_dict(found)


def test_pretrained_weights_need_not_be_there(fakes: FakeParameters, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=8, **type_argument(torch.bfloat16)
    )
    config.save_pretrained(tmp_path)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager"
    )
    assert type(model).__name__ == "LlamaForCausalLM" and not model.training
    assert model.config._attn_implementation == "eager"
    assert is_scripts(model.lm_head.weight) and model.dtype == (
        torch.float32 if loads_float32() else torch.bfloat16
    )
    sized = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, **type_argument(torch.float32)
    )
    assert sized.dtype == torch.float32
    pair = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(pair[0]) is type(model) and not any(pair[1].values())
    assert {"missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"} == pair[1].keys()


def test_a_quantized_model_cannot_be_simulated(fakes: FakeParameters, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(SimulationUnsupported, match="a quantized model cannot be simulated"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, config=config)


def test_zero_init_leaves_fake_parameters_whole(fakes: FakeParameters) -> None:
    zero: Any = importlib.import_module("deepspeed").zero
    with zero.Init(config_dict_or_path={"train_batch_size": 1}):
        layer = torch.nn.Linear(WIDE, WIDE)
    assert layer.weight.shape == (WIDE, WIDE) and is_scripts(layer.weight)
    assert not hasattr(layer.weight, "ds_id")
    assert fakes.partitions_in_stage_3(layer)


def test_stage_3_partitions_what_transformers_makes_by_a_configuration(
    fakes: FakeParameters,
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    make = transformers.AutoModelForCausalLM.from_config
    before = make(config)
    known = transformers.integrations.HfDeepSpeedConfig({"zero_optimization": {"stage": 2}})
    after, by_hand = make(config), transformers.LlamaForCausalLM(config)
    assert not fakes.partitions_in_stage_3(before)
    assert fakes.partitions_in_stage_3(torch.nn.Sequential(after))  # as adapters wrap it
    assert not fakes.partitions_in_stage_3(by_hand)
    del known
    assert not fakes.partitions_in_stage_3(make(config))


def test_everything_is_undone() -> None:
    before = (torch.nn.Parameter.__new__, torch.nn.Module._apply, torch.load)
    found = FakeParameters()
    found.install()
    found.uninstall()
    assert before == (torch.nn.Parameter.__new__, torch.nn.Module._apply, torch.load)
    assert not isinstance(torch.nn.Linear(1024, 1024).weight, FakeTensor)
