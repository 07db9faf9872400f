"""The closed form against DeepSpeed's simulated engine, for large models."""

from __future__ import annotations

import pytest

from benchmarks import formula
from testing import warm_command, warm_host


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "checkpointing", "gas", "lora"),
    [
        ("0.1 B", "off", 1, False),
        ("0.1 B", "on", 4, False),
        ("1 B", "on", 1, False),
        ("1 B", "off", 1, True),
        ("8 B", "on", 1, False),
        ("8 B", "on", 4, False),
    ],
)
def test_the_formula_says_what_the_simulation_says(
    name: str, checkpointing: str, gas: int, lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm_command.use(warm_host.prefix(), monkeypatch.setattr)
    found = list(formula.rows(name, checkpointing, [1, 8], [gas], lora=lora))
    assert len(found) == 14
    assert [bar for bar in formula.bars(found) if not bar.met] == []
