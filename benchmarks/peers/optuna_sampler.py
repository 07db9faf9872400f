"""Optuna's TPE sampler with its defaults, over the space that dsat searches and behind its gate.

The micro batch is a part of the room that is predicted to be left, on a logarithmic axis. Out of
memory counts as a throughput of zero.
"""

from __future__ import annotations

import optuna

from benchmarks.ledger import OBJECTIVE, BudgetSpent, Ledger
from benchmarks.peers.gate import Gated


def play(ledger: Ledger, seed: int, max_trials: int) -> None:
    """Run a study of as many trials as the budget leaves after the profile and the own one."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    gated = Gated(ledger)
    space = gated.space

    def throughput(trial: optuna.Trial) -> float:
        number = trial.suggest_categorical("strategy", range(len(space.branches)))
        branch = space.branches[number]
        settings = {"stage": branch.strategy.stage, **branch.base}
        for key, values in branch.knobs:
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
