"""Reports of processes that end before `deepspeed.initialize`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dsat.in_trial import failures
from dsat.in_trial.adapters.trial import TRIAL
from dsat.in_trial.agreement import rank_and_size
from dsat.in_trial.rank_files import result_file, write_outcome
from dsat.values.outcome import Outcome

_EXITED = "the script ended with sys.exit"


def report_unmeasured(folder: Path, error: BaseException) -> None:
    """Report an error before `deepspeed.initialize`, unless another process has reported one.

    A report of `sys.exit` is replaced, because the command continued after it.
    """
    reports = [path.read_text(encoding="utf-8") for path in folder.glob(result_file("*"))]
    if all(_EXITED in report for report in reports):
        outcome = failures.outcome(error)
        if isinstance(error, SystemExit):  # its traceback has no frame of the script
            outcome = replace(outcome_of_exit(error), detail="")
        write_outcome(folder, rank_and_size()[0], outcome)


def report_exit(folder: Path) -> None:
    """Report the error with which the script itself, not a launcher, called `sys.exit`, if any."""
    if TRIAL.exit is not None and TRIAL.exit.has_failed and TRIAL.exit.place:
        report_unmeasured(folder, TRIAL.exit.error)


def outcome_of_exit(stop: SystemExit) -> Outcome:
    """Return the outcome of a process that ends with `sys.exit`."""
    place = f" at {TRIAL.exit.place}" if TRIAL.exit is not None and TRIAL.exit.place else ""
    message = f"{_EXITED}({stop.code!r}){place}"
    return replace(failures.outcome(stop), message=message)
