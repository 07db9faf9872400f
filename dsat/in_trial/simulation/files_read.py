"""Files that a script reads up to its first step: unless they change, its model is the same.

A script that uses the network may find another model there, so its simulations are not cached.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from dsat.values.files import stamp

# Of libraries: who compares knows their versions.
_INSTALLED = ("site-packages", "dist-packages")
_OF_THE_SYSTEM = tuple(f"{os.sep}{name}{os.sep}" for name in ("dev", "etc", "proc", "sys"))
_MOST = 2000
_NETWORK = ("socket.connect", "socket.getaddrinfo")


class FilesRead:
    """Notes what this process opens from now on; cannot be undone.

    Args:
        without: what lies in this folder is nobody's but this process's.
    """

    def __init__(self, without: Path) -> None:
        self._without = str(without.resolve()) + os.sep
        self._paths: set[str] = set()
        self._asked_network = False
        library = sysconfig.get_path("stdlib")
        self._libraries = library, os.path.realpath(library)
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], (str, bytes)) and len(self._paths) <= _MOST:
            if (args[2] or 0) & os.O_ACCMODE == os.O_RDONLY:
                self._paths.add(os.path.realpath(os.fsdecode(args[0])))
        elif event in _NETWORK and not isinstance(args[-1], str):  # a name: of a local socket
            self._asked_network = True

    def stamps(self) -> list[list[Any]] | None:
        """Return the stamp of each file, with module sources; None if the network was asked."""
        # Lazy modules import something when asked for an attribute that they have not got.
        modules = [getattr(module, "__dict__", {}) for module in list(sys.modules.values())]
        sources = [module.get("__file__") for module in modules]
        paths = {*self._paths, *(os.path.realpath(s) for s in sources if isinstance(s, str))}
        if self._asked_network or len(self._paths) > _MOST:
            return None
        return [stamp(path) for path in sorted(paths) if self._counts(path)]

    def _counts(self, path: str) -> bool:
        if path.startswith((self._without, *_OF_THE_SYSTEM, *self._libraries)):
            return False
        if path.endswith(".pyc") or any(part in _INSTALLED for part in path.split(os.sep)):
            return False
        return not os.path.isdir(path)
