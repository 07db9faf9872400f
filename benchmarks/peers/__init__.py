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

_DETERMINED = ("asha", "binary", "random")
# Name -> module with a function `play`, and what that is given first, if anything.
_PEERS: dict[str, tuple[str, str | None]] = {
    **{f"dsat {method}": ("benchmarks.searching", method) for method in SEARCHES},
    **{f"Determined {method}": (f"{__name__}.determined_dsat", method) for method in _DETERMINED},
    "DeepSpeed fast": (f"{__name__}.deepspeed_autotuner", None),
    "Optuna TPE": (f"{__name__}.optuna_samplers", "TPE"),
    "Optuna GP": (f"{__name__}.optuna_samplers", "GP"),
    "no search": (f"{__name__}.no_search", None),
}
PEERS = tuple(_PEERS)


def player(name: str) -> Play:
    """How to run one of `PEERS`; imports its package, which may be heavy."""
    module, method = _PEERS[name]
    play: Callable[..., None] = importlib.import_module(module).play
    return play if method is None else partial(play, method)
