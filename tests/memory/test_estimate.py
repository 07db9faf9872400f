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


def test_what_needs_no_memory_makes_no_other_question() -> None:
    without = {
        **{name: {"enabled": True} for name in ("tensorboard", "comet", "flops_profiler")},
        "steps_per_print": 1,
        "wall_clock_breakdown": True,
        "dump_state": True,
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 17,
    }
    assert as_simulated({**CONFIG, **without}) == CONFIG


@pytest.mark.parametrize(
    "more",
    [
        {"gradient_accumulation_steps": 1},
        {"gradient_accumulation_steps": "auto"},
        {"bf16": {"enabled": "auto"}},
        {"gradient_clipping": 1.0},
    ],
    ids=str,
)
def test_all_else_does(more: dict[str, Any]) -> None:
    assert as_simulated({**CONFIG, **more}) == {**CONFIG, **more}
