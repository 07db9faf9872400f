"""The search that an `autotuning` section asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testing.scenarios import User


@pytest.mark.parametrize(
    ("section", "method", "given"),
    [
        ({}, "gridsearch", {"early_stopping": 5, "num_micro_batches": 3}),
        ({"tuner_type": "random", "tuner_early_stopping": 0}, "random", {"early_stopping": None}),
        ({"tuner_type": "model_based"}, "model", {"early_stopping": 5, "stop_when": 0.003}),
    ],
)
def test_what_a_section_does_not_say_is_as_in_any_search(
    tmp_path: Path, section: dict[str, Any], method: str, given: dict[str, Any]
) -> None:
    user = User(tmp_path)
    config = {"train_micro_batch_size_per_gpu": 1, "autotuning": {"enabled": True, **section}}
    user.has(config)
    words = "tune --dry-run --json train.py --deepspeed_config ds.json"
    plan = user.types(*words.split()).json["plan"]
    assert plan["method"] == method
    assert plan["search_options"].items() >= given.items()
