"""A host that has come while trials run elsewhere: what it is asked before one runs there."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class SharedFolder:
    """A file in the run's folder by which another host shows that it has the same folder.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._token = secrets.token_hex()
        self.file = folder / f".seen-{secrets.token_hex(4)}"
        self.file.write_text(self._token)

    def problem(self, look: Mapping[str, Any]) -> str:
        """What is wrong with a host that has looked at the file; empty if nothing is."""
        if look["text"] == self._token:
            return ""
        return (
            f"does not share the run's folder {self._folder} with this one: put it on a file "
            "system that all hosts have (--run-dir)"
        )

    def remove(self) -> None:
        """Does nothing twice."""
        self.file.unlink(missing_ok=True)


class Joining:
    """What a host's supervisor is asked first, one thing after the other, while others work.

    Args:
        run_folder: that it must share.
        folders: that trials need.
        warm: requests to import what the other supervisors have imported.
        limit_s: within which it must be ready.

    Attributes:
        folders: that trials need.
        requests: for its supervisor, in this order.
    """

    def __init__(
        self,
        run_folder: Path,
        folders: Sequence[Path],
        warm: Sequence[Mapping[str, Any]],
        *,
        limit_s: float,
    ) -> None:
        self._shared = SharedFolder(run_folder)
        self.folders = folders
        self._looked = 0
        self._unanswered = 1 + len(folders) + len(warm)
        self._limit_s = limit_s
        self._deadline_s = time.monotonic() + limit_s
        self.requests: list[Mapping[str, Any]] = [
            *({"op": "look", "path": str(path)} for path in (self._shared.file, *folders)),
            *warm,
        ]

    @property
    def is_ready(self) -> bool:
        return not self._unanswered

    def hear(self, answer: Mapping[str, Any]) -> str:
        """Takes in an answer; returns why the host cannot be used, or an empty text."""
        self._unanswered -= 1
        if answer["event"] == "warm":
            return "" if answer["ok"] else f"no rank can be forked there ({answer['reason']})"
        self._looked += 1
        if self._looked == 1:
            problem = self._shared.problem(answer)
            return problem and f"it {problem}"
        folder = self.folders[self._looked - 2]
        return "" if answer["is_folder"] else f"it has no folder {folder}"

    def overdue(self) -> str:
        """Why it is not waited for any longer; empty as long as it is."""
        if time.monotonic() < self._deadline_s:
            return ""
        return f"getting ready took longer than {self._limit_s:g} s"

    def end(self) -> None:
        """Leaves nothing behind; does nothing twice."""
        self._shared.remove()
