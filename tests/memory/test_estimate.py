"""What of a DeepSpeed configuration its memory depends on."""

from __future__ import annotations

from typing import Any

import pytest

from dsat.memory.estimate import as_simulated

CONFIG: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2},
}
WITHOUT_MEMORY: dict[str, Any] = {
    **{name: {"enabled": True} for name in ("tensorboard", "comet", "flops_profiler")},
    "steps_per_print": 1,
    "wall_clock_breakdown": True,
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
}


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"gradient_accumulation_steps": 1},
        {"gradient_accumulation_steps": "auto"},
        {"bf16": {"enabled": "auto"}},
        {"gradient_clipping": 1.0},
    ],
    ids=str,
)
def test_what_needs_no_memory_is_left_out(more: dict[str, Any]) -> None:
    assert as_simulated({**CONFIG, **WITHOUT_MEMORY, **more}) == {**CONFIG, **more}
    assert as_simulated({**CONFIG, "gradient_accumulation_steps": 17}) == CONFIG
