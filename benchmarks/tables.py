"""Recorded tables: the real outcomes of all trials of a grid, and answers to others from them.

A table is a file of JSON lines: a header (what ran, where, when, with which versions), then a row
for each trial (during the recording, a row for each pass). `Table.answer` returns the outcome of
any configuration:

- Settings are mapped to the nearest recorded ones of the same strategy. Their distance is that of
  their sizes, as a fraction of the recorded range, plus one for every other setting that differs.
- Between two recorded micro batches that ran, times are interpolated so that throughput is linear
  in the micro batch; durations are linear, too.
- Beyond the largest recorded micro batch that ran, a configuration is out of memory.
- A bucket that alone exceeds a slot's memory is out of memory, as contiguous gradients allocate it
  whole for any model (deepspeed 0.19.8, runtime/zero/stage_1_and_2.py:3266, stage3.py:782).
- With more gradient accumulation than recorded, the times of the forward and backward passes are
  multiplied, but not the optimizer's step.
"""

from __future__ import annotations

import gzip
import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from dsat.command import ds_config
from dsat.space import deepspeed_settings
from dsat.space.overrides import overrides_for
from dsat.values.codec import Recorded
from dsat.values.objective import Objective
from dsat.values.outcome import MemoryUse, Metrics, ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import read_strategy

DATA = Path(__file__).parent / "data"
SUFFIX = ".jsonl"
START_STEP = 2  # the first measured step: the second one, to save time
# Sizes that are capped at the model's number of parameters.
_AT_MOST_THE_MODEL = ("sub_group_size",)
_OUT_OF_MEMORY = "beyond what was recorded to run"


@dataclass(frozen=True)
class Header(Recorded):
    """What a table describes.

    Attributes:
        name: name of the table.
        command: how the script is run, without its DeepSpeed configuration.
        ds_config: the user's own configuration, which settings override.
        slots: slots of every trial.
        slot_memory_bytes: memory limit of a slot.
        profile: result of the profile trial, which took `profile_duration_s`.
        about: facts for people: machine, versions, date, measured steps.
        memory: basis of dsat's memory predictions (`dsat.memory.predictor.Basis`), simulated on
            the same machine; None if it was not simulated.
    """

    name: str
    command: str
    ds_config: Mapping[str, Any]
    slots: int
    slot_memory_bytes: int
    profile: ModelProfile
    profile_duration_s: float
    about: Mapping[str, Any]
    memory: Mapping[str, Any] | None = None

    @property
    def train_batch_size(self) -> int | None:
        """The global batch of every trial, if the user's configuration sets one."""
        return self.ds_config.get("train_batch_size")

    @property
    def steps(self) -> list[int]:
        """First and last optimizer step that every trial measured, and the most steps."""
        least, most = map(int, str(self.about["measured steps"]).split(" to "))
        return [START_STEP, START_STEP + least - 1, most]


@dataclass(frozen=True)
class Row(Recorded):
    """One trial; `settings` are as in a proposal (`stage` and keys of `zero_optimization`)."""

    settings: Mapping[str, Any]
    micro_batch: int
    outcome: Outcome


def of_pass(row: Row, number: int) -> dict[str, Any]:
    """Return a row of a pass as the event that is recorded."""
    return {"event": "row", **row.to_json(), "pass": number}


def pass_of(event: Mapping[str, Any]) -> int:
    """Return the pass of a recorded row, counted from 1."""
    return int(event.get("pass", 1))


