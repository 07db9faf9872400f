"""Engines, which run trials: their interface, and the engine for one or several hosts."""

from __future__ import annotations

from typing import Protocol

from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import Trial

__all__ = ["Engine", "Metrics", "ModelProfile", "Outcome", "OutcomeKind", "Trial"]


class Engine(Protocol):
    """Runner of trials. It reports a failed trial as an `Outcome`, never as an exception."""

    @property
    def num_slots(self) -> int:
        """Number of devices that trials may use at once; it falls when a host is lost."""
        ...

    def launch(self, trial: Trial) -> None:
        """Start a trial, or queue it while too few devices are free, as after the loss of a host.

        Raises:
            EngineError: no trial can run.
        """
        ...

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        """Return ids and outcomes of newly ended trials; if there are none, wait up to `timeout_s`.

        Raises:
            EngineError: no trial runs, and none can start, because too few devices work.
        """
        ...

    def close(self) -> None:
        """End all running trials; `poll` then returns no outcomes."""
        ...
