"""Retries of trials that failed for no fault of their configuration."""

from __future__ import annotations

import enum
import re
from dataclasses import replace

from dsat.engines.local.running import Running
from dsat.values.outcome import Outcome, OutcomeKind

FRESH_PROCESSES_ONLY = (
    "the script runs in fresh processes only, as with --cold: every trial starts slowly"
)
COMMAND_AGAIN = (
    "each trial runs your command again: its ranks cannot be started by themselves (they failed "
    "before deepspeed.initialize, where your command did not)"
)
NO_SEGMENTS = (
    "your script's memory pools refuse expandable segments of torch's allocator, which trials use "
    "by default: they run without, as with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
)
BESIDE_OTHERS = "it failed while other trials ran, and was run again alone"
_NO_FORK_CUDA = (
    "Cannot re-initialize CUDA in forked subprocess",
    "CUDA error: initialization error",
    "CUDA driver initialization failed",
    "CUDA unknown error",
)
# How a process ends whose threads or locks did not survive the fork.
_DIED_OF_FORK = ("was killed by SIGABRT", "was killed by SIGSEGV")
# Errors before `deepspeed.initialize` that no fork explains: the script's own.
_NEVER_OF_FORK = tuple(
    """
    sys.exit SyntaxError IndentationError ImportError ModuleNotFoundError NameError AttributeError
    TypeError KeyError IndexError FileNotFoundError NotADirectoryError IsADirectoryError
    """.split()
)
_ENDED_FROM_OUTSIDE = "was killed by SIGTERM"
_MOST_STARTS = 3
# What vLLM's sleep mode (CuMemAllocator) and torch's memory pools raise.
_REFUSED_SEGMENTS = re.compile(r"(Error|Exception): .*expandable.?segment", re.IGNORECASE)
_ADDRESS_IN_USE = ("EADDRINUSE", "ddress already in use")


class Again(enum.Enum):
    """Ways to run a failed trial again."""

    FRESH = "in fresh processes"
    AS_BEFORE = "as before"
    ALONE = "alone"
    ELSEWHERE = "on other hosts"
    BY_COMMAND = "by the user's command"
    NO_SEGMENTS = "without expandable segments"


