"""Sizes of memory as people read them."""

from __future__ import annotations


def readable(size_bytes: float, *, whole: bool = False) -> str:
    """`1.23 GiB`, `14.6 MiB`; what a machine has is told as `24 GiB`, `whole`."""
    if size_bytes < 2**30:
        return f"{size_bytes / 2**20:,.{0 if whole else 1}f} MiB"
    return f"{size_bytes / 2**30:,.{0 if whole else 2}f} GiB"
