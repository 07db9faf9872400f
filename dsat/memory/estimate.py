"""Predicted memory of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from dsat.inputs.ds_config import BATCH_KEYS

PHASES = ("init", "forward", "backward", "step")
SIMULATED, CLOSED_FORM = "simulated", "closed form"

# Settings that make an engine write, count or print, and need no memory worth mentioning.
_BESIDES = (
    *("autotuning", "comet", "csv_monitor", "dump_state", "flops_profiler", "steps_per_print"),
    *("tensorboard", "wall_clock_breakdown", "wandb"),
)
# DeepCompile runs on CUDA alone: a configuration with it is predicted as one without it.
_NOT_SIMULATED = ("compile",)
_MOST_MICRO_STEPS = 2  # all later ones of an optimizer step are like the second


def without_besides(config: Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed configuration without what its memory does not depend on."""
    return {key: value for key, value in config.items() if key not in _BESIDES}


def as_simulated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a DeepSpeed configuration that memory depends on, without batch sizes.

    Configurations with the same one need the same memory at the same micro batch.
    """
    total, micro, gas = BATCH_KEYS
    left_out = (total, micro, *_NOT_SIMULATED)
    kept = {k: v for k, v in without_besides(config).items() if k not in left_out}
    if isinstance(kept.get(gas), int):
        kept[gas] = min(_MOST_MICRO_STEPS, kept[gas])
    return kept


@dataclass(frozen=True)
class MemoryEstimate:
    """Peaks of one rank in bytes, without what the device's libraries take for themselves.

    Attributes:
        init, forward, backward, step: on the device, by phase, from the second optimizer step on.
            Of a rank on a CPU all of its tensors, since device and host are the same memory.
        host_pinned, host_pageable: largest amounts of host memory that tensors held.
        source: which way it was found, `SIMULATED` or `CLOSED_FORM`.
        operations: operators of a step's last micro step, its optimizer step included; 0 if not
            counted.
        collective_bytes: bytes that the rank hands to collectives in that micro step, by operator.
        note: why it was not simulated.
    """

    init: int
    forward: int
    backward: int
    step: int
    host_pinned: int = 0
    host_pageable: int = 0
    source: str = CLOSED_FORM
    operations: int = 0
    collective_bytes: Mapping[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def peak(self) -> int:
        """The largest of the phases."""
        return max(self.init, self.forward, self.backward, self.step)

    @property
    def host(self) -> int:
        """Host memory, of both kinds."""
        return self.host_pinned + self.host_pageable

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> MemoryEstimate:
        return cls(**{f.name: data[f.name] for f in fields(cls)})
