"""Optimizer steps in which torch compiled, and the end of DeepCompile's compilations.

Nothing is imported here: a script that compiles has imported what is asked.
"""

from __future__ import annotations

import sys
from typing import Any


class CompileWatch:
    """Tells of each optimizer step whether something was compiled in it.

    That is what `torch.compile` does in the first steps, for a batch of another shape, and in those
    steps in which DeepCompile goes over to its next plan.
    """

    def __init__(self) -> None:
        self._seen = _frames()

    def end_step(self) -> bool:
        """Tell whether something was compiled since the last call."""
        before, self._seen = self._seen, _frames()
        return self._seen != before


def steps_until_planned() -> int:
    """So many optimizer steps are made before DeepCompile has its last plan; 0 if none is to come.

    It profiles the first steps and compiles anew with what it has learned: in stage 3 at the sixth
    step (deepspeed/compile/init_z3.py and backend.py, 0.19.8).
    """
    backend: Any = sys.modules.get("deepspeed.compile.backend")
    plans = getattr(backend, "remaining_schedule", None) or ()
    return max((int(step) + 1 for step, _ in plans), default=0)


def _frames() -> int:
    """The frames that Dynamo has compiled, or tried to."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])
