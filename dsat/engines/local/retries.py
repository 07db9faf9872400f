"""Retries of trials that failed for no fault of their configuration."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import replace

from dsat.engines.local.running import FULL_RUN_ID, Running, Way
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
_WARNINGS = {Way.FRESH: FRESH_PROCESSES_ONLY, Way.COMMAND: COMMAND_AGAIN}
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
# Slurm sends the last two to a job's steps; some plug-ins to every process of them (--signal).
_ENDED_FROM_OUTSIDE = tuple(f"was killed by SIG{name}" for name in ("TERM", "USR1", "USR2"))
_MOST_STARTS = 3
# What vLLM's sleep mode (CuMemAllocator) and torch's memory pools raise.
_REFUSED_SEGMENTS = re.compile(r"(Error|Exception): .*expandable.?segment", re.IGNORECASE)
_ADDRESS_IN_USE = ("EADDRINUSE", "ddress already in use")


class Again(enum.Enum):
    """Reasons to run a failed trial again, with what happens then."""

    STARTED_OTHERWISE = "it runs again, with its ranks started in another way"
    ELSEWHERE = "it runs again on other slots"
    AS_BEFORE = "it runs again"
    ALONE = "it runs again without other trials beside it"
    NO_SEGMENTS = "it runs again without expandable segments of torch's allocator"


class Retries:
    """Decide which trials are run again, and in which way ranks are started.

    Args:
        ways: that are possible, in the order in which they are tried.

    Attributes:
        way: in which ranks are started now.
        failure: of the ways before it.
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self._ways = ways
        self.way = self._known_way = ways[0]
        self.failure = ""
        self._tried_by = set[int]()  # trials that try another way
        self._cannot_fork = ""
        self._aborts_by_itself = False
        self._proven = False  # a trial that dsat started has trained
        self._refused_segments: set[int] = set()
        self._starts: dict[int, int] = {}
        self._same_alone: set[str] = set()  # messages of trials that failed alone as well

    def on_warm_up(self, cannot_fork: str) -> None:
        """Take in why ranks cannot be forked; empty if they can be."""
        self._cannot_fork = cannot_fork
        self.way = self._known_way = Way.FRESH if cannot_fork else Way.FORKED

    def decide(self, running: Running, outcome: Outcome, *, broken: bool) -> Again | None:
        """Return how an ended trial is run again; None if its outcome is final."""
        trial_id = running.trial.id
        if outcome.ok or running.canceled or trial_id == FULL_RUN_ID:
            return None  # a second full-length run would delete the checkpoints of the first
        if refuses_segments(outcome) and trial_id not in self._refused_segments:
            self._refused_segments.add(trial_id)
            return Again.NO_SEGMENTS
        is_lost = bool(running.lost) and not running.timed_out
        from_outside = is_lost or _has_part_of(outcome.message, _ENDED_FROM_OUTSIDE)
        if not (from_outside or broken) and self._take_next_way(running, outcome):
            return Again.STARTED_OTHERWISE
        if self._deserves_another_start(trial_id, outcome, from_outside, broken):
            return Again.ELSEWHERE if from_outside else Again.AS_BEFORE
        if running.start.alone:
            self._same_alone.add(outcome.message)
        is_alone = from_outside or running.start.alone or not running.beside
        may_be_others = (
            outcome.kind in (OutcomeKind.ERROR, OutcomeKind.HOST_OOM)
            and outcome.message not in self._same_alone
        )
        return Again.ALONE if may_be_others and not is_alone else None

    def final(self, running: Running, outcome: Outcome) -> Outcome:
        """Return the final outcome, with warnings about earlier attempts."""
        warnings = list(outcome.warnings)
        if running.start.alone:
            warnings.append(BESIDE_OTHERS)
        if running.trial.id in self._refused_segments and outcome.ok:
            warnings.append(NO_SEGMENTS)
        if running.way is not Way.FORKED and _has_part_of(outcome.message, _DIED_OF_FORK):
            self._aborts_by_itself = True
        if running.trial.id in self._tried_by:
            self._tried_by.remove(running.trial.id)
            if outcome.ok:
                self._known_way = running.way
                warnings.append(_WARNINGS[running.way])
            else:  # the way of the start was not the fault
                self.way = self._known_way
        elif self._cannot_fork and self._is_first(running):
            warnings.append(f"{FRESH_PROCESSES_ONLY} ({self._cannot_fork})")
        self._proven |= outcome.ok
        return replace(outcome, warnings=tuple(warnings))

    def _take_next_way(self, running: Running, outcome: Outcome) -> bool:
        """Start ranks in the next way that might help; return whether there is one."""
        if outcome.kind is not OutcomeKind.ERROR:
            return False
        for way in self._ways[self._ways.index(running.way) + 1 :]:
            if self._may_help(way, running, outcome):
                self.way, self.failure = way, outcome.message
                self._tried_by.add(running.trial.id)
                return True
        return False

    def _may_help(self, way: Way, running: Running, outcome: Outcome) -> bool:
        """Return whether a failed trial might run if its ranks were started in another way.

        Any error of the very first trial is tried again so, because some libraries cannot be
        forked; later on, only what CUDA says about forks.
        """
        is_first = self._is_first(running)
        if way is Way.COMMAND:
            return is_first and outcome.before_engine
        signs = _NO_FORK_CUDA if self._aborts_by_itself else (*_NO_FORK_CUDA, *_DIED_OF_FORK)
        if _has_part_of(outcome.message, signs):
            return True
        if outcome.before_engine and _has_part_of(outcome.message, _NEVER_OF_FORK):
            return False
        return running.trial.profiles or (outcome.before_engine and is_first)

    def _is_first(self, running: Running) -> bool:
        """Return whether nothing has shown yet that ranks which dsat starts can train."""
        has_command = self._ways[-1] is Way.COMMAND
        return running.trial.profiles or (has_command and not self._proven)

    def _deserves_another_start(
        self, trial_id: int, outcome: Outcome, from_outside: bool, broken: bool
    ) -> bool:
        """Return whether a trial failed because of its surroundings.

        Its host was lost, its device is broken, or another program took a port between its choice
        and its use. It may have killed the host or the device itself: the second or third failure
        is final.
        """
        starts = self._starts[trial_id] = self._starts.get(trial_id, 1) + 1
        if broken and not from_outside:
            return starts <= _MOST_STARTS
        return (from_outside or lost_its_port(outcome)) and starts <= 2


def lost_its_port(outcome: Outcome) -> bool:
    """Return whether another program took a trial's port between its choice and its use."""
    text = outcome.message + outcome.detail
    return outcome.kind is OutcomeKind.ERROR and _has_part_of(text, _ADDRESS_IN_USE)


def refuses_segments(outcome: Outcome) -> bool:
    """Return whether a trial failed because of expandable segments of torch's allocator."""
    text = f"{outcome.message}\n{outcome.detail}"
    return outcome.kind is OutcomeKind.ERROR and _REFUSED_SEGMENTS.search(text) is not None


def _has_part_of(text: str, parts: Sequence[str]) -> bool:
    return any(part in text for part in parts)
