"""Files that survive a kill at any moment."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

# A run's files may contain passwords passed to its scripts.
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600


def cache_folder(name: str) -> Path:
    """Return the cache folder for answers of one kind; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or home() / ".cache"
    return Path(base) / "dsat" / name


def home() -> Path:
    """Return the user's home folder; the root, as in containers, for a user without one."""
    found = os.path.expanduser("~")
    return Path(found if os.path.isabs(found) else "/")


def sync_folder(folder: Path) -> None:
    """Make new names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path, which replaces a file or folder at the end.

    On failure the temporary path is removed, and a system error names the file to be replaced.
    """
    # A character has at most 4 bytes, and a name 255.
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
    """Replace the contents of a file, which only its owner can read.

    A reader sees either the old text or the new one. On failure the old file stays.
    """
    with written_atomically(path) as temporary, open_private(temporary) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def digest(path: Path) -> str:
    """Return a digest of a file's contents; empty if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def write_cache(path: Path, text: str) -> None:
    """Write a file of a cache and create its folder, ignoring errors of the file system."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        write_atomically(path, text)


def open_private(path: Path) -> TextIO:
    """Open a new file that only its owner can read, replacing an older one.

    Surrogates, which stand for invalid bytes in arguments and file names, are written as bytes.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, PRIVATE_FILE)
    return open(descriptor, "w", encoding="utf-8", errors="surrogateescape")
