"""Sizes of a decoder model by its transformers configuration alone, without torch.

Parameters are counted as the models of transformers 5.23 have them. Activations are those that
their layers keep for the backward pass, with an attention that keeps no matrix of scores (SDPA,
flash). Held against the simulation by tests/simulation/test_config_facts.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsat.errors import UserInputError
from dsat.inputs.estimate_settings import EstimateSettings
from dsat.memory import closed_form
from dsat.memory.closed_form import MATMUL_WORKSPACE_BYTES, TYPE_BYTES, ModelFacts
from dsat.memory.estimate import MemoryEstimate
from dsat.options import ALL_LINEAR
from dsat.simulation.protocol import Question, ScriptFacts

# model_type: words on what is particular about it. All have gated layers and RMSNorm.
_BIAS, _NORMALISED, _FUSED = "bias", "normalised", "fused"
_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "llama": (),
    "mistral": (),
    "mixtral": (),
    "phi3": (_FUSED,),  # one layer for queries, keys and values
    "qwen2": (_BIAS,),  # of queries, keys and values, whatever the configuration says
    "qwen3": (_NORMALISED,),  # queries and keys
    "qwen3_moe": (_NORMALISED,),
}
_HEADS, _CHOSEN, _POSITIONS = (
    "num_key_value_heads",
    "num_experts_per_tok",
    "max_position_embeddings",
)
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    "vocab_size",
)
# Settings beside the sizes that must be there, because their defaults are a family's own.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "mistral": (_HEADS,),
    "mixtral": (_HEADS, "num_local_experts", _CHOSEN),
    "qwen2": (_HEADS,),
    "qwen3": (_HEADS, "head_dim"),
    "qwen3_moe": (_HEADS, "num_experts", _CHOSEN, "moe_intermediate_size"),
}
_OF_EXPERTS = ("num_local_experts", "num_experts", _CHOSEN, "moe_intermediate_size")
_READ_ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj"}
_READ_INNER = {"gate_proj", "up_proj", "gate_up_proj"}
HOW_TO_SIMULATE = (
    "For a simulation of any model, with DeepSpeed's own engine: pip install torch deepspeed "
    "transformers."
)
_USUAL_SEQUENCE = 2048


@dataclass(frozen=True)
class Decoder:
    """A decoder of gated layers.

    Attributes:
        queries, keys: widths of all heads of queries, and of keys or values.
        inner: width of a gated layer, of each expert if there are several.
        experts, chosen: number of experts, and of those that a token goes to; 1 without experts.
        attention_bias, out_bias, inner_bias: layers that have one.
        normalised: queries and keys are.
        fused: one layer makes queries, keys and values.
    """

    hidden: int
    layers: int
    queries: int
    keys: int
    head: int
    inner: int
    vocabulary: int
    experts: int
    chosen: int
    tied: bool
    attention_bias: bool
    out_bias: bool
    inner_bias: bool
    normalised: bool
    fused: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> Decoder:
        """Read a transformers configuration.

        Raises:
            UserInputError: no formula knows the model, or no model has such a size.
        """
        needed = (*_SIZES, *_NEEDED.get(config.get("model_type", ""), ()))
        # Dense models may have settings of experts, too.
        unused = [name for name in _OF_EXPERTS if name not in needed]
        config = {name: value for name, value in config.items() if name not in unused}
        if problem := _unknown(config, needed):
            raise UserInputError(problem, where=where, hint=HOW_TO_SIMULATE)
        if problem := _impossible(config, needed):
            raise UserInputError(problem, where=where, hint="Correct it in the file.")
        family = _FAMILIES[config["model_type"]]
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or config["hidden_size"] // heads
        bias = bool(config.get("attention_bias"))
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            queries=heads * head,
            keys=(config.get(_HEADS) or heads) * head,
            head=head,
            inner=config.get("moe_intermediate_size") or config["intermediate_size"],
            vocabulary=config["vocab_size"],
            experts=config.get("num_local_experts") or config.get("num_experts") or 1,
            chosen=config.get(_CHOSEN) or 1,
            tied=bool(config.get("tie_word_embeddings")),
            attention_bias=_BIAS in family or bias,
            out_bias=bias,
            inner_bias=bool(config.get("mlp_bias")),
            normalised=_NORMALISED in family,
            fused=_FUSED in family,
        )

    @property
    def params(self) -> int:
        """Number of parameters."""
        attention = self.hidden * (2 * self.queries + 2 * self.keys)
        attention += self.attention_bias * (self.queries + 2 * self.keys)
        attention += self.out_bias * self.hidden + self.normalised * 2 * self.head
        inner = 3 * self.hidden * self.inner + self.inner_bias * (2 * self.inner + self.hidden)
        router = self.hidden * self.experts if self.experts > 1 else 0
        layer = attention + self.experts * inner + router + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + embeddings + self.hidden

    @property
    def largest_param(self) -> int:
        """Elements of the largest parameter; the experts of a layer are two parameters."""
        inner = self.hidden * self.inner * (2 * self.experts if self.experts > 1 else 1)
        return max(self.vocabulary * self.hidden, inner)


def _unknown(config: Mapping[str, Any], needed: Sequence[str]) -> str:
    """Return what no formula knows, or which size is missing; nothing if one knows all."""
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        return f"no formula knows the model type {kind!r}"
    heads = [name for name in config.get("architectures") or () if not name.endswith("ForCausalLM")]
    if heads:
        return f"no formula knows {heads[0]}, only language models (...ForCausalLM)"
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        return "no formula knows a model in which only some layers have experts"
    # Heads that are null are as many as those of queries.
    missing = [n for n in needed if config.get(n) is None and (n != _HEADS or n not in config)]
    return f"{missing[0]} is missing" if missing else ""


def _impossible(config: Mapping[str, Any], needed: Sequence[str]) -> str:
    """Return which size is none that a model has; nothing if all are fine."""
    for name in (*_SIZES, _HEADS, "head_dim", *_OF_EXPERTS, _POSITIONS):
        value, least = config.get(name), 1 if name in needed else 0  # 0: as if it were not there
        if value is not None and (type(value) is not int or value < least):
            return f"{name} is {json.dumps(value)}, and no whole number above 0"
    hidden, heads, keys = config["hidden_size"], config["num_attention_heads"], config.get(_HEADS)
    if not config.get("head_dim") and hidden % heads:
        return f"hidden_size is {hidden}, which {heads} heads cannot share evenly"
    if keys and heads % keys:
        return f"num_attention_heads is {heads}, and no multiple of the {keys} of keys and values"
    return ""


class Formula:
    """Answers of the closed form, in the place of a simulation's (`Simulator`).

    Attributes:
        script: what a script with the model would say.
    """

    def __init__(self, config: Mapping[str, Any], settings: EstimateSettings, where: str) -> None:
        self._model, self._settings = Decoder.of(config, where), settings
        takes = config.get(_POSITIONS) or 0
        self.script = ScriptFacts(
            settings.seq_length or min(_USUAL_SEQUENCE, takes or _USUAL_SEQUENCE),
            self._model.queries // self._model.head,
            self._model.hidden,
            takes,
        )
        self._adapters = _adapters(self._model, settings.lora)

    def facts(self, config: Mapping[str, Any], *, unit_tokens: int | None = None) -> ModelFacts:
        """Return the facts of the model; see `Simulator.facts`."""
        model, lora = self._model, self._settings.lora
        size = TYPE_BYTES[self._settings.dtype]
        tokens = unit_tokens or self.script.sequence_length or 0
        adapters = model.layers * sum(self._adapters)
        recompute = self._settings.activation_checkpointing == "on"
        passes = _passes(model, size, lora, recompute=recompute)
        head = 0 if lora else size * model.vocabulary * model.hidden
        return ModelFacts(
            num_params=model.params + adapters,
            trainable_params=adapters if lora else model.params,
            largest_param=max(self._adapters) if lora else model.largest_param,
            matmul_bytes=head + tokens * (4 * model.head + 10) + MATMUL_WORKSPACE_BYTES,
            workspace_bytes=MATMUL_WORKSPACE_BYTES,
            param_bytes=size,
            **{f"{name}_bytes_per_sample": tokens * bytes_ for name, bytes_ in passes.items()},
        )

    def estimates(self, questions: Sequence[Question]) -> list[MemoryEstimate]:
        """Return the memory of configurations; see `Simulator.estimates`."""
        return [
            closed_form.estimate(self.facts(config), config, slots=slots, micro_batch=micro_batch)
            for config, micro_batch, slots, *_ in questions
        ]


def _passes(
    model: Decoder, size: int, lora: Mapping[str, str] | None, *, recompute: bool
) -> dict[str, Any]:
    """Return the bytes of each token at the peaks of the forward and the backward pass."""
    h, inner, layer = model.hidden, model.chosen * model.inner, _kept(model, size, lora)
    # The inputs of all layers are kept, or all activations.
    held = model.layers * (size * h if recompute else layer)
    # Gradients of the gated layer, or of attention.
    gradients, norm = max(2 * size * h + 4 * size * inner, 12 * size * h), _norm(h, size)
    if lora:  # no gradient of a weight, and none before the first adapter
        gradients = norm = 0
    first_gradient = held + gradients + layer * recompute
    # In fp32, with their logarithm of softmax.
    logits = (8 + (size if size < 4 else 0)) * model.vocabulary
    forward = held + norm + logits
    if recompute:
        forward = max(forward, held + 3 * size * inner + 2 * size * h)
    return {
        "forward": forward,
        "backward": max(held + norm + 12 * model.vocabulary, first_gradient),
        "first_gradient": first_gradient,
        "matmul": held + size * model.vocabulary + 5 * size * h,
        "held": 16,  # numbers of tokens, and labels
    }


def _norm(width: int, size: int) -> int:
    """Return what RMSNorm keeps: its input in fp32, the normalised input and the output."""
    return (4 + 2 * size) * width + 4


def _kept(model: Decoder, size: int, lora: Mapping[str, str] | None) -> int:
    """Return the bytes that a layer keeps of each token for the backward pass."""
    h, heads = model.hidden, (model.queries + model.keys) // model.head
    # Queries, keys, values and the output; logarithms of sums. Causal attention needs no mask.
    kept = 2 * _norm(h, size) + 2 * size * (model.queries + model.keys)
    kept += 4 * model.queries // model.head
    kept += 4 * size * model.inner * model.chosen
    if model.normalised:
        kept += (4 + size) * (model.queries + model.keys) + 4 * heads
    if model.fused:  # queries and keys, before their rotation
        kept += size * (model.queries + model.keys)
    if model.experts > 1:  # inputs and outputs of the chosen experts, and the router's
        kept += 2 * size * h * model.chosen + 12 * model.experts
    if lora is None:
        return kept
    # Frozen layers keep no inputs, but those that adapters read.
    targets = set(_targets(model, lora))
    frozen = 2 * h + h * (not targets & _READ_ATTENTION) + h * (not targets & _READ_INNER)
    frozen += model.inner * model.chosen * ("down_proj" not in targets)
    return kept - size * frozen + size * int(lora.get("r", 8)) * len(targets)


def _linear(model: Decoder) -> dict[str, tuple[int, int]]:
    """Return inputs and outputs of the linear layers in each layer of a model, by name."""
    h, inner = model.hidden, model.inner
    if model.fused:
        shapes = {"qkv_proj": (h, model.queries + 2 * model.keys)}
        gated = {"gate_up_proj": (h, 2 * inner)}
    else:
        shapes = {"q_proj": (h, model.queries)} | dict.fromkeys(
            ("k_proj", "v_proj"), (h, model.keys)
        )
        gated = dict.fromkeys(("gate_proj", "up_proj"), (h, inner))
    shapes["o_proj"] = (model.queries, h)
    if model.experts == 1:
        shapes |= {**gated, "down_proj": (inner, h)}
    return shapes


def _targets(model: Decoder, lora: Mapping[str, str]) -> list[str]:
    targets = lora.get("target", "q_proj+v_proj")
    return list(_linear(model)) if targets == ALL_LINEAR else targets.split("+")


def _adapters(model: Decoder, lora: Mapping[str, str] | None) -> list[int]:
    """Return the elements of each low-rank parameter of a layer; nothing without adapters.

    Raises:
        UserInputError: the model has no layer of a name.
    """
    if lora is None:
        return []
    shapes = _linear(model)
    targets, rank = _targets(model, lora), int(lora.get("r", 8))
    unknown = [target for target in targets if target not in shapes]
    if unknown:
        raise UserInputError(
            f"no layer of the model is called {unknown[0]}",
            where="--lora",
            hint=f"There are {', '.join(shapes)}.",
        )
    return [rank * width for target in targets for width in shapes[target]]
