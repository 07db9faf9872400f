"""Projected against published throughput: prints a table.

    python3 -m benchmarks.projection [--only WORD] [--traces FOLDER]

Every row was read at its source. Rows that are marked `fitted`, at most a third, stand for the run
that a user has made: the others of the same software are predicted as by `--from RUN`,
and all of them by the table of cards alone, too. What a source does not say is assumed: bf16,
torch's attention, `overlap_comm`. FSDP counts as stage 3, which has the same traffic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from dsat.app import project
from dsat.app.estimate import simulator_of
from dsat.app.project import Traced
from dsat.inputs import cards
from dsat.inputs.project_settings import ProjectSettings
from dsat.memory.closed_form import ModelFacts
from dsat.memory.estimate import MemoryEstimate
from dsat.search.projected_speed import ProjectedSpeed
from dsat.search.speed import Points
from dsat.search.traced_work import Cluster, hardware_of
from dsat.values.codec import decode, encode
from dsat.values.step_trace import ModelTrace, StepTrace
from dsat.values.zero_strategy import NONE, Strategy

DATA = Path(__file__).parent / "data" / "projection.json"
MEDIAN_BAR, WORST_BAR, PAIRS_BAR = 0.10, 0.20, 0.9
EXPLANATION = (
    "Tokens/s of a card. Each model is simulated on a machine without a GPU. `by the table`: from "
    "the table of cards alone. `corrected`: after the rows of the same source that are marked as "
    "fitted, as `dsat project --from RUN` does with a run of your own; the source without such a "
    "row is not corrected. FSDP counts as stage 3. The factor between the roofline of the table "
    "and what scripts reach (`PRIORS` in `dsat/search/traced_work.py`), and the memory bandwidth "
    "of a rank on the host, were chosen by the fitted rows. All rows were in sight while constants "
    "and the way of correcting were chosen, so the errors of the others are no blind predictions: "
    "expect somewhat larger ones of a source that is not here.",
)
_APART = 1.05  # pairs of strategies that differ by less are not compared
_TRACED_ON = 8
_PUBLISHED_SD = 0.02  # of what was published


@dataclass(frozen=True)
class Row:
    """A published measurement.

    Attributes:
        source: key of the source in the data.
        stack: the software: rows of one stack correct each other.
        model: key of the model's configuration.
        recompute: activations are recomputed: 1, 0, or the part of it that is.
        gas: micro steps of a step.
        tokens_per_second: of a card.
        fitted: it was used to set constants.
    """

    source: str
    stack: str
    model: str
    seq: int
    recompute: float
    stage: int
    offload: str
    card: str
    cards: int
    micro_batch: int
    gas: int
    tokens_per_second: float
    fitted: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of a card in an optimizer step."""
        return self.micro_batch * self.gas * self.seq

    @property
    def seconds(self) -> float:
        """Seconds of an optimizer step."""
        return self.tokens / self.tokens_per_second

    @property
    def strategy(self) -> Strategy:
        optimizer, _, param = self.offload.partition("+")
        return Strategy(self.stage, optimizer or NONE, param or NONE)


def read() -> tuple[list[Row], Mapping[str, str], Mapping[str, Any]]:
    """Return the rows, the sources and the models' configurations."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    rows = [Row(**dict(zip(data["columns"], values, strict=True))) for values in data["rows"]]
    return rows, data["sources"], data["models"]


def traced(
    model: Mapping[str, Any], seq: int, *, recompute: bool, strategies: Sequence[Strategy]
) -> Traced:
    """Simulate a model with some strategies on eight cards."""
    with tempfile.TemporaryDirectory() as folder:
        config, settings = Path(folder) / "config.json", Path(folder) / "ds.json"
        config.write_text(json.dumps(model), encoding="utf-8")
        zero = {"stage": 3, "overlap_comm": True}
        gas = 2 if any(strategy.stage < 3 for strategy in strategies) else 1
        batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": gas}
        settings.write_text(json.dumps({**batch, "zero_optimization": zero}), encoding="utf-8")
        asked = ProjectSettings(
            hf_config=str(config),
            seq_length=seq,
            ds_config=settings,
            activation_checkpointing="on" if recompute else "off",
        )
        with simulator_of(asked) as (_, base, simulator):
            return project.trace(base, simulator, _TRACED_ON, lambda _: strategies)


def compare(rows: Sequence[Row], models: Mapping[str, Any], kept: Path | None) -> list[Compared]:
    """Project all rows, each by the table alone, and corrected by the fitted rows of its stack."""
    found = []
    whole = _trace_all(rows, models, kept)
    for row in rows:
        mine = [each for each in rows if each.fitted and each.stack == row.stack]
        mine = [each for each in mine if each.card == row.card] or mine
        times = [_both(row, each, whole, mine) for each in _parts(row, whole)]
        by_table, corrected = (
            _rates(row.tokens, [statistics.fmean(ends) for ends in zip(*which, strict=True)])
            for which in zip(*times, strict=True)
        )
        found.append(Compared(row, *by_table, *corrected))
    return found


def _rates(tokens: float, seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return the rate and its interval, of seconds with theirs."""
    middle, low, high = seconds
    return tokens / middle, tokens / high, tokens / low


