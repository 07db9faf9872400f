"""What dsat knows of memory, for tuners that have no such model: the same gate, the same start."""

from __future__ import annotations

import bisect
from typing import Any

from benchmarks.ledger import Ledger
from benchmarks.searching import plan_of
from dsat.memory.forecast import Forecast
from dsat.memory.predictor import Basis
from dsat.space.overrides import overrides_for
from dsat.tuning.strategies import make_space
from dsat.values.outcome import Outcome


class Gated:
    """Trials of a ledger behind dsat's own prediction of memory, begun as dsat begins.

    The profile and the user's own configuration are run first. What every trial used corrects the
    prediction.

    Attributes:
        space: what may be tried.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, header = ledger, ledger.table.header
        profile, plan = ledger.profile().profile, plan_of(ledger.table, "model")
        assert profile is not None
        self.space = make_space(plan, profile)
        basis = (
            Basis.of_profile(profile, {})
            if header.memory is None
            else Basis.from_json(dict(header.memory))
        )
        self._forecast = Forecast(basis, plan, profile, self.space)
        ledger.run({**header.ds_config, **plan.own_batch.config()})

    def largest(self, settings: dict[str, Any]) -> int:
        """The largest micro batch that is allowed and predicted to fit; 0 if none is."""
        sizes = self.space.micro_batches
        fitting = bisect.bisect_right(sizes, self._forecast.largest(settings))
        return sizes[fitting - 1] if fitting else 0

    def run(self, settings: dict[str, Any], micro_batch: int) -> Outcome:
        """Run a trial of the next smaller allowed micro batch, and learn what it used."""
        sizes = self.space.micro_batches
        micro_batch = sizes[max(0, bisect.bisect_right(sizes, micro_batch) - 1)]
        batch = self.space.batch(micro_batch, settings)
        outcome = self._ledger.run(self._ledger.table.config(settings, batch))
        self._forecast.learn(overrides_for(settings, batch), {}, outcome)
        return outcome
