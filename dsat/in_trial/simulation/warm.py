"""Imports what simulations need, in a process that forks them; seconds that each of them is spared.

DeepSpeed's Muon gives a function to `torch.compile` when it is imported, which every engine does,
and torch then imports its compiler: 2 s of processor time, of no use where nothing is compiled.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

_NEEDED = (
    "deepspeed",
    "deepspeed.ops.adam",
    "deepspeed.ops.op_builder",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.fp16.fused_optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.parameter_offload",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "torch._dynamo",  # FakeTensorMode does, when it is entered
    "torch.testing._internal.distributed.fake_pg",
    "dsat.in_trial.rank",
    "dsat.in_trial.simulation.borrowed_model",
)


@contextlib.contextmanager
def _compiled_when_called() -> Iterator[None]:
    """Defer `torch.compile` to the first call of the compiled function."""
    original = torch.compile

    @functools.wraps(original)
    def later(model: Callable[..., Any] | None = None, **options: Any) -> Any:
        if model is None:
            return functools.partial(later, **options)

        @functools.lru_cache(maxsize=1)
        def compiled() -> Callable[..., Any]:
            return original(model, **options)

        @functools.wraps(model)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    torch.compile = later
    try:
        yield
    finally:
        torch.compile = original


with _compiled_when_called():
    for _name in _NEEDED:
        with contextlib.suppress(ImportError):  # of another version; whoever needs it will tell
            importlib.import_module(_name)
