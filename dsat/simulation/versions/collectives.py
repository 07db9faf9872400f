"""Collectives of torch's fake process group that accept fake tensors.

Newer versions of torch have kernels for fake tensors. Versions 2.6 and 2.7 register these when a
module is imported, and older versions have none.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
import torch.distributed
from torch.utils._python_dispatch import _disable_current_modes

_TESTED = "c10d::broadcast_"
_MODULE = "torch.distributed._tools.fake_collectives"
# Operators of torch/csrc/distributed/c10d/Ops.cpp (2.5.1): those that return their first argument
# and the work, and those that return only the work.
_WITH_FIRST = (
    "broadcast_ allreduce_ allgather_ _allgather_base_ reduce_scatter_ _reduce_scatter_base_ "
    "scatter_ alltoall_"
).split()
_WORK_ALONE = (
    "reduce_ gather_ alltoall_base_ barrier send recv_ recv_any_source_ allreduce_coalesced_ "
    "allgather_coalesced_ allgather_into_tensor_coalesced_ reduce_scatter_tensor_coalesced_"
).split()
_registered: list[torch.library.Library] = []  # they own the kernels


def take_fake_tensors() -> None:
    """Let collectives accept fake tensors; the fake process group must be initialised."""
    if _registered or torch._C._dispatch_has_kernel_for_dispatch_key(_TESTED, "Meta"):
        return
    if importlib.util.find_spec(_MODULE) is not None:
        importlib.import_module(_MODULE)
        return
    group: Any = torch.distributed.group.WORLD
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        work = torch.ops.c10d.barrier(torch.zeros(1), group.boxed(), [], -1)
    library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    for name in _WITH_FIRST:
        library.impl(name, lambda first, *_: (first, work), "Meta")
    for name in _WORK_ALONE:
        library.impl(name, lambda *_: work, "Meta")
    _registered.append(library)
