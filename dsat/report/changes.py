"""Effects of single settings, by trials that differ in nothing else or by the model of speed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from dsat.inputs.ds_config import flat
from dsat.inputs.switches import SWITCHES
from dsat.report import format as fmt
from dsat.report.differences import (
    GAS,
    MICRO_BATCH,
    STAGE,
    TRAIN_BATCH,
    Difference,
    differences,
)
from dsat.report.run_view import RunView, TrialView
from dsat.report.speed_model import SpeedModel
from dsat.space.knobs import KNOBS

_REASONS = {
    **{knob.path: knob.reason for knob in KNOBS},
    MICRO_BATCH: "more samples in each forward and backward pass share its fixed costs",
    GAS: "more micro batches in each optimizer step share its costs",
    TRAIN_BATCH: "follows from micro batch, accumulation and slots",
    STAGE: "what ranks divide among them: 1 optimizer states, 2 gradients too, 3 parameters too",
    **{name: switch.reason for name, switch in SWITCHES.items()},
}


@dataclass(frozen=True)
class Change:
    """A setting in which the best configuration differs from the user's own.

    Attributes:
        key: dotted, as in the configuration.
        own, best: both values as text.
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
    if view.best is None:
        return []
    found = list(pairs(view))
    return [
        Change(
            each.key,
            *each.texts,
            _REASONS.get(each.key, ""),
            _effect(view, each, found, model),
        )
        for each in differences(view.plan, view.best.trial, view.own_switches)
    ]


def pairs(view: RunView) -> Iterator[Pair]:
    """Yield all pairs of trials that were measured and differ in one setting alone."""
    plan, chosen = view.plan, {key for each in view.ranked for key in each.settings}
    own = flat({**plan.config({}), **view.own_switches})
    base = {key: own.get(key) for key in chosen - _following(view)}
    tried = [(_settings(base, each), each.value) for each in view.ranked if each.value]
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


def _following(view: RunView) -> set[str]:
    """Return the settings that follow from the micro batch."""
    return {TRAIN_BATCH} if view.plan.train_batch_size is None else {TRAIN_BATCH, GAS}


def _effect(
    view: RunView,
    each: Difference,
    found: list[Pair],
    model: SpeedModel | None,
) -> str:
    if each.key in _following(view):
        return f"that of {'the micro batch' if each.key == GAS else 'micro batch and accumulation'}"
    gain, count = paired_gain(found, each.key, each.own, each.its)
    if gain is not None:
        return f"{gain:.2f}x by {fmt.count(count, 'pair')} of trials"
    own = each.default if each.own is None else each.own
    by_model = model and view.best and model.gain(view.best, each.key, own)
    if not by_model:
        return "not measured"
    ratio, low, high = by_model
    return f"{ratio:.2f}x ({low:.2f} to {high:.2f}) by the model of speed"


def _settings(base: Mapping[str, Any], each: TrialView) -> dict[str, Any]:
    """Return the values of a trial for the settings of `base`."""
    return {
        **base,
        **{k: v for k, v in each.settings.items() if k in base},
        STAGE: each.trial.stage,
    }
