"""A device that exists only for fake tensors, and DeepSpeed's view of it.

`dsat.simulation.versions.device_types` registers a backend for torch's private device type, so
autograd finds streams and guards for a device that no machine has. DeepSpeed uses its accelerator
object for everything else.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from dsat.simulation.storage_tracker import PINNED, StorageTracker
from dsat.simulation.versions import device_types

DEVICE_TYPE = "dsat"
# More than any model needs, so that DeepSpeed never acts as if memory were short.
_TOTAL_BYTES = 2**50


class Stream:
    """Stand-in for a stream or an event, whose work is always finished."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 1.0

    def record_event(self, event: Any = None) -> Stream:
        return Stream()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _maker(dtype: torch.dtype) -> property:
    def make(*sizes: Any) -> torch.Tensor:
        if sizes and isinstance(sizes[0], (list, tuple)):
            return torch.tensor(sizes[0], dtype=dtype, device=DEVICE_TYPE)
        return torch.empty(sizes, dtype=dtype, device=DEVICE_TYPE)

    return property(lambda self: make)


class FakeAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """DeepSpeed's accelerator for the fake device."""

    def __init__(self, tracker: StorageTracker) -> None:
        super().__init__()
        self._name = DEVICE_TYPE
        self._communication_backend_name = "fake"
        self._tracker = tracker
        self._stream = Stream()

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index: int | None = None) -> str:
        return DEVICE_TYPE if device_index is None else f"{DEVICE_TYPE}:{device_index}"

    def device(self, device_index: int | None = None) -> Any:
        return contextlib.nullcontext()

    def current_device(self) -> int:
        return 0

    def current_device_name(self) -> str:
        return f"{DEVICE_TYPE}:0"

    def device_count(self) -> int:
        return 1

    Stream = Event = property(lambda self: Stream)

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Note in the trace whether collectives run on another stream than the default one."""
        trace = self._tracker.trace
        if trace is None:
            yield
            return
        previous, trace.overlaps = trace.overlaps, stream is not self._stream
        try:
            yield
        finally:
            trace.overlaps = previous

    def current_stream(self, device_index: int | None = None) -> Any:
        return self._stream

    def default_stream(self, device_index: int | None = None) -> Any:
        return self._stream

    def available_memory(self, device_index: int | None = None) -> int:
        return _TOTAL_BYTES

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == DEVICE_TYPE

    def pin_memory(
        self,
        tensor: torch.Tensor,
        make_copy: bool = True,
        match_shape: bool = True,
        align_bytes: int = 1,  # up to 0.18; no effect on powers of two
    ) -> torch.Tensor:
        return self._make_pinned(tensor.shape if match_shape else (tensor.numel(),), tensor.dtype)

    def _pin_fresh(self, template: torch.Tensor, shape: Any) -> torch.Tensor:
        return self._make_pinned(shape, template.dtype)

    def _make_pinned(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        with self._tracker.placing(PINNED):
            return torch.empty(shape, dtype=dtype, device="cpu")

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._tracker.is_pinned(tensor)

    def is_fp16_supported(self) -> bool:
        return True

    FloatTensor = _maker(torch.float32)
    ByteTensor = _maker(torch.uint8)
    IntTensor = _maker(torch.int32)


def register() -> None:
    """Register the device in torch, for the rest of the process."""
    backend = types.SimpleNamespace(
        is_initialized=lambda: True,
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        device=lambda *_: contextlib.nullcontext(),
        synchronize=lambda *_: None,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda device=0: torch.zeros(8, dtype=torch.uint8),
        set_rng_state=lambda state, device=0: None,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        _is_in_bad_fork=lambda: False,
    )
    device_types.register(DEVICE_TYPE, backend)


def install(accelerator: CPU_Accelerator) -> None:
    """Make DeepSpeed use this accelerator object, for the rest of the process."""
    from deepspeed.accelerator import real_accelerator

    real_accelerator.ds_accelerator = accelerator
