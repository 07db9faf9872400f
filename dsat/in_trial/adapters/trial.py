"""The trial that runs in this process, which decides what adapted functions do."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsat.in_trial.adapters.user_files import UserFiles


class Phase(enum.Enum):
    """The phases of a process; a value describes it for people."""

    INERT = "no trial runs in the process"
    PREPARING = "a trial's script prepares its training"
    MEASURING = "a trial's script has called `deepspeed.initialize`"
    TRAINING = "the training in full length (`--run-full-experiment`)"


IN_TRIALS = (Phase.PREPARING, Phase.MEASURING)
ALWAYS = (*IN_TRIALS, Phase.TRAINING)


class RunningTrial:
    """State of the process's trial.

    Attributes:
        phase: decides which adapters act.
        folder: of the trial; None without one, as on a cluster.
        files: what the trial must leave as it is; None in a full-length run.
        is_simulated: tensors may be fake, and none is written.
        before_engine: take the arguments of `deepspeed.initialize` by name, and may change them.
        after_engine: take the engine that it returns.
        make_engine: takes `deepspeed.initialize` and its arguments in its place, to simulate.
    """

    def __init__(self) -> None:
        self.phase = Phase.INERT
        self.folder: Path | None = None
        self.files: UserFiles | None = None
        self.is_simulated = False
        self.before_engine: list[Callable[[dict[str, Any]], None]] = []
        self.after_engine: list[Callable[[Any], None]] = []
        self.make_engine: Callable[..., Any] | None = None
        self._said: set[str] = set()

    def say(self, text: str) -> None:
        """Print a message to the trial's log, once."""
        if text not in self._said:
            self._said.add(text)
            print(f"dsat: {text}", file=sys.stderr)


TRIAL = RunningTrial()
