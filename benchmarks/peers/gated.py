"""Tuners that have no memory model of their own: they get dsat's gate, start and size axis."""

from __future__ import annotations

import bisect
import contextlib
from typing import Any

import optuna

from benchmarks.ledger import OBJECTIVE, BudgetSpent, Ledger
from benchmarks.searching import plan_of
from dsat.memory.forecast import Forecast
from dsat.memory.predictor import Basis
from dsat.run.strategies import make_space
from dsat.space.overrides import overrides_for
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


def play_no_search(ledger: Ledger, seed: int, max_trials: int) -> None:
    """Run the largest micro batch that is predicted to fit in each stage, and no more."""
    with contextlib.suppress(BudgetSpent):
        gated = Gated(ledger)
        for branch in gated.space.branches:
            settings = branch.settings(0)
            if largest := gated.largest(settings):
                gated.run(settings, largest)


def play_tpe(ledger: Ledger, seed: int, max_trials: int) -> None:
    """Run a study of Optuna's TPE sampler with its defaults, over the space that dsat searches.

    The micro batch is a part of the room that is predicted to be left, on a logarithmic axis. Out
    of memory counts as a throughput of zero.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    gated = Gated(ledger)
    space = gated.space

    def throughput(trial: optuna.Trial) -> float:
        number = trial.suggest_categorical("strategy", range(len(space.branches)))
        branch = space.branches[number]
        settings = {"stage": branch.strategy.stage, **branch.base}
        for key, values in branch.searched:
            chosen = trial.suggest_categorical(f"{number} {key}", range(len(values)))
            settings[key] = values[chosen]
        largest = gated.largest(settings)
        part = trial.suggest_float("part of the room", 0.0, 1.0)
        if not largest:
            return 0.0  # costs nothing
        try:
            return gated.run(settings, round(largest**part)).value(OBJECTIVE) or 0.0
        except BudgetSpent:
            trial.study.stop()
            return 0.0

    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(throughput, n_trials=4 * max_trials)
