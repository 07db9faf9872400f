"""Locks of folders, so that only one dsat process at a time works in each."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from dsat.errors import JournalError, JournalLocked
from dsat.values.files import PRIVATE_FILE, PRIVATE_FOLDER

MARK_FILE = ".dsat"
_TRY_FOR_S = 1.0  # retry, because `is_locked` holds a shared lock for microseconds


class FolderLock:
    """Lock of a folder against other dsat processes, from creation to `close`.

    The folder is created if necessary. The kernel holds the lock, on a file in the folder, and
    releases it when this process ends.

    Raises:
        JournalLocked: another process works there; the message names it.
        JournalError: the file system does not support locks.
        OSError: the folder or its file cannot be created or written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        path = folder / MARK_FILE
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, PRIVATE_FILE)
        try:
            _lock(self._descriptor)
        except BlockingIOError:
            holder = _holder(self._descriptor)
            os.close(self._descriptor)
            raise JournalLocked(
                f"{folder}: another dsat process is working on this run{holder}. Wait for it, stop "
                "it, or use another folder."
            ) from None
        except OSError as error:
            os.close(self._descriptor)
            raise JournalError(
                f"{folder}: cannot be locked: {error.strerror}. Use a folder on another file "
                "system (--run-dir)."
            ) from None
        text = json.dumps(
            {"pid": os.getpid(), "host": socket.gethostname(), "since_s": round(time.time())}
        )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode() + b"\n", 0)

    def close(self) -> None:
        os.close(self._descriptor)


def _lock(descriptor: int) -> None:
    """Acquire the lock; raise BlockingIOError if it is not free within `_TRY_FOR_S`."""
    deadline_s = time.monotonic() + _TRY_FOR_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(0.02)


def is_locked(folder: Path) -> bool:
    """Return whether a process has locked a folder; False without lock file or lock support."""
    try:
        with open(folder / MARK_FILE, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _holder(descriptor: int) -> str:
    """Return ` (process 71 on host, since 2026-11-29 10:31:02)`; empty if the holder is unknown."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        holder: dict[str, Any] = json.loads(os.pread(descriptor, 4096, 0))
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(holder["since_s"]))
        return f" (process {int(holder['pid'])} on {str(holder['host'])[:100]}, since {since})"
    return ""
