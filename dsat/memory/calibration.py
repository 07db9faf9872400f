"""Corrects predicted memory by what real trials used.

A simulation does not see what the device's libraries take: the context and the communication
library (a constant, `context_bytes`), workspaces and the allocator's rest (a constant and a slope
per sample). So

    predicted = max over phases (simulated + fixed_bytes + bytes_per_sample * micro batch)
                + context_bytes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsat.memory.estimate import PHASES, MemoryEstimate
from dsat.values.outcome import MemoryUse

_NOISE = 0.01  # of measured bytes from trial to trial


@dataclass(frozen=True)
class Observation:
    """Predicted and used memory of a trial.

    Attributes:
        used: peaks by phase; all of a rank's tensors.
        context_bytes: what the process held besides its tensors, if known.
        at_least: more may have been used.
    """

    estimate: MemoryEstimate
    micro_batch: int
    used: Mapping[str, int]
    context_bytes: int = 0
    at_least: bool = False

    @classmethod
    def of(
        cls, estimate: MemoryEstimate, micro_batch: int, memory: MemoryUse
    ) -> Observation | None:
        """From a trial's own record; None if there is none."""
        used = {phase: memory.by_phase[phase] for phase in PHASES if phase in memory.by_phase}
        if memory.data_bytes:
            # Of whatever phase that is, it should be the one that was predicted to need most.
            used = {max(PHASES, key=lambda phase: getattr(estimate, phase)): memory.data_bytes}
        elif not memory.is_exact:
            # A resident set shows what the script did before, reading its data for example.
            used.pop("init", None)
        if not used:
            return None
        return cls(estimate, micro_batch, used, memory.context_bytes, not memory.is_exact)

    @property
    def phase(self) -> str:
        """The phase that used most."""
        return max((p for p in PHASES if p in self.used), key=lambda p: self.used[p])

    @property
    def excess(self) -> int:
        """Bytes used beyond what was predicted, in that phase."""
        more = self.used[self.phase] - int(getattr(self.estimate, self.phase))
        return max(0, more) if self.at_least else more


@dataclass(frozen=True)
class Calibration:
    """Correction of a simulation.

    Attributes:
        fixed_bytes, bytes_per_sample: to every phase; the slope is never negative.
        context_bytes: to the largest.
    """

    fixed_bytes: float = 0.0
    bytes_per_sample: float = 0.0
    context_bytes: int = 0

    def added_bytes(self, micro_batch: float) -> float:
        """Bytes of each phase beyond its simulation."""
        return self.fixed_bytes + self.bytes_per_sample * micro_batch


def calibrate(observations: Sequence[Observation], usual_slope: float) -> Calibration:
    """Least squares of the excess over the micro batch.

    One micro batch tells no slope: the excess is then taken for a constant. Small ones tell little
    of it, so the slope is drawn to none. A negative slope would promise room that no workspace
    gives back, and is taken for none.

    Args:
        observations: of trials.
        usual_slope: bytes per sample of the size that is to be expected.
    """
    if not observations:
        return Calibration()
    count = len(observations)
    sizes = [o.micro_batch for o in observations]
    excesses = [o.excess for o in observations]
    mean_size, mean_excess = sum(sizes) / count, sum(excesses) / count
    noise = _NOISE * max(o.used[o.phase] for o in observations)
    spread = sum((size - mean_size) ** 2 for size in sizes)
    slope = 0.0
    if spread and usual_slope > 0:
        pairs = zip(sizes, excesses, strict=True)
        common = sum((m - mean_size) * (e - mean_excess) for m, e in pairs)
        slope = max(0.0, common / (spread + (noise / usual_slope) ** 2))
    return Calibration(
        fixed_bytes=mean_excess - slope * mean_size,
        bytes_per_sample=slope,
        context_bytes=max(o.context_bytes for o in observations),
    )
