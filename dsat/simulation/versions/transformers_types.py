"""Data types of models as versions of transformers name them."""

from __future__ import annotations

import torch

_LOADS_FLOAT32 = 4  # its last major version that loads in float32 unless it is told otherwise


def type_argument(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the keyword argument with which a model is made in a data type: new in 4.56."""
    import transformers

    # Of an empty one: a file may give an older configuration what it does not know.
    known = hasattr(transformers.PretrainedConfig(), "dtype")
    return {"dtype" if known else "torch_dtype": dtype}


def loads_float32() -> bool:
    """Return whether `from_pretrained` loads in float32 by default."""
    import transformers

    return int(transformers.__version__.split(".")[0]) <= _LOADS_FLOAT32
