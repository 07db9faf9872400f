"""The target of a dsat command: an experiment, the user's command, or a model to simulate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsat.errors import UserInputError
from dsat.options import LORA, PATH, WORD, Group, at_least, check_together, option

_EXPERIMENT_SUFFIXES = (".yaml", ".yml")


def names_experiment(word: str) -> bool:
    """Return whether a target is the configuration of an experiment, not a command."""
    return word.endswith(_EXPERIMENT_SUFFIXES)


@dataclass(frozen=True, kw_only=True)
class Target:
    """An experiment (`config` and `model_dir`), or a command."""

    config: Path | None = None
    model_dir: Path | None = None
    command: tuple[str, ...] = ()
    ds_config: Path | None = option(
        "--ds-config",
        kind=PATH,
        metavar="FILE",
        group=Group.TARGET,
        help="DeepSpeed configuration of the command; by default the one that its "
        "arguments name, or else what the script passes to deepspeed.initialize",
    )
    include: tuple[Path, ...] = option(
        "--add-files",
        old=("-i", "--include"),
        kind=PATH,
        many=True,
        default=(),
        group=Group.TARGET,
        help="further files and folders that the script of an experiment file needs beside it",
    )


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Target):
    """Options of the commands that simulate a script or a transformers model."""

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
        help="with --model: tokens of a sample (default: 2048, or the model's maximum if that is "
        "smaller)",
    )
    lora: Mapping[str, str] | None = option(
        "--lora",
        goes_with="--model",
        kind=LORA,
        help="with --model: train low-rank adapters of these layers alone "
        "(for example r=16,target=q_proj+v_proj, or target=all-linear)",
    )
    dtype: str | None = option(
        "--dtype",
        goes_with="--model",
        kind=WORD,
        choices=("bf16", "fp16", "fp32"),
        help="with --model: the type of the parameters (default: that of --ds-config, where no "
        "precision means fp32; without --ds-config, bf16)",
    )
    activation_checkpointing: str | None = option(
        "--activation-checkpointing",
        kind=WORD,
        choices=("on", "off"),
        help="recompute activations in the backward pass, or keep all of them (default: as the "
        "script does)",
    )
    json: bool = option("--json", shell_only=True, help="print the answer as JSON")

    @property
    def has_own(self) -> bool:
        """Return whether the user has a DeepSpeed configuration; always true with a script."""
        return self.model is None or self.ds_config is not None

    def __post_init__(self) -> None:
        if self.model is not None and (self.command or self.config is not None):
            raise UserInputError("cannot be combined with a script", where="--model")
        check_together(self)
