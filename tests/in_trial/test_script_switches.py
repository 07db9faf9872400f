"""Switches that a script turns out to have, and what sets them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsat.errors import InvalidTrial
from dsat.in_trial import recomputation
from dsat.in_trial.script_switches import ScriptSwitches, of_model, switch_model

CONFIG = {"optimizer": {"type": "Adam"}}


def arguments(**changes: Any) -> SimpleNamespace:
    """As transformers 5 has them, just made and not yet checked."""
    values = {
        "gradient_checkpointing": None,
        "activation_checkpointing": None,
        "gradient_checkpointing_kwargs": None,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": True,
        "dataloader_persistent_workers": False,
        "optim": "adamw_torch_fused",
        "torch_compile": False,
    }
    return SimpleNamespace(**{**values, **changes})


def found(args: SimpleNamespace, config: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    switches = ScriptSwitches({}, on_cpu=True)
    switches.set_arguments(args, config)
    assert all(switch.in_arguments for switch in switches.found.values())
    return {name: switch.values for name, switch in switches.found.items()}


def test_a_trainer_has_its_arguments() -> None:
    of_trainer = found(arguments(), CONFIG)
    assert of_trainer["gradient_checkpointing"] == (False, True, "every_2_layers")
    assert of_trainer["dataloader_num_workers"][:2] == (0, 2)
    assert of_trainer["torch_compile"] == (False, True)
    assert "optim" not in of_trainer  # DeepSpeed makes it
    assert "dataloader_persistent_workers" not in of_trainer  # there are none


def test_trl_recomputes_all_layers_or_none() -> None:
    """Behind a generation it switches recomputation on again, as its arguments say, and fails."""
    config = type("GRPOConfig", (SimpleNamespace,), {"__module__": "trl.trainer.grpo_config"})
    own = type("OwnConfig", (config,), {})(**vars(arguments()))
    assert found(own, CONFIG)["gradient_checkpointing"] == (False, True)


def test_its_optimizer_is_one_of_them_if_it_makes_it() -> None:
    own = found(arguments(dataloader_num_workers=3), {})
    assert own["optim"] == ("adamw_torch_fused", "adamw_torch")
    assert own["dataloader_persistent_workers"] == (False, True)
    assert own["dataloader_num_workers"][:2] == (3, 2)
    assert "optim" not in found(arguments(optim="adafactor"), {})


def test_arguments_are_set() -> None:
    args = arguments()
    wanted = {
        "gradient_checkpointing": "every_2_layers",
        "dataloader_num_workers": 2,
        "TrainingArguments.optim": "adafactor",
        "--seed": "3",
    }
    ScriptSwitches(wanted, on_cpu=True).set_arguments(args, CONFIG)
    assert args.activation_checkpointing is True
    assert args.activation_checkpointing_kwargs == {"every_n_layers": 2}
    assert (args.dataloader_num_workers, args.optim) == (2, "adafactor")
    unknown = ScriptSwitches({"TrainingArguments.colour": 1}, on_cpu=True)
    with pytest.raises(InvalidTrial, match="has no field colour"):
        unknown.set_arguments(args, CONFIG)


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_keyword_arguments_may_be_text_of_the_command_line(name: str) -> None:
    for own in ('{"use_reentrant": false}', {"use_reentrant": False}):
        args = arguments(**{f"{name}_kwargs": own})
        switches = ScriptSwitches({"gradient_checkpointing": "every_2_layers"}, on_cpu=True)
        switches.set_arguments(args, CONFIG)
        wanted = {"use_reentrant": False, "every_n_layers": 2}
        assert args.activation_checkpointing_kwargs == wanted


def test_what_a_script_cannot_be_switched_to_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    call = {"model": model, "model_parameters": model.parameters(), "config": CONFIG}
    groups = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)
    switches = ScriptSwitches({"attn_implementation": "eager"}, on_cpu=True)
    with pytest.raises(InvalidTrial, match="where it is Ulysses'"):
        switches.before_engine({**call, "mpu": groups})
    fields = ("optim", "packing", "dataloader_pin_memory", "dataloader_num_workers")
    switches = ScriptSwitches({"--seed": "3", **dict.fromkeys(fields, 2)}, on_cpu=True)
    with pytest.raises(InvalidTrial, match="optim is a field of TrainingArguments"):  # on all ranks
        switches.before_engine(call)
    plain = ScriptSwitches({"--seed": "3"}, on_cpu=True)
    plain.before_engine(call)
    assert {name: s.values for name, s in plain.found.items()} == {"torch_compile": (False, True)}


@pytest.fixture
def gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 8, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


@pytest.mark.slow
def test_a_model_of_transformers_is_switched(gpt2: Any) -> None:
    if not hasattr(gpt2, "set_attn_implementation"):
        pytest.skip("this transformers chooses the attention kernel when it makes a model")
    whole = torch.nn.Sequential(torch.nn.Linear(2, 2), gpt2)
    assert of_model(whole, may_flash=False) == {
        "gradient_checkpointing": (False, True),
        "attn_implementation": ("sdpa", "eager"),
        "tiled_mlp": (False, True),
    }
    switch_model(whole, {"attn_implementation": "eager", "gradient_checkpointing": True})
    own = of_model(whole, may_flash=False)
    assert [values[0] for values in own.values()] == [True, "eager", False]
    with pytest.raises(InvalidTrial, match="no known switch"):
        switch_model(whole[0], {"attn_implementation": "eager"})


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [{}, {"gradient_checkpointing": False}])
def test_a_model_that_the_script_itself_lets_recompute(gpt2: Any, wanted: dict[str, bool]) -> None:
    """Its arguments say nothing of it, as with LLaMA-Factory."""
    recomputation.switch(gpt2, True)
    switches = ScriptSwitches(wanted, on_cpu=True)
    switches.set_arguments(arguments(gradient_checkpointing=False), CONFIG)
    switches.before_engine({"model": gpt2, "model_parameters": gpt2.parameters(), "config": CONFIG})
    assert switches.found["gradient_checkpointing"].values == (True, False)
    assert recomputation.is_on(gpt2) is not bool(wanted)


@pytest.mark.parametrize(
    ("wanted", "options", "has_arguments", "is_compiled"),
    [
        ({"torch_compile": True}, {}, False, True),
        ({"torch_compile": True}, {}, True, False),  # the Trainer does it
        ({}, {"deep_compiles": True}, True, True),
        ({}, {}, False, False),
    ],
)
def test_an_engine_is_compiled_where_nobody_else_does_it(
    wanted: dict[str, Any], options: dict[str, bool], has_arguments: bool, is_compiled: bool
) -> None:
    calls: list[int] = []
    engine = SimpleNamespace(is_compiled=False, compile=lambda: calls.append(1))
    switches = ScriptSwitches(wanted, on_cpu=False, **options)
    if has_arguments:
        switches.set_arguments(arguments(), CONFIG)
    switches.after_engine(engine)
    assert bool(calls) is is_compiled


@pytest.mark.slow
def test_mlps_in_parts_train_like_whole_ones() -> None:
    pytest.importorskip("deepspeed.runtime.sequence_parallel.ulysses_sp")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    model, tokens = transformers.LlamaForCausalLM(config), torch.arange(56)[None]
    calls: list[int] = []
    model.model.layers[0].mlp.up_proj.register_forward_hook(
        lambda _, args, out: calls.append(args[0].shape[-2])
    )

    def trained() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return loss, [parameter.grad.clone() for parameter in model.parameters()]

    whole = trained()
    calls.clear()
    assert of_model(model, may_flash=False)["tiled_mlp"] == (False, True)
    switch_model(model, {"tiled_mlp": True})
    in_parts = trained()
    assert calls == [14] * 8  # four parts, forward and again backward
    torch.testing.assert_close(in_parts, whole)
    with pytest.raises(InvalidTrial, match="no module of the model is an MLP"):
        switch_model(torch.nn.Linear(1, 1), {"tiled_mlp": True})
