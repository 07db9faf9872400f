"""Memory of a configuration before it has run: closed form, simulation, calibration."""

from dsat.memory.estimate import CLOSED_FORM, PHASES, SIMULATED, MemoryEstimate

__all__ = ["CLOSED_FORM", "PHASES", "SIMULATED", "MemoryEstimate"]
