"""Which options reach the method of a model that turns activation checkpointing on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsat.in_trial import recomputation


class Model(torch.nn.Module):
    options: dict[str, Any] | None = None

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        self.options = options

    def gradient_checkpointing_disable(self) -> None:
        self.options = None


@pytest.mark.parametrize(
    ("wanted", "options"),
    [
        (True, {}),
        ("reentrant", {"gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        ("every_2_layers", {"every_n_layers": 2}),
        (False, None),
    ],
)
def test_each_kind_has_options_of_its_own(wanted: bool | str, options: dict[str, Any]) -> None:
    model = Model()
    assert recomputation.switch(model, wanted)
    assert model.options == options
