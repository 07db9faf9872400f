"""The longest sequence of which one sample fits, with sequences and layers divided among slots."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dsat.app import estimate as estimates
from dsat.app.project import Projector, Traced
from dsat.errors import UserInputError
from dsat.inputs import cards
from dsat.inputs.cards import Card
from dsat.inputs.estimate_settings import EstimateSettings
from dsat.memory import closed_form
from dsat.memory.closed_form import ModelFacts
from dsat.memory.estimate import SIMULATED
from dsat.memory.predictor import Anchor, Basis, MemoryModel
from dsat.report.longest_sequence import Longest, LongestSequences
from dsat.simulation.client import Simulator
from dsat.simulation.config_facts import Formula
from dsat.simulation.protocol import Question
from dsat.values.parallelism import Parallelism

UNIT_TOKENS = 1024  # of the "samples" that facts and models are asked about here
_SLOTS_OF_A_HOST = 8  # among which layers and sequences are divided
_MOST_TOKENS = 2**27
# Simulations of a row, and by how much its length may still change after them.
_MOST_SIMULATIONS, _SETTLED = 8, 0.05


def longest(settings: EstimateSettings) -> LongestSequences:
    """Answer `dsat estimate --longest-sequence`."""
    card = None if settings.card is None else cards.find(settings.card)
    with estimates.simulated(settings) as (name, base, simulator):
        if isinstance(simulator, Formula) and (card or settings.switches):
            estimates.check_packages("--card" if card else "--switch")
        found = rows(simulator, base, settings, card)
        if card is not None:
            assert isinstance(simulator, Simulator)
            found = [_timed(row, base, simulator, card) for row in found]
        takes = simulator.script.model_takes
    return LongestSequences(name, found, "" if card is None else card.name, takes)


def rows(
    simulator: Simulator | Formula,
    base: Mapping[str, Any],
    settings: EstimateSettings,
    card: Card | None = None,
) -> list[Longest]:
    """Return a row for every number of slots, strategy, combination of switches and memory.

    Raises:
        UserInputError: the script's samples are no sequences of tokens.
        SimulationUnavailable: the script cannot be simulated.
    """
    if simulator.script.sequence_length is None:
        raise UserInputError(
            "is for samples that are sequences of tokens, and the script's batch has no integers "
            "of two dimensions",
            where="--longest-sequence",
        )
    ladder, names = estimates.ladder(base), list(settings.switches)
    exact = settings.exact or estimates.needs_simulation(base) or card or names
    sizes = settings.slot_memories if card is None else (card.memory_bytes,)
    any_config = estimates.configuration(base, ladder[0], 1, Parallelism())
    models = []
    for values in itertools.product(*settings.switches.values()):
        switches = dict(zip(names, values, strict=True))
        models.append((switches, _facts(simulator, any_config, switches)))
    found = []
    for slots, strategy in itertools.product(settings.slot_counts, ladder):
        configs = {
            shared: estimates.configuration(base, strategy, slots, shared)
            for shared in _divisions(slots, simulator.script.attention_heads or 0)
        }
        for (switches, facts), size in itertools.product(models, sizes):
            row = Longest(slots, strategy, size, Parallelism(), 0, 0, switches=switches)
            by_formula = [
                _with(Basis.of_model(facts), config, replace(row, parallelism=shared))
                for shared, config in configs.items()
            ]
            best = max(by_formula, key=lambda each: each.tokens)
            config = configs[best.parallelism]
            if exact and isinstance(simulator, Simulator) and _may_fit(facts, config, best):
                best = _simulated(facts, config, best, simulator)
            found.append(best)
    return found


def _facts(
    simulator: Simulator | Formula, config: Mapping[str, Any], switches: Mapping[str, Any]
) -> ModelFacts:
    if isinstance(simulator, Simulator):
        return simulator.facts(config, switches, unit_tokens=UNIT_TOKENS)
    return simulator.facts(config, unit_tokens=UNIT_TOKENS)


def _divisions(slots: int, heads: int) -> Iterator[Parallelism]:
    """Yield the ways to divide slots by tensor or by sequence parallelism."""
    yield Parallelism()
    for size in (2**n for n in range(1, slots.bit_length())):
        if size <= _SLOTS_OF_A_HOST and slots % size == 0 and heads % size == 0:
            yield Parallelism(sequence=size)
            yield Parallelism(tensor=size)


def _simulated(
    facts: ModelFacts, config: Mapping[str, Any], row: Longest, simulator: Simulator
) -> Longest:
    """Return a row corrected by simulations, until its length hardly changes.

    One is enough where memory is linear in the length. It is not where attention keeps its scores.
    """
    found, before = replace(row, tokens=max(row.tokens, UNIT_TOKENS)), None
    for _ in range(_MOST_SIMULATIONS):
        length = found.tokens
        [estimate] = simulator.estimates([Question(config, 1, row.slots, length, row.switches)])
        if isinstance(estimate, str):
            return replace(row, note=estimate)
        anchor = Anchor(config, length // UNIT_TOKENS, estimate)
        if before is not None:
            facts = _between(facts, before, anchor, row.slots)
        found = _with(Basis.of_model(facts, [anchor]), config, row)
        if not found.tokens or abs(found.tokens - length) <= _SETTLED * length:
            break
        before = anchor
    return replace(found, host_bytes=anchor.estimate.host, source=SIMULATED)


def _may_fit(facts: ModelFacts, config: Mapping[str, Any], row: Longest) -> bool:
    """Return whether a sequence fits, or at least the model's states, by the formula."""
    states = closed_form.estimate(facts, config, slots=row.slots, micro_batch=0)
    return bool(row.tokens) or states.peak < row.memory_bytes


def _between(facts: ModelFacts, one: Anchor, other: Anchor, slots: int) -> ModelFacts:
    """Return facts whose activations grow as those of two simulations do."""
    simulated, known = (
        other.estimate.peak - one.estimate.peak,
        _peak(facts, other, slots) - _peak(facts, one, slots),
    )
    return facts if simulated * known <= 0 else facts.scaled(simulated / known)


def _peak(facts: ModelFacts, anchor: Anchor, slots: int) -> int:
    micro_batch = anchor.micro_batch
    return closed_form.estimate(facts, anchor.config, slots=slots, micro_batch=micro_batch).peak


def _with(basis: Basis, config: Mapping[str, Any], row: Longest) -> Longest:
    model = MemoryModel(basis, slots=row.slots, limit_bytes=row.memory_bytes, on_device=True)
    shape = model.shape(config, {})
    tokens = int(min(model.largest(shape), _MOST_TOKENS // UNIT_TOKENS)) * UNIT_TOKENS
    return replace(row, tokens=tokens, host_bytes=round(shape.host_bytes))


def _timed(row: Longest, base: Mapping[str, Any], simulator: Simulator, card: Card) -> Longest:
    """Return a row with its speed, by traces of a step and of the model at its length."""
    if not row.tokens or row.source != SIMULATED:
        return row
    config = estimates.configuration(base, row.strategy, row.slots, row.parallelism)
    question = Question(config, 1, row.slots, row.tokens, row.switches)
    [answer] = simulator.traces([question])
    if isinstance(answer, str):
        return replace(row, note=answer)
    estimate, step = answer
    facts, model = simulator.traced_facts(config, sequence_length=row.tokens, switches=row.switches)
    anchor = Anchor(config, 1, estimate, row.slots)
    traced = Traced(config, facts, model, {row.strategy: (step, anchor)}, {}, row.tokens)
    speed = Projector(traced, card, None).row(row.strategy, row.slots, 1)
    return replace(row, speed=speed)
