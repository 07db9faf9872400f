"""Reasons that held a GPU's clocks down during a measurement, as NVML reports them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
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
    """Looks at a device now and then, for reasons that would make its speed an accident.

    Args:
        accelerator: DeepSpeed's; where it is not an NVIDIA GPU, or nothing is told of that one,
            there never is a reason.
    """

    def __init__(self, accelerator: Any) -> None:
        self._library: Any = None
        self._handle = ctypes.c_void_p()
        self._next_s = 0.0
        self._seen = 0
        if accelerator.device_name() == "cuda":
            self._open()

    def look(self) -> None:
        """Asks, unless that was done a moment ago; waits for nothing on the device."""
        now = time.monotonic()
        if self._library is None or now < self._next_s:
            return
        self._next_s = now + _ASK_EVERY_S
        reasons = ctypes.c_ulonglong()
        if not self._ask(self._handle, ctypes.byref(reasons)):
            self._seen |= reasons.value

    def flags(self) -> list[float]:
        """Return 1 for each of `REASONS` that was seen, for a maximum over ranks."""
        return [float(bool(self._seen & bit)) for bit in REASONS]

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


def warning(flags: Sequence[float]) -> str | None:
    """For people, from the flags of all ranks; None if nothing was seen."""
    seen = [why for why, flag in zip(REASONS.values(), flags, strict=True) if flag]
    if not seen:
        return None
    return (
        f"a GPU ran below its clocks while it was measured ({', '.join(seen)}): training may be "
        "as slow for as long as that lasts"
    )
