"""Which simulations a memory model begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsat.memory.estimate import SIMULATED
from dsat.memory.model import Anchor, Basis, MemoryModel, Variant
from dsat.memory.simulator import Simulator

# Where activations need no more than a tiny part of memory, more samples tell no more.
_LARGEST_SIMULATED = 2**16


def variant(
    simulator: Simulator,
    configs: Sequence[Mapping[str, Any]],
    script_args: Mapping[str, Any],
    *,
    slots: int,
    limit_bytes: int,
) -> Variant:
    """Simulates each configuration at about the largest micro batch that fits.

    Args:
        simulator: of the script with these switches.
        configs: whole DeepSpeed configurations, one of each strategy.
        script_args: switches of the script.
        slots: data-parallel slots.
        limit_bytes: what a slot may use.

    Raises:
        SimulationUnavailable: the script cannot be simulated at all.
    """
    facts = simulator.facts(configs[0])
    plain = Variant(dict(script_args), facts)
    model = MemoryModel(Basis((plain,)), slots=slots, limit_bytes=limit_bytes)
    anchors = []
    for config in configs:
        size = max(1, int(min(_LARGEST_SIMULATED, model.largest(model.shape(config, script_args)))))
        estimate = simulator.estimate(config, micro_batch=size, slots=slots)
        if estimate.source == SIMULATED:
            anchors.append(Anchor(dict(config), size, estimate))
    return Variant(dict(script_args), facts, tuple(anchors))
