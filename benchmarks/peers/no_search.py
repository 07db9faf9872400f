"""No search: the largest micro batch that is predicted to fit, in each stage, and no more."""

from __future__ import annotations

import contextlib

from benchmarks.ledger import BudgetSpent, Ledger
from benchmarks.peers.gate import Gated


def play(ledger: Ledger, seed: int, max_trials: int) -> None:
    """Run the profile, the own configuration, then one trial of each stage; it has no seed."""
    with contextlib.suppress(BudgetSpent):
        gated = Gated(ledger)
        for branch in gated.space.branches:
            settings = branch.settings(0)
            if largest := gated.largest(settings):
                gated.run(settings, largest)
