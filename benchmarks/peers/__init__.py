"""The compared tuners, all behind the same interface.

Each tuner is the real one, from its own package; only its trials come from a table or a made-up
cluster. Tuners without a memory model get dsat's prediction of what fits, its first trials and its
list of micro batches.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial

from benchmarks.ledger import Ledger
from dsat.search import SEARCHES

Play = Callable[[Ledger, int, int], None]
"""Run trials of a ledger, with a seed, at most so many."""

_PEERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    **{f"dsat {method}": ("benchmarks.searching", "play", (method,)) for method in SEARCHES},
    **{
        f"Determined {method}": (f"{__name__}.determined_dsat", "play", (method,))
        for method in ("asha", "binary", "random")
    },
    "DeepSpeed fast": (f"{__name__}.deepspeed_autotuner", "play", ()),
    "Optuna TPE": (f"{__name__}.gated", "play_tpe", ()),
    "no search": (f"{__name__}.gated", "play_no_search", ()),
}
PEERS = tuple(_PEERS)


def player(name: str) -> Play:
    """Return the function that runs one of `PEERS`; imports its package, which may be slow."""
    module, play, first = _PEERS[name]
    return partial(getattr(importlib.import_module(module), play), *first)
