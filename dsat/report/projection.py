"""Answers of `dsat project`, as values, text and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsat.inputs.cards import Card
from dsat.search.projected_speed import StepTime
from dsat.values import format as fmt
from dsat.values.table import Table
from dsat.values.zero_strategy import Strategy

_DAY_S = 86_400
_UNITS = (
    (1, "days"),
    (24, "hours"),
    (24 * 60, "minutes"),
    (_DAY_S, "seconds"),
)  # of each a day has
NOT_MODELLED = (
    "data loading, checkpoints and evaluation; failing or slow hosts; torch.compile and fused "
    "kernels of the script; the allocator's retries where memory is nearly full"
)


@dataclass(frozen=True)
class Row:
    """One configuration on so many cards.

    Attributes:
        gas: micro steps of a step.
        memory_bytes: predicted peak of a card.
        fits: with 5 % to spare.
        mfu: model FLOPs, without recomputation, over the peak of the cards.
    """

    strategy: Strategy
    slots: int
    micro_batch: int
    gas: int
    time: StepTime
    memory_bytes: int
    fits: bool
    samples_per_second: float
    mfu: float

    @property
    def spread(self) -> tuple[float, float]:
        """Factors from the throughput to the ends of its 90 % interval."""
        return self.time.seconds / self.time.high_s, self.time.seconds / self.time.low_s

    def to_json(self) -> dict[str, Any]:
        low, high = self.spread
        return {
            "strategy": self.strategy.name,
            "cards": self.slots,
            "micro_batch": self.micro_batch,
            "gradient_accumulation_steps": self.gas,
            "step_s": self.time.seconds,
            "parts_s": self.time.parts,
            "samples_per_second": self.samples_per_second,
            "interval_90": [low * self.samples_per_second, high * self.samples_per_second],
            "mfu": self.mfu,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
        }


@dataclass(frozen=True)
class Projection:
    """Predicted training on cards of one kind.

    Attributes:
        name: of the experiment, the script or the model.
        count: of the cards that were asked about.
        network_bandwidth: bytes/s of a card to other hosts; None where there are none.
        parameters: of the model.
        sequence_length: tokens of a sample; None if samples are no sequences.
        own: the user's configuration, by number of cards.
        best: the fastest strategies, by number of cards.
        failures: why strategies could not be simulated.
        calibrated_by: number of measured trials that corrected it.
        tokens: of the whole training.
        price: of a card's hour.
    """

    name: str
    card: Card
    count: int
    network_bandwidth: float | None
    parameters: int
    sequence_length: int | None
    own: tuple[Row, ...]
    best: Mapping[int, tuple[Row, ...]]
    failures: Mapping[str, str]
    calibrated_by: int = 0
    tokens: float | None = None
    price: float | None = None

    def training(self, row: Row) -> dict[str, Any] | None:
        """Return days, card-hours and cost of the whole training; None without its tokens."""
        if self.tokens is None or self.sequence_length is None:
            return None
        seconds = self.tokens / (row.samples_per_second * self.sequence_length)
        low, high = row.spread
        hours = seconds / 3600 * row.slots
        found = {
            "days": seconds / _DAY_S,
            "days_interval_90": [seconds / high / _DAY_S, seconds / low / _DAY_S],
            "card_hours": hours,
        }
        if self.price is None:
            return found
        cost = hours * self.price
        return {**found, "cost": cost, "cost_interval_90": [cost / high, cost / low]}

    def to_json(self) -> dict[str, Any]:
        def told(row: Row) -> dict[str, Any]:
            tokens = self.sequence_length and self.sequence_length * row.samples_per_second
            found = {**row.to_json(), "tokens_per_second": tokens}
            training = self.training(row)
            return found if training is None else {**found, "training": training}

        return {
            "name": self.name,
            "card": self.card.name,
            "cards": self.count,
            "cards_per_host": self.card.per_host,
            "network_gbit": self.network_bandwidth and self.network_bandwidth * 8e-9,
            "parameters": self.parameters,
            "sequence_length": self.sequence_length,
            "own": [told(row) for row in self.own],
            "best": {str(n): [told(row) for row in rows] for n, rows in self.best.items()},
            "calibrated_by": self.calibrated_by,
            "not_simulated": dict(self.failures),
            "not_modelled": NOT_MODELLED,
        }

    def __str__(self) -> str:
        lines = [summary(self), ""]
        for heading, table in sections(self):
            lines += [f"{heading}:", "", *table.markdown(), ""]
        return "\n".join([*lines, *notes(self)])


def summary(shown: Projection) -> str:
    """Name the model and the cards, and the days and the cost if they are asked for."""
    card, network = shown.card, shown.network_bandwidth
    said = [
        f"{shown.name}: {shown.parameters:,} parameters on {card.name}, {card.per_host} in a host"
        + (f", {network * 8e-9:.0f} usable Gbit/s for each between hosts." if network else ".")
    ]
    asked = shown.best.get(shown.count)
    training = shown.training(asked[0]) if asked else None
    if asked is None and shown.failures:
        said.append(f"Of the strategies that were simulated none fits {shown.count} of them.")
    elif asked is None:
        said.append(
            f"Nothing fits {shown.count} of them. More cards, --activation-checkpointing on or "
            "shorter samples make room; `dsat estimate` shows what each strategy needs."
        )
    elif training is not None and shown.tokens is not None:
        per_day, unit = next((u for u in _UNITS if training["days"] * u[0] >= 1), _UNITS[-1])
        days = (training["days"], *training["days_interval_90"])
        taken, low, high = (_number(per_day * each) for each in days)
        cost = ""
        if "cost" in training:
            least, most = training["cost_interval_90"]
            cost = (
                f", {_number(training['cost'])} ({_number(least)} to {_number(most)})"
                f" at {shown.price:g} each"
            )
        tokens = fmt.prefixed(shown.tokens).replace("G", "B")
        said.append(
            f"{tokens} tokens take {taken} {unit} ({low} to {high})"
            f" on {shown.count}: {_number(training['card_hours'])} card-hours{cost}."
        )
    return " ".join(said)


def sections(shown: Projection) -> list[tuple[str, Table]]:
    """Return the tables, each with its heading."""
    found = []
    asked = shown.best.get(shown.count, ())
    if asked:
        found.append((f"The fastest on {shown.count}", _strategies(shown, asked)))
        found.append((f"The step of {asked[0].strategy.label} on {shown.count}", _parts(asked[0])))
    if shown.best:
        fastest = [rows[0] for rows in shown.best.values()]
        found.append(("The fastest by number of cards", _scaling(shown, fastest)))
    if shown.own:
        found.append(("Your own configuration", _scaling(shown, shown.own)))
    return found


def notes(shown: Projection) -> list[str]:
    """Return what the numbers rest on, and what is missing in them."""
    said = [f"Not simulated: {label}: {why}." for label, why in shown.failures.items()]
    if shown.tokens is not None and shown.sequence_length is None:
        said.append("Days and cost are unknown: the samples are no sequences of tokens.")
    by = "the table of cards alone; measured trials (`--from RUN`) would narrow them"
    if shown.calibrated_by:
        by = f"{fmt.count(shown.calibrated_by, 'measured trial')} and the table of cards"
    said.append(f"Intervals hold 90 %. They rest on {by}.")
    return [*said, f"Not modelled: {NOT_MODELLED}."]


def rate(row: Row, tokens: int | None) -> str:
    """Return `12,300 tokens/s (10,100 to 14,900)`, or samples where those have no tokens."""
    found, unit = row.samples_per_second * (tokens or 1), "tokens/s" if tokens else "samples/s"
    low, high = row.spread
    return f"{_number(found)} {unit} ({_number(low * found)} to {_number(high * found)})"


def _number(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _strategies(shown: Projection, rows: Sequence[Row]) -> Table:
    heads = ["strategy", "micro batch", "throughput", "MFU", "memory of a card"]
    cells = [
        [
            row.strategy.label,
            _batch(row),
            rate(row, shown.sequence_length),
            fmt.percent(row.mfu),
            fmt.memory(row.memory_bytes),
        ]
        for row in rows
    ]
    return Table(heads, cells, numbers=heads[3:])


def _batch(row: Row) -> str:
    return str(row.micro_batch) if row.gas == 1 else f"{row.micro_batch} x {row.gas}"


def _parts(row: Row) -> Table:
    heads = ["part", "time", "share"]
    cells = [
        [name, f"{1000 * seconds:.1f} ms", fmt.percent(seconds / row.time.seconds)]
        for name, seconds in row.time.parts.items()
    ]
    total = ["all", f"{1000 * row.time.seconds:.1f} ms", ""]
    return Table(heads, [*cells, total], numbers=heads[1:])


def _scaling(shown: Projection, rows: Sequence[Row]) -> Table:
    heads = ["cards", "strategy", "micro batch", "throughput", "of a card", "MFU", "fits"]
    cells = [
        [
            str(row.slots),
            row.strategy.label,
            _batch(row),
            rate(row, shown.sequence_length),
            _number(row.samples_per_second * (shown.sequence_length or 1) / row.slots),
            fmt.percent(row.mfu),
            "yes" if row.fits else "no",
        ]
        for row in rows
    ]
    return Table(heads, cells, numbers=["cards", "of a card", "MFU"])
