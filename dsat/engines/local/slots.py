"""Which slots are free, which are broken, and which trials may run side by side."""

from __future__ import annotations

from collections.abc import Collection

from dsat.engines.local.machine import Machine
from dsat.errors import EngineError


class Slots:
    """The slots of a machine.

    Args:
        machine: what it has.
        needed: slots of a trial.
    """

    def __init__(self, machine: Machine, needed: int) -> None:
        self._machine = machine
        self._needed = needed
        self._free = set(range(machine.num_slots))
        self._broken: dict[int, str] = {}

    @property
    def usable(self) -> int:
        """How many are not broken."""
        return self._machine.num_slots - len(self._broken)

    def has(self, count: int) -> bool:
        return len(self._free) >= count

    def check_free(self, *, waiting: int) -> None:
        """Raises EngineError if there is no room for one more trial.

        After a device has failed, trials that were on their way may wait.

        Args:
            waiting: trials that will have slots first.
        """
        if not self._broken and not self.has(self._needed * (waiting + 1)):
            raise EngineError(f"a trial needs {self._needed} slots and {len(self._free)} are free")

    def take(self, count: int) -> list[int]:
        """The first free ones, of which there must be so many."""
        assert self.has(count)
        taken = sorted(self._free)[:count]
        self._free.difference_update(taken)
        return taken

    def give_back(self, slots: Collection[int]) -> None:
        self._free.update(set(slots) - self._broken.keys())

    def quarantine(self, slot: int, reason: str) -> None:
        """Takes a slot out for the rest of the run."""
        self._broken[slot] = reason
        self._free.discard(slot)

    def check_enough(self) -> None:
        """Raises EngineError if too few are left for a trial."""
        if self.usable >= self._needed:
            return
        reasons = "; ".join(
            f"{self._machine.accelerator} {self._machine.devices[slot]}: {reason}"
            for slot, reason in sorted(self._broken.items())
        )
        raise EngineError(
            f"a trial needs {self._needed} slots, and {self.usable} of "
            f"{self._machine.num_slots} still work ({reasons}). Continue with --resume once they "
            "do."
        )
