"""An engine on a virtual clock: outcomes come from a function, and no real time passes."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from dsat.values.outcome import Outcome
from dsat.values.trial import Trial


class SimulatedEngine:
    """Takes the outcomes of trials from a function.

    Args:
        outcome_of: returns the outcome of a trial, with `duration_s` in virtual seconds.
        num_slots: slots that trials may use at once.
        slots_per_trial: slots of every trial.

    Attributes:
        now_s: the virtual time, in seconds.
    """

    def __init__(
        self, outcome_of: Callable[[Trial], Outcome], *, num_slots: int, slots_per_trial: int = 1
    ) -> None:
        self.now_s = 0.0
        self._outcome_of = outcome_of
        self.num_slots = num_slots
        self._slots_per_trial = slots_per_trial
        self._running: dict[int, Outcome] = {}  # outcomes of running trials, by id
        self._ends: list[tuple[float, int]] = []

    def launch(self, trial: Trial) -> None:
        assert (len(self._running) + 1) * self._slots_per_trial <= self.num_slots
        outcome = self._running[trial.id] = self._outcome_of(trial)
        heapq.heappush(self._ends, (self.now_s + outcome.duration_s, trial.id))

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        deadline = self.now_s + timeout_s
        if not self._ends or self._ends[0][0] > deadline:
            self.now_s = deadline
            return []
        self.now_s = max(self.now_s, self._ends[0][0])
        ended = []
        while self._ends and self._ends[0][0] <= self.now_s:
            _, trial_id = heapq.heappop(self._ends)
            ended.append((trial_id, self._running.pop(trial_id)))
        return ended

    def close(self) -> None:
        self._running.clear()
        self._ends.clear()
