"""Files that survive a kill at any moment."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

# What a run writes may hold what its scripts are given, passwords among them.
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
# A socket's path has 107 bytes at most (unix(7)), and its folder and its own name are among them.
_LONGEST_FOR_SOCKETS = 107 - len("/dsat-12345678/s")


def cache_folder(name: str) -> Path:
    """Return the cache folder for answers of one kind; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or home() / ".cache"
    return Path(base) / "dsat" / name


def home() -> Path:
    """Return the user's home folder; the root, as in containers, for a user without one."""
    found = os.path.expanduser("~")
    return Path(found if os.path.isabs(found) else "/")


def folder_for_sockets() -> str:
    """Return the temporary folder, or another if its path is too long for those of sockets."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= _LONGEST_FOR_SOCKETS else "/tmp"  # noqa: S108


def sync_folder(folder: Path) -> None:
    """Makes new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it; nothing if it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """Yield a name beside a file or folder; what is made under it takes its place at the end.

    On failure nothing of it stays, and a system error names the file that was to be made.
    """
    # A character has 4 bytes at most, and a name 255.
    temporary = path.with_name(f".{path.name[:50]}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            for left in path.parent.glob(f"{glob.escape(temporary.name)}*"):  # SQLite's journal too
                remove(left)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = str(path)
            del error.filename2  # None would be shown
        raise


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by new text, readable by its owner alone.

    A reader sees the old text or the new one, never a part. On failure the old file stays.
    """
    with written_atomically(path) as temporary, open_private(temporary) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def digest(path: Path) -> str:
    """Return a digest of what a file holds; empty if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def write_cache(path: Path, text: str) -> None:
    """Write a file of a cache, and its folder. A cache that cannot be written is left as it is."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        write_atomically(path, text)


def open_private(path: Path) -> TextIO:
    """Opens a new file that only its owner may read; one of that name is replaced.

    Arguments of commands and names of files may be no valid text: they become the bytes that they
    were.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, PRIVATE_FILE)
    return open(descriptor, "w", encoding="utf-8", errors="surrogateescape")
