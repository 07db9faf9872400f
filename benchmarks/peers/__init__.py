"""The tuners that are compared, each behind the same few words.

Every one of them is the real thing, from its own package; only the trials come from a table or a
made-up cluster. Those that have no memory model of their own get dsat's gate, start and size axis.
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
    """Return how to run one of `PEERS`; import its package, which may be heavy."""
    module, play, first = _PEERS[name]
    return partial(getattr(importlib.import_module(module), play), *first)
