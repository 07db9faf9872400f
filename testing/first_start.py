"""The user's own command as it is run first: what it shows of its ranks."""

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
    """A command that was started, and runs up to its training or further."""

    def __init__(self, run: OwnCommand, command: Sequence[str]) -> None:
        self._run, self._command = run, command

    @property
    def env(self) -> dict[str, str]:
        """Variables by which what belongs to the command is known."""
        return self._run.env

    def program(self) -> Entrypoint:
        """Wait for its ranks; return what they run.

        Raises:
            DsatError: it starts none, or none that can be tuned.
        """
        cores = os.sched_getaffinity(0)
        return recorded_start.recognise_program(
            self._run.ranks(), self._command, self._run.env, cores
        )

    def ranks(self) -> list[tuple[int, int]]:
        """Wait for its ranks; return the number of each, and how many each sees."""
        return sorted((rank.rank, rank.size) for rank in self._run.ranks())

    def does(self, activity: str) -> None:
        """Say what a rank of it does, as that would."""
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
    """A user's command in its folder; nothing of it is left afterwards.

    Args:
        trains: it goes on behind `deepspeed.initialize`, and is measured.
        ranks: so many processes of the command; None for one that starts its ranks itself.
    """
    options = TrialOptions(timeout_s=timeout_s)
    run = OwnCommand(command, place, options, measures=trains, ranks=ranks)
    try:
        yield Begun(run, command)
    finally:
        run.close()
    assert not processes_of(run.folder) and not run.folder.exists()


def seen(place: Path, *command: str, trains: bool = False) -> Entrypoint:
    """What a command's ranks are seen to run."""
    with begun(command, place, trains=trains) as started:
        return started.program()
