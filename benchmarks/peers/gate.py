"""What dsat knows of memory, for tuners that have no such model: the same gate, the same start."""

from __future__ import annotations

import bisect
from typing import Any

from benchmarks.ledger import STAGES, Ledger, Workload
from benchmarks.peers.ours import plan_of
from dsat.memory.forecast import Forecast
from dsat.memory.predictor import Basis
from dsat.space.knobs import KNOB_NAMES
from dsat.space.overrides import overrides_for, script_args_for
from dsat.space.space import Freedom, Space
from dsat.values.outcome import Outcome
from dsat.values.zero_strategy import plain


def space_of(table: Workload) -> Space:
    """The settings that a workload tells apart, with the micro batches that dsat has."""
    return Space(
        strategies=plain(*STAGES),
        micro_batches=plan_of(table, "model").allowed_micro_batches,
        slots=table.header.slots,
        freedom=Freedom(
            base_config=table.header.ds_config,
            choices={k: v for k, v in table.choices.items() if k not in table.header.switches},
            fix=tuple(name for name in KNOB_NAMES if name not in table.choices),
            switches=table.header.switches,
        ),
        train_batch_size=table.header.train_batch_size,
        num_params=table.header.profile.num_params,
    )


class Gated:
    """Trials of a ledger behind dsat's own prediction of memory, begun as dsat begins.

    The profile and the user's own configuration are run first. What every trial used corrects the
    prediction.

    Attributes:
        space: what may be tried.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.space = space_of(ledger.table)
        self._ledger = ledger
        table = ledger.table
        profile = ledger.profile().profile
        assert profile is not None
        header = table.header
        basis = (
            Basis.of_profile(profile, header.switches)
            if header.memory is None
            else Basis.from_json(dict(header.memory))
        )
        plan = plan_of(table, "model")
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
        self._forecast.learn(overrides_for(settings, batch), script_args_for(settings), outcome)
        return outcome
