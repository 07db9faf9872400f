"""Decisions to run failed trials again, each at most once."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import replace

from dsat.engines.running import Running
from dsat.engines.start import FULL_RUN_ID, StartMethod
from dsat.in_trial.failures import has_part
from dsat.values.outcome import Outcome, OutcomeKind

FRESH_PROCESSES_ONLY = (
    "trials start slowly, because the script works only in fresh processes, as with --no-fork"
)
COMMAND_AGAIN = (
    "trials start slowly, because each runs your whole command: ranks that dsat started failed "
    "before deepspeed.initialize"
)
NO_SEGMENTS = (
    "trials run with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False, because your script's "
    "memory pools refuse expandable segments"
)
AGAIN_ALONE = "the first attempt failed, so the trial ran again alone"
FIXED_PORT = (
    "trials now run one at a time, because the script seems to use the same port in each of them"
)
_FIXED_AFTER = 2  # trials that failed beside others because a port was taken, but succeeded alone
_MAX_DEVICE_ERRORS = 2  # between two successful trials
_WARNINGS = {StartMethod.FRESH: FRESH_PROCESSES_ONLY, StartMethod.COMMAND: COMMAND_AGAIN}
_NO_FORK_CUDA = (
    "Cannot re-initialize CUDA in forked subprocess",
    "CUDA error: initialization error",
    "CUDA driver initialization failed",
    "CUDA unknown error",
)
# Ends of a process whose threads or locks did not survive the fork.
_DIED_OF_FORK = ("was killed by SIGABRT", "was killed by SIGSEGV")
# Slurm's --signal sends USR1 or USR2 to a job's steps; some plug-ins send it to all processes.
_ENDED_FROM_OUTSIDE = tuple(f"was killed by SIG{name}" for name in ("TERM", "USR1", "USR2"))
# Errors of vLLM's sleep mode (CuMemAllocator) and of torch's memory pools.
_REFUSED_SEGMENTS = re.compile(r"(Error|Exception): .*expandable.?segment", re.IGNORECASE)
_ADDRESS_IN_USE = ("EADDRINUSE", "ddress already in use")
# Errors of a device or its driver (https://docs.nvidia.com/deploy/xid-errors). An illegal address
# is missing here, because it is a mistake of the program.
_OF_DEVICES = (
    "busy or unavailable",
    "ECC error",
    "hardware stack error",
    "HIP error",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "launch failure",
    "launch timed out",
    "no CUDA-capable device",
    "NVLink error",
    "system not yet initialized",
    "unhandled cuda error",
    "unrecognized error code",
    "Xid",
)


class RetryReason(enum.Enum):
    """Reasons to run a failed trial again; the values tell users how it then runs."""

    LOST = "it runs again elsewhere"  # a host was lost, or something else killed a rank
    METHOD = "it runs again alone, with another method to start its ranks"
    SEGMENTS = "it runs again alone, without expandable segments of torch's allocator"
    ALONE = "it runs again alone"  # other trials ran, a device failed, or a port was taken


class Retries:
    """Chooser of the failed trials that run again, and of the method by which ranks start.

    Args:
        methods: possible methods, in order of preference.

    Attributes:
        method: the current method.
        failure: message of the failure that last changed the method; empty if none did.
        device_failure: why the run must end, after errors of devices; empty if it may continue.
    """

    def __init__(self, methods: Sequence[StartMethod]) -> None:
        self._methods = methods
        self.method = self._known_method = methods[0]
        self.failure = self.device_failure = ""
        self._device_errors = 0
        self._cannot_fork = ""
        self._is_proven = False  # a trial whose ranks dsat started has succeeded
        self._retry_reasons: dict[int, RetryReason] = {}
        self._repeated_messages: set[str] = set()  # messages of trials that failed again when alone
        self._port_trials: set[int] = set()  # trials that failed because another had the port
        self._num_freed = 0  # number of these that succeeded alone

    @property
    def one_at_a_time(self) -> bool:
        """Return whether trials must run one at a time, because the script uses a fixed port."""
        return self._num_freed >= _FIXED_AFTER

    def note_warm_up(self, cannot_fork: str) -> None:
        """Record why ranks cannot be forked; empty if they can be."""
        self._cannot_fork = cannot_fork
        if cannot_fork:
            self.method = self._known_method = StartMethod.FRESH

    def decide(self, running: Running, outcome: Outcome) -> RetryReason | None:
        """Return why an ended trial runs again; None if its outcome is final."""
        trial_id = running.trial.id
        self._device_errors = 0 if outcome.ok else self._device_errors + is_of_device(outcome)
        if self._device_errors == _MAX_DEVICE_ERRORS:
            self.device_failure = f"device errors ended two attempts: {outcome.message}"
        if self.device_failure:
            return None
        if outcome.ok or running.canceled or trial_id == FULL_RUN_ID:
            return None  # for a full-length run, a retry would delete the checkpoints
        if trial_id in self._retry_reasons:
            if running.start.alone:
                self._repeated_messages.add(outcome.message)
            return None
        reason = self._find_reason(running, outcome)
        if reason is not None:
            self._retry_reasons[trial_id] = reason
        return reason

    def _find_reason(self, running: Running, outcome: Outcome) -> RetryReason | None:
        is_lost = bool(running.lost) and not running.timed_out
        if is_lost or has_part(outcome.message, _ENDED_FROM_OUTSIDE):
            return RetryReason.LOST
        if outcome.kind not in (OutcomeKind.ERROR, OutcomeKind.HOST_OOM):
            return None
        if outcome.refuses(*running.trial.flags.values()):
            return None
        text = f"{outcome.message}\n{outcome.detail}"
        if _REFUSED_SEGMENTS.search(text):
            return RetryReason.SEGMENTS
        is_of_port = outcome.kind is OutcomeKind.ERROR and has_part(text, _ADDRESS_IN_USE)
        if is_of_port and running.beside:
            self._port_trials.add(running.trial.id)  # another trial uses the port
            return RetryReason.ALONE
        if method := self._next_method(running, outcome):
            self.method, self.failure = method, outcome.message
            return RetryReason.METHOD
        if running.beside and outcome.message not in self._repeated_messages:
            return RetryReason.ALONE
        return RetryReason.ALONE if is_of_port or is_of_device(outcome) else None

    def final(self, running: Running, outcome: Outcome) -> Outcome:
        """Return a trial's outcome with warnings about its retry and about slow starts."""
        warnings = list(outcome.warnings)
        reason = self._retry_reasons.get(running.trial.id)
        if reason is RetryReason.METHOD and outcome.ok:
            self._known_method = running.method
            warnings.append(_WARNINGS[running.method])
        elif reason is RetryReason.METHOD:  # the retry failed as well: restore the method
            self.method = self._known_method
        elif reason is RetryReason.SEGMENTS and outcome.ok:
            warnings.append(NO_SEGMENTS)
        elif reason is RetryReason.ALONE:
            warnings.append(AGAIN_ALONE)
            if outcome.ok and running.trial.id in self._port_trials:
                self._num_freed += 1
                warnings += [FIXED_PORT] if self._num_freed == _FIXED_AFTER else []
        elif self._cannot_fork and self._is_first(running):
            warnings.append(f"{FRESH_PROCESSES_ONLY} ({self._cannot_fork})")
        self._is_proven |= outcome.ok and not running.start.is_own
        return replace(outcome, warnings=tuple(warnings))

    def _next_method(self, running: Running, outcome: Outcome) -> StartMethod | None:
        """Return the method by which a failed trial runs again; None if another would not help.

        After errors that forks cause (CUDA's, SIGABRT, SIGSEGV), the method is FRESH. A first trial
        (`_is_first`) gets another method after any error: COMMAND if it failed before
        `deepspeed.initialize`, which the user's command reached; else FRESH.
        """
        if outcome.kind is not OutcomeKind.ERROR:
            return None
        later = self._methods[self._methods.index(running.method) + 1 :]
        is_first, before_engine = self._is_first(running), outcome.before_engine
        is_fork = has_part(outcome.message, (*_NO_FORK_CUDA, *_DIED_OF_FORK))
        if is_first and before_engine and not is_fork and StartMethod.COMMAND in later:
            return StartMethod.COMMAND
        return StartMethod.FRESH if StartMethod.FRESH in later and (is_fork or is_first) else None

    def _is_first(self, running: Running) -> bool:
        """Return whether a trial profiles, or no trial has yet shown that dsat can start ranks."""
        has_command = self._methods[-1] is StartMethod.COMMAND
        return running.trial.profiles or (has_command and not self._is_proven)


def is_of_device(outcome: Outcome) -> bool:
    """Return whether a trial failed with an error of a device or its driver."""
    text = f"{outcome.message}\n{outcome.detail}"
    return outcome.kind is OutcomeKind.ERROR and has_part(text, _OF_DEVICES)
