"""Data types of models as versions of transformers name them."""

from __future__ import annotations

from typing import Any

import torch

_LOADS_FLOAT32 = 4  # its last major version that loads in float32 unless it is told otherwise


def type_argument(config: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the keyword argument with which a configuration's model gets a data type.

    Args:
        config: of the model; from 4.56 on it has a `dtype` itself.
        dtype: of the model.
    """
    return {"dtype" if hasattr(config, "dtype") else "torch_dtype": dtype}


def loads_float32() -> bool:
    """Return whether `from_pretrained` loads in float32 unless it is told otherwise."""
    import transformers

    return int(transformers.__version__.split(".")[0]) <= _LOADS_FLOAT32
