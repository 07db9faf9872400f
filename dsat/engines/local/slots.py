"""Which slots are free, which are broken, and which trials may run side by side."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dsat.engines.local.machine import Machine, problems_with
from dsat.errors import EngineError
from dsat.values.outcome import Outcome, OutcomeKind

# What is worth a look at the device, and not the program's own mistake, as an illegal address is:
# https://docs.nvidia.com/deploy/xid-errors
_MAY_BE_BROKEN = (
    "busy or unavailable",
    "ECC error",
    "hardware stack error",
    "HIP error",
    "launch failure",
    "launch timed out",
    "no CUDA-capable device",
    "NVLink error",
    "unhandled cuda error",
    "unhandled system error",
    "unknown error",
    "unrecognized error code",
    "Xid",
    "was killed by SIGABRT",
    "was killed by SIGBUS",
)
_STUCK = "a rank waits for the device's driver and cannot be ended"


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

    def check(self, slots: Sequence[int], outcome: Outcome, *, stuck: bool) -> list[str]:
        """Takes the slots of a trial out for the rest of the run whose devices no longer work.

        Args:
            slots: of the trial, which has ended.
            outcome: of it, which says whether devices are worth a look.
            stuck: one of its ranks cannot be ended.

        Returns:
            A line for people on each slot that was taken out.
        """
        if self._machine.is_cpu or outcome.ok:
            return []
        if stuck:
            problems = dict.fromkeys(slots, _STUCK)
        elif outcome.kind is OutcomeKind.TIMEOUT or (
            outcome.kind is OutcomeKind.ERROR
            and any(sign in outcome.message + outcome.detail for sign in _MAY_BE_BROKEN)
        ):
            problems = problems_with(self._machine, slots)
        else:
            problems = {}
        self._broken.update(problems)
        self._free.difference_update(problems)
        return [
            f"{self._name(slot)} is not used any more: {problem}"
            for slot, problem in problems.items()
        ]

    def check_enough(self) -> None:
        """Raises EngineError if too few are left for a trial."""
        if self.usable >= self._needed:
            return
        reasons = "; ".join(
            f"{self._name(slot)}: {reason}" for slot, reason in sorted(self._broken.items())
        )
        raise EngineError(
            f"a trial needs {self._needed} slots, and {self.usable} of "
            f"{self._machine.num_slots} still work ({reasons}). Continue with --resume once they "
            "do."
        )

    def _name(self, slot: int) -> str:
        return f"{self._machine.accelerator} {self._machine.devices[slot]}"
