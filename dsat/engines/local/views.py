"""The folder that trials run in, and a view of it for each trial where they would break each other.

A script that writes into its working folder (a lock, a cache, a checkpoint) meets, beside another
trial, what that one writes. The profile trial, which runs alone, shows what it writes there. Trials
that may run side by side then get a folder of their own each: what the script has written is
copied, or a link if it is large, and all else are links to what there is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsat.values.files import PRIVATE_FOLDER, write_atomically

VIEW = "work"  # in a trial's folder
_WRITTEN_FILE = "written.json"
_MOST_ENTRIES = 20_000  # in a larger folder nobody looks what was written
_LARGEST_COPY = 64 * 2**20
_OF_PYTHON = "__pycache__"
_HERE = "."


@dataclass(frozen=True)
class _Seen:
    """A file, or a folder with the names in it, by when it was changed."""

    changed_ns: int
    size_bytes: int = 0
    names: frozenset[str] = frozenset()

    def differs(self, before: _Seen | None) -> bool:
        if before is None or (self.names ^ before.names) - {_OF_PYTHON}:
            return True
        # What was made and is gone again leaves the time; so does what Python has compiled.
        return self.names == before.names and self != before


_State = dict[str, _Seen]  # by the path from the working folder


class WorkingFolder:
    """The folder that trials run in.

    Args:
        real: the user's own folder.
        run: the run's, which may lie in it.

    Attributes:
        real: as given.
    """

    def __init__(self, real: Path, run: Path) -> None:
        self.real = real.resolve()
        self._run = run.resolve()
        self._before: _State | None = None
        self._written: set[str] = set()
        self._is_needed = True
        with contextlib.suppress(OSError, ValueError):
            found = json.loads((run / _WRITTEN_FILE).read_text())
            self._written = {path for path in found if isinstance(path, str)}

    def watch(self) -> None:
        """Notes what there is, before a trial that runs alone."""
        self._before = self._state()

    def look(self, run: Path | None = None) -> None:
        """Notes what that trial has written, now that it has ended.

        Args:
            run: the run's folder, if it was not known before.
        """
        self._run = self._run if run is None else run.resolve()
        before, after = self._before, self._state()
        self._before = None
        if before is None or after is None:
            return
        self._written |= {path for path in after if after[path].differs(before.get(path))}
        write_atomically(self._run / _WRITTEN_FILE, json.dumps(sorted(self._written)) + "\n")

    @property
    def is_written_to(self) -> bool:
        """Return whether concurrent trials need views, because the script writes here."""
        return bool(self._written) and self._is_needed

    def give_up_views(self) -> None:
        """The script needs the real folder: no views from now on."""
        self._is_needed = False

    def view_for(self, trial: Path) -> Path:
        """A trial's own view of the folder.

        Args:
            trial: its folder, where the view is made.
        """
        view = trial.resolve() / VIEW
        self._mirror(self.real, view, _HERE)
        return view

    def _mirror(self, real: Path, view: Path, path: str) -> None:
        """Makes a folder of the view; `path` leads to it from the working folder."""
        view.mkdir(mode=PRIVATE_FOLDER)
        for entry in _entries(real):
            inside = os.path.normpath(os.path.join(path, entry.name))
            target = view / entry.name
            written = inside in self._written
            if entry.is_dir(follow_symlinks=False) and (written or self._writes_below(inside)):
                self._mirror(Path(entry.path), target, inside)
            elif written and entry.is_file() and entry.stat().st_size <= _LARGEST_COPY:
                shutil.copy2(entry.path, target)
            else:
                target.symlink_to(entry.path)

    def _writes_below(self, path: str) -> bool:
        return any(each.startswith(path + os.sep) for each in self._written)

    def _state(self) -> _State | None:
        """Return the state of all files; None if there are too many."""
        state: _State = {}
        folders = [(str(self.real), _HERE)]
        while folders:
            folder, path = folders.pop()
            names = set()
            with contextlib.suppress(OSError):  # gone since
                changed_ns = os.stat(folder).st_mtime_ns
                for entry in _entries(Path(folder)):
                    names.add(entry.name)
                    if entry.name == _OF_PYTHON or Path(entry.path) == self._run:
                        continue
                    inside = os.path.normpath(os.path.join(path, entry.name))
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((entry.path, inside))
                        continue
                    found = entry.stat(follow_symlinks=False)
                    state[inside] = _Seen(found.st_mtime_ns, found.st_size)
                state[path] = _Seen(changed_ns, names=frozenset(names))
            if len(state) > _MOST_ENTRIES:
                return None
        return state


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        yield from entries
