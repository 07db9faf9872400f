"""Settings of `dsat project`; its options are declared here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from dsat.inputs.estimate_settings import ModelSettings
from dsat.options import AMOUNT, CARDS_OF_KIND, PATH, POSITIVE_NUMBER, option

PROJECT = "project"


@dataclass(frozen=True, kw_only=True)
class ProjectSettings(ModelSettings):
    """Settings of `dsat project`; `to` is the number and the name of the cards."""

    summary: ClassVar[str] = (
        "predicts from one simulated step what training will do on so many cards of a named kind: "
        "throughput, scaling, the best strategies, days and money, each with its interval"
    )
    to: tuple[int, str] = option(
        "--to",
        kind=CARDS_OF_KIND,
        default="8xH100",
        help="the cards, such as 64xH100 or 8xA100-40GB",
    )
    network: float | None = option(
        "--network",
        kind=POSITIVE_NUMBER,
        metavar="GBIT",
        help="network bandwidth per card in Gbit/s, about 90 %% of the nominal one (default: that "
        "of usual hosts with these cards)",
    )
    tokens: float | None = option(
        "--tokens",
        kind=AMOUNT,
        help="tokens of the whole training, such as 300B or 1T: tells its days",
    )
    price: float | None = option(
        "--price",
        goes_with="--tokens",
        kind=POSITIVE_NUMBER,
        metavar="X",
        help="price of a card for an hour: with --tokens, tells what the training costs",
    )
    from_run: Path | None = option(
        "--from",
        "--from-run",
        kind=PATH,
        metavar="RUN",
        help="a run of the same script, whose measured trials correct the projection",
    )
    cards: Path | None = option(
        "--cards",
        kind=PATH,
        metavar="FILE",
        help="further cards, in a file of the form of dsat/inputs/cards.json",
    )
    page: Path | None = option(
        "--page", kind=PATH, shell_only=True, metavar="FILE", help="write a page with plots, too"
    )

    @property
    def has_own(self) -> bool:
        """Tell whether the DeepSpeed configuration is the user's, and none that stands for it."""
        return self.hf_config is None or self.ds_config is not None
