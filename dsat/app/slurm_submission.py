"""A search in a job that dsat submits to Slurm by itself, in front of an allocation.

The job runs the same command in its allocation. Its script stays in the run's folder, and goes on
with the run when it is started again, which Slurm does with a job that it has requeued.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from dsat.app import run_folders
from dsat.app import source as sources
from dsat.app.words_of_settings import words_of
from dsat.engines import slurm_jobs
from dsat.engines.slurm import Allocation
from dsat.engines.slurm_jobs import State
from dsat.errors import DsatError, SearchFailed, UserInputError
from dsat.inputs.settings import OF_SLURM_JOB, SLURM, Settings
from dsat.search import SEARCHES
from dsat.tuning.journal import FILE_NAME, read_events
from dsat.tuning.run import Run
from dsat.values.files import write_atomically

_log = logging.getLogger(__name__)
SCRIPT_FILE = "job.sh"
# With these sbatch does not submit one job and return.
_NOT_FOR_SBATCH = ("--array", "-a", "--test-only", "--wait", "-W", "--wrap")


@dataclass(frozen=True)
class Submission:
    """A search that is to be submitted."""

    settings: Settings
    name: str

    def options(self, folder: Path) -> list[str]:
        """sbatch's, of which a later one wins.

        Args:
            folder: of the run, absolute.
        """
        own = self.settings
        given = {"--nodes": own.nodes, "--gpus-per-node": own.gpus_per_node}
        given |= {"--time": own.time}
        log = str(folder / "slurm-").replace("%", "%%") + "%j.log"
        return [
            f"--job-name={folder.name}",
            "--requeue",
            *(f"{flag}={value}" for flag, value in given.items() if value is not None),
            *(own.sbatch_options or ()),
            "--open-mode=append",
            f"--output={log}",
            f"--error={log}",
        ]

    def script(self, folder: Path) -> str:
        """The job's script, for a POSIX shell."""
        path = shlex.quote(str(folder / FILE_NAME))
        again = shlex.join(["sbatch", *self.options(folder), str(folder / SCRIPT_FILE)])
        lines = [
            "#!/bin/sh",
            *(f"# {line}" for line in f"Submitted with: {again}".splitlines()),
            f"cd {shlex.quote(os.getcwd())} || exit",
            f"if [ -e {path} ]; then",
            f"    exec {shlex.join(self._command(folder, resume=True))}",
            "fi",
            f"exec {shlex.join(self._command(folder, resume=False))}",
        ]
        return "\n".join(lines) + "\n"

    def command_to_go_on(self, folder: Path) -> str:
        """What to type to go on with the run in another job."""
        settings = replace(self.settings, run_dir=folder, resume=True, detach=False)
        return shlex.join(["python3", "-m", "dsat", *words_of(settings)])

    def _command(self, folder: Path, *, resume: bool) -> list[str]:
        settings = replace(self.settings, run_dir=folder, resume=resume)
        return [sys.executable, "-m", "dsat", *words_of(settings, without=_NOT_IN_THE_JOB)]


# The allocation has what they ask for, but for the number of nodes, which is compared.
_NOT_IN_THE_JOB = (*(name for name in OF_SLURM_JOB if name != "nodes"), "detach")


@dataclass(frozen=True)
class Submitted:
    """A search that was submitted.

    Attributes:
        folder: of the run, absolute.
        job: its number.
        state: how the job ended; None while it goes on.
        interrupted: Ctrl-C ended the following of its log, not the job.
    """

    submission: Submission
    folder: Path
    job: str
    state: State | None = None
    interrupted: bool = False

    @property
    def log(self) -> Path:
        return self.folder / f"slurm-{self.job}.log"

    @property
    def has_run(self) -> bool:
        """Whether the job came so far that there is something to show."""
        return (self.folder / FILE_NAME).exists()

    @property
    def _over(self) -> bool:
        journal = self.folder / FILE_NAME
        return self.has_run and Run(read_events(journal)).stop_reason is not None

    @property
    def failure(self) -> DsatError | None:
        """Why the search is not done; None if it is, or goes on."""
        if self.state is None or self.state.is_completed or (self.state.is_unknown and self._over):
            return None
        go_on = ""
        if self.has_run:
            go_on = f" Go on with the run: {self.submission.command_to_go_on(self.folder)}"
        return SearchFailed(f"Slurm job {self.job} is {self.state}; its log is {self.log}.{go_on}")


def is_wanted(settings: Settings) -> bool:
    """Whether the search is to be submitted: Slurm is asked for, and this is no allocation."""
    return settings.engine == SLURM and Allocation.of(os.environ) is None


def prepare(settings: Settings) -> Submission:
    """Reads and checks what can be checked without the nodes; writes and starts nothing.

    Raises:
        UserInputError: something of it is wrong.
    """
    if not SEARCHES[settings.method].__module__.startswith("dsat."):
        raise UserInputError(
            f"the search {settings.method!r} is known to this process, not to a job",
            where="--engine slurm",
            hint="Start it inside of the allocation.",
        )
    if settings.watch:
        raise UserInputError(
            "is for a search on this machine",
            where="--watch",
            hint="Once the job runs, `dsat watch RUN` serves the page.",
        )
    for word in settings.sbatch_options or ():
        if word.partition("=")[0] in _NOT_FOR_SBATCH:
            raise UserInputError(
                f"{word} is not for a search, which is one job", where="--sbatch-options"
            )
    return Submission(settings, sources.read(settings).experiment.name)


def submit(ready: Submission) -> Submitted:
    """Makes the run's folder, keeps the job's script there, and submits it.

    Raises:
        DsatError: the folder holds another run, or sbatch is missing or refuses the job.
    """
    slurm_jobs.check_can_submit()
    with ExitStack() as locks:  # which the job itself will need
        folder = run_folders.of_run(ready.settings, ready.name, locks).resolve()
    script = folder / SCRIPT_FILE
    write_atomically(script, ready.script(folder))
    submitted = Submitted(ready, folder, slurm_jobs.submit(script, ready.options(folder)))
    _log.info("submitted Slurm job %s; run folder %s", submitted.job, folder)
    return submitted


def follow(submitted: Submitted) -> Submitted:
    """Logs what the job prints and what becomes of it, until it has ended; Ctrl-C leaves it."""
    try:
        state = slurm_jobs.follow(submitted.job, submitted.log, _log.info)
    except KeyboardInterrupt:
        _log.info("detached: job %s goes on", submitted.job)
        return replace(submitted, interrupted=True)
    _log.info("job %s is %s", submitted.job, state)
    return replace(submitted, state=state)


def tell_how_to_go_on(submitted: Submitted) -> None:
    """Logs what to type to follow a job, to end it, and to see its result."""
    folder, log = (shlex.quote(str(path)) for path in (submitted.folder, submitted.log))
    _log.info(
        "Follow it: tail -F %s, or dsat watch %s; squeue --jobs=%s", log, folder, submitted.job
    )
    _log.info("End it: scancel %s", submitted.job)
    _log.info("Its result: dsat show %s", folder)
