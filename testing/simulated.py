"""An engine on a virtual clock: outcomes come from a function, and no time passes."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial


class SimulatedEngine:
    """Runs trials by asking a function what would come of them.

    Args:
        outcome_of: the outcome of a trial, its `duration_s` in virtual seconds.
        num_slots: slots that trials may use at once.
        slots_per_trial: slots of every trial.

    Attributes:
        now_s: the virtual time, in seconds.
        busy_slot_s: slots x virtual seconds that ended trials used.
    """

    def __init__(
        self, outcome_of: Callable[[Trial], Outcome], *, num_slots: int, slots_per_trial: int = 1
    ) -> None:
        self.now_s = 0.0
        self.busy_slot_s = 0.0
        self._outcome_of = outcome_of
        self.num_slots = num_slots
        self._slots_per_trial = slots_per_trial
        self._running: dict[int, tuple[float, Outcome]] = {}  # when it began, what it will be
        self._ends: list[tuple[float, int]] = []

    def launch(self, trial: Trial) -> None:
        assert (len(self._running) + 1) * self._slots_per_trial <= self.num_slots
        outcome = self._outcome_of(trial)
        self._running[trial.id] = (self.now_s, outcome)
        heapq.heappush(self._ends, (self.now_s + outcome.duration_s, trial.id))

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        deadline = self.now_s + timeout_s
        while self._ends and self._ends[0][0] <= deadline:
            self.now_s = max(self.now_s, self._ends[0][0])
            ended = []
            while self._ends and self._ends[0][0] <= self.now_s:
                _, trial_id = heapq.heappop(self._ends)
                if trial_id in self._running:  # else it was canceled before
                    ended.append((trial_id, self._end(trial_id)))
            if ended:
                return ended
        self.now_s = deadline
        return []

    def cancel(self, trial_id: int) -> None:
        if trial_id in self._running:
            began_s, _ = self._running[trial_id]
            duration_s = self.now_s - began_s
            canceled = Outcome(OutcomeKind.CANCELED, duration_s=duration_s)
            self._running[trial_id] = (began_s, canceled)
            heapq.heappush(self._ends, (self.now_s, trial_id))

    def _end(self, trial_id: int) -> Outcome:
        _, outcome = self._running.pop(trial_id)
        self.busy_slot_s += outcome.duration_s * self._slots_per_trial
        return outcome

    def close(self) -> None:
        self._running.clear()
        self._ends.clear()
