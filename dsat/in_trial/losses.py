"""The loss of every optimizer step, however the script computes it, and the first gradient norm.

Nothing is synchronised inside a step: losses stay tensors on their device until they are read.

The norm is taken in the first step, before clipping. In stages 1 to 3, and in stage 0 with fp16,
DeepSpeed's optimizers keep it. Otherwise dsat computes it: in stage 0, DeepSpeed has no
norm in fp32, and 0.17.6 to 0.18.5 report a wrong one in bf16.

With DeepSpeed's Muon, the norm in stages 1 to 3 is unknown: these stages replace the gradients by
updates before they compute the norm and clip (0.19.8).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsat.errors import Diverged
from dsat.in_trial import pairs, precision
from dsat.in_trial.meter_spec import MeterSpec
from dsat.values.outcome import TrainingCurve
from dsat.values.parallelism import DATA_ONLY

MUON = "MuonWithAuxAdam"  # the class of DeepSpeed's Muon
FIRST_STEPS, LAST_STEPS = 32, 8  # steps of a curve that are kept
_LOST_STEPS = 3  # consecutive steps without a finite loss that end the trial
_DIGITS = 9  # decimal digits that distinguish neighbouring float32 values

_WHAT_TO_DO = (
    "Lower the learning rate, lengthen its warm-up, or train in bf16 instead of fp16. If your own "
    "configuration trains well, the cause is a setting of this trial"
)


@dataclass
class _Step:
    """Results of one optimizer step: tensors until they are read, then numbers; None if unknown.

    Attributes:
        loss: sum over the micro steps; after reading, their mean over all ranks.
        applied: False if fp16 skipped the step.
    """

    loss: Any
    micro_steps: int
    applied: bool


class LossWatch:
    """Recorder of the losses of `engine.backward(loss)` or the script's own `loss.backward()`."""

    def __init__(self, engine: Any, spec: MeterSpec) -> None:
        self._engine = engine
        # The norm is known if each rank has the whole model, or an equal share of each parameter.
        self._needs_norm = spec.parallelism == DATA_ONLY
        self._norm: Any = None
        # The micro batch until the first loss is checked for pairs of samples; then 0.
        self._micro_batch = spec.micro_batch if spec.profile else 0
        self._compares_samples = False
        self._ignoring = 0
        self._fp16_losses: tuple[Any, Any] = (None, None)  # a loss as scaled for fp16, and unscaled
        self._sum: Any = None
        self.count = 0  # losses since the last optimizer step
        self._steps: list[_Step] = []
        self._num_read = 0

    def add_engine_loss(self, loss: Any, *, scaled_by_script: bool) -> None:
        """Record the loss of `engine.backward`.

        `scaled_by_script`: whether the script has divided it by the accumulation steps.
        """
        self._add(loss, self._engine.gradient_accumulation_steps() if scaled_by_script else 1)

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignore losses in this context: they are already recorded, or belong to another engine."""
        self._ignoring += 1
        try:
            yield
        finally:
            self._ignoring -= 1

    def add_script_loss(self, tensors: Any) -> None:
        """Record the loss of a backward pass that the script started."""
        import torch

        # Activation checkpointing runs a backward pass inside of the backward pass.
        if self._ignoring or not is_training(self._engine) or is_in_backward():
            return
        for tensor in [tensors] if isinstance(tensors, torch.Tensor) else list(tensors or ()):
            scaled, loss = self._fp16_losses
            self._add(loss if tensor is scaled else tensor, 1)
        self._fp16_losses = (None, None)

    def note_scaled_loss(self, engine: Any, scaled: Any, loss: Any) -> None:
        """Record a loss of the measured engine, both scaled for fp16 and unscaled."""
        if engine is self._engine:
            self._fp16_losses = (scaled, loss)

    def begin_step(self) -> None:
        """Compute the gradient norm before the engine's `step`, which may clear the gradients."""
        engine = self._engine
        if not self._needs_norm or engine.zero_optimization_stage() > 0 or engine.fp16_enabled():
            return
        if engine.is_gradient_accumulation_boundary():
            self._norm = _total_norm(engine.module.parameters())

    def end_step(self, *, micro_steps: int, applied: bool) -> None:
        """Finish an optimizer step; if `micro_steps` is 0, the number of losses replaces it."""
        self._steps.append(_Step(self._sum, micro_steps or self.count, applied))
        self._sum, self.count = None, 0
        if not self._needs_norm:
            return
        self._needs_norm = False
        if not applied:
            self._norm = None
        elif self._norm is None and not self._is_misreported():
            self._norm = self._engine.get_global_grad_norm()

    def _is_misreported(self) -> bool:
        """Return whether DeepSpeed's norm is wrong: Muon's updates', or scaled without fp16."""
        engine = self._engine
        if engine.zero_optimization_stage() > 0 and type(engine.basic_optimizer).__name__ == MUON:
            return True
        return getattr(engine.optimizer, "cur_scale", 1.0) != 1.0 and not engine.fp16_enabled()

    def read(self, mean_over_ranks: Callable[[list[float]], list[float]]) -> None:
        """Read the losses of new steps, a collective call; raise Diverged if they diverge."""
        steps = self._steps[self._num_read :]
        if not steps:
            return
        self._num_read = len(self._steps)
        sums = _numbers([step.loss for step in steps])
        means = [
            0.0 if total is None else total / max(1, step.micro_steps)
            for total, step in zip(sums, steps, strict=True)
        ]
        over_ranks = mean_over_ranks([*means, *(float(total is not None) for total in sums)])
        shares = over_ranks[len(steps) :]
        for step, mean, share in zip(steps, over_ranks[: len(steps)], shares, strict=True):
            step.loss = mean / share if share else None
        self._check()

    def curve(self) -> TrainingCurve:
        """Wait for the device; return the losses and the gradient norm so far."""
        count = self._num_read
        positions = [i for i in range(count) if i < FIRST_STEPS or i >= count - LAST_STEPS]
        norm = math.nan if self._norm is None else float(self._norm)  # waits for the device
        return TrainingCurve(
            steps=tuple(i + 1 for i in positions),
            losses=tuple(_round(self._steps[i].loss) for i in positions),
            skipped=tuple(i + 1 for i in positions if not self._steps[i].applied),
            precision=precision.find(self._engine),
            # DeepSpeed's norm is 0 where it was not computed, and -1 after an overflow.
            gradient_norm=norm if math.isfinite(norm) and norm > 0 else None,
            compares_samples=self._compares_samples,
            deepspeed_version=str(getattr(sys.modules.get("deepspeed"), "__version__", "")),
        )

    def _check(self) -> None:
        """Raise Diverged if a step not skipped by fp16, or three in a row, has no finite loss."""
        steps = [(i, step) for i, step in enumerate(self._steps, 1) if step.loss is not None]
        latest = [step.loss for _, step in steps[-_LOST_STEPS:]]
        is_lost = len(latest) == _LOST_STEPS and not any(map(math.isfinite, latest))
        context = ""
        for number, step in steps:
            if not math.isfinite(step.loss) and (step.applied or is_lost):
                raise Diverged(
                    f"the loss is {step.loss} in optimizer step {number}{context}. {_WHAT_TO_DO}"
                )
            context = f", after {step.loss:.4g} in the step before"

    def _add(self, loss: Any, weight: int) -> None:
        import torch

        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex():
            return
        if self._micro_batch:
            ranks = getattr(self._engine, "dp_world_size", 1)
            self._compares_samples = pairs.compares_samples(loss, self._micro_batch, ranks)
            self._micro_batch = 0
        value = loss.detach().reshape(()).float() * weight
        self._sum = value if self._sum is None else self._sum + value
        self.count += 1


def is_training(engine: Any) -> bool:
    """Return whether a call of an engine's model at this moment is part of training."""
    import torch

    return bool(torch.is_grad_enabled() and engine.training)


def is_in_backward() -> bool:
    """Return whether a backward pass is running."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def _numbers(values: Sequence[Any]) -> list[float | None]:
    """Convert scalar tensors to floats, waiting for the device once; None stays None."""
    import torch

    tensors = [value for value in values if value is not None]
    scalars = [tensor.to(tensors[0].device) for tensor in tensors]
    numbers = iter(torch.stack(scalars).tolist() if scalars else [])
    return [None if value is None else next(numbers) for value in values]


def _total_norm(parameters: Any) -> Any:
    import torch

    gradients = [p.grad.detach() for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    device = norms[0].device if norms else None
    return torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms])) if norms else None


def _round(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")
