"""Jobs of Slurm as whoever submits them sees them: submitted, waiting, running, ended."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsat.engines.slurm import ask
from dsat.errors import EngineError, UserInputError

# Where a job can come to its end (`squeue --helpstate`); one that is requeued is PENDING again.
_ENDED = frozenset(
    """
    BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED LAUNCH_FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED
    RECONFIG_FAIL REVOKED TIMEOUT
    """.split()
)
_COMPLETED, _PENDING = "COMPLETED", "PENDING"
# The controller is asked by everyone on a cluster; a log is read by one.
_ASK_EVERY_S, _READ_EVERY_S = 10.0, 1.0
_UNKNOWN_JOB = "Invalid job id"
_NO_REASON = ("", "None")


@dataclass(frozen=True)
class State:
    """Where a job is.

    Attributes:
        name: Slurm's, such as RUNNING; empty if Slurm no longer knows the job.
        reason: why it waits, or ended.
    """

    name: str
    reason: str = ""

    @property
    def is_unknown(self) -> bool:
        """Whether Slurm has forgotten the job, as it does some minutes after its end."""
        return not self.name

    @property
    def is_over(self) -> bool:
        return self.name in _ENDED or self.is_unknown

    @property
    def is_completed(self) -> bool:
        """Whether the job's command ended well."""
        return self.name == _COMPLETED

    def __str__(self) -> str:
        shown = self.name or "not known any more"
        return shown if self.reason in _NO_REASON else f"{shown} ({self.reason})"


def check_can_submit() -> None:
    """Raises UserInputError if there is no sbatch."""
    if shutil.which("sbatch") is None:
        raise UserInputError(
            "there is no sbatch here, and no Slurm allocation around dsat",
            where="--engine slurm",
            hint="Start dsat where jobs are submitted, or inside of an allocation.",
        )


def submit(script: Path, options: Sequence[str]) -> str:
    """Submits a job script.

    Returns:
        The job's number.

    Raises:
        EngineError: sbatch refuses the job.
    """
    said = ask("sbatch", *options, "--parsable", str(script))
    return said.strip().partition(";")[0]  # the cluster's name may follow


def state_of(job: str) -> State:
    """Where a job is.

    Raises:
        EngineError: Slurm does not tell, perhaps for a moment only.
    """
    try:
        said = ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T|%r")
    except EngineError as error:
        if _UNKNOWN_JOB in str(error):
            return State("")
        raise
    name, _, reason = said.partition("\n")[0].strip().partition("|")
    return State(name, reason)


def follow(job: str, log: Path, say: Callable[[str], object]) -> State:
    """Says what becomes of a job, and what it prints, until it has ended.

    Args:
        log: what it prints to.
    """
    lines, last, told = _new_lines(log), State(_PENDING), set[str]()
    ask_at_s = 0.0
    while True:
        if time.monotonic() >= ask_at_s:
            try:
                state = state_of(job)
            except EngineError as error:
                state, said = last, f"the state of job {job} cannot be told now: {error}"
            else:
                said = f"job {job} is {state}"
            if state.name != last.name:
                told.clear()
                if state.name == _PENDING:
                    said = f"job {job} was requeued, and goes on with the run when it starts again"
            if state.is_over:
                _say_all(lines, say)
                return state
            if said not in told:
                told.add(said)
                say(said)
            last, ask_at_s = state, time.monotonic() + _ASK_EVERY_S
        _say_all(lines, say)
        time.sleep(_READ_EVERY_S)


def _say_all(lines: Iterator[str | None], say: Callable[[str], object]) -> None:
    while (line := next(lines)) is not None:
        say(line)


def _new_lines(path: Path) -> Iterator[str | None]:
    """Lines that are appended to a file, which may not exist yet; None where there are no more so
    far. It is opened anew each time, since other hosts' writing is seen only so over NFS."""
    position, begun = 0, b""
    while True:
        try:
            with open(path, "rb") as file:
                file.seek(position)
                found = file.read()
        except FileNotFoundError:
            found = b""
        position += len(found)
        *lines, begun = (begun + found).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")
        yield None
