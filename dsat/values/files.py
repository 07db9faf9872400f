"""Writing of files atomically and for their owner only; caches; digests."""

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
    """Return dsat's cache folder of this name, which may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or home() / ".cache"
    return Path(base) / "dsat" / name


def home() -> Path:
    """Return the user's home folder; `/` for a user without one, as in containers."""
    folder = os.path.expanduser("~")
    return Path(folder if os.path.isabs(folder) else "/")


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that new names of files survive a crash."""
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
    """Yield a temporary path; when the context ends, the file or folder there replaces `path`.

    On failure the temporary path is removed, and an OSError names `path`.
    """
    # A character has at most 4 bytes, and a file name at most 255 bytes.
    temporary = path.with_name(f".{path.name[:50]}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            for file in path.parent.glob(f"{glob.escape(temporary.name)}*"):  # SQLite's journal too
                remove(file)
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = str(path)
            del error.filename2  # else the message would show None
        raise


def write_atomically(path: Path, text: str) -> None:
    """Replace the contents of a file, and let only its owner read the file.

    A reader sees either the old text or the new text. On failure the old file stays.
    """
    with written_atomically(path) as temporary, open_private(temporary) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def digest(path: Path) -> str:
    """Return 16 hex digits of the SHA-256 of a file's contents; empty if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError:
        return ""


def write_cache(path: Path, text: str) -> None:
    """Write a cache file and create its folder; ignore errors of the file system."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        write_atomically(path, text)


def open_private(path: Path) -> TextIO:
    """Open a new file that only its owner can read, replacing an existing file.

    Surrogates, which stand for invalid bytes in arguments and file names, are written as bytes.
    """
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, PRIVATE_FILE)
    return open(descriptor, "w", encoding="utf-8", errors="surrogateescape")
