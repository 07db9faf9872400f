"""What a trial makes of Lightning's Trainer."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dsat.in_trial import lightning_trainer
from dsat.inputs.switches import OTHER_ACCUMULATION


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize(
    ("own", "automatic", "found", "warnings"),
    [
        (2, True, 4, [OTHER_ACCUMULATION]),
        (4, True, 4, []),
        (1, False, 1, []),
    ],
)
def test_optimizer_steps_are_counted_as_the_engine_makes_them(
    package: str,
    own: int,
    automatic: bool,
    found: int,
    warnings: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From before the schedule of the learning rate is made."""
    seen: list[int] = []

    class DeepSpeedStrategy:
        def setup(self, trainer: Any) -> None:
            seen.append(trainer.accumulate_grad_batches)

    module = ModuleType(f"{package}.strategies.deepspeed")
    module.DeepSpeedStrategy = DeepSpeedStrategy  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    said: list[str] = []
    lightning_trainer.install(4, said.append)
    of_script = SimpleNamespace(automatic_optimization=automatic)
    DeepSpeedStrategy().setup(
        SimpleNamespace(accumulate_grad_batches=own, lightning_module=of_script)
    )
    assert seen == [found] and said == warnings
