"""Tuners without a memory model, which get dsat's memory predictions and first trials."""

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
    """Trials of a ledger, limited by dsat's memory predictions.

    As in dsat, the profile and the user's own configuration run first. The memory that each trial
    used corrects the predictions.

    Attributes:
        space: the search space.
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
        """Return the largest allowed micro batch that is predicted to fit; 0 if none is."""
        sizes = self.space.micro_batches
        fitting = bisect.bisect_right(sizes, self._forecast.largest(settings))
        return sizes[fitting - 1] if fitting else 0

    def run(self, settings: dict[str, Any], micro_batch: int) -> Outcome:
        """Run a trial with this micro batch, or the next smaller allowed one; learn from its
        memory."""
        sizes = self.space.micro_batches
        micro_batch = sizes[max(0, bisect.bisect_right(sizes, micro_batch) - 1)]
        batch = self.space.batch(micro_batch, settings)
        outcome = self._ledger.run(self._ledger.table.config(settings, batch))
        self._forecast.learn(overrides_for(settings, batch), {}, outcome)
        return outcome


def play_no_search(ledger: Ledger, seed: int, max_trials: int) -> None:
    """Run only the largest micro batch that is predicted to fit, in each stage."""
    with contextlib.suppress(BudgetSpent):
        gated = Gated(ledger)
        for branch in gated.space.branches:
            settings = branch.settings(0)
            if largest := gated.largest(settings):
                gated.run(settings, largest)


def play_tpe(ledger: Ledger, seed: int, max_trials: int) -> None:
    """Run a study with Optuna's TPE sampler and its defaults, over dsat's search space.

    The sampler chooses an exponent from 0 to 1: the micro batch is this power of the largest one
    that is predicted to fit. Out of memory counts as a throughput of zero.
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
            return 0.0  # without a trial
        try:
            return gated.run(settings, round(largest**part)).value(OBJECTIVE) or 0.0
        except BudgetSpent:
            trial.study.stop()
            return 0.0

    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.optimize(throughput, n_trials=4 * max_trials)
