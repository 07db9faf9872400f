"""Sizes of memory as people read them."""

from __future__ import annotations


def readable(size_bytes: float) -> str:
    """`1.23 GiB`, `14.6 MiB`."""
    if size_bytes < 2**30:
        return f"{size_bytes / 2**20:.1f} MiB"
    return f"{size_bytes / 2**30:.2f} GiB"
