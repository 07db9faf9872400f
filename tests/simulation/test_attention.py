"""Attention on a CPU in a simulation, with torch's own choice of kernels."""

from __future__ import annotations

import itertools

import pytest
import torch
from packaging.version import Version

from dsat.simulation.attention import Kernel, attention, kernel_for

FLASH = 1  # of torch's `SDPBackend`


@pytest.mark.parametrize(
    ("mask", "dropout_p", "key_heads", "head"),
    list(itertools.product(("none", "fixed", "trained"), (0.0, 0.1), (4, 2), (16, 10))),
)
def test_the_kernel_is_the_one_that_torch_takes(
    mask: str, dropout_p: float, key_heads: int, head: int
) -> None:
    query = torch.zeros(2, 4, 8, head)
    key = value = torch.zeros(2, key_heads, 8, head)
    added = None if mask == "none" else torch.zeros(1, 4, 8, 8, requires_grad=mask == "trained")
    gqa = key_heads < 4
    if gqa and Version(torch.__version__) < Version("2.7"):
        pytest.skip("torch before 2.7 shares no heads on a CPU")
    real = torch._fused_sdp_choice(query, key, value, added, dropout_p, enable_gqa=gqa)
    found = kernel_for(query, key, value, added, dropout_p, enable_gqa=gqa)
    assert (found is Kernel.FLASH) is (real == FLASH)


def test_a_mask_that_is_trained_gets_a_gradient() -> None:
    """An example is the relative positions of T5."""
    query = torch.randn(1, 2, 4, 8)
    mask = torch.randn(1, 2, 4, 4, requires_grad=True)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query, mask)
    found = attention(query, query, query, mask)
    torch.testing.assert_close(found, expected)
    [gradient] = torch.autograd.grad(found.sum(), mask)
    [wanted] = torch.autograd.grad(expected.sum(), mask)
    torch.testing.assert_close(gradient, wanted)
