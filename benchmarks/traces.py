"""Simulated models whose speed and memory benchmarks predict, kept in files."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.app import project
from dsat.app.estimate import simulator_of
from dsat.app.project import Traced
from dsat.inputs.project_settings import ProjectSettings
from dsat.memory.closed_form import ModelFacts
from dsat.memory.predictor import Anchor
from dsat.values.codec import Recorded
from dsat.values.step_trace import ModelTrace, StepTrace
from dsat.values.zero_strategy import Strategy

SLOTS = 8  # that are simulated


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
            return project.trace(base, simulator, SLOTS, lambda _: strategies)


def kept(path: Path | None, trace: Callable[[], Traced]) -> Traced:
    """Return what a file keeps, or trace and keep it there."""
    if path is not None and path.is_file():
        return _Kept.from_json(json.loads(path.read_text(encoding="utf-8"))).traced()
    found = trace()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_Kept.of(found).to_json()), encoding="utf-8")
    return found


@dataclass(frozen=True)
class _Kept(Recorded):
    """A traced model as a file has it."""

    base: Mapping[str, Any]
    facts: ModelFacts
    model: ModelTrace
    strategies: tuple[Strategy, ...]
    traces: tuple[StepTrace, ...]
    memory: tuple[Anchor, ...]
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
