"""Projected against published throughput: prints a table.

    python3 -m benchmarks.projection [--only WORD] [--traces FOLDER]

Every row was read at its source. The constants of the projection (`dsat/search/traced_work.py`)
were set by the rows that are marked `fitted`, at most a third; all others are predicted. What a
source does not say is assumed: bf16, torch's attention, `overlap_comm`. FSDP counts as stage 3,
which has the same traffic.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from dsat.app import project
from dsat.app.estimate import simulator_of
from dsat.app.project import Projector, Traced
from dsat.inputs import cards
from dsat.inputs.project_settings import ProjectSettings
from dsat.memory.closed_form import ModelFacts
from dsat.memory.estimate import MemoryEstimate
from dsat.search.projected_speed import StepTime
from dsat.values.codec import decode, encode
from dsat.values.step_trace import ModelTrace, StepTrace
from dsat.values.zero_strategy import NONE, Strategy

DATA = Path(__file__).parent / "data" / "projection.json"
MEDIAN_BAR, WORST_BAR, PAIRS_BAR = 0.10, 0.20, 0.9
_APART = 1.05  # pairs of strategies that differ by less are not compared
_TRACED_ON = 8


@dataclass(frozen=True)
class Row:
    """A published measurement.

    Attributes:
        source: key of the source in the data.
        model: key of the model's configuration.
        recompute: activations are recomputed: 1, 0, or the part of it that is.
        gas: micro steps of a step.
        tokens_per_second: of a card.
        fitted: it was used to set constants.
    """

    source: str
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
            return project.trace(base, simulator, _TRACED_ON, strategies)


def predict(row: Row, found: Traced) -> StepTime:
    """Project a row's step."""
    projector = Projector(found, cards.find(row.card), None)
    return projector.step_time(row.strategy, row.cards, row.micro_batch, row.gas)


def compare(rows: Iterable[Row], models: Mapping[str, Any], kept: Path | None) -> list[Compared]:
    """Project all rows, each model traced once for all of its rows."""
    groups: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.seq), []).append(row)
    found = []
    for (model, seq), members in groups.items():
        whole = {
            recompute: _kept(model, models[model], seq, recompute, members, kept)
            for recompute in (False, True)
            if any(row.recompute in (recompute, 0.5) for row in members)
        }
        for row in members:
            needed = [part for part in whole if row.recompute in (part, 0.5)]
            times = [predict(row, whole[part]) for part in needed]
            tokens = row.micro_batch * row.gas * row.seq
            ends = [[t.seconds, t.low_s, t.high_s] for t in times]
            seconds, low, high = (statistics.fmean(each) for each in zip(*ends, strict=True))
            found.append(Compared(row, tokens / seconds, tokens / high, tokens / low))
    return found


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
    """A row with its projection, in tokens/s of a card."""

    row: Row
    predicted: float
    low: float
    high: float

    @property
    def error(self) -> float:
        return self.predicted / self.row.tokens_per_second - 1

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
            right += (ratio > 1) == (one.predicted > other.predicted)
    return right, pairs


def _table(found: Sequence[Compared]) -> list[str]:
    lines = [
        "| source | model | cards | strategy | recomputed | batch | measured | projected | error "
        "| in interval |",
        "|---|---|---|---|---|---|---:|---:|---:|---|",
    ]
    for each in found:
        row = each.row
        lines.append(
            f"| {row.source}{' (fitted)' if row.fitted else ''} | {row.model}, {row.seq} tokens "
            f"| {row.cards} x {row.card} | {row.strategy.label} | {row.recompute:g} "
            f"| {row.micro_batch} x {row.gas} | {row.tokens_per_second:,.0f} "
            f"| {each.predicted:,.0f} | {100 * each.error:+.1f} % "
            f"| {'yes' if each.holds else 'no'} |"
        )
    return lines


def _verdict(found: Sequence[Compared]) -> list[str]:
    predicted = [each for each in found if not each.row.fitted]
    errors = sorted(abs(each.error) for each in predicted)
    right, pairs = ordered_pairs(found)
    inside = sum(each.holds for each in predicted)
    return [
        f"{len(found)} rows, {len(found) - len(predicted)} of them fitted. The others: median "
        f"error {100 * statistics.median(errors):.1f} % (bar {100 * MEDIAN_BAR:.0f} %), worst "
        f"{100 * errors[-1]:.1f} % (bar {100 * WORST_BAR:.0f} %), "
        f"{sum(e <= WORST_BAR for e in errors)} of {len(errors)} within {100 * WORST_BAR:.0f} %.",
        f"Order of two configurations that differ by 5 % or more: {right} of {pairs} right.",
        f"The 90 % interval holds {inside} of {len(predicted)}.",
    ]


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