Key = tuple[str, int, bool]


def _parts(row: Row, whole: Mapping[Key, Traced]) -> list[Traced]:
    """Return the traces of a row; with a part recomputed, the step is between two of them."""
    switches = [on for on in (False, True) if row.recompute in (on, 0.5)]
    return [whole[row.model, row.seq, on] for on in switches]


def _both(
    row: Row, traced: Traced, whole: Mapping[Key, Traced], fitted: Sequence[Row]
) -> tuple[list[float], list[float]]:
    """Return seconds and their interval, by the table of cards, and corrected by other rows."""
    strategies = list(dict.fromkeys(each.strategy for each in (row, *fitted)))
    speed = ProjectedSpeed(hardware_of(cards.find(row.card)), strategies)
    times = [speed.predict(_points(speed, row, traced))]
    if fitted:
        points, seconds = [], []
        for other in fitted:  # a step between two others counts as both
            parts = [_points(speed, other, part) for part in _parts(other, whole)]
            alone = [speed.predict(part).seconds for part in parts]
            points += parts
            seconds += [other.seconds * each / statistics.fmean(alone) for each in alone]
        error = np.full(len(points), _PUBLISHED_SD)
        measured_on = hardware_of(cards.find(fitted[0].card))
        speed = speed.calibrated(measured_on, Points.of(points), np.log(seconds), error)
    times.append(speed.predict(_points(speed, row, traced)))
    by_table, corrected = ([t.seconds, t.low_s, t.high_s] for t in times)
    return by_table, corrected


def _points(speed: ProjectedSpeed, row: Row, traced: Traced) -> Points:
    cluster = Cluster.of(cards.find(row.card), row.cards)
    work = traced.work(row.strategy, row.micro_batch, cluster)
    return speed.points(work, row.strategy, row.micro_batch, row.gas)


def _trace_all(
    rows: Sequence[Row], models: Mapping[str, Any], kept: Path | None
) -> dict[Key, Traced]:
    """Trace each model once for all of its rows, with and without recomputation as they have it."""
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        for on in (False, True):
            if row.recompute in (on, 0.5):
                groups.setdefault((row.model, row.seq, on), []).append(row)
    return {
        (model, seq, on): _kept(model, models[model], seq, on, members, kept)
        for (model, seq, on), members in groups.items()
    }


def _kept(
    name: str, model: Any, seq: int, recompute: bool, rows: Sequence[Row], folder: Path | None
) -> Traced:
    """Trace a model, or take it from a folder of traces."""
    path = folder / f"{name}-{seq}-{recompute}.json" if folder is not None else None
    if path is not None and path.is_file():
        again: _Kept = decode(_Kept, json.loads(path.read_text(encoding="utf-8")))
        return again.traced()
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    found = traced(model, seq, recompute=recompute, strategies=strategies)
    if path is not None:
        path.write_text(json.dumps(encode(_Kept.of(found))), encoding="utf-8")
    return found


@dataclass(frozen=True)
class _Kept:
    """A traced model as a file has it."""

    base: Mapping[str, Any]
    facts: ModelFacts
    model: ModelTrace
    strategies: tuple[Strategy, ...]
    traces: tuple[StepTrace, ...]
    memory: tuple[MemoryEstimate, ...]
    failures: Mapping[str, str]
    sequence_length: int | None

    @classmethod
    def of(cls, found: Traced) -> _Kept:
        traces, memory = zip(*found.traces.values(), strict=True)
        return cls(
            dict(found.base),
            found.facts,
            found.model,
            tuple(found.traces),
            traces,
            memory,
            dict(found.failures),
            found.sequence_length,
        )

    def traced(self) -> Traced:
        pairs = zip(self.traces, self.memory, strict=True)
        traces = dict(zip(self.strategies, pairs, strict=True))
        return Traced(
            self.base, self.facts, self.model, traces, self.failures, self.sequence_length
        )


