"""Settings of DeepSpeed that a simulation cannot run."""

from __future__ import annotations

from typing import Any

import pytest

from dsat.simulation.protocol import SimulationUnsupported
from dsat.simulation.simulation import check_supported


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"zero_quantized_weights": True}, "zero_quantized_weights"),
        ({"zero_quantized_gradients": True}, "zero_quantized_gradients"),
        ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, "super_offload"),
    ],
)
def test_settings_that_need_a_gpu_are_named(settings: dict[str, Any], name: str) -> None:
    """DeepSpeed's own error would be a TypeError, an abort, or one about another accelerator."""
    with pytest.raises(SimulationUnsupported, match=f"{name} needs a GPU"):
        check_supported({"zero_optimization": {"stage": 3, **settings}})
    check_supported({"zero_optimization": {"stage": 2, **settings}})
    check_supported({"zero_optimization": {"stage": 3, "zero_quantized_weights": False}})
