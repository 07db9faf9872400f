"""Options of `dsat project`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dsat.options import (
    AMOUNT,
    NUMBER_OF_GPUS,
    PATH,
    POSITIVE_NUMBER,
    WORD,
    Kind,
    at_least,
    option,
)
from dsat.prepare.target import ModelSettings


def _gpus_of_model(value: str) -> tuple[int, str]:
    """Parse `64xH100` into number and type of GPUs; raise ValueError for any other form."""
    match = re.fullmatch(r"\s*([\d.+-]+)\s*[xX]\s*([^,;+]+)", WORD.read(value))
    if match is None:
        raise ValueError(f"invalid GPUs {value!r}: write, for example, 64xH100")
    return NUMBER_OF_GPUS.read(match[1]), match[2].strip()


GPUS_OF_MODEL = Kind(_gpus_of_model, metavar="NxGPU")


@dataclass(frozen=True, kw_only=True)
class ProjectSettings(ModelSettings):
    """Settings of `dsat project`; `to` is the number of the GPUs, and their type by name."""

    summary: ClassVar[str] = "predict throughput, scaling, time and cost on N GPUs of a named model"
    to: tuple[int, str] = option(
        "--to",
        kind=GPUS_OF_MODEL,
        once=True,
        default="8xH100",
        help="number and model of the GPUs, such as 64xH100 or 8xA100-40GB",
    )
    network: float | None = option(
        "--network",
        kind=POSITIVE_NUMBER,
        metavar="GBIT",
        help="usable bandwidth between hosts for each GPU, in Gbit/s: about 90 %% of the nominal "
        "one. Give it if your network is faster or slower than usual (default: that of usual hosts "
        "with these GPUs)",
    )
    train_batch_size: int | None = option(
        "--train-batch-size",
        kind=at_least(1),
        help="global batch of all strategies and numbers of GPUs (default: that of your DeepSpeed "
        "configuration; without one, 16,384 tokens for each GPU, or 32 samples if they are not "
        "sequences)",
    )
    tokens: float | None = option(
        "--tokens",
        kind=AMOUNT,
        help="total training tokens, such as 300B or 1T; adds the training time",
    )
    price: float | None = option(
        "--price",
        goes_with="--tokens",
        kind=POSITIVE_NUMBER,
        help="price of a GPU for an hour; adds the cost of the training",
    )
    from_run: Path | None = option(
        "--from",
        "--from-run",
        kind=PATH,
        metavar="RUN",
        help="a run of the same script; its measured trials correct the projection",
    )
