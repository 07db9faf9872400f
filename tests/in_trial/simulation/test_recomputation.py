"""Activation checkpointing that is switched from outside, on real models: who computes twice."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dsat.in_trial.simulation.recomputation import Recomputation
from testing.versions import needs

WIDTH = 4
TORCH = "torch.utils.checkpoint"
DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"


@pytest.fixture(autouse=True)
def _not_for_the_rest_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (TORCH, DEEPSPEED):
        module = importlib.import_module(name)
        for attribute, value in list(vars(module).items()):
            if "heckpoint" in attribute:
                monkeypatch.setattr(module, attribute, value)


class Counting(nn.Linear):
    """A layer that counts how often it computes."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return super().forward(x).tanh()


class Own(nn.Module):
    """A model that checkpoints its layer by itself, or does not.

    Args:
        how: calls the layer.
    """

    def __init__(self, how: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.how = Counting(), how

    def forward(self, x: torch.Tensor) -> Any:
        return self.how(self.layer, x)


def with_deepspeed(layer: nn.Module, x: torch.Tensor) -> Any:
    import deepspeed

    return deepspeed.checkpointing.checkpoint(layer, x)


OWN: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "non-reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "deepspeed": with_deepspeed,
}


def trained(model: Own, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a step."""
    model.zero_grad()
    model(x).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "how",
    [
        "reentrant",
        "non-reentrant",
        pytest.param("deepspeed", marks=needs("deepspeed", "0.18", "must be configured first")),
    ],
)
def test_a_model_that_checkpoints_by_itself_can_be_told_not_to(how: str) -> None:
    model, x = Own(OWN[how]), torch.randn(3, WIDTH, requires_grad=True)
    gradients = trained(model, x)
    assert model.layer.passes == 2

    on = Recomputation(True)
    on.switch(model)
    trained(model, x)
    assert (model.layer.passes, on.is_used) == (4, True)

    off = Recomputation(False)
    off.switch(model)
    assert all(map(torch.equal, trained(model, x), gradients))
    assert (model.layer.passes, off.is_used) == (5, True)


def test_a_model_without_checkpointing_cannot_be_told_to() -> None:
    model = Own(lambda layer, x: layer(x))
    on = Recomputation(True)
    on.switch(model)
    trained(model, torch.randn(3, WIDTH))
    assert (model.layer.passes, on.is_used) == (1, False)


class OfLibrary(nn.Module):
    """What a library's class has of its switch; the names are the library's.

    Args:
        names: of the methods that switch it on and off.
        supported: what the class says of itself, if anything.
    """

    def __init__(self, names: tuple[str, str], **supported: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.calls: list[Any] = []
        if names[0] == names[1]:
            setattr(self, names[0], lambda enable=True: self.calls.append(enable))
        else:
            setattr(self, names[0], lambda: self.calls.append(True))
            setattr(self, names[1], lambda: self.calls.append(False))
        for name, value in supported.items():
            setattr(self, name, value)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize(
    "names",
    [
        ("activation_checkpointing_enable", "activation_checkpointing_disable"),
        ("gradient_checkpointing_enable", "gradient_checkpointing_disable"),
        ("enable_gradient_checkpointing", "disable_gradient_checkpointing"),
        ("set_grad_checkpointing", "set_grad_checkpointing"),
    ],
)
def test_a_librarys_model_is_switched_wherever_it_is(names: tuple[str, str], wanted: bool) -> None:
    library = OfLibrary(names)
    library.part = OfLibrary(names)  # which the whole switches itself
    Recomputation(wanted).switch(nn.Sequential(nn.Linear(WIDTH, WIDTH), library))
    assert (library.calls, library.part.calls) == ([wanted], [])


def test_a_class_that_does_not_support_it_is_left_alone() -> None:
    names = ("gradient_checkpointing_enable", "gradient_checkpointing_disable")
    library = OfLibrary(names, supports_gradient_checkpointing=False)
    Recomputation(True).switch(library)
    assert library.calls == []


@pytest.mark.parametrize("frozen", [False, True])
def test_a_transformer_is_switched_on_and_off(frozen: bool) -> None:
    """With LoRA, all but the adapters is frozen, and gradients must flow to them all the same."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8,
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    if frozen:
        model.requires_grad_(False)
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    passes = []
    # It ends as soon as all is recomputed that is needed.
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    ids = torch.zeros(1, 4, dtype=torch.long)
    model.train()
    for wanted, expected in ((True, 2), (False, 1)):
        recomputation = Recomputation(wanted)
        recomputation.switch(model)
        passes.clear()
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        assert len(passes) == expected
        assert model.model.layers[0].mlp.up_proj.weight.grad is not None
    assert not recomputation.is_used
