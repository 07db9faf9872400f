"""The precision in which a training was observed to compute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dsat.in_trial import precision
from testing.metered import Clock, FakeEngine, attach, measure
from testing.scripts import Scripts

AUTOCASTS = """
model = torch.nn.Linear(16, 1)
forward = model.forward
engine = make_engine(model)
with torch.autocast("cpu", dtype={dtype}, enabled={enabled}):
    train(engine)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "enabled", "said"),
    [("torch.bfloat16", True, "bf16"), ("torch.bfloat16", False, "fp32")],
)
def test_a_script_that_autocasts_by_itself(
    scripts: Scripts, dtype: str, enabled: bool, said: str
) -> None:
    ended = scripts.run(AUTOCASTS.format(dtype=dtype, enabled=enabled))
    curve = ended.well().outcome.training
    assert curve is not None and curve.precision == said


def with_weights(dtype: torch.dtype) -> nn.Module:
    half = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)])
    return nn.ModuleList([nn.Linear(2, 2), half])


@pytest.mark.parametrize(
    ("module", "device", "tf32", "said"),
    [
        (with_weights(torch.float64), "cpu", False, "fp32"),
        (with_weights(torch.float16), "cpu", False, "fp16"),
        (with_weights(torch.bfloat16), "cpu", False, "bf16"),
        (with_weights(torch.uint8), "cpu", False, "bf16"),  # quantised
        (nn.Conv2d(1, 1, 1), "cuda", False, "fp16"),  # PyTorch's default
        (nn.Linear(1, 1), "cuda", False, "fp32"),
        (nn.Linear(1, 1), "cuda", True, "fp16"),  # TF32 has as many digits
        (nn.Linear(1, 1), "cpu", True, "fp32"),
    ],
)
def test_weights_and_products(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    module: nn.Module,
    device: str,
    tf32: bool,
    said: str,
) -> None:
    monkeypatch.setattr(precision, "_entered", set())  # of other tests
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_tf32=tf32))
    engine = FakeEngine(clock)
    engine.module, engine.device = module, torch.device(device)
    attach(engine)
    curve = measure(engine).training
    assert curve is not None and curve.precision == said
