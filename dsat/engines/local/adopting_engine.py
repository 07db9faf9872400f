"""Engine whose first trial runs before the engine is there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsat.engines.local.engine import LocalEngine
from dsat.engines.local.first_run import FirstRun
from dsat.engines.local.retries import lost_its_port, refuses_segments
from dsat.in_trial.rank_files import CONFIG_FILE
from dsat.values.files import write_atomically
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial


class AdoptingEngine:
    """An engine whose first trial runs already; it hands all others to an engine made then.

    Args:
        first: the run of the user's command.
        make: makes the engine of the other trials, whose imports would disturb the first one.
        trials: where trials have their folders.
        num_slots: of the machine.
        config_of: returns the whole configuration of a trial's overrides.
    """

    def __init__(
        self,
        first: FirstRun,
        make: Callable[[], LocalEngine],
        *,
        trials: Path,
        num_slots: int,
        config_of: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    ) -> None:
        self._config_of = config_of
        self._first: FirstRun | None = first  # until it has ended
        self._make = make
        self._trials = trials
        self._num_slots = num_slots
        self._adopted: Trial | None = None
        self._made: LocalEngine | None = None

    @property
    def num_slots(self) -> int:
        return self._num_slots if self._made is None else self._made.num_slots

    @property
    def engine(self) -> LocalEngine:
        """The engine of the other trials; the first run ends before it is made."""
        if self._made is None:
            if self._first is not None:
                self._first.close()
                self._first = None
            self._made = self._make()
            if self._adopted is not None:
                self._made.import_modules_of(self._trials / self._adopted.name)
        return self._made

    def launch(self, trial: Trial) -> None:
        if self._first is None or self._adopted is not None or not self._first.is_of(trial):
            self.engine.launch(trial)
            return
        self._adopted = trial
        folder = self._trials / trial.name
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.symlink_to(self._first.folder)
        text = json.dumps(self._config_of(trial.overrides), indent=2) + "\n"
        write_atomically(folder / CONFIG_FILE, text)

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        if self._adopted is None or self._first is None:
            return self.engine.poll(timeout_s)
        outcome = self._first.poll(timeout_s)
        if outcome is None:
            return []
        folder = self._trials / self._adopted.name
        if refuses_segments(outcome) or lost_its_port(outcome):
            folder.unlink()
            self.engine.launch(self._adopted)  # without segments when it fails again
            return []
        self._first.close(keep_files=True)
        self._first.move_to(folder)
        self._first = None
        return [(self._adopted.id, outcome)]

    def cancel(self, trial_id: int) -> None:
        if self._first is not None and self._adopted is not None:
            self._first.cancel()
        elif self._made is not None:
            self._made.cancel(trial_id)

    def close(self) -> None:
        if self._first is not None and self._adopted is not None:  # its files go as well
            (self._trials / self._adopted.name).unlink(missing_ok=True)
        for each in (self._first, self._made):
            if each is not None:
                each.close()
