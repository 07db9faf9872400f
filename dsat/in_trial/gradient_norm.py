"""The norm of the gradients of the first optimizer step, before clipping.

In stages 1 to 3, and in stage 0 with fp16, DeepSpeed's optimizers keep the norm. Otherwise dsat
computes it: in stage 0, DeepSpeed has no norm in fp32, and 0.17.6 to 0.18.5 report a wrong one in
bf16. Nothing is synchronised inside a step.

With DeepSpeed's Muon, the norm in stages 1 to 3 is unknown: they replace the gradients by updates
before they compute the norm and clip (0.19.8).
"""

from __future__ import annotations

import math
from typing import Any

MUON = "MuonWithAuxAdam"  # the class of DeepSpeed's Muon


class GradientNorm:
    """Norm of the gradients in an engine's first step.

    `is_known`: whether each rank can know the norm; if False, the norm is None.
    """

    def __init__(self, engine: Any, *, is_known: bool) -> None:
        self._engine = engine
        self._norm: Any = None
        self._is_over = not is_known

    def before_step(self) -> None:
        """Compute the norm in stage 0 without fp16, before the step clears the gradients."""
        engine = self._engine
        if self._is_over or engine.zero_optimization_stage() > 0 or engine.fp16_enabled():
            return
        if engine.is_gradient_accumulation_boundary():
            self._norm = _total_norm(engine.module.parameters())

    def after_step(self, *, skipped: bool) -> None:
        """Read DeepSpeed's norm, if none was computed before; a skipped step has no norm."""
        if self._is_over:
            return
        self._is_over = True
        if skipped:
            self._norm = None
        elif self._norm is None and not self._is_misreported():
            self._norm = self._engine.get_global_grad_norm()

    def _is_misreported(self) -> bool:
        """Return whether DeepSpeed's norm is of Muon's updates, or scaled although fp16 is off."""
        engine = self._engine
        if engine.zero_optimization_stage() > 0 and type(engine.basic_optimizer).__name__ == MUON:
            return True
        return getattr(engine.optimizer, "cur_scale", 1.0) != 1.0 and not engine.fp16_enabled()

    def value(self) -> float | None:
        """Return the norm, None if unknown; waits for the device."""
        norm = None if self._norm is None else float(self._norm)
        # DeepSpeed has 0 where it was not computed, and -1 after an overflow.
        return norm if norm is not None and math.isfinite(norm) and norm > 0 else None


def _total_norm(parameters: Any) -> Any:
    import torch

    gradients = [p.grad.detach() for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in gradients]
    device = norms[0].device if norms else None
    return torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms])) if norms else None
