"""Reasons that held a GPU's clocks down during a measurement, as NVML reports them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_ASK_EVERY_S = 0.25  # an answer may take the driver a millisecond
# nvmlClocksEventReasons of nvml.h that make a measurement slower than the device is. A limit of
# power is not among them: large GPUs train at it all day, and so will the user's training.
REASONS = {
    0x08: "its hardware slowed it down",
    0x20: "it was too hot",
    0x40: "its hardware was too hot",
    0x80: "its power supply slowed it down",
}


class Throttling:
    """Watch of a device for reasons that slow it down.

    Args:
        accelerator: DeepSpeed's; there is never a reason where NVML does not know its device.
    """

    def __init__(self, accelerator: Any) -> None:
        self._library: Any = None
        self._handle = ctypes.c_void_p()
        self._next_s = 0.0
        self._seen = 0
        if accelerator.device_name() == "cuda":
            self._open()

    def look(self) -> None:
        """Ask for reasons, unless that was done a moment ago; does not wait for the device."""
        now = time.monotonic()
        if self._library is None or now < self._next_s:
            return
        self._next_s = now + _ASK_EVERY_S
        reasons = ctypes.c_ulonglong()
        if not self._ask(self._handle, ctypes.byref(reasons)):
            self._seen |= reasons.value

    def warning(self, maximum: Callable[[list[float]], list[float]]) -> list[str]:
        """Return a message for the user if a rank's device was slowed down; a collective call."""
        flags = maximum([float(bool(self._seen & bit)) for bit in REASONS])
        seen = [why for why, flag in zip(REASONS.values(), flags, strict=True) if flag]
        if not seen:
            return []
        return [
            f"a GPU ran below its clocks while it was measured ({', '.join(seen)}): training may "
            "be as slow for as long as that lasts"
        ]

    def _open(self) -> None:
        import torch

        try:
            library = ctypes.CDLL(_LIBRARY)
            ask = getattr(library, "nvmlDeviceGetCurrentClocksEventReasons", None)
            # Its name before driver 535.
            self._ask = ask or library.nvmlDeviceGetCurrentClocksThrottleReasons
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            is_open = not library.nvmlInit_v2()
            name = f"GPU-{uuid}".encode()
            if is_open and not library.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self._handle)):
                self._library = library
        except (OSError, AttributeError):  # no such library, function or attribute
            return
