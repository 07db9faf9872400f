"""Models as versions of transformers make them: data types, and attention masks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

_MASKS_MODULE = "transformers.masking_utils"  # new in 4.53


def type_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the keyword argument with which a model is made in a data type: new in 4.56."""
    import transformers

    # Of an empty one: a file may give an older configuration what it does not know.
    known = hasattr(transformers.PretrainedConfig(), "dtype")
    return {"dtype" if known else "torch_dtype": dtype}


def loads_float32() -> bool:
    """Return whether `from_pretrained` loads in float32 by default, as up to version 4."""
    import transformers

    return int(transformers.__version__.split(".")[0]) <= 4


def decide_masks_by_values(known: Callable[[torch.Tensor], bool]) -> None:
    """Have masks left out in a simulation where they are left out in a training.

    From 5.0 on, a fake tensor counts as traced, and then every sample as several packed ones, which
    need a mask and so another attention kernel. For the rest of the process.

    Args:
        known: tells whether the values of a fake tensor are known.
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
