"""Triton kernels in a simulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dsat.simulation.patches import skip_triton_kernels

triton: Any = pytest.importorskip("triton")


def twice(source: Any, result: Any, size: Any) -> None:
    raise AssertionError("it ran")


def test_kernels_of_triton_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (triton.runtime.jit.JITFunction, triton.runtime.autotuner.Autotuner):
        monkeypatch.setattr(kind, "run", kind.run)
    skip_triton_kernels()
    kernel = triton.jit(twice)
    configs = [triton.Config({}, num_warps=count) for count in (1, 2)]
    source, result = torch.ones(8, device="meta"), torch.empty(8, device="meta")
    assert kernel[(1,)](source, result, 8) is None
    try:
        tuned = triton.autotune(configs=configs, key=["size"])(kernel)
    except RuntimeError as error:  # 3.3, of torch 2.7
        pytest.skip(f"this Triton makes no tuned kernel without a device: {error}")
    assert tuned[(1,)](source, result, 8) is None