class Retries:
    """Decides which trials are run again, and with that whether ranks are forked at all.

    Args:
        cold: ranks are fresh processes, whatever happens.
        has_command: there is a command that came to its training by itself when it was run.

    Attributes:
        cold: whether ranks are to be fresh processes now.
    """

    def __init__(self, *, cold: bool, has_command: bool = False) -> None:
        self.cold = cold
        self._has_command = has_command
        self._took_command = False
        self._took_segments: set[int] = set()  # trials that refused them
        self._fell_back = False
        self._aborts_by_itself = False
        self._proven = False  # a trial that dsat started has trained
        self._cannot_fork = ""
        self._starts: dict[int, int] = {}  # by trial, where one did not do
        self._moved: set[int] = set()

    def hear_of_warm_up(self, cannot_fork: str) -> None:
        """Takes in why ranks cannot be forked, or that they can: empty."""
        self._cannot_fork = cannot_fork
        self.cold = bool(cannot_fork)

    def decide(self, running: Running, outcome: Outcome, *, broken: bool) -> Again | None:
        """Return how a trial is to be run again; None if its outcome stands.

        Args:
            running: the trial, which has ended.
            outcome: of it.
            broken: one of its devices no longer works.
        """
        if running.lost or _ENDED_FROM_OUTSIDE in outcome.message:
            return self._elsewhere(running, outcome)
        if refuses_segments(outcome) and running.trial.id not in self._took_segments:
            self._took_segments.add(running.trial.id)
            return Again.NO_SEGMENTS
        if self._may_be_the_fork(running, outcome) and not broken:
            self.cold = self._fell_back = True
            return Again.FRESH
        if self._may_be_the_start(running, outcome) and not broken:
            self.cold, self._fell_back, self._took_command = True, False, True
            return Again.BY_COMMAND
        if self._deserves_another_start(running, outcome, broken=broken):
            return Again.AS_BEFORE
        return Again.ALONE if _may_be_the_others(running, outcome) else None

    def settle(self, running: Running, outcome: Outcome) -> Outcome:
        """The outcome that stands, with what people should know of how it came about."""
        warnings = list(outcome.warnings)
        if running.again_alone:
            warnings.append(BESIDE_OTHERS)
        if running.trial.id in self._took_segments and outcome.ok:
            warnings.append(NO_SEGMENTS)
        is_first = self._is_first(running)
        self._proven |= outcome.ok
        if running.cold and any(part in outcome.message for part in _DIED_OF_FORK):
            # Aborted in fresh processes too: that was not the fork.
            self._aborts_by_itself = True
            self._forgive(fell_back=self._fell_back and not is_first)
        if is_first:
            self._forgive(fell_back=self._fell_back and not outcome.ok)
            if self._took_command:
                warnings.append(COMMAND_AGAIN)
            elif self._fell_back or self._cannot_fork:
                reason = f" ({self._cannot_fork})" if self._cannot_fork else ""
                warnings.append(FRESH_PROCESSES_ONLY + reason)
        return replace(outcome, warnings=tuple(warnings))

    def _forgive(self, *, fell_back: bool) -> None:
        """Forks again, if fresh processes were tried for nothing."""
        if fell_back:
            self.cold = self._fell_back = False

    def _may_be_the_fork(self, running: Running, outcome: Outcome) -> bool:
        """Return whether a fresh process might run a trial that failed.

        Any error of the very first trial is tried again so, because some libraries cannot be
        forked; later on, only what CUDA says about forks.
        """
        if running.cold or outcome.kind is not OutcomeKind.ERROR:
            return False
        signs = _NO_FORK_CUDA if self._aborts_by_itself else (*_NO_FORK_CUDA, *_DIED_OF_FORK)
        no_fork = any(part in outcome.message for part in signs)
        if outcome.before_engine and any(name in outcome.message for name in _NEVER_OF_FORK):
            return no_fork
        return (
            no_fork or running.trial.profiles or (outcome.before_engine and self._is_first(running))
        )

    def _may_be_the_start(self, running: Running, outcome: Outcome) -> bool:
        """Return whether the ranks failed where the user's command did not."""
        ended = running.canceled or running.timed_out or running.by_command
        failed = outcome.kind is OutcomeKind.ERROR and outcome.before_engine
        return self._has_command and self._is_first(running) and failed and not ended

    def _is_first(self, running: Running) -> bool:
        """Decide whether nothing has shown yet that ranks which dsat starts can train."""
        return running.trial.profiles or (self._has_command and not self._proven)

    def _elsewhere(self, running: Running, outcome: Outcome) -> Again | None:
        """Decide about a trial whose host was lost: once elsewhere, not a third time.

        The trial itself may have killed the host.
        """
        moved = running.trial.id in self._moved
        self._moved.add(running.trial.id)
        stays = outcome.ok or running.canceled or running.timed_out or moved
        return None if stays else Again.ELSEWHERE

    def _deserves_another_start(self, running: Running, outcome: Outcome, *, broken: bool) -> bool:
        """Return whether a trial failed because of its surroundings.

        The device is broken, or another program took a port between its choice and its use, which
        is tried again once.
        """
        lost = outcome.kind is OutcomeKind.ERROR and any(
            part in outcome.message + outcome.detail for part in _ADDRESS_IN_USE
        )
        starts = self._starts[running.trial.id] = self._starts.get(running.trial.id, 1) + 1
        if broken:  # by its own doing perhaps, and there are fewer slots each time
            return not running.canceled and starts <= _MOST_STARTS
        return lost and starts <= 2


def refuses_segments(outcome: Outcome) -> bool:
    """Return whether a trial failed because of expandable segments of torch's allocator."""
    said = f"{outcome.message}\n{outcome.detail}"
    return outcome.kind is OutcomeKind.ERROR and _REFUSED_SEGMENTS.search(said) is not None


def _may_be_the_others(running: Running, outcome: Outcome) -> bool:
    """Return whether a failed trial might run alone, or in the real working folder."""
    mine = outcome.kind in (OutcomeKind.ERROR, OutcomeKind.HOST_OOM)
    return (
        mine
        and (running.beside or running.in_view)
        and not running.again_alone
        and not running.canceled
    )
