"""Attention masks of transformers where tensors are fake."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_MODULE = "transformers.masking_utils"  # new in 4.53


def decide_by_values(known: Callable[[torch.Tensor], bool]) -> None:
    """Have masks left out in a simulation where they are left out in a training.

    From 5.0 on, a fake tensor counts as traced, and then every sample as several packed ones, which
    need a mask and so another attention kernel. For the rest of the process.

    Args:
        known: tells whether the values of a fake tensor are known.
    """
    module = sys.modules.get(_MODULE)
    original: Any = getattr(module, "is_tracing", None)
    if original is None:
        return

    def is_tracing(tensor: Any = None) -> bool:
        if isinstance(tensor, torch.Tensor) and known(tensor):
            return bool(original())
        return bool(original(tensor))

    module.is_tracing = is_tracing  # type: ignore[union-attr]
