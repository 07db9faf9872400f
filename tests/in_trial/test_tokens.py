"""Which elements of a script's inputs are tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dsat.in_trial.samples import leaves_of
from dsat.in_trial.tokens import TokenCounter

IDS = torch.ones(4, 9, dtype=torch.long)
MASK = torch.ones(4, 9, dtype=torch.long).tril()  # 1 + 2 + 3 + 4 of them
IMAGES = torch.zeros(4, 3, 8, 8)
LABELS = torch.ones(4, 40, dtype=torch.long)


def jagged(*lengths: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)


def counted(*args: Any, micro_batch: int = 4) -> tuple[float | None, int | None]:
    fed = TokenCounter(micro_batch).count(list(leaves_of(args)))
    return None if fed.tokens is None else float(fed.tokens), fed.length


@pytest.mark.parametrize(
    ("args", "tokens", "length"),
    [
        ([IDS], 36, 9),
        ([IDS.int()], 36, 9),
        ([IDS.T], 36, 9),  # time first
        ([{"input_ids": IDS, "labels": IDS}], 36, 9),
        ([{"attention_mask": MASK, "input_ids": IDS}], 10, 9),
        ([{"attention_mask": MASK.bool(), "input_ids": IDS}], 10, 9),
        ([{"attention_mask": 3 * MASK, "input_ids": IDS}], 10, 9),  # numbers of documents
        ([{"input_ids": IDS, "attention_mask": torch.ones(4, 1, 9, 9)}], 36, 9),
        ([{"pixel_values": IMAGES, "input_ids": IDS}], 36, 9),
        ([[IDS, LABELS]], 36, 9),
        ([torch.ones(1, 640, dtype=torch.long)], 640, None),  # all samples in one row
        ([IMAGES, LABELS], None, None),
        ([{"pixel_values": IMAGES, "labels": LABELS}], None, None),
        ([IMAGES], None, None),
        ([torch.zeros(4, 9)], None, None),
        ([torch.ones(4, dtype=torch.long)], None, None),
        ([torch.ones(4, 1, dtype=torch.bool)], None, None),
        ([], None, None),
        ([jagged(3, 5, 2, 1)], 11, 5),
        ([nn.utils.rnn.pack_sequence([torch.arange(n) for n in (5, 3, 2, 1)])], 11, 5),
    ],
)
def test_what_counts(args: list[Any], tokens: float | None, length: int | None) -> None:
    assert counted(*args) == (tokens, length)


class Wrapped(nn.Module):
    """As PEFT wraps a transformers model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class WithConfig(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"max_position_embeddings": 512})()


@pytest.mark.parametrize(
    ("model", "takes"), [(WithConfig(), 512), (Wrapped(WithConfig()), 512), (nn.Linear(2, 2), 0)]
)
def test_lengths_over_the_micro_steps(model: nn.Module, takes: int) -> None:
    counter = TokenCounter(4)
    engine = type("Engine", (), {"module": model})()
    assert counter.lengths(engine)[1:] == [0, 0]
    for length in (7, 30, 12):
        counter.count(list(leaves_of([torch.ones(4, length, dtype=torch.long)])))
    assert counter.lengths(engine) == [-7, 30, takes]
