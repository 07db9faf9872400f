"""Contents of a trial's folder, its working folder, and folders that its script creates."""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import wrapt

import dsat
from dsat.command.experiment import Experiment
from dsat.in_trial import hook
from dsat.in_trial.adapters.user_files import read_created
from dsat.in_trial.hook import HOOK_FOLDER, SPARE_FOLDER
from dsat.values.files import write_atomically

_log = logging.getLogger(__name__)
COMMAND_FILE = "cmd.txt"
PACKAGES_FOLDER = "packages"
TRIALS_FOLDER = "trials"  # of a run's folder
_END_BYTES = 64 * 2**10  # at the end of a log, to be read
_SPACE_FILE, _SPACE_BYTES = "space", 64 * 2**10  # of `check_space`; a trial writes more


def make_hook(folder: Path) -> None:
    """Make the folders from which the user's Python processes import dsat and its hook.

    Each folder has links to single packages: an interpreter of another environment must not find
    other packages of dsat's environment.
    """
    hook_folder = folder / HOOK_FOLDER
    for place, module in ((folder / PACKAGES_FOLDER, dsat), (hook_folder / SPARE_FOLDER, wrapt)):
        place.mkdir(parents=True)
        (place / module.__name__).symlink_to(Path(str(module.__file__)).resolve().parent)
    shutil.copyfile(hook.__file__, hook_folder / "sitecustomize.py")


def remove_hook(folder: Path) -> None:
    """Remove the folders that `make_hook` creates."""
    for name in (HOOK_FOLDER, PACKAGES_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)


def check_space(folder: Path) -> None:
    """Raise OSError if the disk is full, so that a failed trial's settings are not blamed."""
    write_atomically(folder / _SPACE_FILE, " " * _SPACE_BYTES)
    (folder / _SPACE_FILE).unlink()


class CreatedFolders:
    """Folders that the scripts of trials created outside of the trials' folders."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._logged_names: set[str] = set()

    def add(self, folder: Path) -> None:
        """Add the folders that the script of an ended trial created."""
        self._names += read_created(folder)

    def remove_empty(self) -> None:
        """Remove empty folders, innermost first; log once each outermost folder that has files."""
        for name in sorted(self._names, reverse=True):
            with contextlib.suppress(OSError):  # it is not empty, a link, or gone
                os.rmdir(name)
        nonempty = {n for n in self._names if os.path.isdir(n) and not os.path.islink(n)}
        self._names.clear()
        for name in sorted(nonempty - self._logged_names):
            if nonempty.isdisjoint(map(str, Path(name).parents)):
                self._logged_names.add(name)
                _log.info("note: the script's new folder %s holds files, so it is kept", name)


def log_files(cross_rank: int) -> list[str]:
    """Return the names of a trial's logs on host number `cross_rank`; hosts cannot share files."""
    part = f"-{cross_rank}" if cross_rank else ""
    return [f"stdout{part}.log", f"stderr{part}.log"]


def read_end(log: Path) -> list[str]:
    """Return the lines in the last 64 KiB of a log; an empty list if it cannot be read."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - _END_BYTES))
        return file.read().decode(errors="replace").splitlines()
    return []


def follow(log: Path) -> Iterator[str]:
    """Yield, without end, the text added to a log since the last yield; empty if there is none."""
    decoder, position = codecs.getincrementaldecoder("utf-8")("replace"), 0
    while True:
        content = b""
        with contextlib.suppress(OSError), open(log, "rb") as file:
            file.seek(position)
            content = file.read()
        position += len(content)
        yield decoder.decode(content)


def working_folder(experiment: Experiment, folder: Path) -> Path:
    """Return the folder in which scripts run: the model folder.

    If the experiment has includes, make a folder of links to them and to the model folder's files.
    """
    if not experiment.includes:
        return experiment.model_dir
    together = folder / "context"
    together.mkdir(exist_ok=True)
    for path in [*experiment.model_dir.iterdir(), *experiment.includes]:
        link = together / path.name
        if not link.is_symlink():
            link.symlink_to(path.resolve())
    return together
