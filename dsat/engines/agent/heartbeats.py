"""Heartbeats of other hosts."""

from __future__ import annotations

PING_EVERY_S = 10.0
# Longer than a host stalls that swaps, or whose files come over a slow network.
SILENT_AFTER_S = 60.0
