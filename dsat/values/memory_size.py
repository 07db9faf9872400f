"""Sizes of memory as people read them."""

from __future__ import annotations


def readable(size_bytes: float, *, whole: bool = False) -> str:
    """Return `1.23 GiB`, `14.6 MiB` or `2.5 KiB`; `24 GiB` if `whole`."""
    if 0 < size_bytes < 2**20:
        return f"{size_bytes / 2**10:,.{0 if whole else 1}f} KiB"
    if size_bytes < 2**30:
        return f"{size_bytes / 2**20:,.{0 if whole else 1}f} MiB"
    return f"{size_bytes / 2**30:,.{0 if whole else 2}f} GiB"
