"""The recorded table that tests of the benchmarks share: its step times follow a law."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import record
from benchmarks.tables import Header, Row, Table
from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple

PARAMS = 10**8
SAMPLE_BYTES = 20_000_000
SLOT_BYTES = 4 * 2**30
FIXED_MS = {0: 300.0, 1: 200.0, 2: 250.0, 3: 600.0}
HEADER = Header(
    name="made-up",
    command="train.py",
    ds_config={"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}},
    slots=1,
    slot_memory_bytes=SLOT_BYTES,
    profile=ModelProfile(PARAMS, PARAMS, 4, SAMPLE_BYTES, 1e9, SLOT_BYTES),
    profile_duration_s=3.0,
    about={"date": "today", "measured steps": "2 to 3"},
)


def outcome_of(settings: dict[str, Any], size: int) -> Outcome:
    """A step takes so long for the optimizer and 50 ms for each sample; buckets take memory."""
    stage = settings["stage"]
    used = 20 * PARAMS + SAMPLE_BYTES * size
    if stage and settings.get("contiguous_gradients", True):
        used += 4 * settings["reduce_bucket_size"]
    if used > SLOT_BYTES:
        return Outcome(OutcomeKind.OOM, message="out of memory", duration_s=2.0)
    ms = FIXED_MS[stage] + 50 * size
    metrics = Metrics(size / ms * 1e3, ms, 20 * size, 30 * size, FIXED_MS[stage], 1e9, 2, 0.01)
    return Outcome(OutcomeKind.OK, metrics=metrics, duration_s=2.0 + 3 * ms / 1e3)


@pytest.fixture(scope="session")
def table() -> Table:
    """Recorded as `record` would: doubled micro batches, then a bisected edge."""
    rows = []
    for settings in record.SETTINGS:
        known: dict[int, bool] = {}
        while (size := record.next_size(known, 4096)) is not None:
            outcome = outcome_of(settings, size)
            known[size] = outcome.ok
            rows.append(Row(settings, size, 1, 1, outcome))
    return Table(HEADER, rows)


def config_of(stage: int, size: int, gas: int = 1, **zero: Any) -> dict[str, Any]:
    return {
        **HEADER.ds_config,
        **BatchTriple(size * gas, size, gas).config(),
        "zero_optimization": {"stage": stage, **zero},
    }
