"""Losses over pairs of samples are recognised by the graph that autograd keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy, logsigmoid, normalize
from torch.nn.utils.parametrizations import weight_norm

from dsat.in_trial.pairs import compares_samples

SIZE, WIDTH = 8, 16
TOWERS = torch.nn.Linear(4, WIDTH), torch.nn.Linear(4, WIDTH)
LABELS = torch.arange(SIZE)


def outputs() -> tuple[Tensor, Tensor]:
    first, second = TOWERS
    return first(torch.randn(SIZE, 4)), second(torch.randn(SIZE, 4))


def with_two_views(u: Tensor, v: Tensor) -> Tensor:
    both = torch.cat([u, v])
    return cross_entropy(both @ both.T, torch.arange(2 * SIZE))


CONTRASTIVE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "towers": lambda u, v: cross_entropy(u @ v.T, LABELS),
    "cosine": lambda u, v: cross_entropy(20 * torch.mm(normalize(u), normalize(v).T), LABELS),
    "einsum": lambda u, v: cross_entropy(torch.einsum("id,jd->ij", u, v), LABELS),
    "two views": with_two_views,
    "hard negatives": lambda u, v: cross_entropy(u @ torch.cat([v, v + 1]).T, LABELS),
    "all of three ranks": lambda u, v: (torch.cat([u] * 3) @ torch.cat([v] * 3).T).mean(),
    "cosines of rows and columns": lambda u, v: cross_entropy(
        cosine_similarity(u[:, None], v[None], dim=-1), LABELS
    ),
    "products by elements": lambda u, v: cross_entropy((u[:, None] * v[None]).sum(-1), LABELS),
    "distances": lambda u, v: cross_entropy(-torch.cdist(u.float(), v.float()), LABELS),
    "distances by a product": lambda u, v: cross_entropy(
        -torch.cdist(u.float(), v.float(), compute_mode="use_mm_for_euclid_dist"), LABELS
    ),
    "ranking": lambda u, _: -logsigmoid(u[:, :1] - u[:, :1].T).mean(),
    "gathered from three ranks": lambda u, v: cross_entropy(u @ torch.cat([v] * 3).T, LABELS),
}


@pytest.mark.parametrize("loss", CONTRASTIVE.values(), ids=CONTRASTIVE.keys())
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_loss_over_pairs_of_samples(
    loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype | None
) -> None:
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        assert compares_samples(loss(*outputs()), SIZE, ranks=3)


def attention(rows: int) -> Tensor:
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 1, batch_first=True)
    found: Tensor = layer(torch.randn(rows, SIZE, WIDTH)).mean()
    return found


ORDINARY: dict[str, Callable[[], Tensor]] = {
    # As many outputs as samples.
    "linear": lambda: torch.nn.Linear(WIDTH, SIZE, bias=False)(outputs()[0]).mean(),
    "autocast": lambda: torch.nn.Linear(4, SIZE, bias=False)(torch.randn(SIZE, 4)).mean(),
    "weight norm": lambda: weight_norm(torch.nn.Linear(WIDTH, 50))(outputs()[0]).mean(),
    "a bank of constants": lambda: (outputs()[0] @ torch.randn(WIDTH, SIZE)).mean(),
    "attention": lambda: attention(SIZE),
    "layer norm": lambda: (outputs()[0] - outputs()[0].mean(1, keepdim=True)).mean(),
    "a row of parameters": lambda: (outputs()[0][:, :1] * TOWERS[0].bias[None, :SIZE]).mean(),
    "distances within samples": lambda: torch.cdist(many(), many()).mean(),
}


def many() -> Tensor:
    found: Tensor = TOWERS[0](torch.randn(SIZE, SIZE, 4))
    return found


@pytest.mark.parametrize("loss", ORDINARY.values(), ids=ORDINARY.keys())
def test_other_losses(loss: Callable[[], Tensor]) -> None:
    assert not compares_samples(loss(), SIZE, ranks=1)


def test_one_sample_has_no_pairs() -> None:
    assert not compares_samples(attention(1), 1, ranks=2)
    assert not compares_samples(torch.zeros(()), SIZE, ranks=2)
