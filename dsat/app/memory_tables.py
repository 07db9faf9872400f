"""Tables of `dsat estimate`, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsat.app import fewest_cards
from dsat.app.fewest_cards import Choice
from dsat.memory.closed_form import ModelFacts
from dsat.memory.estimate import MemoryEstimate
from dsat.simulation.config_facts import HOW_TO_SIMULATE
from dsat.values import format as fmt
from dsat.values.table import Table
from dsat.values.zero_strategy import Strategy


@dataclass(frozen=True)
class Line:
    """Memory of one strategy on a number of slots.

    Attributes:
        slots: data-parallel slots.
        estimate: with a micro batch of one sample.
        needed: bytes that a slot must have for it, where DeepSpeed does without what is optional.
        largest: the largest micro batch by memory of a slot; 0 if none fits.
    """

    strategy: Strategy
    slots: int
    estimate: MemoryEstimate
    needed: int
    largest: Mapping[int, int]

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.name,
            "slots": self.slots,
            "memory": self.estimate.to_json(),
            "peak_bytes": self.needed,
            "largest_micro_batch": {str(size): count for size, count in self.largest.items()},
        }


@dataclass(frozen=True)
class Estimate:
    """Memory of each rung of the ladder.

    Attributes:
        lines: one for every strategy and number of slots.
        cards: the fewest cards of each usual size.
        sequence_length: tokens of a sample; None if it is no sequence of tokens.
        missing: packages without which nothing could be simulated.
    """

    name: str
    model: ModelFacts
    lines: Sequence[Line]
    cards: Sequence[Choice]
    sequence_length: int | None
    missing: Sequence[str] = ()

    @property
    def is_complete(self) -> bool:
        """False if lines were to be simulated and none could be; the formula answers for those."""
        return not all(line.estimate.note for line in self.lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "model": vars(self.model),
            "sequence_length": self.sequence_length,
            "lines": [line.to_json() for line in self.lines],
            "cards": [choice.to_json() for choice in self.cards],
            "missing": list(self.missing),
        }

    def __str__(self) -> str:
        facts, lines = self.model, self.lines
        tokens = f" of {self.sequence_length:,} tokens" if self.sequence_length else ""
        said = [
            f"{self.name}: {facts.num_params:,} parameters, {facts.trainable_params:,} of them "
            f"trained; activations {fmt.memory(facts.backward_bytes_per_sample)} per sample{tokens}"
        ]
        for slots in dict.fromkeys(line.slots for line in lines):
            said += ["", f"{slots} slot{'s' if slots > 1 else ''}:", ""]
            said += _table([line for line in lines if line.slots == slots])
        sources = " and ".join(dict.fromkeys(line.estimate.source for line in lines))
        said += [
            "",
            f"Source: {sources}. 5 % are left free for the largest micro batches; the device's "
            "context and the communication library come on top.",
            *_not_simulated(lines),
        ]
        if self.missing:
            verb = "is" if len(self.missing) == 1 else "are"
            said.append(f"{' and '.join(self.missing)} {verb} not installed. {HOW_TO_SIMULATE}")
        said += ["", f"The fewest cards of each size, by {sources}, with 5 % to spare:", ""]
        return "\n".join([*said, *fewest_cards.table(self.cards)])


def _not_simulated(lines: Sequence[Line]) -> list[str]:
    """Return the lines of a table that could not be simulated, by the reason."""
    reasons: dict[str, list[str]] = {}
    for line in lines:
        if line.estimate.note:
            named = f"{line.strategy.label} on {line.slots}"
            reasons.setdefault(line.estimate.note, []).append(named)
    return [
        f"By formula, since they could not be simulated: {', '.join(named)} slots: {why}"
        for why, named in reasons.items()
    ]


def _table(lines: Sequence[Line]) -> list[str]:
    sizes = list(lines[0].largest)
    heads = ["strategy", "slot at micro batch 1", "host per slot"]
    heads += [f"largest on {fmt.memory(size)}" for size in sizes]
    rows = [
        [
            line.strategy.label,
            fmt.memory(line.needed),
            fmt.memory(line.estimate.host) if line.estimate.host else "-",
            *(str(count or "-") for count in line.largest.values()),
        ]
        for line in lines
    ]
    first = {
        size: next((line.strategy.label for line in lines if line.largest[size]), "none")
        for size in sizes
    }
    fits = ", ".join(f"{fmt.memory(size)}: {label}" for size, label in first.items())
    return [
        *Table(heads, rows, numbers=heads[1:]).markdown(),
        "",
        f"First strategy that fits: {fits}",
    ]
