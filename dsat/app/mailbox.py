"""Requests to a running search, left in its folder by other processes of the same user.

The folder is private: a process that may write there may also end the run's processes.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from dsat.run.requests import Request
from dsat.values.codec import DecodeError
from dsat.values.files import PRIVATE_FOLDER, write_atomically

FOLDER = "requests"
_SUFFIX = ".json"
_log = logging.getLogger(__name__)


def leave(run_folder: Path, request: Request) -> None:
    """Leave a request for the process that works on a run."""
    folder = run_folder / FOLDER
    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    text = json.dumps(request.to_json())
    write_atomically(folder / f"{time.time_ns():020}{_SUFFIX}", text)


def take(run_folder: Path) -> list[Request]:
    """Take the requests since the last call, the oldest first."""
    found = []
    for path in sorted((run_folder / FOLDER).glob(f"[0-9]*{_SUFFIX}")):
        text = path.read_text(encoding="utf-8", errors="replace")
        path.unlink()
        try:
            found.append(Request.from_json(json.loads(text)))
        except (ValueError, DecodeError):
            _log.warning("%s is no request, and was deleted", path)
    return found