def fold(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each trial: the one with the median throughput of all passes.

    Of an even number of passes, this is the lower middle one. Out of memory counts as the least.
    """
    return [sorted(same, key=_throughput)[(len(same) - 1) // 2] for same in _passes(rows)]


def _passes(rows: Iterable[Row]) -> Iterable[list[Row]]:
    """Return the rows of all passes, grouped by trial."""
    passes: dict[str, list[Row]] = {}
    for row in rows:
        which = json.dumps([row.settings, row.micro_batch], sort_keys=True)
        passes.setdefault(which, []).append(row)
    return passes.values()


def _throughput(row: Row) -> float:
    return 0.0 if row.outcome.metrics is None else row.outcome.metrics.throughput


class Table:
    """A recorded table of trials without gradient accumulation."""

    def __init__(self, header: Header, rows: Iterable[Row]) -> None:
        self.header = header
        self.rows = tuple(rows)
        self._nearest: dict[str, _Curve] = {}

    @cached_property
    def _curves(self) -> list[_Curve]:
        by_settings: dict[str, list[Row]] = {}
        for row in self.rows:
            by_settings.setdefault(json.dumps(row.settings, sort_keys=True), []).append(row)
        return [_Curve(rows) for rows in by_settings.values()]

    def best(self, objective: Objective) -> float:
        """Return the best value of all recorded trials."""
        return min(self._values(objective), key=objective.loss)

    def run_sd(self, outcome: Outcome) -> float:
        """Return the relative standard deviation of a measured time."""
        return 0.0 if outcome.metrics is None else outcome.metrics.standard_error

    def close_to_best(self, objective: Objective, part: float) -> int:
        """Return the number of recorded trials that are worse than the best by at most `part`."""
        best = self.best(objective)
        return sum(objective.gain(best, v) * (1 - part) <= 1 for v in self._values(objective))

    def _values(self, objective: Objective) -> list[float]:
        return [value for row in self.rows if (value := row.outcome.value(objective)) is not None]

    @cached_property
    def choices(self) -> dict[str, list[Any]]:
        """The recorded values of each setting, sorted; True comes first."""
        found: dict[str, set[Any]] = {}
        for row in self.rows:
            for name, value in row.settings.items():
                if name != "stage":
                    found.setdefault(name, set()).add(value)
        return {
            name: sorted(values, reverse=isinstance(next(iter(values)), bool))
            for name, values in found.items()
        }

    @property
    def cap(self) -> int | None:
        """The largest micro batch that ran, if larger ones might run too; None if all were out
        of memory."""
        return None if all(curve.has_an_end for curve in self._curves) else self.largest_micro_batch

    @property
    def largest_micro_batch(self) -> int:
        """The largest micro batch that ran with any settings."""
        return max(row.micro_batch for row in self.rows if row.outcome.ok)

    @property
    def profile_outcome(self) -> Outcome:
        """The outcome of the profile trial; its memory is that of one sample in stage 0."""
        row = next((r for r in self.rows if (r.settings, r.micro_batch) == ({"stage": 0}, 1)), None)
        return Outcome(
            OutcomeKind.OK,
            memory=None if row is None else row.outcome.memory,
            profile=self.header.profile,
            duration_s=self.header.profile_duration_s,
        )

    def config(self, settings: Mapping[str, Any], batch: BatchTriple) -> dict[str, Any]:
        """Return the DeepSpeed configuration with these settings and batch sizes."""
        return ds_config.prepare_for_training(self.header.ds_config, overrides_for(settings, batch))

    def answer(self, config: Mapping[str, Any]) -> Outcome:
        """Return the outcome of a trial of a complete DeepSpeed configuration.

        Raises:
            ValueError: no trial of its strategy was recorded.
        """
        batch = ds_config.resolve_batch(config, self.header.slots, where="the configuration")
        strategy = read_strategy(config)
        own = config.get("zero_optimization") or {}
        zero = {**deepspeed_settings.defaults(strategy.stage), **own}
        if strategy.stage > 0 and zero["contiguous_gradients"]:
            bucket_bytes = zero["reduce_bucket_size"] * self.header.profile.param_bytes
            if bucket_bytes > self.header.slot_memory_bytes:
                duration_s = min(row.outcome.duration_s for row in self.rows)
                return Outcome(OutcomeKind.OOM, message=_OUT_OF_MEMORY, duration_s=duration_s)
        outcome = self._curve(strategy.name, zero).answer(batch.micro_batch)
        if outcome.metrics is None:
            return outcome
        return _accumulated(outcome, outcome.metrics, batch, self.header)

    def _curve(self, strategy: str, zero: Mapping[str, Any]) -> _Curve:
        key = json.dumps(zero, sort_keys=True)
        if key not in self._nearest:
            candidates = [c for c in self._curves if c.strategy == strategy]
            if not candidates:
                raise ValueError(f"{self.header.name}: nothing was recorded of {strategy}")
            self._nearest[key] = min(candidates, key=lambda c: self._distance(zero, c, candidates))
        return self._nearest[key]

    def _distance(
        self, zero: Mapping[str, Any], curve: _Curve, candidates: Sequence[_Curve]
    ) -> float:
        total = 0.0
        for name, recorded in curve.settings.items():
            if name == "stage":
                continue
            wanted = zero.get(name, recorded)
            if isinstance(recorded, bool) or not isinstance(recorded, (int, float)):
                total += wanted != recorded
                continue
            sizes = [self._size(name, other.settings[name]) for other in candidates]
            width = max(sizes) - min(sizes) or 1
            total += abs(self._size(name, wanted) - self._size(name, recorded)) / width
        return total

    def _size(self, name: str, value: float) -> float:
        most = self.header.profile.num_params if name in _AT_MOST_THE_MODEL else float("inf")
        return min(value, most)


class _Curve:
    """The outcomes of all micro batches with the same settings."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.settings = rows[0].settings
        self.strategy = read_strategy({"zero_optimization": _nested(self.settings)}).name
        ran = sorted((row.micro_batch, row.outcome) for row in rows if row.outcome.ok)
        self._sizes = [size for size, _ in ran]
        self._outcomes = [outcome for _, outcome in ran]
        self._failed = {row.micro_batch: row.outcome for row in rows if not row.outcome.ok}

    @property
    def has_an_end(self) -> bool:
        """Whether a micro batch ran out of memory."""
        return bool(self._failed)

    def answer(self, size: int) -> Outcome:
        if not self._sizes or size > self._sizes[-1]:
            if not self._failed:
                duration_s = self._outcomes[-1].duration_s
                return Outcome(OutcomeKind.OOM, message=_OUT_OF_MEMORY, duration_s=duration_s)
            return self._failed[min(self._failed, key=lambda failed: abs(failed - size))]
        above = bisect_left(self._sizes, size)
        if self._sizes[above] == size or above == 0:
            return self._outcomes[above]
        low, high = self._sizes[above - 1], self._sizes[above]
        part = (size - low) / (high - low)
        return _between(self._outcomes[above - 1], self._outcomes[above], part, size)


def _between(low: Outcome, high: Outcome, part: float, size: int) -> Outcome:
    """Return the interpolated outcome of a micro batch between two recorded ones."""
    one, other = low.metrics, high.metrics
    assert one is not None and other is not None

    def mean(a: float, b: float) -> float:
        return a + part * (b - a)

    throughput = mean(one.throughput, other.throughput)
    samples = mean(one.throughput * one.latency, other.throughput * other.latency)
    metrics = replace(
        one if part < 0.5 else other,
        throughput=throughput,
        latency=samples / throughput,
        forward=mean(one.forward, other.forward),
        backward=mean(one.backward, other.backward),
        step=mean(one.step, other.step),
    )
    return Outcome(
        OutcomeKind.OK,
        metrics=metrics,
        memory=_memory_between(low.memory, high.memory, part),
        duration_s=mean(low.duration_s, high.duration_s),
    )


def _memory_between(low: MemoryUse | None, high: MemoryUse | None, part: float) -> MemoryUse | None:
    if low is None or high is None:
        return None

    def mean(kind: str) -> dict[str, int]:
        one, other = getattr(low, kind), getattr(high, kind)
        return {phase: round(one[phase] + part * (other[phase] - one[phase])) for phase in one}

    return MemoryUse(
        mean("allocated_bytes"),
        mean("reserved_bytes"),
        mean("host_rss_bytes"),
        max(low.context_bytes, high.context_bytes),
        round(low.data_bytes + part * (high.data_bytes - low.data_bytes)),
    )


def _accumulated(outcome: Outcome, metrics: Metrics, batch: BatchTriple, header: Header) -> Outcome:
    """Return an outcome without accumulation, converted to the accumulation of a batch."""
    more_ms = (batch.gas - 1) * (metrics.latency - metrics.step)
    latency = metrics.latency + more_ms
    throughput = metrics.throughput * batch.gas * metrics.latency / latency
    changed = replace(
        metrics,
        throughput=throughput,
        latency=latency,
        forward=metrics.forward * batch.gas,
        backward=metrics.backward * batch.gas,
        FLOPS_per_gpu=throughput * header.profile.flops_per_sample / header.slots,
    )
    steps = 1 + metrics.num_steps
    duration_s = outcome.duration_s + steps * more_ms / 1e3
    return replace(outcome, metrics=changed, duration_s=duration_s)


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    overrides = overrides_for(settings, BatchTriple(1, 1, 1))
    return dict(overrides.get("zero_optimization", {}))


def read(path: Path) -> Table:
    """Read a table, compressed or not; it may still be recorded."""
    header, rows = _read(path)
    return Table(header, fold(rows))


def _read(path: Path) -> tuple[Header, list[Row]]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    finished, _, _ = content.rpartition(b"\n")  # the last line may be torn
    lines = [json.loads(line) for line in finished.split(b"\n")]
    return Header.from_json(lines[0]), list(map(Row.from_json, lines[1:]))


def read_all(folder: Path = DATA) -> list[Table]:
    """Read all finished tables of a folder."""
    return [read(path) for path in sorted(folder.glob(f"*{SUFFIX}.gz"))]


def compress(path: Path) -> Path:
    """Reduce a finished table to one row per trial and compress it, reproducibly to the byte.

    Returns:
        The path of the new file.
    """
    target = path.with_name(path.name + ".gz")
    header, rows = _read(path)
    _write(target, header, fold(rows))
    return target


def with_memory(path: Path, memory: Mapping[str, Any]) -> None:
    """Add a basis of memory predictions to the header of a finished table."""
    table = read(path)
    _write(path, replace(table.header, memory=memory), table.rows)


def _write(path: Path, header: Header, rows: Iterable[Row]) -> None:
    lines = [header.to_json(), *(row.to_json() for row in rows)]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    part = path.with_name(path.name + ".part")
    part.write_bytes(gzip.compress(text.encode(), mtime=0))
    os.replace(part, path)
