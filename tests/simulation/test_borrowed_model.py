"""The script's model and optimizer, as the simulation uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW

from dsat.estimating.tables import needs_simulation
from dsat.in_trial.profiler import hidden_size
from dsat.simulation import borrowed_model
from dsat.simulation.borrowed_model import BorrowedModel, is_quadratic
from dsat.simulation.captured import Captured, ModuleSnapshot
from dsat.simulation.protocol import Question


class Own(Adam):
    """A subclass of Adam, whose states dsat cannot know."""


@pytest.mark.parametrize(
    ("make", "simulated", "of_torch"),
    [
        (None, False, False),
        (AdamW, False, True),
        (lambda trained: AdamW(trained, amsgrad=True), True, False),
        (lambda trained: AdamW(trained, foreach=False), True, False),
        (SGD, True, False),
        (Own, True, False),
    ],
)
def test_the_scripts_own_optimizer_decides_whether_the_formula_does(
    make: Callable[..., Any] | None, simulated: bool, of_torch: bool
) -> None:
    model = torch.nn.Linear(2, 2)
    passed = None if make is None else make(model.parameters())
    arguments = {"model": model, "optimizer": passed}
    section = BorrowedModel(lambda **_: None, arguments, {}).optimizer()
    assert needs_simulation({"optimizer": section}) is simulated
    assert bool(section.get("params", {}).get("torch_adam")) is of_torch


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (SimpleNamespace(hidden_size=64), 64),
        (SimpleNamespace(hidden_sizes=[32, 128]), 128),
        (SimpleNamespace(text_config=SimpleNamespace(hidden_size=48)), 48),
        (SimpleNamespace(hidden_size=64.0), None),
        (SimpleNamespace(), None),
        (None, None),
    ],
)
def test_the_hidden_size_is_found_where_a_trainer_looks_for_it(
    config: Any, size: int | None
) -> None:
    model: Any = torch.nn.Linear(2, 2)
    if config is not None:
        model.config = config
    assert hidden_size(model) == size


def captured_with(**more: Any) -> Captured:
    model = torch.nn.Linear(2, 2)
    usual = Captured(
        lambda **_: None,
        {"model": model},
        ModuleSnapshot(model),
        micro_batch=13,
        follows_config=True,
        packed_length=0,
        sequence_length=None,
        on_host={},
        uses_zero_init=False,
        earlier=(),
    )
    return replace(usual, **more)


@pytest.mark.parametrize(
    ("micro_batch", "outputs", "numbers"),
    [
        (4, (4, 2), {13: 4, 26: 8}),
        (13, (13, 2), {26: 26}),
        (26, (26, 2), {13: 26}),  # 26 may be a size of the candidate's own tensors
        (4, (4, 3, 26, 26), {13: 4}),  # a grid, or as many classes
    ],
)
def test_a_loss_may_compute_with_the_micro_batch(
    micro_batch: int, outputs: tuple[int, ...], numbers: dict[int, int]
) -> None:
    candidate = Question({}, micro_batch=micro_batch, slots=1)
    given = [torch.ones(outputs)]
    assert captured_with().numbers_for(candidate, given) == numbers
    assert captured_with(follows_config=False).numbers_for(candidate, given) == {}


@pytest.mark.parametrize(
    ("kind", "sizes", "expected"),
    [
        ("t5", {"d_model": 8, "num_layers": 1, "d_ff": 8, "num_heads": 2, "d_kv": 4}, True),
        ("bloom", {"hidden_size": 8, "n_layer": 1, "n_head": 2}, True),  # has only eager attention
        ("gpt2", {"n_embd": 8, "n_layer": 1, "n_head": 2}, False),
        ("gpt2", {"n_embd": 8, "n_layer": 1, "n_head": 2, "attn_implementation": "eager"}, True),
        ("mamba", {"hidden_size": 8, "num_hidden_layers": 1}, False),  # has no attention
    ],
)
def test_memory_grows_with_the_square_of_the_length_in_some_models(
    kind: str, sizes: dict[str, Any], expected: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, vocab_size=16, **sizes)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    assert is_quadratic(torch.nn.Sequential(model)) is expected


def test_what_was_there_before_the_engine_is_no_batch() -> None:
    weights, fixed = torch.ones(26), torch.ones(13, 4)
    borrowed = BorrowedModel(lambda **_: None, {"model": torch.nn.Linear(2, 2)}, {})
    captured = captured_with(earlier=borrowed.earlier)
    candidate = Question({}, micro_batch=4, slots=1)
    shapes = [captured.shape_for(candidate, t) for t in (weights, fixed, torch.ones(26, 4))]
    assert shapes == [[26], [4, 4], [8, 4]]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_batch_older_than_the_engine_is_rescaled(
    by_keyword: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds for several rows per sample, and for keyword arguments."""
    pairs = torch.ones(26, 4)
    config = {"train_micro_batch_size_per_gpu": 13}
    borrowed = BorrowedModel(lambda **_: None, {"model": torch.nn.Linear(2, 2)}, config)
    found: list[Captured] = []

    class Ended(Exception): ...

    def simulate(captured: Captured, _: Question) -> None:
        found.append(captured)
        raise Ended

    monkeypatch.setattr(borrowed_model, "Simulation", simulate)
    candidate = Question({}, micro_batch=32, slots=1)
    args, kwargs = ((), {"pairs": pairs}) if by_keyword else ((pairs,), {})
    borrowed.capture(args, kwargs)
    with pytest.raises(Ended):
        borrowed.begin(candidate._asdict(), args, kwargs, lambda _: None)
    assert found[0].shape_for(candidate, pairs) == [64, 4]
