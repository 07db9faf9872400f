"""Settings of `dsat estimate`; its options are declared here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from dsat.command.switches import MODEL_SWITCHES
from dsat.errors import UserInputError
from dsat.inputs.target import Target
from dsat.options import (
    CARDS,
    LORA,
    MEMORY_SIZE,
    NUMBER_OF_CARDS,
    SWITCH,
    WORD,
    at_least,
    check_together,
    option,
)

ESTIMATE = "estimate"
_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Target):
    """Options of commands that simulate a script, or the model of a configuration."""

    hf_config: str | None = option(
        "--hf-config",
        kind=WORD,
        metavar="PATH",
        help="look at the model of a transformers configuration (a config.json, its folder, or a "
        "model in the local Hugging Face cache) instead of a script's; no weights are needed",
    )
    seq_length: int | None = option(
        "--seq-length",
        goes_with="--hf-config",
        kind=at_least(1),
        metavar="N",
        help="with --hf-config: tokens of a sample (default: 2048, or what the model has at most)",
    )
    lora: Mapping[str, str] | None = option(
        "--lora",
        goes_with="--hf-config",
        kind=LORA,
        metavar="r=N,target=NAME+NAME",
        help="with --hf-config: train low-rank adapters of these layers alone "
        "(for example r=16,target=q_proj+v_proj, or target=all-linear)",
    )
    dtype: str = option(
        "--dtype",
        goes_with="--hf-config",
        kind=WORD,
        default="bf16",
        choices=("bf16", "fp16", "fp32"),
        help="with --hf-config: the type of the parameters",
    )
    activation_checkpointing: str | None = option(
        "--activation-checkpointing",
        kind=WORD,
        choices=("on", "off"),
        help="with activations recomputed in the backward pass, or with all of them kept (default: "
        "as the script has it)",
    )
    json: bool = option("--json", shell_only=True, help="print the answer as JSON")

    def __post_init__(self) -> None:
        if self.hf_config is not None and (self.command or self.config is not None):
            raise UserInputError(
                "is for a model without a script, and there is a script", where="--hf-config"
            )
        check_together(self)


@dataclass(frozen=True, kw_only=True)
class EstimateSettings(ModelSettings):
    """Settings of `dsat estimate`.

    Attributes:
        fits: number and memory, in bytes, of the cards that the configuration is held against; None
            for tables of all strategies.
    """

    summary: ClassVar[str] = (
        "predicts without running a trial what memory each ZeRO stage and offloading needs, and "
        "the largest micro batch on slots of several sizes"
    )
    slot_memories: tuple[int, ...] = option(
        "--slot-memory",
        kind=MEMORY_SIZE,
        many=True,
        default=tuple(size * _GIB for size in (16, 24, 40, 80, 141)),
        metavar="SIZE",
        help="memory of a slot (default: 16GiB 24GiB 40GiB 80GiB 141GiB)",
    )
    slot_counts: tuple[int, ...] = option(
        "--slots",
        kind=NUMBER_OF_CARDS,
        many=True,
        default=(1, 8, 64, 512),
        metavar="N",
        help="data-parallel slots (default: 1 8 64 512)",
    )
    exact: bool = option(
        "--exact",
        help="simulate every line of the table, not the model alone: seconds for each; exit status "
        "1 if none of them can be simulated",
    )
    longest_sequence: bool = option(
        "--longest-sequence",
        help="in place of the tables: the longest sequence of which one sample fits, where "
        "sequences (sp) or layers (tp) may be divided among up to 8 slots",
    )
    switches: Mapping[str, tuple[Any, ...]] = option(
        "--switch",
        goes_with="--longest-sequence",
        kind=SWITCH,
        many=True,
        default=(),
        help="with --longest-sequence: values of a switch of the model, such as "
        "gradient_checkpointing=true,offload or tiled_mlp=true; every combination is simulated",
    )
    card: str | None = option(
        "--card",
        goes_with="--longest-sequence",
        excludes=("--slot-memory",),
        kind=WORD,
        metavar="NAME",
        help="with --longest-sequence: the memory of this card, such as H100 or A100-40GB, in "
        "place of --slot-memory, and how fast it trains there (two more simulations for each line)",
    )
    fits: tuple[int, int] | None = option(
        "--fits",
        excludes=("--slots", "--slot-memory", "--longest-sequence"),
        kind=CARDS,
        shell_only=True,
        help="in place of the tables: does your own configuration fit these cards, such as "
        "8x80GiB? exit status 0 if it does, 1 if not, 2 if that cannot be predicted",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.switches:
            if name not in MODEL_SWITCHES:
                raise UserInputError(
                    f"is no switch of the model; these are: {', '.join(MODEL_SWITCHES)}",
                    where=f"--switch {name}",
                )
