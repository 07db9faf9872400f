"""Corrects predicted memory by what real trials used.

A simulation does not see what the device's libraries take: the context and the communication
library (a constant, `context_bytes`), workspaces and the allocator's rest (a constant and a slope
per sample). So

    predicted = max over phases (simulated + fixed_bytes + bytes_per_sample * micro batch)
                + context_bytes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dsat.memory.estimate import PHASES, MemoryEstimate
from dsat.trial import MemoryUse

UNCALIBRATED_MARGIN, CALIBRATED_MARGIN = 1.05, 1.02


@dataclass(frozen=True)
class Observation:
    """What was predicted of a trial, and what it used.

    Attributes:
        used: peaks by phase; all of a rank's tensors.
        context_bytes: what the process held on the device besides its allocator, if known.
    """

    estimate: MemoryEstimate
    micro_batch: int
    used: Mapping[str, int]
    context_bytes: int = 0

    @classmethod
    def of(
        cls, estimate: MemoryEstimate, micro_batch: int, memory: MemoryUse, context_bytes: int = 0
    ) -> Observation | None:
        """From a trial's own record; None if its device has no allocator to ask."""
        used = dict(memory.allocated_bytes)
        return cls(estimate, micro_batch, used, context_bytes) if used else None

    @property
    def phase(self) -> str:
        """The phase that used most."""
        return max((p for p in PHASES if p in self.used), key=lambda p: self.used[p])

    @property
    def excess(self) -> int:
        """Bytes used beyond what was predicted, in that phase."""
        return self.used[self.phase] - int(getattr(self.estimate, self.phase))


@dataclass(frozen=True)
class Calibration:
    """What is added to a simulation.

    Attributes:
        fixed_bytes, bytes_per_sample: to every phase; the slope is never negative.
        context_bytes: to the largest.
        observations: trials it is drawn from.
    """

    fixed_bytes: float = 0.0
    bytes_per_sample: float = 0.0
    context_bytes: int = 0
    observations: int = 0

    @property
    def margin(self) -> float:
        """By which factor more than the prediction must be free."""
        return CALIBRATED_MARGIN if self.observations else UNCALIBRATED_MARGIN

    def predicted_bytes(self, estimate: MemoryEstimate, micro_batch: int) -> int:
        """Peak of one slot."""
        added = self.fixed_bytes + self.bytes_per_sample * micro_batch
        return round(estimate.peak + added + self.context_bytes)

    def fits(self, estimate: MemoryEstimate, micro_batch: int, slot_memory_bytes: int) -> bool:
        """Whether a trial may be launched."""
        return self.predicted_bytes(estimate, micro_batch) * self.margin <= slot_memory_bytes


def calibrate(observations: Sequence[Observation]) -> Calibration:
    """Least squares of the excess over the micro batch.

    One micro batch tells no slope: the excess is then taken for a constant. A negative slope would
    promise room that no workspace gives back, and is taken for none.
    """
    if not observations:
        return Calibration()
    count = len(observations)
    sizes = [o.micro_batch for o in observations]
    excesses = [o.excess for o in observations]
    mean_size, mean_excess = sum(sizes) / count, sum(excesses) / count
    spread = sum((size - mean_size) ** 2 for size in sizes)
    slope = 0.0
    if spread:
        pairs = zip(sizes, excesses, strict=True)
        slope = max(0.0, sum((m - mean_size) * (e - mean_excess) for m, e in pairs) / spread)
    return Calibration(
        fixed_bytes=mean_excess - slope * mean_size,
        bytes_per_sample=slope,
        context_bytes=max(o.context_bytes for o in observations),
        observations=count,
    )


def largest_micro_batch(
    estimate: Callable[[int], MemoryEstimate],
    calibration: Calibration,
    slot_memory_bytes: int,
    allowed: Sequence[int],
) -> int | None:
    """The largest allowed micro batch whose predicted memory fits, found by bisection.

    Args:
        estimate: memory of the configuration with a micro batch; asked about log2(allowed) times.
        calibration: what real trials have taught.
        slot_memory_bytes: what a slot may use.
        allowed: ascending.

    Returns:
        None if not even the smallest fits.
    """

    def fits(index: int) -> bool:
        size = allowed[index]
        return calibration.fits(estimate(size), size, slot_memory_bytes)

    if not allowed or not fits(0):
        return None
    # Doubling first: micro batches far beyond the memory are of no interest.
    low, high = 0, 1
    while high < len(allowed) and fits(high):
        low, high = high, 2 * high
    high = min(high, len(allowed))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return allowed[low]
