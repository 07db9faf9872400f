"""The options of the commands that simulate a model; they import nothing that simulates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsat.errors import UserInputError
from dsat.options import LORA, WORD, at_least, check_together, option
from dsat.prepare.target import Target


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Target):
    """Options of the commands that simulate a script, or the model of a configuration."""

    model: str | None = option(
        "--model",
        old=("--hf-config",),
        kind=WORD,
        metavar="MODEL",
        help="predict a model of transformers instead of a script: a config.json, its folder, or "
        "the id of a model on the Hugging Face Hub; no weights are needed",
    )
    seq_length: int | None = option(
        "--seq-length",
        goes_with="--model",
        kind=at_least(1),
        help="with --model: tokens of a sample (default: 2048, or what the model has at most)",
    )
    lora: Mapping[str, str] | None = option(
        "--lora",
        goes_with="--model",
        kind=LORA,
        help="with --model: train low-rank adapters of these layers alone "
        "(for example r=16,target=q_proj+v_proj, or target=all-linear)",
    )
    dtype: str = option(
        "--dtype",
        goes_with="--model",
        kind=WORD,
        default="bf16",
        choices=("bf16", "fp16", "fp32"),
        help="with --model: the type of the parameters",
    )
    activation_checkpointing: str | None = option(
        "--activation-checkpointing",
        kind=WORD,
        choices=("on", "off"),
        help="recompute activations in the backward pass, or keep all of them (default: as the "
        "script does)",
    )
    json: bool = option("--json", shell_only=True, help="print the answer as JSON")

    def __post_init__(self) -> None:
        if self.model is not None and (self.command or self.config is not None):
            raise UserInputError(
                "is for a model without a script, and there is a script", where="--model"
            )
        check_together(self)
