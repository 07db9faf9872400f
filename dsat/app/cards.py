"""The fewest cards of each size that hold a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsat.memory import closed_form
from dsat.memory.closed_form import ModelFacts
from dsat.memory.predictor import Basis, MemoryModel, Variant
from dsat.report import format as fmt
from dsat.space.space import LARGEST_MICRO_BATCH
from dsat.values.zero_strategy import NONE, Strategy

_GIB = 2**30
# A10G and RTX 4090; A100; A6000 and L40S; A100 and H100; H200; MI300X and B200.
SIZES = tuple(size * _GIB for size in (24, 40, 48, 80, 141, 192))
_COUNTS = tuple(2**n for n in range(11))


@dataclass(frozen=True)
class Choice:
    """The fewest cards of a size that hold a model.

    Attributes:
        memory_bytes: of a card.
        cards: how many; powers of two are tried.
        strategy: the first of the ladder that fits, which is the fastest of them as a rule.
        micro_batch: the largest.
        host_bytes: of the host's memory, for each card.
        sequence_length: the longest sequence of which one sample fits, if activations grow in
            proportion to it; None if the samples are no sequences.
    """

    memory_bytes: int
    cards: int
    strategy: Strategy
    micro_batch: int
    host_bytes: int
    sequence_length: int | None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "strategy": self.strategy.name}

    def __str__(self) -> str:
        said = f"{self.cards} card{'s' if self.cards > 1 else ''} with {self.strategy.label}"
        said += f", micro batch up to {self.micro_batch}"
        if self.sequence_length is not None:
            said += f" or a sequence of up to {self.sequence_length:,}"
        if self.host_bytes:
            said += f", {fmt.memory(self.host_bytes)} of host memory for each"
        return said


@dataclass(frozen=True)
class Advice:
    """The fewest cards of a size.

    Attributes:
        memory_bytes: of a card.
        plain: without offloading; None if the largest number that is tried is not enough.
        offloaded: with offloading, if fewer cards are then enough.
    """

    memory_bytes: int
    plain: Choice | None
    offloaded: Choice | None

    def to_json(self) -> dict[str, Any]:
        return {
            "memory_bytes": self.memory_bytes,
            "without_offloading": None if self.plain is None else self.plain.to_json(),
            "with_offloading": None if self.offloaded is None else self.offloaded.to_json(),
        }

    def __str__(self) -> str:
        found = [str(choice) for choice in (self.plain, self.offloaded) if choice is not None]
        said = "; or ".join(found) or f"not on {_COUNTS[-1]} cards"
        return f"{fmt.memory(self.memory_bytes)}: {said}."


def advise(
    facts: ModelFacts,
    configuration: Callable[[Strategy, int], Mapping[str, Any]],
    strategies: Sequence[Strategy],
    sequence_length: int | None,
) -> list[Advice]:
    """Return the fewest cards of each size, by formula.

    Args:
        facts: of the model.
        configuration: the DeepSpeed configuration of a strategy on so many cards.
        strategies: the ladder.
        sequence_length: of the samples from which the facts come.
    """

    def fewest(size: int, among: Sequence[Strategy]) -> Choice | None:
        basis = Basis((Variant({}, facts),))
        for cards, strategy in itertools.product(_COUNTS, among):
            model = MemoryModel(basis, slots=cards, limit_bytes=size, on_device=True)
            config = configuration(strategy, cards)
            most = min(model.largest(model.shape(config, {})), float(LARGEST_MICRO_BATCH))
            if most >= 1:
                needed = closed_form.estimate(facts, config, slots=cards, micro_batch=int(most))
                longest = None if sequence_length is None else int(sequence_length * most)
                return Choice(size, cards, strategy, int(most), needed.host, longest)
        return None

    without = [s for s in strategies if NONE == s.offload_optimizer == s.offload_param]
    rest = [s for s in strategies if s not in without]
    advice = []
    for size in SIZES:
        plain, offloaded = fewest(size, without), fewest(size, rest)
        if plain is not None and offloaded is not None and offloaded.cards >= plain.cards:
            offloaded = None
        advice.append(Advice(size, plain, offloaded))
    return advice
