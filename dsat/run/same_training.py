"""Comparison of losses: a configuration against the user's own, on the same data.

Bucket sizes, overlapped communication, ZeRO stages, offloading, and accumulation at the same global
batch change where numbers are stored and in which order they are added, not what is computed. So
losses may differ only by rounding. They may differ by `_ROUNDING`, or if that is more, by
`_TIMES_OWN` times the difference between runs of the user's own configuration.

`_ROUNDING` was chosen by the precision of each format, not derived. It was checked with trainings
of a small language model, 22 steps of Adam on a CPU (DeepSpeed 0.19.8). In fp32, stages 0 to 3,
buckets and accumulation changed losses by at most 1.2e-7, and a dropped gradient of a bias by 2e-4,
at a learning rate of 1e-3. In bf16, accumulation changed them by 3e-4 and stage 0 by 1.3e-2. A race
in a bucket changed them by 2e-2, which is not detected.

Wrong gradients change losses late, or little. So the gradient norms of the first step are compared
too. In bf16, those of tiny models differed by at most 1e-3 between stages, with offloading and with
accumulation (`testing/gradients.py`, DeepSpeed 0.19.8).
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsat.command import ds_config
from dsat.values.outcome import PRECISIONS, TrainingCurve

_LEAST_STEPS = 3  # steps of a curve; the first loss precedes any change of weights
# Allowed relative differences of losses: in the first step, and added by every further one.
_ROUNDING = {"fp32": (1e-5, 1e-5), "fp16": (2e-3, 1e-3), "bf16": (5e-3, 2e-3)}
# Allowed relative differences of gradient norms in the first step; a lost micro batch exceeds them.
_ROUNDING_OF_NORMS = {"fp32": 5e-3, "fp16": 2e-2, "bf16": 1e-1}
# A loss that is zero, negative or below the fraction `_CANCELS_BELOW` of the usual loss is a
# difference of larger terms (policy gradients, advantages of mean 0), and has the rounding errors
# of these terms. They are assumed to be at least `_TERMS`.
_CANCELS_BELOW, _TERMS = 1e-3, 1.0
_TIMES_OWN = 4.0  # allowed difference, as a multiple of that between runs of the user's own
_OTHER_START = (
    "The reason may be different data, weights or random numbers (dropout draws new ones for "
    "another micro batch), or a loss that depends on the micro batch (in-batch negatives, batch "
    "normalization, means over padded tokens)"
)


class Agreement(str, enum.Enum):
    """Result of comparing the losses of two configurations."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """Result of a comparison, with its reason.

    Attributes:
        reason: why the trainings differ or cannot be compared; empty if they agree.
        of_gradients: whether the losses of the first step agree but the gradient norms differ.
    """

    agreement: Agreement
    reason: str = ""
    of_gradients: bool = False

    @property
    def differs(self) -> bool:
        return self.agreement is Agreement.DIFFERENT


def compare(
    own: Sequence[TrainingCurve], other: TrainingCurve, *, precision: str, same_batch: bool
) -> Finding:
    """Compare a training with runs of the user's own configuration.

    Args:
        own: curves of the user's own configuration, in any order; at least two are needed.
        other: curve of another configuration, with the same seed and data.
        precision: number format of the configuration, one of `PRECISIONS`; if a curve recorded a
            coarser format, that one counts.
        same_batch: whether both have the same global batch size.
    """
    if not same_batch:
        return _unknown("the global batch size differs")
    curves = [curve_losses for curve in own if len(curve_losses := _losses(curve)) >= _LEAST_STEPS]
    other_losses = _losses(other)
    if len(curves) < 2:
        problem = "recorded losses only once" if curves else "recorded too few losses"
        return _unknown(f"your own configuration {problem}")
    if len(other_losses) < _LEAST_STEPS:
        return _unknown("the best configuration recorded too few losses")
    precisions = (precision, *(curve.precision or precision for curve in (*own, other)))
    precision = max(precisions, key=PRECISIONS.index)
    first, growth = _ROUNDING[precision]
    reference, *repeats = curves
    least = _least_scale([*curves, other_losses])
    spread = {
        step: max(_relative(other.get(step, loss), loss, least) for other in repeats)
        for step, loss in reference.items()
    }
    start = min(reference)
    if spread[start] > first:
        return _unknown(
            "the script sets no seed, so the first losses of two runs of your own configuration "
            f"differ by {100 * spread[start]:.2f} %. Set a seed to compare losses"
        )
    noise = _TIMES_OWN * max(spread.values())
    for step in sorted(set(other_losses) & set(reference)):
        apart = _relative(other_losses[step], reference[step], least)
        limit = max(first + growth * (step - start), noise)
        if apart <= limit:
            if step == start and (differing := _gradient_difference(own, other, precision)):
                return Finding(Agreement.DIFFERENT, differing, of_gradients=True)
            continue
        values = f"{other_losses[step]:.6g} instead of {reference[step]:.6g}"
        if step == start:
            return _unknown(f"the first loss is {values}. {_OTHER_START}")
        return Finding(
            Agreement.DIFFERENT,
            f"Its loss in step {step} is {values}, which differs by {100 * apart:.2f} %; rounding "
            f"explains at most {100 * limit:.2f} %",
        )
    return Finding(Agreement.SAME)


def norms_agree(first: TrainingCurve, other: TrainingCurve, precision: str) -> bool | None:
    """Return whether the first gradient norms agree within rounding; None if one is unknown."""
    first_norm, other_norm = first.gradient_norm, other.gradient_norm
    if first_norm is None or other_norm is None:
        return None
    return _relative(first_norm, other_norm, 0.0) <= _ROUNDING_OF_NORMS[precision]


def _gradient_difference(
    own: Sequence[TrainingCurve], other: TrainingCurve, precision: str
) -> str | None:
    """Describe how the gradient norms of the first step differ; None if rounding explains it."""
    norms = [curve.gradient_norm for curve in own if curve.gradient_norm is not None]
    norm = other.gradient_norm
    if len(norms) < 2 or norm is None:
        return None
    noise = _TIMES_OWN * max(_relative(value, norms[0], 0.0) for value in norms)
    if _relative(norm, norms[0], 0.0) <= max(_ROUNDING_OF_NORMS[precision], noise):
        return None
    return (
        f"Its first loss equals yours, but its first gradient norm is {norm:.4g} instead of "
        f"{norms[0]:.4g}"
    )


def precision_of(config: Mapping[str, Any]) -> str:
    """Return the number format of a DeepSpeed configuration: bf16, fp16 or fp32.

    If the script decides ("auto"), return fp32; the curves record the format in use.
    """
    model, _ = ds_config.data_types(config)
    if model in ("bf16", "fp16"):
        return str(model)
    autocast = config.get("torch_autocast")
    if isinstance(autocast, Mapping) and autocast.get("enabled"):
        return "fp16" if str(autocast.get("dtype", "")).split(".")[-1] == "float16" else "bf16"
    return "fp32"


def suspects(changes: Mapping[str, Any], harmless: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the changes that may explain different losses.

    These are the changes that no configuration in `harmless` has, or else all changes.

    Args:
        changes: changes of the configuration that trains differently, by setting.
        harmless: changes of configurations that train like the user's own.
    """
    unexplained = {
        key: value
        for key, value in changes.items()
        if not any(key in other and other[key] == value for other in harmless)
    }
    return unexplained or dict(changes)


def _unknown(reason: str) -> Finding:
    return Finding(Agreement.UNKNOWN, reason)


def _losses(curve: TrainingCurve) -> dict[int, float]:
    """Return losses by step, until one is missing, not finite, or of a step that fp16 skipped."""
    losses: dict[int, float] = {}
    for step, loss in zip(curve.steps, curve.losses, strict=True):
        if loss is None or not math.isfinite(loss) or step in curve.skipped:
            break
        losses[step] = loss
    return losses


def _least_scale(curves: Sequence[Mapping[int, float]]) -> float:
    """Return the least denominator of relative differences; 0 unless terms of a loss cancel."""
    losses = [loss for curve in curves for loss in curve.values()]
    usual = statistics.median(map(abs, losses))
    return max(usual, _TERMS) if min(losses) <= _CANCELS_BELOW * usual else 0.0


def _relative(value: float, reference: float, least: float) -> float:
    scale = max(abs(reference), abs(value), least)
    return abs(value - reference) / scale if scale else 0.0
