"""Projected against published throughput: prints a table.

    python3 -m benchmarks.projection [--only WORD]

Throughput is in tokens/s per GPU. Each model is simulated on a machine without a GPU.

- `by the table`: predicted from the table of GPUs alone.
- `corrected`: predicted after a correction by the rows marked as fitted (at most a third) of the
  same software, as `dsat project --from RUN` does with a run of your own. Software without a fitted
  row is not corrected.
- `memory`: the predicted peak, as a part of the GPU's memory.

Every row was read at its source. Where a source is silent, these are assumed: bf16, torch's
attention, `overlap_comm`. FSDP counts as stage 3, which has the same traffic. Two constants were
chosen by the fitted rows, with all rows in sight except the checked ones: the factor between the
table's roofline and the speed that scripts reach (`PRIORS` in traced_work.py), and the memory
bandwidth of a host thread.

The checked rows were written down, with their sources, before the first prediction of any of them;
another table has the errors of those first predictions. They showed that two terms were missing
(NCCL's protocols for small messages, and the time of DeepSpeed's hooks in stage 3), and that
corrected intervals were too narrow for other GPUs. All three were then mended, without a constant
fitted to a row. The rows of ZenFlow came later. Their first predictions were 10 times too slow,
because each rank was assumed to have one thread on the host, as the ranks of the gist have. The
rate of all threads of a host together is from DeepSpeed#6834, not from these rows.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from dsat.prepare.simulated_model import simulate
from dsat.projecting.options import ProjectSettings
from dsat.projecting.speed import ProjectedSpeed
from dsat.projecting.traced_work import Cluster, hardware_of
from dsat.projecting.tracing import Traced, trace
from dsat.search import gpus
from dsat.search.speed import Points
from dsat.values.zero_strategy import NONE, Strategy

DATA = Path(__file__).parent / "data" / "projection.json"
SLOTS = 8  # simulated data-parallel ranks
MEDIAN_BAR, WORST_BAR, PAIRS_BAR = 0.10, 0.20, 0.9
_APART = 1.05  # pairs of strategies that differ by less are not compared
_PUBLISHED_SD = 0.02  # relative standard deviation of published values


@dataclass(frozen=True)
class Row:
    """A published measurement.

    Attributes:
        source: key of the source in the data.
        stack: the software; rows of one stack correct each other.
        model: key of the model's configuration.
        recompute: recomputed part of the activations: 0, 0.5 or 1.
        gas: micro steps of a step.
        tokens_per_second: per GPU.
        network: Gbit/s per GPU between hosts; None means the value in the table of GPUs.
        fitted: it was used to set constants.
        held_out: it was written down before its first prediction.
        threads: host threads of a rank; 0 for its share of the cores.
    """

    source: str
    stack: str
    model: str
    seq: int
    recompute: float
    stage: int
    offload: str
    gpu: str
    gpus: int
    micro_batch: int
    gas: int
    tokens_per_second: float
    network: float | None = None
    fitted: bool = False
    held_out: bool = False
    threads: int = 0

    @property
    def tokens(self) -> int:
        """Tokens per GPU in an optimizer step."""
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
    threads = data["threads"]
    rows = [Row(**each, threads=threads.get(each["source"], 0)) for each in _records(data)]
    rows += [Row(**each, held_out=True) for each in _records(data["held_out"])]
    return rows, data["sources"], data["models"]


def _records(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(data["columns"], values, strict=True)) for values in data["rows"]]


def compare(rows: Sequence[Row], models: Mapping[str, Any]) -> list[Compared]:
    """Project all rows: by the table alone, and corrected by the fitted rows of their stack."""
    found = []
    whole = _trace_all(rows, models)
    for row in rows:
        mine = [each for each in rows if each.fitted and each.stack == row.stack]
        mine = [each for each in mine if each.gpu == row.gpu] or mine
        parts = _parts(row, whole)
        by_table, corrected = (
            Rate.of(row, [statistics.fmean(ends) for ends in zip(*which, strict=True)])
            for which in zip(*(_both(row, each, whole, mine) for each in parts), strict=True)
        )
        filled = statistics.fmean(_filled(row, each) for each in parts)
        found.append(Compared(row, filled, bool(mine), by_table, corrected))
    return found


def _filled(row: Row, traced: Traced) -> float:
    """Return the predicted peak of memory, as a part of the GPU's memory."""
    gpu = gpus.find(row.gpu)
    return traced.memory(row.strategy, row.gpus, row.micro_batch, gpu)[0] / gpu.memory_bytes


