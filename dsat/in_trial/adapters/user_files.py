"""The user's files, which a trial must not change: all files that are older than the trial."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from dsat.in_trial import failures
from dsat.values.files import home

# One file per host. Its modification time is the trial's start there, by the file system's clock.
_BEGAN_FILE = "began-{host}.json"
_INSTEAD_FOLDER = "instead"  # in the trial's folder: copies that the script changes
CREATED_FILE = "created.jsonl"  # in the trial's folder: paths elsewhere that the script created
# Larger files are not copied: a script that appends to them or changes parts changes the originals.
_LARGEST_COPIED_BYTES = 2**26
_KERNEL_FOLDERS = (Path("/proc"), Path("/sys"))
# Libraries may change their caches, which are by default in folders of the user's home.
_CACHE_FOLDERS = (".cache", ".triton", ".nv")
_CACHE_VARIABLES = tuple(
    "HF_HOME HF_HUB_CACHE HF_DATASETS_CACHE HF_MODULES_CACHE TRANSFORMERS_CACHE TORCH_HOME "
    "TORCH_EXTENSIONS_DIR TORCHINDUCTOR_CACHE_DIR TRITON_CACHE_DIR TRITON_HOME XDG_CACHE_HOME "
    "MPLCONFIGDIR NUMBA_CACHE_DIR CUDA_CACHE_PATH MODELSCOPE_CACHE".split()
)


class UserFiles:
    """Files that are older than a trial, and the copies that the trial writes instead of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._copies = self._folder / _INSTEAD_FOLDER
        self._temporary = Path(tempfile.gettempdir()).resolve()
        self._began_ns, self._earlier_names = _note_begin(self._folder, self._temporary)
        self._dsat_folders: list[Path] = []
        self._removed: set[Path] = set()  # paths that the script believes it removed

    def is_older(self, path: Path) -> bool:
        try:
            return os.lstat(path).st_ctime_ns < self._began_ns
        except OSError:
            return False

    def add_scratch(self, folder: Path) -> None:
        """Let the trial write to another folder of dsat, such as a simulation's message folder."""
        self._dsat_folders.append(folder.resolve())

    def is_scratch(self, path: Path) -> bool:
        """Return whether a trial may change a path without restrictions.

        Such paths are in the trial's own folder, caches, /proc and /sys, or new temporary files.
        """
        folders = (self._folder, *self._dsat_folders, *_KERNEL_FOLDERS, *_caches())
        if any(map(path.is_relative_to, folders)):
            return True
        if not path.is_relative_to(self._temporary) or path == self._temporary:
            return False
        first = path.relative_to(self._temporary).parts[0]
        return first not in self._earlier_names or first.startswith("torchinductor_")

    def is_to_stay(self, raw_path: Any) -> bool:
        """Return whether a path is protected.

        Paths older than the trial are protected, and folders that contain such paths. So are files
        that dsat did not let the script save.
        """
        path = absolute(raw_path)
        if path is None or self.is_scratch(path):
            return False
        if not os.path.lexists(path):
            return path.resolve() in failures.unwritten
        if self.is_older(path):
            return True
        tree = os.walk(path) if path.is_dir() and not path.is_symlink() else ()
        return any(self.is_older(Path(root, n)) for root, dirs, files in tree for n in dirs + files)

    def note_created(self, raw_path: Any) -> None:
        """Record a folder or link that the script created; empty folders are removed later."""
        path = absolute(raw_path)
        if path is not None and not self.is_scratch(path):
            with open(self._folder / CREATED_FILE, "a", encoding="utf-8") as file:
                file.write(json.dumps(str(path)) + "\n")

    def is_left_by_a_trial(self, raw_path: Any) -> bool:
        """Return whether another trial of the run, not this one, created this folder or link."""
        path = str(absolute(raw_path))
        folders = [folder for folder in self._folder.parent.iterdir() if folder != self._folder]
        return path not in read_created(self._folder) and any(
            path in read_created(folder) for folder in folders
        )

    def remove(self, raw_path: Any) -> None:
        """Record that the script removed a path, although dsat kept it."""
        path = absolute(raw_path)
        if path is not None:
            self._removed.add(path)

    def is_removed(self, raw_path: Any) -> bool:
        """Return whether a path, or a folder above it, exists only because dsat kept it."""
        path = absolute(raw_path)
        return path is not None and not self._removed.isdisjoint({path, *path.parents})

    def move(self, source: Any, target: Any) -> None:
        """Pretend to move a protected path; move a new file to the copy of a protected target."""
        old, new = absolute(source), absolute(target)
        if old is None or new is None:
            return
        if self.is_to_stay(old):
            self._removed.add(old)
            failures.unwritten.add(new.resolve())
        elif old.is_file():
            self._copies.mkdir(exist_ok=True)
            shutil.copyfile(old, self._copy_path(new))
            os.unlink(old)

    def instead_of(self, raw_path: Any, mode: str) -> Any:
        """Return the path to open: the trial's copy of a file, or else the given path.

        Opening a file older than the trial for writing makes the copy, which is then also read.
        """
        path = absolute(raw_path)
        if path is None:
            return raw_path
        if not set(mode) & set("wax+"):
            has_stand_in = self._copies.exists() and self._copy_path(path).exists()
            return self._copy_path(path) if has_stand_in else raw_path
        target = path.resolve()
        if self.is_scratch(target) or not (target.is_file() and self.is_older(target)):
            return raw_path
        stand_in = self._copy_path(path)
        if stand_in.exists() or "w" in mode or "x" in mode:
            self._copies.mkdir(exist_ok=True)
        elif target.stat().st_size <= _LARGEST_COPIED_BYTES:
            self._copies.mkdir(exist_ok=True)
            shutil.copyfile(target, stand_in)
        else:
            return raw_path
        return stand_in

    def _copy_path(self, path: Path) -> Path:
        target = path.resolve()
        digest = hashlib.sha256(os.fsencode(target)).hexdigest()[:16]
        return self._copies / f"{digest}-{target.name}"


def read_created(folder: Path) -> list[str]:
    """Return the folders and links that a trial's script created outside of the trial's folder."""
    try:
        lines = (folder / CREATED_FILE).read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]
    except (OSError, ValueError):  # none, or a process was killed as it wrote
        return []


def absolute(path: Any) -> Path | None:
    """Make a path absolute; return None for anything that is not a path, such as a descriptor."""
    try:
        return Path(os.path.abspath(os.fsdecode(path)))
    except TypeError:
        return None


def _caches() -> list[Path]:
    """Return libraries' cache folders by the present variables, which a script may change."""
    caches = [Path(os.environ[name]) for name in _CACHE_VARIABLES if os.environ.get(name)]
    return [*(home() / name for name in _CACHE_FOLDERS), *caches]


def _note_begin(folder: Path, temporary: Path) -> tuple[int, frozenset[str]]:
    """Return when the trial began, and the contents of the temporary folder at that time.

    On each host, the trial's first process records both for the other processes.
    """
    file = folder / _BEGAN_FILE.format(host=os.uname().nodename)
    draft = file.with_suffix(f".{os.getpid()}")
    if not file.exists():
        draft.write_text(json.dumps(os.listdir(temporary)), encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            os.link(draft, file)
        draft.unlink()
    names = json.loads(file.read_text(encoding="utf-8"))
    return file.stat().st_mtime_ns, frozenset(names)
