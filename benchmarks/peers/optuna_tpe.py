"""Optuna's tree-structured Parzen estimator with its defaults, over the space that dsat searches.

It has no profile trial. Instead it is given what no tuner can know: the largest micro batch that
runs with any settings. Out of memory counts as a throughput of zero.
"""

from __future__ import annotations

import optuna

from benchmarks.ledger import OBJECTIVE, STAGES, Ledger
from dsat.space.knobs import KNOB_NAMES
from dsat.space.space import Freedom, Space
from dsat.values.zero_strategy import plain


def play(ledger: Ledger, seed: int, max_trials: int) -> None:
    """Runs a study of as many trials as the budget allows."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    table = ledger.table
    space = Space(
        strategies=plain(*STAGES),
        micro_batches=range(1, table.largest_micro_batch + 1),
        slots=table.header.slots,
        freedom=Freedom(
            choices=table.choices,
            fixed=tuple(name for name in KNOB_NAMES if name not in table.choices),
        ),
        config=table.header.ds_config,
        num_params=table.header.profile.num_params,
    )

    def throughput(trial: optuna.Trial) -> float:
        number = trial.suggest_categorical("strategy", range(len(space.branches)))
        branch = space.branches[number]
        settings = {"stage": branch.strategy.stage, **branch.base}
        for key, values in branch.knobs:
            chosen = trial.suggest_categorical(f"{number} {key}", range(len(values)))
            settings[key] = values[chosen]
        size = trial.suggest_int("micro_batch", 1, table.largest_micro_batch, log=True)
        outcome = ledger.run(table.config(settings, space.batch(size, settings)))
        return outcome.value(OBJECTIVE) or 0.0

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(throughput, n_trials=max_trials)
