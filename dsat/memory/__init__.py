"""Memory of a configuration before it has run: floor, closed form, simulation, calibration."""

from dsat.memory.estimate import CLOSED_FORM, PHASES, SIMULATED, MemoryEstimate
from dsat.memory.floor import (
    StateBytes,
    describe,
    describe_floors,
    largest_micro_batch,
    model_state,
    required_bytes,
)

__all__ = [
    "CLOSED_FORM",
    "PHASES",
    "SIMULATED",
    "MemoryEstimate",
    "StateBytes",
    "describe",
    "describe_floors",
    "largest_micro_batch",
    "model_state",
    "required_bytes",
]
