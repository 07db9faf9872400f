"""State of this process's trial, on which adapters depend."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dsat.in_trial.rank_files import Progress


class Phase(enum.Enum):
    """The phases of a process; the values describe the phases to users."""

    INERT = "no trial runs in the process"
    PREPARING = "a trial's script prepares its training"
    MEASURING = "a trial's script has called `deepspeed.initialize`"
    BELOW_RANK = "a process that a rank of a trial started"
    ON_CLUSTER = "a trial in a container of a Determined cluster"
    TRAINING = "the training in full length (`--run-full-experiment`)"


IN_LOCAL_TRIALS = (Phase.PREPARING, Phase.MEASURING)
IN_LOCAL_PROCESSES = (*IN_LOCAL_TRIALS, Phase.BELOW_RANK)
IN_TRIALS = (*IN_LOCAL_TRIALS, Phase.ON_CLUSTER)
ALWAYS = (*IN_TRIALS, Phase.TRAINING)
_printed: set[str] = set()


class Exit(NamedTuple):
    """A call of `sys.exit`, which the script may have caught.

    Attributes:
        place: file and line of the script; empty in a launcher.
    """

    error: SystemExit
    place: str

    @property
    def has_failed(self) -> bool:
        return self.error.code not in (None, 0)


@dataclass
class Calls:
    """Functions that adapters call for a trial.

    Attributes:
        before_engine: functions that get, and may change, the arguments of
            `deepspeed.initialize` by name.
        make_engine: in simulations, called instead of `deepspeed.initialize`, with this function
            and its arguments.
        before_model: called once, before the script builds its first model.
        around_compilation: makes a context in which DeepSpeed compiles an operator.
    """

    before_engine: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)
    after_engine: list[Callable[[Any], None]] = field(default_factory=list)
    make_engine: Callable[..., Any] | None = None
    before_model: Callable[[], None] | None = None
    around_compilation: Callable[[], AbstractContextManager[None]] = nullcontext


class ScriptFlag(NamedTuple):
    """A flag of the script.

    Attributes:
        leads: whether the flag must precede all other arguments.
    """

    default: Any
    leads: bool


@dataclass
class RunningTrial:
    """State of the process's trial.

    Attributes:
        phase: decides which adapters act.
        folder: folder of the trial; None on a cluster.
        files: in a local trial, the `UserFiles` to protect; else None.
        is_simulated: whether tensors may be fake, so models are never written.
        config: the trial's DeepSpeed configuration; None keeps the script's own.
        rank: the `Rank` that this process is or may become; else None.
        on_uncaught: called with the exception that ends the process.
        exit: the last call of `sys.exit`; else None.
        progress: progress files, which rank 0 writes.
        trainer: `TrainerSettings` for the Trainer of transformers, and for accelerate's plugin.
        task: the `LocalTask` whose information determined's adapters return; else None.
        script_flags: flags of all parsers that have parsed arguments, by name.
        local_rank: default for the script's `--local_rank`; None keeps the script's own.
    """

    phase: Phase = Phase.INERT
    folder: Path | None = None
    files: Any = None
    is_simulated: bool = False
    calls: Calls = field(default_factory=Calls)
    config: Mapping[str, Any] | None = None
    rank: Any = None
    on_uncaught: Callable[[BaseException], None] | None = None
    exit: Exit | None = None
    meter: Any = None
    progress: Progress = field(default_factory=lambda: Progress(None))
    trainer: Any = None
    task: Any = None
    script_flags: dict[str, ScriptFlag] = field(default_factory=dict)
    local_rank: str | None = None

    @property
    def script_options(self) -> dict[str, Any]:
        """Defaults of `script_flags`."""
        return {name: flag.default for name, flag in self.script_flags.items()}

    def warn(self, text: str) -> None:
        """Add a warning to the outcome; without a meter, print it instead."""
        if self.meter is None:
            self.say(text)
        else:
            self.meter.warn(text)

    def say(self, text: str) -> None:
        if text not in _printed:
            _printed.add(text)
            print(f"dsat: {text}", file=sys.stderr)


TRIAL = RunningTrial()
