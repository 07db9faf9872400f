"""Correction of predicted memory by the memory that trials used.

A simulation does not count the memory of the device's libraries. The context and the communication
library take a constant (`context_bytes`). Workspaces and the allocator's overhead take another
constant, and more for each sample. So

    predicted = max over phases (simulated + fixed_bytes + bytes_per_sample * micro batch)
                + context_bytes (if the memory limit includes the context)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsat.memory.estimate import PHASES
from dsat.values.outcome import MemoryUse

_NOISE = 0.01  # relative variation of measured bytes between trials


@dataclass(frozen=True)
class Observation:
    """Memory of a trial in the phase that used most.

    Attributes:
        used: bytes of a rank's tensors in this phase.
        excess: `used` minus the prediction; 0 instead of a negative number unless `is_exact`.
        context_bytes: memory of the process besides its tensors; 0 if unknown.
        is_exact: False if `used` is only a lower bound.
    """

    micro_batch: int
    used: int
    excess: int
    context_bytes: int = 0
    is_exact: bool = True


def observe(
    predicted: Mapping[str, int], micro_batch: int, memory: MemoryUse
) -> Observation | None:
    """Compare a trial's memory with the predicted bytes of each phase; None if not measured."""
    peaks = {phase: memory.by_phase[phase] for phase in PHASES if phase in memory.by_phase}
    if memory.data_bytes:
        # Only one peak over all phases is recorded: assign it to the phase predicted to need most.
        peaks = {max(PHASES, key=lambda phase: predicted[phase]): memory.data_bytes}
    elif not memory.is_exact:
        # The resident set of this phase includes earlier work, such as reading the data.
        peaks.pop("init", None)
    if not peaks:
        return None
    phase = max(peaks, key=lambda phase: peaks[phase])
    excess = peaks[phase] - predicted[phase]
    if not memory.is_exact:
        excess = max(0, excess)
    return Observation(micro_batch, peaks[phase], excess, memory.context_bytes, memory.is_exact)


def asked_bytes(message: str) -> int:
    """Return the bytes of the failed allocation that an error message names; 0 if it names none."""
    match = re.search(r"tried to allocate ([\d,.]+) ([KMG])iB", message, re.IGNORECASE)
    if match is None:
        return 0
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}[match[2].upper()]
    return round(float(match[1].replace(",", "")) * unit)


@dataclass(frozen=True)
class Calibration:
    """Correction of a prediction.

    Attributes:
        fixed_bytes, bytes_per_sample: bytes to add to every phase; may be negative.
        context_bytes: bytes to add to the largest phase.
    """

    fixed_bytes: float = 0.0
    bytes_per_sample: float = 0.0
    context_bytes: int = 0

    def added_bytes(self, micro_batch: float) -> float:
        """Return the bytes to add to each phase at a micro batch."""
        return self.fixed_bytes + self.bytes_per_sample * micro_batch


def calibrate(
    observations: Sequence[Observation], usual_slope: float, least_slope: float = 0.0
) -> Calibration:
    """Fit the excess as a linear function of the micro batch, by least squares.

    The slope is shrunk towards 0, because small micro batches show little of it. If all
    observations have the same micro batch, it is 0.

    Args:
        observations: observations of at least one trial.
        usual_slope: expected size of the slope, in bytes per sample; 0 makes the slope 0.
        least_slope: lower bound of the slope, in bytes per sample; negative if predictions may be
            too large.
    """
    count = len(observations)
    sizes = [o.micro_batch for o in observations]
    excesses = [o.excess for o in observations]
    mean_size, mean_excess = sum(sizes) / count, sum(excesses) / count
    noise = _NOISE * max(o.used for o in observations)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    slope = 0.0
    if spread and usual_slope > 0:
        pairs = zip(sizes, excesses, strict=True)
        common = sum((m - mean_size) * (e - mean_excess) for m, e in pairs)
        slope = max(least_slope, common / (spread + (noise / usual_slope) ** 2))
    return Calibration(
        fixed_bytes=mean_excess - slope * mean_size,
        bytes_per_sample=slope,
        context_bytes=max(o.context_bytes for o in observations),
    )
