"""Recorder of the kernels and collectives of a simulated step (`dsat.values.step_trace`).

FLOPs are torch's own count (`torch.utils.flop_counter`). Kernels compute only half of causal
attention, so its FLOPs are halved for kernels, but not in the model's FLOPs. Bytes are those that
an operator reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from dsat.simulation.operands import name_arguments, tensors_in
from dsat.values.step_trace import (
    ALL_GATHER,
    ALL_REDUCE,
    ATTENTION,
    BACKWARD,
    CONVOLUTION,
    HOST,
    MATMUL,
    MEMORY,
    PHASES,
    REDUCE_SCATTER,
    TRANSFER,
    Collectives,
    Kernels,
    StepTrace,
)

# Operators that launch no kernel, in addition to views.
_FREE = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided set_ resize_ _unsafe_view "
    "is_pinned record_stream _local_scalar_dense".split()
)
# Operators that write their first argument without reading it; and operators that read only as many
# elements of an argument as they return.
_OVERWRITES = frozenset("copy_ zero_ fill_".split())
_GATHERS = frozenset("embedding index_select gather index nll_loss_forward".split())
_COLLECTIVES = {  # by a part of their names
    "allgather": ALL_GATHER,
    "reduce_scatter": REDUCE_SCATTER,
    "allreduce": ALL_REDUCE,
}
_Kernel = tuple[str, bool, str, int, float]
_Group = tuple[str, bool, str, int, int, bool]


class OperatorTrace:
    """Counter of operators and collectives, by phase.

    Attributes:
        is_last: whether the last micro step of an optimizer step has begun.
        overlaps: whether the current stream is not the default one.
    """

    def __init__(self, device_type: str) -> None:
        self.is_last = True
        self.overlaps = False
        self._device_type = device_type
        self._model_flops = 0.0
        # Total bytes and number of calls.
        self._kernels: dict[_Kernel, list[float]] = {}
        self._collectives: dict[_Group, list[float]] = {}

    def record(
        self, phase: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Count an operator that ran in a phase; ignore phases that are not in `PHASES`."""
        if phase == "first gradient":
            phase = BACKWARD
        if phase not in PHASES:
            return
        if func.namespace == "c10d":
            self._record_collective(phase, func, args)
            return
        name = func._overloadpacket.__name__
        if func.is_view or name in _FREE or func.namespace == "prim":
            return
        results = list(tensors_in(out))
        if not (results or func._schema.is_mutable):
            return
        inputs = results if name in _GATHERS else list(tensors_in((args, kwargs)))
        if name in _OVERWRITES:
            inputs = inputs[1:]
        flops = self._flops(func, args, kwargs, out)
        kind = _kind(name) if flops else MEMORY
        self._add(phase, kind, flops, inputs, results)

    def record_compiled(self, phase: str, args: Sequence[Any]) -> None:
        """Count a call of an operator that DeepSpeed compiles, such as a fused Adam."""
        tensors = list(tensors_in(args))
        if tensors and phase in PHASES:
            self._add(phase, MEMORY, 0.0, tensors, tensors)  # reads and writes each

    def result(self, *, micro_batch: int, slots: int, parameters: int) -> StepTrace:
        return StepTrace(
            kernels=tuple(
                Kernels(*key, total / count, int(count))
                for key, (total, count) in self._kernels.items()
            ),
            collectives=tuple(
                Collectives(*key, total, int(count))
                for key, (total, count) in self._collectives.items()
            ),
            micro_batch=micro_batch,
            slots=slots,
            parameters=parameters,
            model_flops=self._model_flops,
        )

    def _add(
        self,
        phase: str,
        kind: str,
        flops: float,
        inputs: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
    ) -> None:
        num_bytes = _bytes((*inputs, *results))
        if not num_bytes:
            return
        places = {t.device.type for t in (*inputs, *results) if t.dim()}
        if places and self._device_type not in places:
            kind, flops = HOST, 0.0
        elif len(places) > 1 and "cpu" in places:
            kind, num_bytes = TRANSFER, _bytes(results)
        itemsize = results[0].element_size() if results else 4
        key = (phase, self.is_last, kind, itemsize, flops)
        total = self._kernels.setdefault(key, [0.0, 0])
        total[0] += num_bytes
        total[1] += 1

    def _flops(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
        formula = flop_registry.get(func._overloadpacket)
        if formula is None:
            return 0.0
        flops = float(formula(*args, **kwargs, out_val=out))
        # A backward pass enables gradients only to recompute, which adds no model FLOPs.
        if torch._C._current_graph_task_id() == -1 or not torch.is_grad_enabled():
            self._model_flops += flops if self.is_last else 0.0
        return flops / 2 if name_arguments(func, args, kwargs).get("is_causal") else flops

    def _record_collective(self, phase: str, func: Any, args: Sequence[Any]) -> None:
        ranks = _ranks(args)
        if len(ranks) < 2:
            return
        sizes = [_bytes(tensors_in(arg)) for arg in args]
        name = func._overloadpacket.__name__
        kinds = (kind for part, kind in _COLLECTIVES.items() if part in name)
        kind = next(kinds, name.strip("_"))
        stride = ranks[1] - ranks[0]
        key = (phase, self.is_last, kind, len(ranks), stride, self.overlaps)
        total = self._collectives.setdefault(key, [0.0, 0])
        total[0] += max(sizes)
        total[1] += 1


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    # `nbytes` is not defined for sparse tensors.
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _kind(name: str) -> str:
    if "attention" in name:
        return ATTENTION
    return CONVOLUTION if "conv" in name else MATMUL


def _ranks(args: Sequence[Any]) -> list[int]:
    """Return the ranks of the process group among a collective's arguments."""
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            group = torch.distributed.ProcessGroup.unbox(arg)
            return torch.distributed.get_process_group_ranks(group)
    return []
