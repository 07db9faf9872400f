"""Fake tensors of integers know their values; those of activations do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from dsat.simulation.known_values import ValuesMode

TOKENS = torch.arange(24).reshape(4, 6)


@pytest.fixture
def tokens() -> Iterator[torch.Tensor]:
    mode = ValuesMode()
    with mode:
        fake = torch.empty(4, 6, dtype=torch.long)
        mode.know(fake, TOKENS.clone)
        yield fake


def test_values_are_compared_counted_and_listed(tokens: torch.Tensor) -> None:
    assert isinstance(tokens, FakeTensor)
    assert (tokens > 10).sum().item() == 13
    assert tokens[:, 1].tolist() == [1, 7, 13, 19]
    assert tokens.float().mean().item() == 11.5
    assert bool((tokens >= torch.arange(6)).all())
    assert torch.equal(tokens, tokens + 0) and not torch.equal(tokens, tokens + 1)


def test_shapes_that_depend_on_values_are_right(tokens: torch.Tensor) -> None:
    activations = torch.randn(4, 6, 3)
    mask = tokens > 10
    assert activations[mask].shape == (13, 3)
    assert activations.masked_select(mask.unsqueeze(-1)).shape == (39,)
    assert torch.nonzero(mask).shape == (13, 2)
    assert torch.unique(tokens.fill_diagonal_(0)).shape == (21,)
    assert [part.shape[0] for part in torch.split(activations[0], tokens[0, 1:4].tolist())] == [
        1,
        2,
        3,
    ]
    assert torch.repeat_interleave(activations[0], tokens[0], dim=0).shape == (15, 3)


def test_what_is_written_into_a_view_is_known_of_the_whole(tokens: torch.Tensor) -> None:
    before = int(TOKENS.sum())
    tokens[1].fill_(7)
    assert tokens.sum().item() == before - int(TOKENS[1].sum()) + 6 * 7
    tokens[:, 0] = torch.tensor([1, 2, 3, 4])
    assert tokens[:, 0].tolist() == [1, 2, 3, 4]


def test_what_comes_of_activations_is_not_known(tokens: torch.Tensor) -> None:
    activations = torch.randn(4, 6)
    with pytest.raises(DynamicOutputShapeException):
        activations[activations > 0]
    row = tokens[1]
    row.copy_(activations[1])  # a copy changes the whole tensor, too
    with pytest.raises(DynamicOutputShapeException):
        torch.nonzero(tokens)
    assert (tokens.sum().item(), activations.sum().item()) == (0, 1.0)  # of the right type
    assert (tokens > activations).any().item() is False


@pytest.mark.parametrize("shape", [(), (1,)])
def test_an_unknown_number_is_compared_as_it_is_read(
    tokens: torch.Tensor, shape: tuple[int, ...]
) -> None:
    norm = torch.randn(4, 6).norm().reshape(shape)
    assert norm.item() == 1.0 and norm > 0.0 and not norm < 0.5 and norm == 1.0 and norm != -1


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
def test_what_memory_happens_to_hold_is_not_known(tokens: torch.Tensor, dtype: torch.dtype) -> None:
    activations = torch.randn(6)
    for made in (
        torch.empty(64, dtype=dtype),
        tokens.new_empty(64, dtype=dtype),
        torch.empty_like(tokens, dtype=dtype),
        activations.to(dtype),  # made of what is empty
        activations.isnan().to(dtype),
        torch.zeros_like(activations, dtype=dtype) + activations.to(dtype),
    ):
        with pytest.raises(DynamicOutputShapeException):
            torch.nonzero(made)
        assert not made.flatten()[0].item()


def test_a_view_of_an_activation_has_its_storage(tokens: torch.Tensor) -> None:
    """Compared with torch's own views of a tensor with values."""
    real, fake = torch.arange(24.0).reshape(4, 6), torch.empty(4, 6)
    views: list[Callable[[Any], Any]] = [
        lambda x: x[1:3],
        lambda x: x.t(),
        lambda x: x.detach().view(24),
        lambda x: x.split(2)[1],
        lambda x: x.as_strided((2, 2), (3, 1), 5),
        lambda x: x.view(torch.int32),
        lambda x: x.expand(2, 4, 6),
    ]
    for view in views:
        with _disable_current_modes():
            expected = view(real)
        found = view(fake)
        assert isinstance(found, FakeTensor) and found.device == fake.device
        assert (found.shape, found.stride(), found.storage_offset(), found.dtype) == (
            *(expected.shape, expected.stride(), expected.storage_offset(), expected.dtype),
        )
        assert found.untyped_storage()._cdata == fake.untyped_storage()._cdata


def test_too_many_values_are_not_kept(tokens: torch.Tensor) -> None:
    many = tokens.reshape(-1, 1, 1) > torch.zeros(2**10, 2**10, dtype=torch.long)
    assert many.shape == (24, 2**10, 2**10)
    with pytest.raises(DynamicOutputShapeException):
        torch.nonzero(many)
