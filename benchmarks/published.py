"""Predicted against published GPU memory: prints a table.

    python3 -m benchmarks.published

The closed form answers, since no more of the models is known than their sizes. Left out are figures
that it has no line for: what is held between steps (25.74 GiB in the first source, which is no peak
of a phase), and bf16 master weights and gradients (18.93 GiB there).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsat.memory import closed_form
from dsat.memory.closed_form import ModelFacts
from dsat.memory.estimate import MemoryEstimate

_GIB = 2**30
BAR = 0.03


@dataclass(frozen=True)
class Row:
    """A published measurement.

    Attributes:
        source: where it was published.
        what: what was measured, a phase of the estimate or its `peak`.
        facts: of the model; without activations where they do not decide what was measured.
        config: the DeepSpeed configuration.
        slots: data-parallel ranks.
        measured_gib: what was published.
        note: what of the configuration is not published, and the reason of a miss.
    """

    source: str
    what: str
    facts: ModelFacts
    config: Mapping[str, Any]
    slots: int
    measured_gib: float
    note: str = ""

    @property
    def predicted_gib(self) -> float:
        found: MemoryEstimate = closed_form.estimate(
            self.facts, self.config, slots=self.slots, micro_batch=1
        )
        return float(getattr(found, self.what)) / _GIB

    @property
    def error(self) -> float:
        return self.predicted_gib / self.measured_gib - 1


def _facts(num_params: int, trainable: int | None = None, largest: int = 0) -> ModelFacts:
    trained = num_params if trainable is None else trainable
    return ModelFacts(num_params, trained, largest, 0.0, 0.0, 0.0)


_MASTER_WEIGHTS = "DeepSpeedExamples training/bf16_master_weight"
_STAGE_3: Mapping[str, Any] = {
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 5 * 10**7,
        "stage3_param_persistence_threshold": 0,
    },
}
_LAYERS = 36  # of Qwen3-8B, whose q_proj is 4096 x 4096 and v_proj 1024 x 4096
_ADAPTERS = _LAYERS * 16 * ((4096 + 4096) + (4096 + 1024))
ROWS = (
    Row(
        _MASTER_WEIGHTS,
        "step",
        _facts(6_858_000_000),
        _STAGE_3,
        4,
        31.38,
        "the peak is the optimizer step's, so activations do not count",
    ),
    Row(
        "deepspeedai/DeepSpeed#8029, Qwen3-8B with LoRA",
        "init",
        _facts(8_190_735_360 + _ADAPTERS, _ADAPTERS, largest=4096 * 16),
        {"bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
        1,
        15.36,
        "after initialisation",
    ),
)


def main() -> None:
    print("| source | what | measured GiB | predicted GiB | error | note |")
    print("|---|---|---|---|---|---|")
    for row in ROWS:
        within = "" if abs(row.error) <= BAR else " (beyond the bar)"
        print(
            f"| {row.source} | {row.what} | {row.measured_gib:.2f} | {row.predicted_gib:.2f} "
            f"| {row.error:+.1%}{within} | {row.note} |"
        )


if __name__ == "__main__":
    main()
