"""Plain rows for the report page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from dsat.inputs.ds_config import BATCH_KEYS
from dsat.report import format as fmt
from dsat.space.knobs import KNOBS
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome
from dsat.values.text import values_without_secrets
from dsat.values.trial import Trial, TrialKind

STRATEGY = "strategy"
_STAGE = "zero_optimization.stage"
_MICRO_BATCH = "train_micro_batch_size_per_gpu"
_BATCH_REASONS = {
    _MICRO_BATCH: "more samples in each forward and backward pass share its fixed costs",
    "gradient_accumulation_steps": "more micro batches in each optimizer step share its costs",
    "train_batch_size": "follows from micro batch, accumulation and slots",
    _STAGE: "what ranks divide among them: 1 optimizer states, 2 gradients too, 3 parameters too",
    "gradient_checkpointing": "activations are computed again in the backward pass, not kept",
}
_REASONS = {
    **{knob.path: knob.reason for knob in KNOBS},
    **_BATCH_REASONS,
}


@dataclass(frozen=True)
class Change:
    """A setting in which the best configuration differs from the user's own.

    Attributes:
        key: dotted, as in the configuration.
        own, best: both values as text; empty where a configuration does not name the setting.
        reason: what the setting does.
        gain: how many times better the best value is than the user's; None if nothing tells.
        pairs: how many pairs of trials that differ in nothing else say so; 0 if the model of speed
            says it.
        low, high: the model's 95 % interval.
        is_default: the best value is DeepSpeed's own, which the user's configuration has too.
    """

    key: str
    own: str
    best: str
    reason: str
    gain: float | None
    pairs: int
    low: float | None = None
    high: float | None = None
    is_default: bool = False

    @property
    def told(self) -> str:
        """The gain, and how it is known."""
        if self.key == BATCH_KEYS[0]:
            return "that of micro batch and accumulation"
        if self.is_default:
            return "none: DeepSpeed's default"
        if self.gain is None:
            return "nothing that ran tells"
        if self.pairs:
            how = f"{self.pairs} pair{'' if self.pairs == 1 else 's'} of trials"
            return f"{self.gain:.3f}x by {how}"
        return f"{self.gain:.2f}x ({self.low:.2f} to {self.high:.2f}) by the model of speed"


def trial_rows(run: Run, folders: str) -> list[dict[str, Any]]:
    """Return a row for each trial, in the order in which they were proposed.

    Args:
        run: whose trials.
        folders: where trials have their folders, relative to the page.
    """
    assert run.plan is not None
    return [_row(run, trial, folders) for trial in run.trials.values()]


def _row(run: Run, trial: Trial, folders: str) -> dict[str, Any]:
    assert run.plan is not None
    outcome = run.outcomes.get(trial.id)
    row: dict[str, Any] = {
        "id": trial.id,
        "name": trial.name,
        "kind": trial.kind.value,
        "strategy": trial.strategy.removeprefix("z").replace("_", " "),
        "micro_batch": trial.batch.micro_batch,
        "gas": trial.batch.gas,
        "global_batch": trial.batch.train_batch_size,
        "result": "running",
        "shown": "running",
        "best": trial is run.best,
        "own": trial.kind is TrialKind.BASELINE,
        "predicted_gib": _gib(trial.predicted_bytes),
        "used_gib": None,
        "took_s": None,
        "folder": f"{folders}/{trial.name}",
        "changes": _changes_text(run, trial),
    }
    if outcome is None:
        return row
    row |= {
        "result": outcome.kind.value,
        "shown": fmt.outcome(outcome, run.plan.metric),
        "took_s": round(outcome.duration_s, 1),
        "ended_s": round(run.ended_s[trial.id], 1),
        "used_gib": _gib(run.used_bytes(outcome)),
    }
    if outcome.metrics is not None and trial.kind is not TrialKind.PROFILE:
        row |= _measured(run, outcome)
    return row


def _measured(run: Run, outcome: Outcome) -> dict[str, Any]:
    assert run.plan is not None and outcome.metrics is not None
    metrics, value = outcome.metrics, outcome.value(run.plan.objective)
    parts = (metrics.forward, metrics.backward, metrics.step)
    spread = None if value is None else abs(value) * metrics.ci95
    return {
        "value": value,
        "low": None if value is None or spread is None else value - spread,
        "high": None if value is None or spread is None else value + spread,
        "forward_ms": metrics.forward,
        "backward_ms": metrics.backward,
        "step_ms": metrics.step,
        "other_ms": max(0.0, metrics.latency - sum(parts)),
        "num_steps": metrics.num_steps,
    }


def best_so_far(run: Run) -> list[dict[str, Any]]:
    """Return the best value after each trial that ended, over trials and over time."""
    assert run.plan is not None
    rows: list[dict[str, Any]] = []
    best: float | None = None
    for number, (trial_id, outcome) in enumerate(run.outcomes.items(), start=1):
        trial = run.trials[trial_id]
        value = None if trial.kind is TrialKind.PROFILE else outcome.value(run.plan.objective)
        if value is not None and run.plan.admits(trial.batch):
            better = run.plan.objective.is_better(value, best)
            best = value if better else best
        if best is not None:
            minutes = run.ended_s[trial_id] / 60
            rows.append({"trials": number, "minutes": minutes, "best": best, "name": trial.name})
    return rows


def final_rows(run: Run) -> list[dict[str, Any]]:
    """Return two rows for each pair of the finals that decides.

    A row has `pair`, `which` ("yours" or the other's name) and `value`.
    """
    if run.plan is None or run.finals is None or run.finals.pick is None:
        return []
    sign = -1 if run.plan.objective.smaller_is_better else 1
    name = run.trials[run.finals.pick.trial_id].name
    return [
        {"pair": number, "which": which, "value": math.exp(sign * log_value)}
        for number, pair in enumerate(run.finals.pairs, start=1)
        for which, log_value in zip(("yours", name), pair, strict=True)
    ]


def changes(
    run: Run, predicted: Callable[[Trial, str, Any], Any] = lambda *_: None
) -> list[Change]:
    """Return the settings in which the best configuration differs from the user's own.

    Args:
        run: which one.
        predicted: the gain by a model (`ratio`, `low`, `high`) of the best trial over the same with
            the user's own value of a setting; asked where no trials tell.
    """
    if run.best is None or run.plan is None:
        return []
    own = {**flat(run.plan.config(run.plan.own_batch.config())), **run.plan.switches}
    best = {**flat(run.plan.config(run.best.overrides)), **run.best.script_args}
    found = []
    for key in sorted(own.keys() | best.keys(), key=_order):
        if own.get(key) == best.get(key):
            continue
        gain, pairs = paired_gain(run, key, own.get(key), best.get(key))
        reason = _REASONS.get(key, "")
        change = Change(key, text_of(own.get(key)), text_of(best.get(key)), reason, gain, pairs)
        default = None if key in own else default_of(key, run.best.stage)
        if default is not None and default == best[key]:
            change = replace(change, is_default=True)
        elif gain is None and key != BATCH_KEYS[0]:
            by_model = predicted(run.best, key, own.get(key, default))
            if by_model is not None:
                change = replace(change, gain=by_model.ratio, low=by_model.low, high=by_model.high)
        found.append(change)
    return found


def default_of(key: str, stage: int) -> Any:
    """DeepSpeed's own value of a knob; None if it is no knob of the stage."""
    for knob in KNOBS:
        if knob.path == key and stage in knob.stages:
            return knob.values[0]
    return None


def paired_gain(run: Run, key: str, own: Any, best: Any) -> tuple[float | None, int]:
    """Return the gain of `best` over `own` for a setting, by trials that differ in it alone.

    Returns:
        The geometric mean over all pairs, None if there are none; and the number of pairs.
    """
    assert run.plan is not None
    objective = run.plan.objective
    logarithms = []
    for (_, one, value), (_, other, second) in combinations(_settings_and_values(run), 2):
        if _differences(one, other) != {key}:
            continue
        if (one.get(key), other.get(key)) == (own, best):
            logarithms.append(math.log(objective.gain(second, value)))
        elif (one.get(key), other.get(key)) == (best, own):
            logarithms.append(math.log(objective.gain(value, second)))
    if not logarithms:
        return None, 0
    return math.exp(sum(logarithms) / len(logarithms)), len(logarithms)


def importances(run: Run) -> list[dict[str, Any]]:
    """Return the effect of each setting, by trials that differ in nothing else.

    Returns:
        A row for each setting with such pairs: the median of the factors between the better and
        the worse of a pair, largest first.
    """
    assert run.plan is not None
    objective = run.plan.objective
    factors: dict[str, list[float]] = {}
    for (_, one, value), (_, other, second) in combinations(_settings_and_values(run), 2):
        differing = _differences(one, other)
        if len(differing) == 1:
            gain = objective.gain(value, second)
            factors.setdefault(differing.pop(), []).append(max(gain, 1 / gain))
    rows = [
        {"setting": key, "factor": sorted(found)[len(found) // 2], "pairs": len(found)}
        for key, found in factors.items()
    ]
    return sorted(rows, key=lambda row: row["factor"], reverse=True)


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten a nested configuration to dotted keys, with `***` for secrets."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        else:
            found[name] = values_without_secrets({key: value})[key]
    return found


def _settings_and_values(run: Run) -> Iterator[tuple[Trial, dict[str, Any], float]]:
    """Settings and value of each trial that ran; the global batch, which follows, is left out."""
    assert run.plan is not None
    for trial in run.trials.values():
        value = run.value(trial)
        if trial.kind is not TrialKind.PROFILE and value is not None and value > 0:
            settings = {**flat(trial.overrides), **trial.script_args}
            settings.pop(BATCH_KEYS[0], None)
            settings[_STAGE] = trial.stage
            yield trial, settings, value


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}


def _changes_text(run: Run, trial: Trial) -> str:
    settings = {**flat(trial.overrides), **trial.script_args}
    left_out = {*BATCH_KEYS, _STAGE}
    return ", ".join(
        f"{key.removeprefix('zero_optimization.')}={text_of(value)}"
        for key, value in settings.items()
        if key not in left_out
    )


def _order(key: str) -> tuple[int, str]:
    first = (_STAGE, _MICRO_BATCH, "gradient_accumulation_steps", "train_batch_size")
    return (first.index(key) if key in first else len(first), key)


def text_of(value: Any) -> str:
    """A setting's value for people; empty for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value:,}" if value >= 10_000 else str(value)
    return str(value)


def _gib(size_bytes: float | None) -> float | None:
    return None if size_bytes is None else round(size_bytes / 2**30, 4)


def folders_of(trials: Path, page: Path) -> str:
    """Return the link from the page to the folder of trials."""
    try:
        return trials.resolve().relative_to(page.resolve().parent).as_posix() or "."
    except ValueError:
        return trials.resolve().as_posix()
