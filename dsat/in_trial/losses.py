"""The loss and the gradient norm of every optimizer step, however the script computes its loss.

Nothing is synchronised inside a step: losses stay tensors on their device until somebody asks.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsat.errors import Diverged
from dsat.in_trial import precision
from dsat.values.outcome import TrainingCurve

FIRST_STEPS, LAST_STEPS = 32, 8  # kept of a curve
_LOST_STEPS = 3  # skipped in a row without a finite loss: one overflow is an accident
_DIGITS = 9  # that tell a float32 apart from its neighbours

_WHAT_TO_DO = (
    "Lower the learning rate or lengthen its warm-up, and train in bf16 rather than fp16; if your "
    "own configuration trains well, what this one changes is to blame"
)


@dataclass(frozen=True)
class _Step:
    """Results of one optimizer step: tensors or numbers, None if DeepSpeed or the script has none.

    Attributes:
        loss: the sum over the micro steps.
        micro_steps: how many it is the sum of.
        applied: False if fp16 skipped it because of an overflow.
    """

    loss: Any
    micro_steps: int
    grad_norm: Any
    applied: bool


class LossWatch:
    """Follows the losses that go into backward passes, and the norms of the gradients.

    Args:
        engine: a DeepSpeed engine; losses are taken from `engine.backward(loss)`, or from
            `loss.backward()` of the script's own.
        in_training: whether a backward pass now is one of the training loop.
    """

    def __init__(self, engine: Any, in_training: Callable[[], bool]) -> None:
        self._engine = engine
        self._in_training = in_training
        self._elsewhere = 0  # inside of a backward pass whose loss is known, or not this engine's
        self._scaled: tuple[Any, Any] | None = None
        self._sum: Any = None
        self._count = 0
        self._steps: list[_Step] = []
        self._read: list[tuple[float | None, float | None]] = []
        if hasattr(engine, "scale"):
            engine.scale = self._remember_unscaled(engine.scale)
        _listen(self)

    @property
    def count(self) -> int:
        """Losses since the last optimizer step."""
        return self._count

    def of_engine(self, loss: Any, *, scaled_by_script: bool) -> None:
        """Takes the loss of `engine.backward`.

        Args:
            scaled_by_script: the script has divided it by the accumulation steps itself.
        """
        self._add(loss, self._engine.gradient_accumulation_steps() if scaled_by_script else 1)

    @contextlib.contextmanager
    def deaf(self) -> Iterator[None]:
        """Losses of what runs inside are not taken."""
        self._elsewhere += 1
        try:
            yield
        finally:
            self._elsewhere -= 1

    def heard(self, tensors: Any) -> None:
        """Takes the loss of a backward pass that the script began itself."""
        import torch

        if self._elsewhere or not self._in_training():
            return
        if torch._C._current_graph_task_id() != -1:  # a checkpoint's, inside of a backward pass
            return
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else list(tensors or ()):
            if self._scaled is not None and tensor is self._scaled[0]:
                tensor = self._scaled[1]
            self._add(tensor, 1)
        self._scaled = None

    def end_step(self, *, micro_steps: int, applied: bool) -> None:
        """Closes an optimizer step of so many micro steps."""
        import torch

        norm: Any = None
        if hasattr(self._engine, "get_global_grad_norm"):
            norm = self._engine.get_global_grad_norm()
        if isinstance(norm, torch.Tensor):  # which the next step may overwrite
            norm = norm.detach().clone()
        self._steps.append(_Step(self._sum, micro_steps or self._count, norm, applied))
        self._sum, self._count = None, 0

    def read(self, mean_over_ranks: Callable[[list[float]], list[float]]) -> None:
        """Fetches what is new; a collective call.

        Args:
            mean_over_ranks: the elementwise mean over all ranks, the same on each.

        Raises:
            Diverged: the loss is not finite any more.
        """
        new = self._steps[len(self._read) :]
        if not new:
            return
        sums = _numbers([step.loss for step in new])
        losses = [
            None if total is None else total / max(1, step.micro_steps)
            for total, step in zip(sums, new, strict=True)
        ]
        norms = _numbers([step.grad_norm for step in new])
        known = [float(loss is not None) for loss in losses]
        flat = mean_over_ranks([*(loss or 0.0 for loss in losses), *known])
        for mean, share, norm in zip(flat[: len(new)], flat[len(new) :], norms, strict=True):
            self._read.append((mean / share if share else None, norm))
        self._check()

    def curve(self) -> TrainingCurve:
        """The first and the last of the steps that were read."""
        count = len(self._read)
        kept = [i for i in range(count) if i < FIRST_STEPS or i >= count - LAST_STEPS]
        return TrainingCurve(
            steps=tuple(i + 1 for i in kept),
            losses=tuple(_rounded(self._read[i][0]) for i in kept),
            grad_norms=tuple(_rounded(self._read[i][1]) for i in kept),
            skipped=tuple(i + 1 for i in kept if not self._steps[i].applied),
            precision=precision.of_engine(self._engine),
        )

    def _check(self) -> None:
        seen = [
            (number, loss, step.applied)
            for number, ((loss, _), step) in enumerate(zip(self._read, self._steps, strict=True), 1)
            if loss is not None
        ]
        # DeepSpeed skips a step without finite gradients: one is an accident, several are not.
        latest = [loss for _, loss, _ in seen[-_LOST_STEPS:]]
        lost = len(latest) == _LOST_STEPS and not any(map(math.isfinite, latest))
        for number, loss, was_applied in seen:
            if not math.isfinite(loss) and (was_applied or lost):
                before = [value for earlier, value, _ in seen if earlier < number]
                was = f", after {before[-1]:.4g} in the step before" if before else ""
                raise Diverged(f"the loss is {loss} in optimizer step {number}{was}. {_WHAT_TO_DO}")

    def _add(self, loss: Any, weight: int) -> None:
        import torch

        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
            return
        value = loss.detach().reshape(()).float() * weight
        self._sum = value if self._sum is None else self._sum + value
        self._count += 1

    def _remember_unscaled(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Remember the loss that fp16 scales in `engine.scale(loss).backward()`."""

        @functools.wraps(original)
        def scale(loss: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(loss, *args, **kwargs)
            self._scaled = (result, loss)
            return result

        return scale


_watches: weakref.WeakSet[LossWatch] = weakref.WeakSet()


def _listen(watch: LossWatch) -> None:
    """Has a watch hear of all backward passes from now on; `Tensor.backward` comes here too."""
    import torch

    _watches.add(watch)
    original = torch.autograd.backward
    if hasattr(original, "dsat_listens"):
        return

    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        for each in list(_watches):
            each.heard(tensors)
        return original(tensors, *args, **kwargs)

    backward.dsat_listens = True  # type: ignore[attr-defined]
    torch.autograd.backward = backward


def _numbers(values: Sequence[Any]) -> list[float | None]:
    """Tensors, numbers or None as floats; the device is waited for once."""
    import torch

    tensors = [value.reshape(()).float() for value in values if isinstance(value, torch.Tensor)]
    fetched = iter(
        torch.stack([t.to(tensors[0].device) for t in tensors]).tolist() if tensors else []
    )
    return [
        next(fetched)
        if isinstance(value, torch.Tensor)
        else (None if value is None else float(value))
        for value in values
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")
