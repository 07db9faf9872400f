"""Predicted memory of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsat.command.ds_config import BATCH_KEYS
from dsat.values.codec import Recorded
from dsat.values.zero_strategy import CPU, NVME, of_config

PHASES = ("init", "forward", "backward", "step")
SIMULATED, CLOSED_FORM = "simulated", "closed form"
# Tokens of a simulated micro batch of which the values are known. Of more, transformers cannot tell
# that they are not packed samples, and makes a mask that training does not have.
MOST_TOKENS = 2**22

# Settings that make an engine write, count or print. DeepCompile runs on CUDA alone: a
# configuration with it is predicted as one without it.
_WITHOUT_MEMORY = (
    *("autotuning", "comet", "compile", "csv_monitor", "dump_state", "flops_profiler"),
    *("steps_per_print", "tensorboard", "wall_clock_breakdown", "wandb"),
)
_MOST_MICRO_STEPS = 2  # all later ones of an optimizer step are like the second


def as_simulated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a DeepSpeed configuration that memory depends on, without batch sizes.

    Configurations with the same one need the same memory at the same micro batch. A device needs as
    much if state is on NVMe as if it is on the host.
    """
    total, micro, gas = BATCH_KEYS
    left_out = (total, micro, *_WITHOUT_MEMORY)
    kept = {key: value for key, value in config.items() if key not in left_out}
    if isinstance(kept.get(gas), int):
        kept[gas] = min(_MOST_MICRO_STEPS, kept[gas])
    on_nvme = [name for name, device in of_config(config).offloading.items() if device == NVME]
    if on_nvme:
        zero = kept["zero_optimization"]
        on_host = {name: {**zero[name], "device": CPU} for name in on_nvme}
        kept["zero_optimization"] = {**zero, **on_host}
    return kept


@dataclass(frozen=True)
class MemoryEstimate(Recorded):
    """Peaks of one rank in bytes, without what the device's libraries take for themselves.

    Attributes:
        init, forward, backward, step: on the device, by phase, from the second optimizer step on.
            Of a rank on a CPU all of its tensors, since device and host are the same memory.
        host_pinned, host_pageable: largest amounts of host memory that tensors held.
        source: which way it was found, `SIMULATED` or `CLOSED_FORM`.
        note: why it was not simulated.
    """

    init: int
    forward: int
    backward: int
    step: int
    host_pinned: int = 0
    host_pageable: int = 0
    source: str = CLOSED_FORM
    note: str = ""

    @property
    def peak(self) -> int:
        return max(self.init, self.forward, self.backward, self.step)

    @property
    def host(self) -> int:
        return self.host_pinned + self.host_pageable
