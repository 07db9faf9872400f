"""In which numbers a training was seen to compute."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dsat.in_trial import precision


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "_entered", set())
    monkeypatch.setattr(torch.autocast, "__enter__", inspect.unwrap(torch.autocast.__enter__))
    precision.watch.__wrapped__()


def seen(module: nn.Module, device: str = "cpu") -> str:
    return precision.of_engine(SimpleNamespace(module=module, device=torch.device(device)))


@pytest.mark.parametrize(("dtype", "said"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_a_script_that_autocasts_by_itself(dtype: torch.dtype, said: str) -> None:
    model = nn.Linear(4, 4)
    with torch.autocast("cpu", dtype=dtype, enabled=False):
        assert seen(model) == "fp32"
    with torch.autocast("cpu", dtype=dtype):
        model(torch.ones(2, 4))
    assert seen(model) == said


@pytest.mark.parametrize(
    ("dtype", "said"),
    [
        (torch.float64, "fp32"),
        (torch.float16, "fp16"),
        (torch.bfloat16, "bf16"),
        (torch.uint8, "bf16"),  # quantised
    ],
)
def test_weights_in_other_formats(dtype: torch.dtype, said: str) -> None:
    half = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)])
    assert seen(nn.ModuleList([nn.Linear(2, 2), half])) == said


def test_convolutions_and_products_that_may_use_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(nn.Conv2d(1, 1, 1), "cuda") == "fp16"  # PyTorch's default
    assert seen(nn.Linear(1, 1), "cuda") == "fp32"
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=True))
    assert seen(nn.Linear(1, 1), "cuda") == "fp16"
    assert seen(nn.Linear(1, 1), "cpu") == "fp32"
