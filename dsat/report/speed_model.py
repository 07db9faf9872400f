"""Model of step time, fitted to a run's trials, whatever search proposed them.

It is the one that the `model` search decides by (`dsat.search.step_time`), fitted to all trials
that ran. Settings besides strategy and batch sizes each have an effect of their own, drawn to none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsat.inputs.ds_config import BATCH_KEYS
from dsat.report.page_rows import flat
from dsat.search import step_time
from dsat.search.normal import Array
from dsat.tuning.run import Run
from dsat.values.trial import Trial, TrialKind
from dsat.values.zero_strategy import Strategy, of_config

_LEAST = 4  # trials that ran, before anything is said
_SETTING_SD = 0.03  # of what a setting does to the time of a step, as a fraction
_GRID = 24
_STRATEGY_KEYS = ("zero_optimization.stage", "zero_optimization.offload_")
_CERTAIN = 1.96


@dataclass(frozen=True)
class Predicted:
    """Predicted gain and its 95 % interval."""

    ratio: float
    low: float
    high: float


class SpeedModel:
    """The fitted model.

    Args:
        run: whose trials; see `of_run`.
        trials: that ran and measured the objective.
    """

    def __init__(self, run: Run, trials: list[Trial]) -> None:
        assert run.plan is not None
        self._plan = run.plan
        self._objective = run.plan.objective
        configs = [_settings(run, trial) for trial in trials]
        self._strategies = list(dict.fromkeys(_strategy(run, trial) for trial in trials))
        self._columns = _columns(configs)
        self._trials = trials
        count = len(self._columns)
        layout = step_time.Layout(
            strategies=self._strategies,
            slots=run.plan.slots_per_trial,
            reference_micro_batch=max(trial.batch.micro_batch for trial in trials),
            knobs=step_time.KnobPrior(
                np.zeros(count),
                np.full(count, _SETTING_SD),
                np.full(count, -1),
                np.zeros(count, bool),
            ),
            over_hosts=run.plan.slots_per_host > 0,
        )
        points = step_time.Points(
            strategy=np.array([self._strategies.index(_strategy(run, t)) for t in trials]),
            micro_batch=np.array([t.batch.micro_batch for t in trials], float),
            gas=np.array([t.batch.gas for t in trials], float),
            knobs=np.array([self._row(config) for config in configs]).reshape(len(trials), count),
        )
        values = np.array([run.value(trial) for trial in trials], float)
        errors = [run.outcomes[trial.id].metrics for trial in trials]
        ci95 = np.array([1.96 * m.standard_error if m else 0.0 for m in errors])
        log_s = self._log_work(points) - self._sign * np.log(values)
        self._fit = step_time.fit(layout, points, log_s, ci95)

    @classmethod
    def of_run(cls, run: Run) -> SpeedModel | None:
        """The model of a run; None with too few trials that ran."""
        ran = [
            trial
            for trial in run.trials.values()
            if trial.kind is not TrialKind.PROFILE and (run.value(trial) or 0) > 0
        ]
        return cls(run, ran) if len(ran) >= _LEAST else None

    def band(self) -> list[dict[str, Any]]:
        """Return rows `strategy`, `micro_batch`, `low`, `high` of the metric's 95 % interval.

        They cover the micro batches between those that ran, with the usual other settings.
        """
        rows = []
        for number, strategy in enumerate(self._strategies):
            own = [t for t in self._trials if t.strategy == strategy.name]
            sizes = [trial.batch.micro_batch for trial in own]
            if len(set(sizes)) < 2:
                continue
            at = np.geomspace(min(sizes), max(sizes), _GRID)
            gas = np.interp(at, *_by_size(own))
            knobs = np.zeros((_GRID, len(self._columns)))
            points = step_time.Points(np.full(_GRID, number), at, gas, knobs)
            mean, sd = self._fit.predict(points)
            middle = self._sign * (self._log_work(points) - mean)
            label = strategy.name.removeprefix("z").replace("_", " ")
            rows += [
                {"strategy": label, "micro_batch": float(size), "low": low, "high": high}
                for size, low, high in zip(
                    at,
                    np.exp(middle - _CERTAIN * sd).tolist(),
                    np.exp(middle + _CERTAIN * sd).tolist(),
                    strict=True,
                )
            ]
        return rows

    def gain(self, run: Run, best: Trial, key: str, own: Any) -> Predicted | None:
        """Return the gain of the best configuration over the user's own value of one setting.

        Args:
            run: the model's.
            best: the recommended trial.
            key: dotted name of the setting.
            own: the user's value.

        Returns:
            None if nothing that ran tells.
        """
        settings, batch, strategy = _settings(run, best), best.batch, _strategy(run, best)
        micro_batch, gas = batch.micro_batch, batch.gas
        if own is None and key != "zero_optimization.stage":
            return None
        if key == BATCH_KEYS[1]:
            micro_batch = int(own)
        elif key == BATCH_KEYS[2]:
            gas = int(own)
        elif key == "zero_optimization.stage":
            strategy = Strategy(int(own or 0))
        elif not any((key, value) in self._columns for value in (own, settings.get(key))):
            return None
        if strategy not in self._strategies:
            return None
        changed = {**settings, key: own}
        both = step_time.Points(
            strategy=np.array(
                [self._strategies.index(s) for s in (strategy, _strategy(run, best))]
            ),
            micro_batch=np.array([micro_batch, batch.micro_batch], float),
            gas=np.array([gas, batch.gas], float),
            knobs=np.array([self._row(changed), self._row(settings)]),
        )
        mean, gradient = self._fit.layout.predict(self._fit.theta, both)
        away = gradient[1] - gradient[0]
        sd = math.sqrt(max(0.0, float(away @ self._fit.covariance @ away)))
        before, after = (self._log_work(both) - mean).tolist()
        log = after - before
        return Predicted(
            math.exp(log), math.exp(log - _CERTAIN * sd), math.exp(log + _CERTAIN * sd)
        )

    @property
    def _sign(self) -> int:
        return -1 if self._objective.smaller_is_better else 1

    def _log_work(self, points: step_time.Points) -> Array:
        """Return the log of samples per step, which turns log rates into log times."""
        if self._objective.smaller_is_better:
            return np.zeros(len(points))
        work: Array = np.log(points.micro_batch * points.gas)
        return work

    def _row(self, settings: Mapping[str, Any]) -> list[float]:
        return [float(settings.get(key) == value) for key, value in self._columns]


def _strategy(run: Run, trial: Trial) -> Strategy:
    assert run.plan is not None
    return of_config(run.plan.config(trial.overrides))


def _settings(run: Run, trial: Trial) -> dict[str, Any]:
    """Settings besides strategy and batch sizes; lists and the like as text."""
    assert run.plan is not None
    found = {**flat(run.plan.config(trial.overrides)), **run.plan.switches, **trial.script_args}
    return {
        key: value if isinstance(value, (bool, int, float, str)) else repr(value)
        for key, value in found.items()
        if key not in BATCH_KEYS and not key.startswith(_STRATEGY_KEYS)
    }


def _columns(configs: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Return the settings that differ between trials, with their values.

    The most frequent value of a setting is what the others are compared with, and is left out.
    """
    found = []
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [config[key] for config in configs if key in config]
        usual = max(dict.fromkeys(values), key=values.count)
        found += [(key, value) for value in dict.fromkeys(values) if value != usual]
    return found


def _by_size(trials: list[Trial]) -> tuple[list[float], list[float]]:
    """Micro batches in their order, and the accumulation steps with each."""
    gas = {float(t.batch.micro_batch): float(t.batch.gas) for t in trials}
    return sorted(gas), [gas[size] for size in sorted(gas)]
