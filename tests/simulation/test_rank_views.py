"""Views of all ranks' parts of a tensor, at the cost of one view."""

from __future__ import annotations

import pytest
import torch

from dsat.simulation import rank_views
from dsat.simulation.rank_views import RankViews

RANKS = 7


def _parts(flat: torch.Tensor) -> list[torch.Tensor]:
    """Divide a tensor among the ranks, as DeepSpeed's `reduce_scatter_coalesced` does."""
    size = -(-flat.numel() // RANKS)
    return [flat[rank * size : rank * size + size] for rank in range(RANKS)]


def _gathered(flat: torch.Tensor) -> torch.Tensor:
    """Join the ranks' parts of a tensor, as DeepSpeed does when it gathers parameters."""
    size = flat.numel() // RANKS
    rows = [flat.narrow(0, size * rank, size) for rank in range(RANKS)]
    return torch.cat([row.narrow(0, 1, size - 1) for row in rows])


@pytest.mark.parametrize("numbers", [70, 71, 76, 4])
def test_sizes_are_those_of_plain_torch(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    flat = torch.arange(numbers)
    sizes, joined = [len(part) for part in _parts(flat)], torch.cat(_parts(flat))
    gathered = _gathered(torch.arange(70))
    for place, name in ((torch.Tensor, "narrow"), (torch.Tensor, "numel"), (torch, "cat")):
        monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setattr(torch.Tensor, "__getitem__", torch.Tensor.__getitem__)
    monkeypatch.setattr(rank_views, "_SMALLEST", 1)
    RankViews(RANKS).install()
    parts = _parts(flat)
    assert [len(part) for part in parts] == sizes
    assert torch.cat(parts).shape == joined.shape
    assert _gathered(torch.arange(70)).shape == gathered.shape
    assert len(set(map(id, parts))) < RANKS


def test_other_views_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of equal size are different tensors, unless there is one for each rank."""
    for name in ("narrow", "numel", "__getitem__"):
        monkeypatch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
    monkeypatch.setattr(torch, "cat", torch.cat)
    RankViews(RANKS).install()
    flat = torch.arange(100)
    assert [int(flat.narrow(0, start, 1)) for start in (3, 4)] == [3, 4]
    assert [int(flat[start : start + 1].sum()) for start in (3, 4)] == [3, 4]
    assert torch.cat([flat[:2], flat[5:7]]).tolist() == [0, 1, 5, 6]
    few = torch.arange(RANKS)
    assert [int(few[start : start + 1]) for start in range(RANKS)] == list(range(RANKS))
    ten = flat[0:10]
    assert len(flat[0:10:2]) == 5 and len(ten) == 10
    assert torch.cat([torch.empty(0), torch.ones(2, 3), torch.ones(2, 3)]).shape == (4, 3)
