"""Engines, which run trials behind one interface that searches do not depend on."""

from __future__ import annotations

from typing import Protocol

from dsat.values.outcome import Outcome
from dsat.values.trial import Trial


class Engine(Protocol):
    """Runner of trials. An ordinary failure of a trial is an `Outcome`, never an exception."""

    @property
    def num_slots(self) -> int:
        """Devices that trials may use at once; fewer once some have failed."""
        ...

    def launch(self, trial: Trial) -> None:
        """Start a trial; devices are free, unless some have just failed.

        Raises:
            EngineError: nothing can run at all.
        """
        ...

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        """Return trials that ended since the last call, each once; wait for one if there is none.

        Raises:
            EngineError: none can end any more, because too few devices work.
        """
        ...

    def close(self) -> None:
        """End everything that runs, without further outcomes."""
        ...
