"""SuperOffload's process of its own, in this one: what it allocates, and what it hands back."""

from __future__ import annotations

import importlib
from collections import deque
from typing import Any

import torch

_UTILS = "deepspeed.runtime.superoffload.superoffload_utils"
_STAGE_3 = "deepspeed.runtime.superoffload.superoffload_stage3"


class CpuOptimizer:
    """`SuperOffloadCPUOptimizer`, whose steps are made as soon as they are asked for.

    Args:
        optimizer_config, cpuadam_cores_perc: of no effect on memory.
        max_grad_numel: elements of the buffer through which gradients come.
        pin_memory: whether it is pinned.
    """

    def __init__(
        self,
        optimizer_config: Any,
        cpuadam_cores_perc: float = 0.8,
        max_grad_numel: int = 1_000_000,
        pin_memory: bool = True,
    ) -> None:
        self._utils: Any = importlib.import_module(_UTILS)
        self._buffer = self._utils._allocate_worker_grad_buffer(max_grad_numel, pin_memory)
        self._moments: dict[int, list[torch.Tensor]] = {}
        self._done: deque[dict[str, Any]] = deque()

    def async_step(
        self,
        param_group_id: int,
        sub_group_id: int,
        fp32_param: torch.Tensor,
        fp32_grad: torch.Tensor,
        rollback: bool = False,
        lr: float | None = None,
    ) -> None:
        if sub_group_id not in self._moments:
            self._moments[sub_group_id] = [torch.zeros_like(fp32_param) for _ in range(2)]
        tasks, results, events = (
            getattr(self._utils, name) for name in ("TaskKeys", "ResultKeys", "EventTypes")
        )
        self._done.append(
            {
                tasks.PARAM_GROUP_ID: param_group_id,
                tasks.SUB_GROUP_ID: sub_group_id,
                results.UPDATED_PARAM: fp32_param,
                results.EVENT_TYPE: events.ROLLBACK if rollback else events.ADAM_STEP,
            }
        )

    def get_result(self, expected_event_type: str | None = None) -> dict[str, Any] | None:
        return self._done.popleft() if self._done else None

    def close(self) -> None: ...


def install() -> None:
    """Has SuperOffload take it, and any accelerator; nothing if this DeepSpeed has none."""
    try:
        stage_3: Any = importlib.import_module(_STAGE_3)
    except ImportError:
        return
    stage_3.SuperOffloadCPUOptimizer = CpuOptimizer
    stage_3._validate_superoffload_accelerator = lambda: None
