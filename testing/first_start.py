"""The first run of a user's own command, which shows how the command starts its ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from dsat.command import recorded_start
from dsat.command.entrypoint import Entrypoint
from dsat.engines.own_command import OwnCommand
from dsat.in_trial.rank_files import Progress
from dsat.values.trial import TrialOptions
from testing.local import PATIENCE_S, PROGRAMS, processes_of

# A training as far as the first run needs it.
TRAINS = "import deepspeed; deepspeed.initialize(model_parameters=[], config={})"
# Each runs the command after its own options, in the environment that the real one makes.
STAND_INS = {
    "srun": "#!/bin/bash\nshift 1; export SLURM_NTASKS=2\n"
    'SLURM_PROCID=0 "$@" & SLURM_PROCID=1 "$@" & wait\n',
    "pipx-like": f"#!{sys.executable}\nimport runpy, sys\n"
    "sys.path.insert(0, '.')\nrunpy.run_path('train.py', run_name='__main__')\n",
}


def runnable(path: Path, text: str) -> None:
    """Write a program that can be started."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a user's folder with a script, and a stand-in for DeepSpeed next to it."""
    shutil.copytree(PROGRAMS / "launched", tmp_path / "work")
    for name, text in STAND_INS.items():
        runnable(tmp_path / "bin" / name, text)
    path = [str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))
    return tmp_path / "work"


class Begun:
    """A user's command after its start; it runs at least up to its training."""

    def __init__(self, run: OwnCommand, command: Sequence[str]) -> None:
        self._run, self._command = run, command

    @property
    def env(self) -> dict[str, str]:
        """Variables that mark all processes of the command."""
        return self._run.env

    def program(self) -> Entrypoint:
        """Wait for the command's ranks; return the program that they run.

        Raises:
            DsatError: the command starts no ranks, or none that can be tuned.
        """
        cores = os.sched_getaffinity(0)
        return recorded_start.recognise_program(
            self._run.ranks(), self._command, self._run.env, cores
        )

    def ranks(self) -> list[tuple[int, int]]:
        """Wait for the command's ranks; return rank number and world size of each."""
        return sorted((rank.rank, rank.size) for rank in self._run.ranks())

    def does(self, activity: str) -> None:
        """Report an activity on behalf of a rank."""
        Progress(self._run.folder).set_activity(activity)


@contextlib.contextmanager
def begun(
    command: Sequence[str],
    place: Path,
    *,
    timeout_s: float = PATIENCE_S,
    trains: bool = False,
    ranks: int | None = None,
) -> Iterator[Begun]:
    """Start a user's command in its folder; on exit, check that no process and no file remains.

    Args:
        trains: run past `deepspeed.initialize`, and measure the training.
        ranks: number of processes of the command to start; None if the command starts its ranks.
    """
    options = TrialOptions(timeout_s=timeout_s)
    run = OwnCommand(command, place, options, measures=trains, ranks=ranks)
    try:
        yield Begun(run, command)
    finally:
        run.close()
    assert not processes_of(run.folder) and not run.folder.exists()


def seen(place: Path, *command: str, trains: bool = False) -> Entrypoint:
    """Run a command up to its training; return the program that its ranks run."""
    with begun(command, place, trains=trains) as started:
        return started.program()
