"""Runs of made-up searches, for tests of their reports."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from dsat.prepare import installed_deepspeed
from dsat.run.history import read_run
from dsat.run.journal import FILE_NAME
from dsat.run.run import Run
from testing.scenarios import User
from testing.world import Failure, World

HOSTILE = "</script><script>document.body.dataset.hacked='yes'</script><img src=x onerror=alert(1)>"


def write_run(
    folder: Path,
    world: World | None = None,
    *,
    trials: int = 40,
) -> Run:
    """Search in a made-up world, write the run's folder and return the run.

    Args:
        folder: created if it is missing.
        world: by default one in which stage 3 fails with a hostile message.
        trials: the search's budget.
    """
    failure = Failure("ERROR", {"stage": 3}, HOSTILE)
    with tempfile.TemporaryDirectory() as place:
        user = User(Path(place), world or World(failures=(failure,)))
        user.has({"train_micro_batch_size_per_gpu": 1})
        with mock.patch.object(installed_deepspeed, "_stamp", return_value=None):
            told = user.tunes("--max-trials", trials, method="random")
        assert told.status == 0, told.err
        shutil.copytree(user.folder / "run", folder, dirs_exist_ok=True)
    return read_run(folder / FILE_NAME)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Let `dsat watch` serve the page of a run; yield its URL."""
    command = User(folder).starts("watch", folder, "--json")
    try:
        yield command.read_json()["url"]
    finally:
        command.signal(signal.SIGINT)
        assert command.wait().status == 0
