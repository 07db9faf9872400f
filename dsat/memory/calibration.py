"""Correction of predicted memory by what real trials used.

A simulation does not see what the device's libraries take: the context and the communication
library (a constant, `context_bytes`), workspaces and the allocator's rest (a constant and a slope
per sample). So

    predicted = max over phases (simulated + fixed_bytes + bytes_per_sample * micro batch)
                + context_bytes
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsat.memory.estimate import PHASES
from dsat.values.outcome import MemoryUse

_NOISE = 0.01  # of measured bytes from trial to trial


@dataclass(frozen=True)
class Observation:
    """Memory of a trial, in the phase that used most.

    Attributes:
        used: bytes of all of a rank's tensors.
        excess: bytes of them beyond the prediction.
        context_bytes: what the process held besides its tensors, if known.
        is_exact: False if more may have been used.
    """

    micro_batch: int
    used: int
    excess: int
    context_bytes: int = 0
    is_exact: bool = True


def observe(
    predicted: Mapping[str, int], micro_batch: int, memory: MemoryUse
) -> Observation | None:
    """Compare a trial's own record with the bytes predicted by phase; None without a record."""
    used = {phase: memory.by_phase[phase] for phase in PHASES if phase in memory.by_phase}
    if memory.data_bytes:
        # Taken for the phase that was predicted to need most, since no phase is recorded.
        used = {max(PHASES, key=lambda phase: predicted[phase]): memory.data_bytes}
    elif not memory.is_exact:
        # A resident set shows what the script did before, reading its data for example.
        used.pop("init", None)
    if not used:
        return None
    phase = max(used, key=lambda phase: used[phase])
    excess = used[phase] - predicted[phase]
    if not memory.is_exact:
        excess = max(0, excess)
    return Observation(micro_batch, used[phase], excess, memory.context_bytes, memory.is_exact)


def asked_bytes(message: str) -> int:
    """Return the size of the block that an error says could not be allocated; 0 if it says none."""
    found = re.search(r"tried to allocate ([\d,.]+) ([KMG])iB", message, re.IGNORECASE)
    if found is None:
        return 0
    unit = {"K": 2**10, "M": 2**20, "G": 2**30}[found[2].upper()]
    return round(float(found[1].replace(",", "")) * unit)


@dataclass(frozen=True)
class Calibration:
    """Correction of a simulation.

    Attributes:
        fixed_bytes, bytes_per_sample: to every phase.
        context_bytes: to the largest.
    """

    fixed_bytes: float = 0.0
    bytes_per_sample: float = 0.0
    context_bytes: int = 0

    def added_bytes(self, micro_batch: float) -> float:
        """Bytes of each phase beyond its simulation."""
        return self.fixed_bytes + self.bytes_per_sample * micro_batch


def calibrate(
    observations: Sequence[Observation], usual_slope: float, least_slope: float = 0.0
) -> Calibration:
    """Fit the excess over the micro batch by least squares.

    The slope is shrunk towards zero, since small micro batches carry little information on it. One
    micro batch alone gives a constant. A slope is negative where the prediction was too large.

    Args:
        observations: of at least one trial.
        usual_slope: bytes per sample of the size that is to be expected.
        least_slope: the smallest that is possible.
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
