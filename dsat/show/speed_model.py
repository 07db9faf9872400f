"""Model of step time, fitted to a run's trials, whatever search proposed them.

It is the model that the `model` search decides by (`dsat.search.speed`), fitted to all trials.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dsat.command.ds_config import BATCH_KEYS, flat
from dsat.search.candidates import SETTING_SD, STRATEGY_SD, SWITCH_SD
from dsat.search.normal import Array
from dsat.search.speed import Points, Prior, fit
from dsat.search.step_time import Job, acts_on_whole_step, work
from dsat.show.view import RunView, TrialView
from dsat.values import format as fmt
from dsat.values.zero_strategy import Strategy, of_config

_LEAST = 4  # trials that ran, before anything is said
_GRID = 24
_STAGE = "zero_optimization.stage"
_STRATEGY_KEYS = (_STAGE, "zero_optimization.offload_")
_CERTAIN = 1.96


class SpeedModel:
    """The fitted model.

    Args:
        view: of a run with trials that were measured; see `of`.
    """

    def __init__(self, view: RunView) -> None:
        self._plan, self._trials, self._switches = view.plan, view.ranked, view.own_switches
        settings = [self._settings(each) for each in self._trials]
        own = [self._strategy(each) for each in self._trials]
        self._strategies, self._columns = list(dict.fromkeys(own)), _columns(settings)
        self._usual = {key: _most_frequent(settings, key) for key, _ in self._columns}
        assert view.profile is not None
        self._job = Job.of_profile(
            view.profile, slots=view.plan.slots_per_trial, slots_per_host=view.plan.slots_per_host
        )
        batches = [each.trial.batch for each in self._trials]
        micro_batches, gas = [b.micro_batch for b in batches], [b.gas for b in batches]
        points = self._points(own, micro_batches, gas, settings)
        values = np.array([each.value for each in self._trials], float)
        metrics = [each.outcome and each.outcome.metrics for each in self._trials]
        errors = np.array([m.standard_error if m else 0.0 for m in metrics])
        is_whole = [acts_on_whole_step(key) for key, _ in self._columns]
        is_switch = np.array([False] * len(self._strategies) + is_whole)
        effects = np.where(is_switch, SWITCH_SD, SETTING_SD)
        effects[: len(self._strategies)] = STRATEGY_SD
        prior = Prior(self._job.hardware, effects, is_switch)
        log_s = self._log_rate(points, np.log(values))
        self._fit = fit(prior, points, log_s, errors)

    @classmethod
    def of(cls, view: RunView) -> SpeedModel | None:
        """Return the model of a run; None with too few trials, or with values that are zero."""
        ran = view.ranked
        known = view.profile is not None and len(ran) >= _LEAST
        return cls(view) if known and all(each.value for each in ran) else None

    def band(self) -> list[dict[str, Any]]:
        """Return rows `strategy`, `micro_batch`, `low`, `high` of the metric's 95 % interval.

        They cover the micro batches between those that ran, with the usual other settings.
        """
        rows = []
        for strategy in self._strategies:
            batches = [t.trial.batch for t in self._trials if t.trial.strategy == strategy.name]
            gas = {float(batch.micro_batch): float(batch.gas) for batch in batches}
            sizes = sorted(gas)
            if len(sizes) < 2:
                continue
            at = np.geomspace(sizes[0], sizes[-1], _GRID)
            steps = np.interp(at, sizes, [gas[size] for size in sizes])
            points = self._points([strategy] * _GRID, at, steps, [self._usual] * _GRID)
            mean, sd = self._fit.predict(points)
            middle = self._log_rate(points, mean)
            low, high = np.exp(middle - _CERTAIN * sd), np.exp(middle + _CERTAIN * sd)
            columns = zip(at.tolist(), low.tolist(), high.tolist(), strict=True)
            label = fmt.strategy(strategy.name)
            rows += [
                {"strategy": label, "micro_batch": size, "low": least, "high": most}
                for size, least, most in columns
            ]
        return rows

    def gain(self, best: TrialView, key: str, own: Any) -> tuple[float, float, float] | None:
        """Return the gain of the best configuration over the user's own value of one setting.

        Args:
            best: the recommended trial.
            key: dotted name of the setting.
            own: the user's value.

        Returns:
            The gain and the ends of its 95 % interval; None if nothing that ran tells.
        """
        settings, batch, strategy = self._settings(best), best.trial.batch, self._strategy(best)
        before = strategy
        if own is None and key != _STAGE:
            return None
        if key == _STAGE:
            before = Strategy(int(own or 0))
        elif key not in BATCH_KEYS and not any(
            (key, value) in self._columns for value in (own, settings.get(key))
        ):
            return None
        if before not in self._strategies:
            return None
        size, steps = batch.micro_batch, batch.gas
        if key == BATCH_KEYS[1]:
            size, kept = own, self._plan.train_batch_size is not None
            steps = self._plan.own_batch.gas if kept else steps
        both = self._points(
            [before, strategy],
            [size, batch.micro_batch],
            [own if key == BATCH_KEYS[2] else steps, batch.gas],
            [{**settings, key: own}, settings],
        )
        mean, [sd, _] = self._fit.predict(both, both.only(np.array([1])))
        slower, faster = self._log_rate(both, mean)
        if self._plan.objective.smaller_is_better:
            slower, faster = -slower, -faster
        log = float(faster - slower)
        return math.exp(log), math.exp(log - _CERTAIN * sd), math.exp(log + _CERTAIN * sd)

    def _log_rate(self, points: Points, log: Array) -> Array:
        """Turn log times of a step into logs of the metric, and the other way round."""
        if self._plan.objective.smaller_is_better:
            return log
        work: Array = np.log(points.micro_batch * points.gas)
        return work - log

    def _points(
        self,
        strategies: Sequence[Strategy],
        micro_batches: Sequence[float] | Array,
        gas: Sequence[float] | Array,
        settings: Sequence[Mapping[str, Any]],
    ) -> Points:
        proposed = [
            {k.removeprefix("zero_optimization."): v for k, v in s.items()} for s in settings
        ]
        both = list(zip(strategies, settings, strict=True))
        traits = [
            [float(strategy == each) for each in self._strategies]
            + [float(its.get(key) == value) for key, value in self._columns]
            for strategy, its in both
        ]
        return Points(
            work=np.array(
                [work(self._job, each, its) for each, its in zip(strategies, proposed, strict=True)]
            ),
            micro_batch=np.array(micro_batches, float),
            gas=np.array(gas, float),
            room=np.ones(len(settings)),
            traits=np.array(traits),
        )

    def _strategy(self, each: TrialView) -> Strategy:
        return of_config(self._plan.config(each.trial.overrides))

    def _settings(self, each: TrialView) -> dict[str, Any]:
        """Return settings besides strategy and batch sizes; lists and the like as text."""
        config = flat(self._plan.config(each.trial.overrides))
        found = {**config, **self._switches, **each.trial.script_args}
        return {
            key: value if isinstance(value, (bool, int, float, str)) else repr(value)
            for key, value in found.items()
            if key not in BATCH_KEYS and not key.startswith(_STRATEGY_KEYS)
        }


def _columns(configs: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """Return the settings that differ between trials, with their values."""
    found = []
    for key in dict.fromkeys(key for config in configs for key in config):
        values = dict.fromkeys(config.get(key) for config in configs)
        found += [(key, value) for value in values if len(values) > 1]
    return found


def _most_frequent(configs: list[dict[str, Any]], key: str) -> Any:
    values = [config.get(key) for config in configs]
    return max(dict.fromkeys(values), key=values.count)