Key = tuple[str, int, bool]


def _keys(row: Row) -> list[Key]:
    """Return the keys of a row's traces: two if a part of the activations is recomputed."""
    return [(row.model, row.seq, on) for on in (False, True) if row.recompute in (on, 0.5)]


def _parts(row: Row, whole: Mapping[Key, Traced]) -> list[Traced]:
    return [whole[key] for key in _keys(row)]


def _both(
    row: Row, traced: Traced, whole: Mapping[Key, Traced], fitted: Sequence[Row]
) -> tuple[list[float], list[float]]:
    """Return seconds with their interval, twice: by the table of GPUs, and corrected by
    `fitted`."""
    strategies = list(dict.fromkeys(each.strategy for each in (row, *fitted)))
    speed = ProjectedSpeed(hardware_of(gpus.find(row.gpu)), strategies)
    times = [speed.predict(_points(speed, row, traced))]
    if fitted:
        points, seconds = [], []
        for other in fitted:  # partly recomputed: both traces count as points
            parts = [_points(speed, other, part) for part in _parts(other, whole)]
            alone = [speed.predict(part).seconds for part in parts]
            points += parts
            seconds += [other.seconds * each / statistics.fmean(alone) for each in alone]
        error = np.full(len(points), _PUBLISHED_SD)
        measured_on = hardware_of(gpus.find(fitted[0].gpu))
        speed = speed.calibrated(measured_on, Points.join(points), np.log(seconds), error)
    times.append(speed.predict(_points(speed, row, traced)))
    by_table, corrected = ([t.seconds, t.low_s, t.high_s] for t in times)
    return by_table, corrected


def _points(speed: ProjectedSpeed, row: Row, traced: Traced) -> Points:
    network = None if row.network is None else 1e9 / 8 * row.network
    cluster = Cluster.of(gpus.find(row.gpu), row.gpus, network, row.threads)
    work = traced.work(row.strategy, row.micro_batch, cluster)
    return speed.points(work, row.strategy, row.micro_batch, row.gas)


def _trace_all(rows: Sequence[Row], models: Mapping[str, Any]) -> dict[Key, Traced]:
    """Trace each model once for all of its rows, with and without recomputation as the rows
    need."""
    groups: dict[Key, dict[Strategy, None]] = {}
    for row in rows:
        for key in _keys(row):
            groups.setdefault(key, {})[row.strategy] = None
    return {
        (model, seq, on): _traced(models[model], seq, on, list(strategies))
        for (model, seq, on), strategies in groups.items()
    }


