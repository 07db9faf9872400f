"""Every error that dsat raises on purpose.

    DsatError
    |-- UserInputError        something the user wrote is wrong: exit status 2, one line
    |-- JournalError          a run's journal cannot be read or written
    |   |-- JournalLocked     another process is working on the run
    |   `-- JournalMismatch   the journal is of a run with another plan: status 2
    |-- SearchFailed          no configuration of a run could be measured, or trained
    |-- EngineError           trials cannot be run on this machine at all
    |   `-- ScriptFailed      the user's script failed before there is a trial; a SearchFailed too
    |-- InvalidTrial          a trial's script did not do what its configuration says
    `-- Diverged              a trial's training diverged

An ordinary failure of a trial (out of memory, a crash, a time-out) is an `Outcome`, never an
exception. Every message says what is wrong, where, and what to do next.
"""

from __future__ import annotations


class DsatError(Exception):
    """Base of all errors that dsat raises on purpose."""


class UserInputError(DsatError):
    """Something the user wrote cannot work.

    Args:
        problem: what is wrong, in one line.
        where: the file, key or option that holds it.
        hint: what to do about it.
    """

    def __init__(self, problem: str, *, where: str = "", hint: str = "") -> None:
        self.problem, self.where, self.hint = problem, where, hint
        text = f"{where}: {problem}" if where else problem
        super().__init__(f"{text}. {hint}" if hint else text)


class JournalError(DsatError):
    """A run's journal cannot be read or written."""


class JournalLocked(JournalError):
    """Another dsat process is working on the run."""


class JournalMismatch(JournalError):
    """The journal is of a run with another plan."""


class SearchFailed(DsatError):
    """No configuration of a run could be measured, or the full-length training failed.

    Args:
        message: what happened, in one line.
        detail: the script's own traceback or the end of its log; may be empty.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class EngineError(DsatError):
    """Trials cannot be run here at all."""


class ScriptFailed(EngineError, SearchFailed):
    """The user's script ended before its configuration is known."""


class InvalidTrial(DsatError):
    """Inside a trial: the script did not do what the trial's configuration says.

    Args:
        message: what happened, in one line.
        smaller_may_run: it failed for want of data, of which a smaller micro batch needs less.
        most_samples: the largest micro batch that there are data for, if that is known.
        fixed_batch: see `Outcome`.
    """

    def __init__(
        self,
        message: str,
        *,
        smaller_may_run: bool = False,
        most_samples: int | None = None,
        fixed_batch: int | None = None,
    ) -> None:
        super().__init__(message)
        self.smaller_may_run = smaller_may_run or most_samples is not None
        self.most_samples = most_samples
        self.fixed_batch = fixed_batch


class Diverged(DsatError):
    """Inside a trial: the loss is not finite."""
