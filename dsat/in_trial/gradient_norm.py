"""The norm of the gradients of the first optimizer step, before clipping.

DeepSpeed's optimizers keep it in every stage, also offloaded. In stage 0 a script's own fp32
optimizer is not wrapped, and there it is computed, once. Nothing is synchronised inside a step.
"""

from __future__ import annotations

import math
from typing import Any


class GradientNorm:
    """Norm of the first step's gradients of an engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._norm: Any = None
        self._is_over = False

    def before_step(self) -> None:
        """Compute the norm of gradients that no optimizer of DeepSpeed will: they are cleared."""
        engine = self._engine
        if self._is_over or engine.zero_optimization_stage() > 0:
            return
        if engine.is_gradient_accumulation_boundary():
            self._norm = _total_norm(engine.module.parameters())

    def after_step(self, *, skipped: bool) -> None:
        """Take the norm that DeepSpeed computed in an optimizer step."""
        if self._is_over:
            return
        self._is_over = True
        known = self._engine.get_global_grad_norm()
        if skipped:
            self._norm = None
        elif known is not None:
            self._norm = known

    def value(self) -> float | None:
        """Return the norm; waits for the device."""
        norm = None if self._norm is None else float(self._norm)
        # DeepSpeed has 0 where it was not computed, and -1 after an overflow.
        return norm if norm is not None and math.isfinite(norm) and norm > 0 else None


def _total_norm(parameters: Any) -> Any:
    import torch

    gradients = [p.grad.detach() for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients]
    device = norms[0].device if norms else None
    return torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms])) if norms else None
