"""The first run of a user's own command, which shows how the command starts its ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dsat.command import recorded_start
from dsat.command.entrypoint import Entrypoint
from dsat.engines.own_command import OwnCommand
from dsat.in_trial.rank_files import Progress
from dsat.values.trial import TrialOptions
from testing.local import PATIENCE_S, processes_of


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
