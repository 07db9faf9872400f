"""Effects of single settings, by trials that differ in nothing else or by the model of speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from dsat.inputs.ds_config import BATCH_KEYS, flat
from dsat.report import format as fmt
from dsat.report.run_view import RunView, TrialView
from dsat.report.speed_model import SpeedModel
from dsat.space.knobs import KNOBS
from dsat.values.text import values_without_secrets

_STAGE = "zero_optimization.stage"
_TRAIN_BATCH, _MICRO_BATCH, _GAS = BATCH_KEYS
_FIRST = (_STAGE, _MICRO_BATCH, _GAS, _TRAIN_BATCH)
_REASONS = {
    **{knob.path: knob.reason for knob in KNOBS},
    _MICRO_BATCH: "more samples in each forward and backward pass share its fixed costs",
    _GAS: "more micro batches in each optimizer step share its costs",
    _TRAIN_BATCH: "follows from micro batch, accumulation and slots",
    _STAGE: "what ranks divide among them: 1 optimizer states, 2 gradients too, 3 parameters too",
    "gradient_checkpointing": "activations are computed again in the backward pass, not kept",
}


@dataclass(frozen=True)
class Change:
    """A setting in which the best configuration differs from the user's own.

    Attributes:
        key: dotted, as in the configuration.
        own, best: both values as text; empty where a configuration does not name the setting.
        reason: what the setting does.
        effect: gain of the best value over the user's, and its source.
    """

    key: str
    own: str
    best: str
    reason: str
    effect: str


@dataclass(frozen=True)
class Pair:
    """Two trials that differ in one setting alone.

    Attributes:
        values: of the setting, by trial.
        gain: of the second over the first.
    """

    key: str
    values: tuple[Any, Any]
    gain: float


def changes(view: RunView, model: SpeedModel | None) -> list[Change]:
    """Return the settings in which the best configuration differs from the user's own."""
    if view.best is None or view.best_config is None:
        return []
    plan = view.plan
    own = flat(values_without_secrets({**plan.config(plan.own_batch.config()), **plan.switches}))
    best = flat(values_without_secrets({**view.best_config, **view.best.trial.script_args}))
    keys = sorted(own.keys() | best.keys(), key=lambda key: (_order(key), key))
    found = list(pairs(view))
    return [
        Change(
            key,
            fmt.setting(own.get(key)),
            fmt.setting(best.get(key)),
            _REASONS.get(key, ""),
            _effect(view.best, key, own, best, found, model),
        )
        for key in keys
        if own.get(key) != best.get(key)
    ]


def pairs(view: RunView) -> Iterator[Pair]:
    """Yield all pairs of trials that were measured and differ in one setting alone."""
    tried = [(_settings(each), each.value) for each in view.ranked if each.value]
    for (one, value), (other, second) in combinations(tried, 2):
        keys = [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
        if len(keys) == 1:
            [key] = keys
            gain = view.plan.objective.gain(second, value)
            yield Pair(key, (one.get(key), other.get(key)), gain)


def paired_gain(found: list[Pair], key: str, own: Any, best: Any) -> tuple[float | None, int]:
    """Return the geometric mean of a setting's gains from `own` to `best`, and their number."""
    gains = [pair.gain for pair in found if pair.key == key and pair.values == (own, best)]
    gains += [1 / pair.gain for pair in found if pair.key == key and pair.values == (best, own)]
    return (statistics.geometric_mean(gains) if gains else None), len(gains)


def importances(view: RunView) -> list[dict[str, Any]]:
    """Return the effect of each setting, the largest first.

    Returns:
        Rows with `setting`, `pairs`, and `percent`: the median difference between the better and
        the worse of a pair.
    """
    factors: dict[str, list[float]] = {}
    for pair in pairs(view):
        factors.setdefault(pair.key, []).append(math.exp(abs(math.log(pair.gain))))
    rows = [
        {
            "setting": key,
            "percent": 100 * (statistics.median_high(found) - 1),
            "pairs": len(found),
        }
        for key, found in factors.items()
    ]
    return sorted(rows, key=lambda row: row["percent"], reverse=True)


def _effect(
    best: TrialView,
    key: str,
    own: Mapping[str, Any],
    its: Mapping[str, Any],
    found: list[Pair],
    model: SpeedModel | None,
) -> str:
    if key == _TRAIN_BATCH:
        return "that of micro batch and accumulation"
    default = None if key in own else _default_of(key, best.trial.stage)
    if default is not None and default == its[key]:
        return "none: DeepSpeed's default"
    gain, count = paired_gain(found, key, own.get(key), its.get(key))
    if gain is not None:
        return f"{gain:.3f}x by {fmt.count(count, 'pair')} of trials"
    by_model = model and model.gain(best, key, own.get(key, default))
    if not by_model:
        return "not measured"
    ratio, low, high = by_model
    return f"{ratio:.2f}x ({low:.2f} to {high:.2f}) by the model of speed"


def _default_of(key: str, stage: int) -> Any:
    """Return DeepSpeed's own value of a knob; None if it is no knob of the stage."""
    return next((k.values[0] for k in KNOBS if k.path == key and stage in k.stages), None)


def _settings(each: TrialView) -> dict[str, Any]:
    """Return the settings of a trial; the global batch, which follows, is left out."""
    found = {key: value for key, value in each.settings.items() if key != _TRAIN_BATCH}
    return {**found, _STAGE: each.trial.stage}


def _order(key: str) -> int:
    return _FIRST.index(key) if key in _FIRST else len(_FIRST)
