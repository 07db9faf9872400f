"""Sizes of a decoder model by its transformers configuration alone, without torch.

Parameters are counted as the models of transformers 5.23 have them. Activations are those that
their layers keep for the backward pass, with an attention that keeps no matrix of scores (SDPA,
flash). Held against the simulation by tests/memory/test_config_facts.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsat.errors import UserInputError

# model_type: whether queries, keys and values have a bias whatever the configuration says, and
# whether queries and keys are normalised. All have gated layers and RMSNorm.
_FAMILIES: Mapping[str, tuple[bool, bool]] = {
    "llama": (False, False),
    "mistral": (False, False),
    "mixtral": (False, False),
    "phi3": (False, False),
    "qwen2": (True, False),
    "qwen3": (False, True),
    "qwen3_moe": (False, True),
}
HOW_TO_SIMULATE = (
    "For a simulation of any model, with DeepSpeed's own engine: pip install 'dsat[deepspeed]' "
    "transformers."
)
_USUAL_SEQUENCE = 2048
_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Decoder:
    """A decoder of gated layers.

    Attributes:
        queries, keys: widths of all heads of queries, and of keys or values.
        inner: width of a gated layer, of each expert if there are several.
        experts, chosen: number of experts, and of those that a token goes to; 1 without experts.
        attention_bias, out_bias, inner_bias: layers that have one.
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

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str) -> Decoder:
        """Read a transformers configuration.

        Raises:
            UserInputError: it is of another kind of model, or lacks a size.
        """
        family = _FAMILIES.get(str(config.get("model_type")))
        if family is None or config.get("mlp_only_layers"):
            raise UserInputError(
                f"no formula knows the model type {config.get('model_type')!r}",
                where=where,
                hint=HOW_TO_SIMULATE,
            )
        missing = [name for name in _SIZES if not isinstance(config.get(name), int)]
        if missing:
            raise UserInputError(f"{missing[0]} is missing, or no whole number", where=where)
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or config["hidden_size"] // heads
        bias = bool(config.get("attention_bias"))
        experts = config.get("num_local_experts") or config.get("num_experts") or 1
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            queries=heads * head,
            keys=(config.get("num_key_value_heads") or heads) * head,
            head=head,
            inner=config.get("moe_intermediate_size") or config["intermediate_size"],
            vocabulary=config["vocab_size"],
            experts=experts,
            chosen=config.get("num_experts_per_tok") or 1,
            tied=bool(config.get("tie_word_embeddings")),
            attention_bias=family[0] or bias,
            out_bias=bias,
            inner_bias=bool(config.get("mlp_bias")),
            normalised=family[1],
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
        inner = self.hidden * self.inner
        return max(
            self.vocabulary * self.hidden,
            2 * self.experts * inner if self.experts > 1 else inner,
        )


_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
)


def _adapters(model: Decoder, lora: Mapping[str, str] | None, where: str) -> list[int]:
    """Return the elements of each low-rank parameter of a layer; nothing without adapters.

    Raises:
        UserInputError: the model has no layer of a name.
    """
    if lora is None:
        return []
    shapes = {
        "q_proj": (model.hidden, model.queries),
        "k_proj": (model.hidden, model.keys),
        "v_proj": (model.hidden, model.keys),
        "qkv_proj": (model.hidden, model.queries + 2 * model.keys),
        "o_proj": (model.queries, model.hidden),
    }
    if model.experts == 1:
        shapes |= {
            "gate_proj": (model.hidden, model.inner),
            "up_proj": (model.hidden, model.inner),
            "gate_up_proj": (model.hidden, 2 * model.inner),
            "down_proj": (model.inner, model.hidden),
        }
    targets, rank = lora.get("target", "q_proj+v_proj").split("+"), int(lora.get("r", 8))
    unknown = [target for target in targets if target not in shapes]
    if unknown:
        raise UserInputError(
            f"no layer of the model is called {unknown[0]}",
            where="--lora",
            hint=f"There are {', '.join(shapes)}.",
        )
    return [rank * width for target in targets for width in shapes[target]]
