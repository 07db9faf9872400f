"""Predicted memory of a configuration, and the settings that it depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsat.command.ds_config import BATCH_KEYS
from dsat.values.codec import Recorded
from dsat.values.zero_strategy import CPU, NVME, read_strategy

PHASES = ("init", "forward", "backward", "step")
SIMULATED, CLOSED_FORM = "simulated", "closed form"
METHODS = {SIMULATED: "simulation", CLOSED_FORM: "formula"}  # in messages
# Most tokens of a micro batch whose values a simulation keeps. Without values, transformers assumes
# that samples may be packed, and makes a mask that training does not have.
MOST_TOKENS = 2**22

# Settings without effect on predicted memory: they make an engine write, count or print.
# DeepCompile (`compile`) runs only on CUDA, so memory is predicted as if it were off.
_WITHOUT_MEMORY = (
    *("autotuning", "comet", "compile", "csv_monitor", "dump_state", "flops_profiler"),
    *("steps_per_print", "tensorboard", "wall_clock_breakdown", "wandb"),
)
_MOST_MICRO_STEPS = 2  # all later micro steps of an optimizer step are like the second


def select_memory_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings on which memory depends.

    If two configurations give the same result, they need the same device memory at the same micro
    batch. More than two accumulation steps become two. NVMe becomes the host, because the device
    keeps the same state with both.
    """
    total, micro, gas = BATCH_KEYS
    left_out = (total, micro, *_WITHOUT_MEMORY)
    selection = {key: value for key, value in config.items() if key not in left_out}
    if isinstance(selection.get(gas), int):
        selection[gas] = min(_MOST_MICRO_STEPS, selection[gas])
    nvme_sections = [
        name for name, device in read_strategy(config, 3).offloading.items() if device == NVME
    ]
    if nvme_sections:
        zero = selection["zero_optimization"]
        host_sections = {name: {**zero[name], "device": CPU} for name in nvme_sections}
        selection["zero_optimization"] = {**zero, **host_sections}
    return selection


@dataclass(frozen=True)
class MemoryEstimate(Recorded):
    """Peaks of the rank that needs most, in bytes, without the context of the device.

    Attributes:
        init, forward, backward, step: peaks on the device by phase; all but `init` hold from the
            second optimizer step on. On a CPU, all tensors count: device and host are the same.
        host_pinned, host_pageable: peaks of the tensors on the host.
        source: `SIMULATED` or `CLOSED_FORM`.
        note: why the simulation failed; empty if it did not.
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
