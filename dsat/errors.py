"""All exceptions that dsat raises deliberately.

    DsatError
    |-- UserInputError        invalid input from the user: exit status 2
    |-- JournalError          a run's journal cannot be read or written
    |   |-- JournalLocked     another process is using the run
    |   `-- JournalMismatch   the journal belongs to a run with another plan: exit status 2
    |-- SearchFailed          no configuration could be measured, or the final training failed
    |-- EngineError           this machine cannot run trials
    |   `-- ScriptFailed      the user's script did not reach DeepSpeed; also a SearchFailed
    |-- InvalidTrial          a trial's script did not follow its configuration
    `-- Diverged              a trial's training diverged

An ordinary failure of a trial (out of memory, a crash, a timeout) is an `Outcome`, not an
exception. Every message says what is wrong, where, and what to do next.
"""

from __future__ import annotations

import shutil
from typing import Any


class DsatError(Exception):
    """Base of all exceptions that dsat raises deliberately."""

    @classmethod
    def convert_os_error(cls, error: OSError) -> DsatError:
        """Convert an error of the operating system; the message names the file, if known."""
        if isinstance(error, shutil.Error) and isinstance(error.args[0], list):
            *_, reason = error.args[0][0]  # source, target and reason of the first file that failed
            return cls(str(reason))
        name = f"{error.filename}: " if error.filename else ""
        return cls(f"{name}{error.strerror or error}")


class UserInputError(DsatError):
    """Invalid input from the user.

    Args:
        problem: what is wrong, in one line.
        where: the file, key or option concerned.
        hint: how to correct it.
    """

    def __init__(self, problem: str, *, where: str = "", hint: str = "") -> None:
        self.problem, self.where, self.hint = problem, where, hint
        text = f"{where}: {problem}" if where else problem
        super().__init__(f"{text}. {hint}" if hint else text)


class JournalError(DsatError):
    """A run's journal cannot be read or written."""


class JournalLocked(JournalError):
    """Another dsat process is using the run."""


class JournalMismatch(JournalError):
    """The journal belongs to a run with another plan."""


class SearchFailed(DsatError):
    """No configuration of a run could be measured, or the full-length training failed.

    Args:
        detail: the script's own traceback or the end of its log; may be empty.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class EngineError(DsatError):
    """This machine cannot run trials."""


class ScriptFailed(EngineError, SearchFailed):
    """The user's script did not call `deepspeed.initialize` on every rank, or not in time."""


class InvalidTrial(DsatError):
    """Inside a trial: the script did not follow the trial's configuration.

    Attributes:
        facts: the keyword arguments, which become fields of `Outcome`; `smaller_may_run` is also
            true if `most_samples` is known.
    """

    def __init__(
        self,
        message: str,
        *,
        smaller_may_run: bool = False,
        most_samples: int | None = None,
        fixed_batch: int | None = None,
        batch_flag: str = "",
    ) -> None:
        super().__init__(message)
        self.facts: dict[str, Any] = {
            "smaller_may_run": smaller_may_run or most_samples is not None,
            "most_samples": most_samples,
            "fixed_batch": fixed_batch,
            "batch_flag": batch_flag,
        }


class Diverged(DsatError):
    """Inside a trial: the loss is not finite, or too many steps overflow in fp16."""
