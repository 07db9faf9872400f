"""The answer of `dsat project`, as values, text and JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsat.projecting.speed import StepTime
from dsat.search.gpus import GpuModel
from dsat.values import format as fmt
from dsat.values.table import Table
from dsat.values.zero_strategy import Strategy

_DAY_S = 86_400
_NEARLY_SAME = 0.02  # of a step: strategies that differ by less are about as fast
# Units of time, with the number of each in a day.
_UNITS = ((1, "days"), (24, "hours"), (24 * 60, "minutes"), (_DAY_S, "seconds"))
NOT_MODELLED = (
    "data loading, checkpoints and evaluation; failing or slow hosts; torch.compile and fused "
    "kernels of the script; the allocator's retries where memory is nearly full"
)


@dataclass(frozen=True)
class Row:
    """One configuration on a number of GPUs.

    Attributes:
        gas: accumulation steps.
        memory_bytes: predicted peak memory of a GPU.
        fits: whether a GPU has at least 5 % more memory than this.
        mfu: FLOP/s of the model, without recomputation, divided by the peak FLOP/s of all GPUs.
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
    def global_batch(self) -> int:
        """Return the samples of an optimizer step on all GPUs."""
        return round(self.samples_per_second * self.time.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """Return the ends of the 90 % interval, as factors of the throughput."""
        return self.time.seconds / self.time.high_s, self.time.seconds / self.time.low_s

    def to_json(self) -> dict[str, Any]:
        low, high = self.spread
        return {
            "strategy": self.strategy.name,
            "gpus": self.slots,
            "micro_batch": self.micro_batch,
            "gradient_accumulation_steps": self.gas,
            "train_batch_size": self.global_batch,
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
    """Predicted training on one type of GPU.

    Attributes:
        name: name of the experiment, the script or the model.
        count: number of GPUs that the user asks about.
        network_bandwidth: bytes/s between a GPU and other hosts.
        parameters, trained: numbers of all parameters and of trained parameters.
        sequence_length: tokens of a sample; None if samples are not sequences.
        recomputes: activation checkpointing, `on` or `off`; None if the script decides it.
        own: the user's configuration on each number of GPUs; empty if the user gave none.
        best: the fastest strategies that fit, by number of GPUs; absent where none fits.
        failures: why strategies could not be simulated, by the label of the strategy.
        calibrated_by: number of measured trials that corrected the projection.
        tokens: number of tokens of the whole training; None if not given.
        price: price of a GPU-hour; None if not given.
        batch_is_default: whether dsat chose the global batch.
        dtype: type of the parameters; None if a script decides it.
    """

    name: str
    gpu: GpuModel
    count: int
    network_bandwidth: float
    parameters: int
    trained: int
    sequence_length: int | None
    recomputes: str | None
    own: tuple[Row, ...]
    best: Mapping[int, tuple[Row, ...]]
    failures: Mapping[str, str]
    calibrated_by: int = 0
    tokens: float | None = None
    price: float | None = None
    batch_is_default: bool = False
    dtype: str | None = None

    def training(self, row: Row) -> dict[str, Any] | None:
        """Return time, GPU-hours and, with a price, cost; None without tokens or sequences."""
        if self.tokens is None or self.sequence_length is None:
            return None
        steps = math.ceil(self.tokens / (row.global_batch * self.sequence_length))
        seconds = steps * row.time.seconds
        low, high = row.spread
        hours = seconds / 3600 * row.slots
        values = {
            "days": seconds / _DAY_S,
            "days_interval_90": [seconds / high / _DAY_S, seconds / low / _DAY_S],
            "gpu_hours": hours,
        }
        if self.price is None:
            return values
        cost = hours * self.price
        return {**values, "cost": cost, "cost_interval_90": [cost / high, cost / low]}

    def to_json(self) -> dict[str, Any]:
        def json_of(row: Row) -> dict[str, Any]:
            tokens = self.sequence_length and self.sequence_length * row.samples_per_second
            values = {**row.to_json(), "tokens_per_second": tokens}
            training = self.training(row)
            return values if training is None else {**values, "training": training}

        return {
            "name": self.name,
            "gpu": self.gpu.name,
            "gpus": self.count,
            "gpus_per_host": self.gpu.per_host,
            "network_gbit": self.network_bandwidth * 8e-9,
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "sequence_length": self.sequence_length,
            "dtype": self.dtype,
            "activation_checkpointing": self.recomputes,
            "own": [json_of(row) for row in self.own],
            "best": {str(n): [json_of(row) for row in rows] for n, rows in self.best.items()},
            "calibrated_by": self.calibrated_by,
            "not_simulated": dict(self.failures),
            "not_modelled": NOT_MODELLED,
        }

    def __str__(self) -> str:
        lines = [summary(self), *comparison(self), ""]
        for heading, table in _tables(self):
            lines += [f"{heading}:", "", *table.markdown(), ""]
        return "\n".join([*lines, *_notes(self)])


def _fastest(result: Projection) -> tuple[Row, ...]:
    """Return the fastest strategies on the number of GPUs that the user asks about."""
    return result.best.get(result.count, ())


def summary(result: Projection) -> str:
    """Return a paragraph on model and GPUs, with time and cost or a remark that nothing fits."""
    gpu, gpus = result.gpu, fmt.count(result.count, "GPU")
    trained = f" ({result.trained:,} trained)" if result.trained < result.parameters else ""
    dtype = f" in {result.dtype}" if result.dtype else ""
    text = [
        f"{result.name}: {result.parameters:,} parameters{trained}{dtype} on {gpu.name}, "
        f"{gpu.per_host} per host, {result.network_bandwidth * 8e-9:.0f} usable Gbit/s per GPU "
        "between hosts."
    ]
    if rows := _fastest(result):
        text += _training(result, rows[0])
    elif result.failures:
        text.append(f"No simulated strategy fits {gpus}.")
    else:
        text.append(
            f"Nothing fits {gpus}. Use more GPUs, --activation-checkpointing on or shorter "
            "samples; `dsat estimate` shows the memory of each strategy."
        )
    return " ".join(text)


def comparison(result: Projection) -> list[str]:
    """Return what all strategies have in common, and why the first is faster than the second."""
    rows = _fastest(result)
    if not rows:
        return []
    first, *rest = rows
    tokens = f" of {result.sequence_length:,} tokens" if result.sequence_length else ""
    default = " (dsat's default; --train-batch-size sets it)" if result.batch_is_default else ""
    checkpointing = result.recomputes or "as in the script"
    text = [
        f"Same for all strategies: global batch of {first.global_batch:,} samples{tokens}"
        f"{default}, activation checkpointing {checkpointing}."
    ]
    if rest:
        text.append(_why(first, rest[0]))
    return text


def _why(first: Row, second: Row) -> str:
    """Return a sentence on the part of the step that makes the first strategy faster."""
    saved_s = second.time.seconds - first.time.seconds
    names = f"{first.strategy.label} and {second.strategy.label}"
    if saved_s <= _NEARLY_SAME * second.time.seconds:
        return f"{names} are about equally fast, so the lower stage comes first."
    parts = {name: second.time.parts[name] - s for name, s in first.time.parts.items()}
    most = max(parts, key=parts.__getitem__)
    text = (
        f"A step with {first.strategy.label} takes {_number(1000 * saved_s)} ms less than with "
        f"{second.strategy.label}"
    )
    part, lost_s = f"the part `{most}` takes", parts[most] - saved_s
    if 1000 * lost_s >= 0.5:
        return (
            f"{text}: {part} {_number(1000 * parts[most])} ms less, and the other parts together "
            f"{_number(1000 * lost_s)} ms more."
        )
    return f"{text}; {part} {_number(1000 * parts[most])} ms less."


def _training(result: Projection, row: Row) -> list[str]:
    """Return the sentence on time and cost; nothing if the tokens are unknown."""
    training = result.training(row)
    if training is None or result.tokens is None:
        return []
    per_day, unit = next((u for u in _UNITS if training["days"] * u[0] >= 1), _UNITS[-1])
    days = (training["days"], *training["days_interval_90"])
    time, low, high = (_number(per_day * d) for d in days)
    unit = unit.removesuffix("s") if time == "1" else unit
    cost = ""
    if "cost" in training:
        least, most = training["cost_interval_90"]
        cost = (
            f", {_number(training['cost'])} ({_number(least)} to {_number(most)})"
            f" at {result.price:g} each"
        )
    return [
        f"{_tokens(result.tokens)} tokens take {time} {unit} ({low} to {high})"
        f" on {fmt.count(result.count, 'GPU')}: {_number(training['gpu_hours'])} GPU-hours{cost}."
    ]


def _tokens(number: float) -> str:
    """Write a number of tokens: `300 B` or `500,000`."""
    return f"{number:,.0f}" if number < 1e6 else fmt.prefixed(number).replace("G", "B")


def _tables(result: Projection) -> Iterator[tuple[str, Table]]:
    """Yield the tables, each with its heading."""
    gpus = fmt.count(result.count, "GPU")
    if rows := _fastest(result):
        yield f"The fastest on {gpus}", _strategies(result, rows)
        yield f"A step of {rows[0].strategy.label} on {gpus}", _parts(rows[0])
    if result.best:
        fastest = [rows[0] for rows in result.best.values()]
        yield "The fastest by number of GPUs", _scaling(result, fastest)
    if result.own:
        yield "Your configuration", _scaling(result, result.own)


def _notes(result: Projection) -> list[str]:
    """Return the sources of the numbers, and what they do not include."""
    text = [f"Not simulated: {label}: {reason}." for label, reason in result.failures.items()]
    if result.tokens is None:
        text.append("For the time and cost of a whole training, add --tokens and --price.")
    elif result.sequence_length is None:
        text.append("Time and cost are unknown, because samples are not sequences of tokens.")
    sources = "the table of GPUs alone; measured trials (`--from RUN`) would narrow them"
    if result.calibrated_by:
        sources = f"{fmt.count(result.calibrated_by, 'measured trial')} and the table of GPUs"
    text.append(f"Intervals cover 90 %. They come from {sources}.")
    return [*text, f"Not modelled: {NOT_MODELLED}."]


def _rate(row: Row, tokens: int | None) -> str:
    """Return `12,300 tokens/s (10,100 to 14,900)`; samples/s if `tokens` per sample is None."""
    value, unit = row.samples_per_second * (tokens or 1), "tokens/s" if tokens else "samples/s"
    low, high = row.spread
    return f"{_number(value)} {unit} ({_number(low * value)} to {_number(high * value)})"


def _number(value: float) -> str:
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.3g}"


def _strategies(result: Projection, rows: Sequence[Row]) -> Table:
    heads = ["strategy", "micro batch", "global batch", "throughput", "MFU", "memory per GPU"]
    cells = [
        [*_cells(result, row), fmt.percent(row.mfu), fmt.memory(row.memory_bytes)] for row in rows
    ]
    return Table(heads, cells, numbers=["global batch", *heads[4:]])


def _cells(result: Projection, row: Row) -> list[str]:
    """Return a row's cells: strategy, micro batch, global batch and throughput."""
    batch = str(row.micro_batch) if row.gas == 1 else f"{row.micro_batch} x {row.gas}"
    rate = _rate(row, result.sequence_length)
    return [row.strategy.label, batch, f"{row.global_batch:,}", rate]


def _parts(row: Row) -> Table:
    heads = ["part", "time", "share"]
    cells = [
        [name, f"{1000 * seconds:.1f} ms", fmt.percent(seconds / row.time.seconds)]
        for name, seconds in row.time.parts.items()
    ]
    total = ["all", f"{1000 * row.time.seconds:.1f} ms", ""]
    return Table(heads, [*cells, total], numbers=heads[1:])


def _scaling(result: Projection, rows: Sequence[Row]) -> Table:
    heads = ["GPUs", "strategy", "micro batch", "global batch", "throughput", "per GPU", "MFU"]
    heads.append("fits")
    cells = [
        [
            str(row.slots),
            *_cells(result, row),
            _number(row.samples_per_second * (result.sequence_length or 1) / row.slots),
            fmt.percent(row.mfu),
            "yes" if row.fits else "no",
        ]
        for row in rows
    ]
    return Table(heads, cells, numbers=["GPUs", "global batch", "per GPU", "MFU"])
