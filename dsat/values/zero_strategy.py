"""ZeRO strategies: a stage, and where optimizer states and parameters are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NONE, CPU, NVME = "none", "cpu", "nvme"


@dataclass(frozen=True)
class Strategy:
    """A ZeRO stage, and where optimizer states and parameters are stored.

    Attributes:
        offload_optimizer: `none`; `cpu` from stage 1 on; `nvme` in stage 3 only.
        offload_param: `none`, `cpu` or `nvme`; in stage 3 only.
    """

    stage: int
    offload_optimizer: str = NONE
    offload_param: str = NONE

    @property
    def offloads(self) -> bool:
        """Return whether optimizer states or parameters are stored on the host or on NVMe."""
        return self.offloaded > 0

    @property
    def name(self) -> str:
        """Short name, for trial names: `z2`, `z2_offload`, `z3_offload_param`, `z3_nvme_param`."""
        words = {CPU: "offload", NVME: "nvme"}
        parts = [f"z{self.stage}"]
        if self.offload_optimizer != NONE:
            parts.append(words[self.offload_optimizer])
        if self.offload_param != NONE:
            parts.append("param" if self.offload_param == self.offload_optimizer else "offparam")
        return "_".join(parts)

    @property
    def label(self) -> str:
        """Description for messages: `stage 3, optimizer on cpu, parameters on cpu`."""
        parts = [f"stage {self.stage}"]
        if self.offload_optimizer != NONE:
            parts.append(f"optimizer on {self.offload_optimizer}")
        if self.offload_param != NONE:
            parts.append(f"parameters on {self.offload_param}")
        return ", ".join(parts)

    @property
    def offloading(self) -> dict[str, str]:
        """Device of each offload section: `{"offload_param": "cpu", ...}`."""
        return {"offload_optimizer": self.offload_optimizer, "offload_param": self.offload_param}

    @property
    def offloaded(self) -> int:
        """Number of offloaded kinds of state: optimizer states, parameters, both or none."""
        return (self.offload_optimizer != NONE) + (self.offload_param != NONE)

    @property
    def burden(self) -> int:
        """Number of memory-saving measures that cost traffic, for ordering strategies."""
        on_nvme = NVME in (self.offload_optimizer, self.offload_param)
        return (self.stage == 3) + self.offloaded + on_nvme


# Practitioners try strategies in this order until one fits in memory.
USUAL_ORDER = (
    Strategy(0),
    Strategy(1),
    Strategy(2),
    Strategy(2, CPU),
    Strategy(3),
    Strategy(3, CPU),
    Strategy(3, CPU, CPU),
    Strategy(3, NVME, NVME),
)


def plain(*stages: int) -> tuple[Strategy, ...]:
    """Return strategies without offloading."""
    return tuple(Strategy(stage) for stage in stages)


def read_strategy(config: Mapping[str, Any], stage: int | None = None) -> Strategy:
    """Return the strategy of a DeepSpeed configuration, optionally with another stage.

    Offloading that the stage does not support is dropped. In stages 1 and 2, NVMe for optimizer
    states means the host, as in DeepSpeed (zero/stage_1_and_2.py:221, 0.19.8).
    """
    zero = config.get("zero_optimization") or {}
    if stage is None:
        stage = int(zero.get("stage", 0))
    optimizer = _device(zero, "offload_optimizer") if stage >= 1 else NONE
    return Strategy(
        stage,
        CPU if optimizer == NVME and stage < 3 else optimizer,
        _device(zero, "offload_param") if stage == 3 else NONE,
    )


def _device(zero: Mapping[str, Any], section: str) -> str:
    offload = zero.get(section)
    return str(offload.get("device") or NONE) if isinstance(offload, Mapping) else NONE
