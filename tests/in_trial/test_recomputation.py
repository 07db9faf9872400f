"""Activation checkpointing that is switched from outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dsat.in_trial.recomputation import is_on, switch

WIDTH = 4


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


@pytest.mark.parametrize(
    "names",
    [
        ("activation_checkpointing_enable", "activation_checkpointing_disable"),
        ("gradient_checkpointing_enable", "gradient_checkpointing_disable"),
        ("enable_gradient_checkpointing", "disable_gradient_checkpointing"),
        ("set_grad_checkpointing", "set_grad_checkpointing"),
    ],
)
def test_a_librarys_model_is_switched_wherever_it_is(names: tuple[str, str]) -> None:
    library = OfLibrary(names)
    library.part = OfLibrary(names)  # which the whole switches itself
    for wanted in (True, False):
        switch(nn.Sequential(nn.Linear(WIDTH, WIDTH), library), wanted)
    assert (library.calls, library.part.calls) == ([True, False], [])


def test_a_model_without_a_switch_is_left_alone() -> None:
    names = ("gradient_checkpointing_enable", "gradient_checkpointing_disable")
    library = OfLibrary(names, supports_gradient_checkpointing=False)
    for wanted in (True, False):
        assert not switch(library, wanted)
    assert library.calls == []


@pytest.mark.parametrize("frozen", [False, True])
def test_a_transformer_is_switched_on_and_off(frozen: bool) -> None:
    """With LoRA, all but the adapters is frozen, and gradients must flow to them all the same."""
    transformers = pytest.importorskip("transformers")
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers"), 2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
    if frozen:
        model.requires_grad_(False)
        model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    passes = []
    # It ends as soon as all is recomputed that is needed.
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: passes.append(1))
    ids = torch.zeros(1, 4, dtype=torch.long)
    model.train()
    for wanted, expected in ((True, 2), (False, 1)):
        assert switch(model, wanted)
        assert is_on(model) is wanted
        passes.clear()
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        assert len(passes) == expected
        assert model.model.layers[0].mlp.up_proj.weight.grad is not None
