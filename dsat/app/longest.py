"""The longest sequence of which one sample fits, with sequences and layers divided among slots."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsat.errors import UserInputError
from dsat.memory.closed_form import ModelFacts
from dsat.memory.config_facts import Formula
from dsat.memory.estimate import CLOSED_FORM, SIMULATED
from dsat.memory.predictor import Anchor, Basis, MemoryModel, Variant
from dsat.memory.simulation_client import Question, Simulator
from dsat.report import format as fmt
from dsat.report.table import Table
from dsat.values.parallelism import Parallelism
from dsat.values.zero_strategy import Strategy

UNIT_TOKENS = 1024  # of the "samples" that facts and models are asked about here
_SLOTS_OF_A_HOST = 8  # among which layers and sequences are divided
_MOST_TOKENS = 2**27

Configuration = Callable[[Strategy, int, Parallelism], Mapping[str, Any]]


@dataclass(frozen=True)
class Longest:
    """The longest sequence on a number of slots with a strategy.

    Attributes:
        memory_bytes: of a slot.
        parallelism: with which it is longest; the one that divides least among equals.
        tokens: 0 if not even a short one fits.
        host_bytes: of the host's memory, for each slot.
        source: `SIMULATED` at about this length, or `CLOSED_FORM`.
        note: why it was not simulated, if it was to be.
    """

    slots: int
    strategy: Strategy
    memory_bytes: int
    parallelism: Parallelism
    tokens: int
    host_bytes: int
    source: str = CLOSED_FORM
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "strategy": self.strategy.name,
            "parallelism": vars(self.parallelism),
        }


def rows(
    simulator: Simulator | Formula,
    configuration: Configuration,
    strategies: Sequence[Strategy],
    slot_counts: Sequence[int],
    slot_memories: Sequence[int],
    *,
    exact: bool,
) -> list[Longest]:
    """Return a row for every number of slots, strategy and memory of a slot.

    Args:
        simulator: of the script, whose samples must be sequences of tokens.
        configuration: the DeepSpeed configuration of a strategy on slots that are divided so.
        exact: simulate each row at its length.

    Raises:
        UserInputError: they are none.
        SimulationUnavailable: the script cannot be simulated.
    """
    if simulator.sequence_length is None:
        raise UserInputError(
            "is for samples that are sequences of tokens, and the script's batch has no integers "
            "of two dimensions",
            where="--longest-sequence",
        )
    facts = simulator.facts(configuration(strategies[0], 1, Parallelism()), unit_tokens=UNIT_TOKENS)
    found = []
    for slots, strategy in itertools.product(slot_counts, strategies):
        configs = {
            shared: configuration(strategy, slots, shared)
            for shared in _divisions(slots, simulator.attention_heads)
        }
        for size in slot_memories:
            best = _by_formula(facts, configs, Longest(slots, strategy, size, Parallelism(), 0, 0))
            if exact and best.tokens:
                best = _simulated(facts, configs[best.parallelism], best, simulator)
            found.append(best)
    return found


def _divisions(slots: int, heads: int) -> Iterator[Parallelism]:
    """Yield the ways to divide slots by tensor or by sequence parallelism."""
    yield Parallelism()
    for size in (2**n for n in range(1, slots.bit_length())):
        if size <= _SLOTS_OF_A_HOST and slots % size == 0 and heads % size == 0:
            yield Parallelism(sequence=size)
            yield Parallelism(tensor=size)


def _by_formula(
    facts: ModelFacts, configs: Mapping[Parallelism, Mapping[str, Any]], row: Longest
) -> Longest:
    """Return the longest of all divisions."""
    basis = Basis((Variant({}, facts),))
    found = [_with(basis, config, replace(row, parallelism=p)) for p, config in configs.items()]
    return max(found, key=lambda each: each.tokens)


def _simulated(
    facts: ModelFacts, config: Mapping[str, Any], row: Longest, simulator: Simulator | Formula
) -> Longest:
    """Return a row corrected by a simulation at its length."""
    question = Question(config, 1, row.slots, row.tokens)
    [estimate] = simulator.estimates([question])
    if estimate.source != SIMULATED:
        return replace(row, note=estimate.note)
    anchor = Anchor(config, row.tokens // UNIT_TOKENS, estimate)
    found = _with(Basis((Variant({}, facts, (anchor,)),)), config, row)
    return replace(found, host_bytes=estimate.host, source=SIMULATED)


def _with(basis: Basis, config: Mapping[str, Any], row: Longest) -> Longest:
    model = MemoryModel(basis, slots=row.slots, limit_bytes=row.memory_bytes, on_device=True)
    shape = model.shape(config, {})
    tokens = int(min(model.largest(shape), _MOST_TOKENS // UNIT_TOKENS)) * UNIT_TOKENS
    return replace(row, tokens=tokens, host_bytes=round(shape.host_bytes))


def text(found: Sequence[Longest]) -> list[str]:
    """Lay out tables for people, one for each number of slots."""
    lines = []
    for slots, group in itertools.groupby(found, key=lambda each: each.slots):
        lines += ["", f"{slots} slot{'s' if slots > 1 else ''}:", "", *_of_slots(list(group))]
    for note in dict.fromkeys(each.note for each in found if each.note):
        lines += ["", f"By formula where it could not be simulated: {note}"]
    sources = " and ".join(dict.fromkeys(row.source for row in found))
    return [
        *lines[1:],
        "",
        "sp: slots that divide each sequence (Ulysses); tp: that divide each layer (AutoTP). "
        f"Source: {sources}. 5 % are left free; the device's context and the communication library "
        "come on top.",
    ]


def _of_slots(found: Sequence[Longest]) -> list[str]:
    sizes = list(dict.fromkeys(each.memory_bytes for each in found))
    heads = ["strategy", *(f"tokens on {fmt.memory(size)}" for size in sizes), "host per slot"]
    cells = []
    for strategy, group in itertools.groupby(found, key=lambda each: each.strategy):
        of_strategy = list(group)
        most = max(each.host_bytes for each in of_strategy)
        cells.append(
            [
                strategy.label,
                *(_length(each) for each in of_strategy),
                fmt.memory(most) if most else "-",
            ]
        )
    return Table(heads, cells, numbers=heads[1:]).markdown()


def _length(row: Longest) -> str:
    if not row.tokens:
        return "-"
    sizes = row.parallelism
    named = (("tp", sizes.tensor), ("sp", sizes.sequence))
    return f"{row.tokens:,}" + "".join(f" {name}{size}" for name, size in named if size > 1)
