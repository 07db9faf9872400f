"""State of compilation by torch and DeepCompile, read from modules that the script imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any


def count_frames() -> int:
    """Return the number of frames that Dynamo has compiled, or tried to."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])


def uncompiled_parts(module: Any) -> Iterator[Any]:
    """Yield a module and its submodules, except compiled ones and what they contain."""
    is_compiled = getattr(module, "_compiled_call_impl", None) is not None  # by `module.compile()`
    if not (is_compiled or hasattr(module, "_orig_mod")):  # by `torch.compile`
        yield module
        for part in module.children():
            yield from uncompiled_parts(part)


def steps_until_planned() -> int:
    """Return the last step, counted from 1, at which DeepCompile will compile; 0 if unplanned.

    DeepCompile profiles the first steps and compiles again: in stage 3 by default at the sixth
    step (deepspeed/compile/init_z3.py and backend.py, 0.19.8).
    """
    backend: Any = sys.modules.get("deepspeed.compile.backend")
    plans = getattr(backend, "remaining_schedule", None) or ()
    return max((int(step) + 1 for step, _ in plans), default=0)
