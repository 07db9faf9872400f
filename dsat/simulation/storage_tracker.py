"""Storages of fake tensors: bytes by kind of memory, and their peaks by phase."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsat.memory.closed_form import BIASED_WORKSPACE_BYTES
from dsat.memory.host import pinned_bytes
from dsat.simulation.attention import workspace_bytes
from dsat.simulation.operands import tensors_in
from dsat.simulation.operator_trace import OperatorTrace

aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default
DEVICE, HOST, PINNED, ALL = "device", "host", "pinned", "all"
MATMUL = "matmul"  # a further name besides the phases: for peaks during products of matrices
_MATMULS = frozenset((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default))
_CUDA_BLOCK_BYTES = 512  # kMinBlockSize, c10/core/AllocatorConfig.h


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the storages of fake tensors, operator by operator.

    Parameters that a script built on the host are simulated on the device from the beginning,
    because a fake tensor cannot change its device. Until DeepSpeed moves them, they are "parked":
    they count as memory of the host.

    Attributes:
        workspace_bytes: size of cuBLAS's workspace. It counts during a product of matrices or, if
            torch keeps it, from the first product on.
        trace: recorder of operators; None if nothing is recorded.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._place: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._bytes: dict[str, int] = dict.fromkeys((DEVICE, HOST, PINNED, ALL), 0)
        self._peaks: dict[tuple[str, str], int] = {}
        self._phase = "script"
        self._placement: str | None = None
        self.workspace_bytes = 0
        self._has_multiplied = False
        self.trace: OperatorTrace | None = None

    # -- phases

    def begin(self, phase: str) -> None:
        """Begin or continue a phase."""
        self._phase = phase
        for kind in self._bytes:
            self._note(kind)

    def peak(self, phase: str, kind: str = DEVICE) -> int:
        """Return the peak of a kind of memory in a phase, in bytes."""
        return self._peaks.get((phase, kind), 0)

    def current(self, kind: str = DEVICE) -> int:
        """Return the present size of a kind of memory, in bytes."""
        return self._bytes[kind]

    # -- storages

    def see(self, tensor: FakeTensor, place: str | None = None) -> None:
        """Count the storage of a fake tensor, unless it is empty, counted already or on `meta`."""
        storage = tensor.untyped_storage()
        size, device = storage.nbytes(), tensor.fake_device.type
        if storage in self._place or size == 0 or device == "meta":
            return
        place = place or self._placement
        if place is None:
            place = DEVICE if device == self._device_type else HOST
        if place == PINNED:
            size = pinned_bytes(size)
        elif device == self._device_type != "cpu":
            size = -(-size // _CUDA_BLOCK_BYTES) * _CUDA_BLOCK_BYTES
        self._place[storage] = place
        self._add(place, size)
        weakref.finalize(storage, self._add, place, -size)

    def _add(self, place: str, size: int) -> None:
        for kind in (place, ALL):
            self._bytes[kind] += size
            self._note(kind)

    def _note(self, kind: str, phase: str = "") -> None:
        key = phase or self._phase, kind
        self._peaks[key] = max(self._peaks.get(key, 0), self._bytes[kind])

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._place.get(tensor.untyped_storage()) == PINNED

    @contextlib.contextmanager
    def placing(self, place: str) -> Iterator[None]:
        """Count storages that are allocated in this context as the kind of memory `place`."""
        self._placement, previous = place, self._placement
        try:
            yield
        finally:
            self._placement = previous

    def is_parked(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor of the device counts as memory of the host."""
        on_device = tensor.device.type == self._device_type
        return on_device and self._place.get(tensor.untyped_storage()) == HOST

    # -- operators

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, so that torch calls the mode directly: nothing is compiled here."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE_OF and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all calls, otherwise passed on by every mode
        kwargs = kwargs or {}
        if self._phase == "forward" and torch._C._current_graph_task_id() != -1:
            self.begin("backward")
        if func is aten.is_pinned.default:
            return self.is_pinned(args[0])
        out = func(*args, **kwargs)
        if self.trace is not None:
            self.trace.record(self._phase, func, args, kwargs, out)
        fakes = [t for t in tensors_in(out) if isinstance(t, FakeTensor)]
        place = None
        if fakes and func is aten._to_copy.default and self.is_parked(args[0]):
            place = HOST
        for tensor in fakes:
            self.see(tensor, place)
        if workspace := workspace_bytes(func, args):
            self._take_briefly(workspace)
        if func in _MATMULS:
            for kind in self._bytes:
                self._note(kind, MATMUL)
            self._take_workspace(func is aten.addmm.default and args[0].dim() == 1)
        return out

    def _take_workspace(self, adds_bias: bool) -> None:
        if not keeps_workspace():
            workspace = min(self.workspace_bytes, BIASED_WORKSPACE_BYTES)
            self._take_briefly(workspace if adds_bias else self.workspace_bytes)
        elif not self._has_multiplied:
            self._add(DEVICE, self.workspace_bytes)
        self._has_multiplied = True

    def ran_compiled(self, args: Sequence[Any]) -> None:
        """Record a call of an operator that DeepSpeed compiles; here, a stand-in runs instead."""
        if self.trace is not None:
            self.trace.record_compiled(self._phase, args)

    def _take_briefly(self, size: int) -> None:
        self._add(DEVICE, size)
        self._add(DEVICE, -size)


@functools.cache  # called for each product
def keeps_workspace() -> bool:
    """Return whether torch keeps the workspace of cuBLAS after the first product.

    torch below 2.15 does. From 2.15 on, it does with TORCH_CUBLAS_WORKSPACE_CACHE=1
    (ATen/cuda/CUDAContextLight.h).
    """
    return torch.__version__ < "2.15" or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
