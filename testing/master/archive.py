"""Model definitions: the files of a request, and the archive that a container gets."""

from __future__ import annotations

import base64
import io
import tarfile
from collections.abc import Iterable, Mapping
from typing import Any

_DIRECTORY = 53  # the tar type '5'; 48, or '0', is a file


def pack(files: Iterable[Mapping[str, Any]]) -> bytes:
    """A gzipped tar archive of v1File items."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for file in files:
            content = base64.b64decode(file.get("content") or "")
            info = tarfile.TarInfo(file["path"])
            info.mode = int(file.get("mode") or 0o644)
            info.mtime = int(file.get("mtime") or 0)
            if int(file["type"]) == _DIRECTORY:
                info.type = tarfile.DIRTYPE
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def text(archive: bytes) -> str:
    """As it is sent."""
    return base64.b64encode(archive).decode("ascii")


def names(archive: bytes) -> list[str]:
    """The paths in an archive."""
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as opened:
        return opened.getnames()
