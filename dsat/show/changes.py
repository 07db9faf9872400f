"""Effects of single settings, by trials that differ in nothing else or by the model of speed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsat.command.ds_config import flat
from dsat.command.switches import SWITCHES
from dsat.show.differences import (
    GAS,
    MICRO_BATCH,
    STAGE,
    TRAIN_BATCH,
    Difference,
    differences,
)
from dsat.show.speed_model import SpeedModel
from dsat.show.view import RunView, TrialView
from dsat.space.knobs import KNOBS
from dsat.values import format as fmt

_REASONS = {
    **{knob.path: knob.reason for knob in KNOBS},
    MICRO_BATCH: "more samples in each forward and backward pass share its fixed costs",
    GAS: "more micro batches in each optimizer step share its costs",
    TRAIN_BATCH: "follows from micro batch, accumulation and devices",
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


def changes(view: RunView, model: SpeedModel | None) -> list[Change]:
    """Return the settings in which the best configuration differs from the user's own."""
    if view.best is None:
        return []
    return [
        Change(each.key, *each.texts, _REASONS.get(each.key, ""), _effect(view, each, model))
        for each in differences(view.plan, view.best.trial, view.own_switches)
    ]


def paired_gain(view: RunView, key: str, own: Any, best: Any) -> tuple[float | None, int]:
    """Return the gain of a setting's value `best` over `own`, and the number of pairs behind it.

    It is the geometric mean over all pairs of trials that differ in nothing else.
    """
    chosen = {name for each in view.ranked for name in each.settings} - _following(view)
    configuration = flat({**view.plan.config({}), **view.own_switches})
    base = {name: configuration.get(name) for name in chosen}
    tried = [(_settings(base, each), each.value) for each in view.ranked if each.value]

    def with_value(wanted: Any) -> list[tuple[dict[str, Any], float]]:
        return [({**its, key: None}, value) for its, value in tried if its.get(key) == wanted]

    after = with_value(best)
    gains = [
        view.plan.objective.gain(faster, slower)
        for settings, slower in with_value(own)
        for others, faster in after
        if settings == others
    ]
    return (statistics.geometric_mean(gains) if gains else None), len(gains)


def _following(view: RunView) -> set[str]:
    """Return the settings that follow from the micro batch."""
    return {TRAIN_BATCH} if view.plan.train_batch_size is None else {TRAIN_BATCH, GAS}


def _effect(view: RunView, each: Difference, model: SpeedModel | None) -> str:
    if each.key in _following(view):
        return f"that of {'the micro batch' if each.key == GAS else 'micro batch and accumulation'}"
    gain, count = paired_gain(view, each.key, each.own, each.its)
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
    its = {key: value for key, value in each.settings.items() if key in base}
    return {**base, **its, STAGE: each.trial.stage}
