"""Differences between versions of transformers: data types, and attention masks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_MASKS_MODULE = "transformers.masking_utils"  # new in 4.53


def type_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the argument that sets a model's data type: `dtype` since 4.56, or `torch_dtype`."""
    import transformers

    # Checked on an empty configuration: a file may add attributes that its class lacks.
    has_dtype = hasattr(transformers.PretrainedConfig(), "dtype")
    return {"dtype" if has_dtype else "torch_dtype": dtype}


def loads_float32() -> bool:
    """Return whether `from_pretrained` loads in float32 by default (transformers 4 and older)."""
    import transformers

    return int(transformers.__version__.split(".")[0]) <= 4


def decide_masks_by_values(known: Callable[[torch.Tensor], bool]) -> None:
    """From now on in this process, simulate without a mask if training would have none.

    Since transformers 5.0, fake tensors count as traced. transformers does not check whether traced
    samples are packed: it builds a mask for them, and so chooses another attention kernel.

    Args:
        known: returns whether the values of a fake tensor are known.
    """
    module = sys.modules.get(_MASKS_MODULE)
    original: Any = getattr(module, "is_tracing", None)
    if original is None:
        return

    def is_tracing(tensor: Any = None) -> bool:
        if isinstance(tensor, torch.Tensor) and known(tensor):
            return bool(original())
        return bool(original(tensor))

    module.is_tracing = is_tracing  # type: ignore[union-attr]
