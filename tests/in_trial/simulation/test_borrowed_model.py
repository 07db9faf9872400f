"""The script's model and optimizer, as the simulation knows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from dsat.app import estimate
from dsat.in_trial.simulation.borrowed_model import BorrowedModel


class Own(Adam):
    """An Adam that may hold anything."""


@pytest.mark.parametrize(
    ("make", "simulated", "of_torch"),
    [
        (None, False, False),
        (AdamW, False, True),
        (lambda trained: AdamW(trained, amsgrad=True), True, False),
        (lambda trained: AdamW(trained, foreach=False), True, False),
        (SGD, True, False),
        (Own, True, False),
    ],
)
def test_the_scripts_own_optimizer_decides_whether_the_formula_does(
    make: Callable[..., Any] | None, simulated: bool, of_torch: bool
) -> None:
    model = torch.nn.Linear(2, 2)
    passed = None if make is None else make(model.parameters())
    arguments = {"model": model, "optimizer": passed}
    section = BorrowedModel(lambda **_: None, arguments, {}).optimizer()
    assert estimate.needs_simulation({"optimizer": section}) is simulated
    assert bool(section.get("params", {}).get("torch_adam")) is of_torch