@dataclass(frozen=True)
class Compared:
    """A row with its projections, in tokens/s of a card.

    Attributes:
        by_table, table_low, table_high: by the table of cards alone, with its interval.
        corrected, low, high: after the fitted rows of its stack.
    """

    row: Row
    by_table: float
    table_low: float
    table_high: float
    corrected: float
    low: float
    high: float

    @property
    def table_error(self) -> float:
        return self.by_table / self.row.tokens_per_second - 1

    @property
    def error(self) -> float:
        return self.corrected / self.row.tokens_per_second - 1

    @property
    def table_holds(self) -> bool:
        """Tell whether the interval by the table holds what was measured."""
        return self.table_low <= self.row.tokens_per_second <= self.table_high

    @property
    def holds(self) -> bool:
        """Tell whether the interval holds what was measured."""
        return self.low <= self.row.tokens_per_second <= self.high


def ordered_pairs(found: Sequence[Compared]) -> tuple[int, int]:
    """Count pairs of strategies of one source, model and cards; and those in the right order."""
    right = pairs = 0
    for one, other in combinations(found, 2):
        a, b = one.row, other.row
        same = (a.source, a.model, a.seq, a.card, a.cards) == (
            b.source, b.model, b.seq, b.card, b.cards
        )  # fmt: skip
        ratio = a.tokens_per_second / b.tokens_per_second
        if same and max(ratio, 1 / ratio) >= _APART:
            pairs += 1
            right += (ratio > 1) == (one.corrected > other.corrected)
    return right, pairs


def _table(found: Sequence[Compared]) -> list[str]:
    lines = [
        "| source | model | cards | strategy | recomputed | batch | measured | by the table "
        "| error | corrected | error | in interval |",
        "|---|---|---|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for each in found:
        row = each.row
        lines.append(
            f"| {row.source}{' (fitted)' if row.fitted else ''} | {row.model}, {row.seq} tokens "
            f"| {row.cards} x {row.card} | {row.strategy.label} | {row.recompute:g} "
            f"| {row.micro_batch} x {row.gas} | {row.tokens_per_second:,.0f} "
            f"| {each.by_table:,.0f} | {100 * each.table_error:+.1f} % "
            f"| {each.corrected:,.0f} | {100 * each.error:+.1f} % "
            f"| {'yes' if each.holds else 'no'} |"
        )
    return lines


def _verdict(found: Sequence[Compared]) -> list[str]:
    predicted = [each for each in found if not each.row.fitted]
    right, pairs = ordered_pairs(found)
    return [
        f"{len(found)} rows, {len(found) - len(predicted)} of them fitted. Of the others:",
        "",
        f"- corrected: {_errors([each.error for each in predicted])}; the 90 % interval holds "
        f"{sum(each.holds for each in predicted)} of {len(predicted)}",
        f"- by the table of cards alone: {_errors([each.table_error for each in found])}; the "
        f"90 % interval holds {sum(each.table_holds for each in found)} of {len(found)} (all rows)",
        f"- order of two configurations that differ by 5 % or more: {right} of {pairs} right "
        f"(bar {100 * PAIRS_BAR:.0f} %)",
    ]


def _errors(errors: Sequence[float]) -> str:
    sizes = sorted(abs(error) for error in errors)
    return (
        f"median error {100 * statistics.median(sizes):.1f} % (bar {100 * MEDIAN_BAR:.0f} %), "
        f"worst {100 * sizes[-1]:.1f} % (bar {100 * WORST_BAR:.0f} %), "
        f"{sum(size <= WORST_BAR for size in sizes)} of {len(sizes)} within "
        f"{100 * WORST_BAR:.0f} %"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose source or model has this word")
    parser.add_argument("--traces", type=Path, help="folder that keeps what was simulated")
    args = parser.parse_args()
    rows, sources, models = read()
    chosen = [row for row in rows if args.only in f"{row.source} {row.model}"]
    if args.traces is not None:
        args.traces.mkdir(parents=True, exist_ok=True)
    found = compare(chosen, models, args.traces)
    print("\n".join([*_table(found), "", *_verdict(found), ""]))
    for name in dict.fromkeys(row.source for row in chosen):
        print(f"- {name}: {sources[name]}")


if __name__ == "__main__":
    main()