def _traced(
    model: Mapping[str, Any], seq: int, recompute: bool, strategies: Sequence[Strategy]
) -> Traced:
    """Simulate and trace a model with some strategies on eight GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        config, settings = Path(folder) / "config.json", Path(folder) / "ds.json"
        config.write_text(json.dumps(model), encoding="utf-8")
        zero = {"stage": 3, "overlap_comm": True}
        gas = 2 if any(strategy.stage < 3 for strategy in strategies) else 1
        batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": gas}
        settings.write_text(json.dumps({**batch, "zero_optimization": zero}), encoding="utf-8")
        asked = ProjectSettings(
            model=str(config),
            seq_length=seq,
            ds_config=settings,
            activation_checkpointing="on" if recompute else "off",
        )
        with simulate(asked) as simulated:
            return trace(simulated, SLOTS, lambda _: strategies)


@dataclass(frozen=True)
class Rate:
    """Projected tokens/s per GPU with an interval, and the published value."""

    rate: float
    low: float
    high: float
    published: float

    @classmethod
    def of(cls, row: Row, seconds: Sequence[float]) -> Rate:
        """Return the rate of a row from the seconds of its step: middle, low and high."""
        middle, low, high = seconds
        return cls(row.tokens / middle, row.tokens / high, row.tokens / low, row.tokens_per_second)

    @property
    def error(self) -> float:
        return self.rate / self.published - 1

    @property
    def holds(self) -> bool:
        """Whether the interval contains the published value."""
        return self.low <= self.published <= self.high


@dataclass(frozen=True)
class Compared:
    """A row with its projections.

    Attributes:
        filled: predicted peak of memory, as a part of the GPU's memory.
        is_corrected: there are fitted rows of its stack.
        by_table: projection by the table of GPUs alone.
        corrected: projection corrected by the fitted rows of its stack.
    """

    row: Row
    filled: float
    is_corrected: bool
    by_table: Rate
    corrected: Rate

    def cells(self) -> list[str]:
        """Return a table row for people; see `HEADINGS`."""
        row = self.row
        mark = " (fitted)" if row.fitted else " (checked)" if row.held_out else ""
        return [
            f"{row.source}{mark}",
            f"{row.model}, {row.seq} tokens",
            f"{row.gpus} x {row.gpu}",
            row.strategy.label,
            f"{row.recompute:g}",
            f"{row.micro_batch} x {row.gas}",
            f"{100 * self.filled:.0f} %",
            f"{row.tokens_per_second:,.0f}",
            *(f"{self.by_table.rate:,.0f}", f"{100 * self.by_table.error:+.1f} %"),
            *(f"{self.corrected.rate:,.0f}", f"{100 * self.corrected.error:+.1f} %"),
            "yes" if self.corrected.holds else "no",
        ]


HEADINGS = (
    *("source", "model", "gpus", "strategy", "recomputed", "batch", "memory", "measured"),
    *("by the table", "error", "corrected", "error", "in interval"),
)


def ordered_pairs(found: Sequence[Compared]) -> tuple[int, int]:
    """Count the pairs of strategies that are projected in the right order, and all pairs.

    A pair has the same source, model and GPUs.
    """
    right = pairs = 0
    for one, other in combinations(found, 2):
        a, b = one.row, other.row
        same = (a.source, a.model, a.seq, a.gpu, a.gpus) == (
            b.source, b.model, b.seq, b.gpu, b.gpus
        )  # fmt: skip
        ratio = a.tokens_per_second / b.tokens_per_second
        if same and max(ratio, 1 / ratio) >= _APART:
            pairs += 1
            right += (ratio > 1) == (one.corrected.rate > other.corrected.rate)
    return right, pairs


def _verdict(found: Sequence[Compared]) -> list[str]:
    """Return lines on the errors of the checked rows, and of the rows in sight."""
    groups = {
        "checked": [each for each in found if each.row.held_out],
        "in sight": [each for each in found if not (each.row.fitted or each.row.held_out)],
    }
    said = [f"{len(found)} rows, {sum(each.row.fitted for each in found)} of them fitted.", ""]
    for name, rows in groups.items():
        corrected = [each.corrected for each in rows if each.is_corrected]
        said += _told(f"{name}, by the table of GPUs alone", [each.by_table for each in rows])
        said += _told(f"{name}, corrected", corrected)
    right, pairs = ordered_pairs(found)
    return [
        *said,
        f"- order of two configurations that differ by 5 % or more: {right} of {pairs} right "
        f"(bar {100 * PAIRS_BAR:.0f} %)",
    ]


def _told(name: str, rates: Sequence[Rate]) -> list[str]:
    if not rates:
        return []
    sizes = sorted(abs(each.error) for each in rates)
    held, within = sum(each.holds for each in rates), sum(size <= WORST_BAR for size in sizes)
    return [
        f"- {name}: median error {100 * statistics.median(sizes):.1f} % (bar "
        f"{100 * MEDIAN_BAR:.0f} %), worst {100 * sizes[-1]:.1f} % (bar {100 * WORST_BAR:.0f} %), "
        f"{within} of {len(sizes)} within {100 * WORST_BAR:.0f} %; the 90 % interval holds "
        f"{held} of {len(rates)}"
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", default="", help="rows whose source or model has this word")
    args = parser.parse_args()
    rows, sources, models = read()
    chosen = [row for row in rows if args.only in f"{row.source} {row.model}"]
    common.print_explanation(__doc__)
    found = compare(chosen, models)
    numbers = ("memory", "measured", "by the table", "corrected", "error")
    common.print_head(*HEADINGS, numbers=numbers)
    for each in found:
        common.print_row(*each.cells())
    print("\n".join(["", *_verdict(found), ""]))
    for name in dict.fromkeys(row.source for row in chosen):
        print(f"- {name}: {sources[name]}")


if __name__ == "__main__":
    main()
