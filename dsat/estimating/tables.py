"""The tables of `dsat estimate`: memory by strategy, number of devices and their memory."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dsat.estimating import fewest_cards
from dsat.estimating.advice import Advice, advise
from dsat.estimating.fewest_cards import Choice
from dsat.estimating.line import Line
from dsat.estimating.options import EstimateSettings
from dsat.memory import closed_form, host
from dsat.memory.estimate import SIMULATED, MemoryEstimate
from dsat.memory.facts import ModelFacts
from dsat.memory.predictor import Anchor, Basis, MemoryModel, fits_host
from dsat.memory.strategies import compared, with_strategy
from dsat.prepare.simulated_model import SimulatedModel, simulate
from dsat.simulation.protocol import Question
from dsat.space.batch_rule import LARGEST_MICRO_BATCH
from dsat.values import format as fmt
from dsat.values import slow
from dsat.values.table import Table
from dsat.values.zero_strategy import Strategy

_log = logging.getLogger(__name__)
_MUCH = 0.1  # of a host's memory


@dataclass(frozen=True)
class Estimate:
    """Memory of each strategy.

    Attributes:
        lines: one for every strategy and number of devices.
        advice: the fastest strategy that fits, by number of devices and their memory.
        cards: the fewest cards of each usual size.
        sequence_length: tokens of a sample; None if samples are not sequences.
    """

    name: str
    model: ModelFacts
    lines: Sequence[Line]
    advice: Sequence[Advice]
    cards: Sequence[Choice]
    sequence_length: int | None

    @property
    def is_complete(self) -> bool:
        """Return False if no line could be simulated, and the formula answers for all of them."""
        return not all(line.estimate.note for line in self.lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "model": vars(self.model),
            "sequence_length": self.sequence_length,
            "lines": [line.to_json() for line in self.lines],
            "advice": [each.to_json() for each in self.advice],
            "cards": [choice.to_json() for choice in self.cards],
        }

    def __str__(self) -> str:
        facts, lines = self.model, self.lines
        tokens = f" of {self.sequence_length:,} tokens" if self.sequence_length else ""
        text = [
            f"{self.name}: {facts.num_params:,} parameters, {facts.trainable_params:,} of them "
            f"trained; activations {fmt.memory(facts.backward_bytes_per_sample)} per sample{tokens}"
        ]
        for slots in dict.fromkeys(line.slots for line in lines):
            text += ["", f"{fmt.count(slots, 'GPU')}:", ""]
            text += _table([line for line in lines if line.slots == slots])
            text += _advice([each for each in self.advice if each.slots == slots])
        sources = " and ".join(dict.fromkeys(line.estimate.source for line in lines))
        text += [
            "",
            f"Source: {sources}. Largest micro batches leave 5 % free. The CUDA context and NCCL "
            "need memory on top. The host has up to 8 GPUs; its memory is for all their ranks.",
            *_pinning(lines),
            *_failures(lines),
            "",
            f"The fewest GPUs of each size, by {sources}, with 5 % free:",
            "",
        ]
        return "\n".join([*text, *fewest_cards.table(self.cards)])


def estimate(settings: EstimateSettings) -> Estimate:
    """Simulate a model and return its tables.

    Raises:
        UserInputError: the settings or the files are wrong.
        DsatError: the model cannot be simulated.
    """
    with simulate(settings) as model:
        return tables(model, settings)


def tables(model: SimulatedModel, settings: EstimateSettings) -> Estimate:
    """Return the tables of a model."""
    config, simulator = model.config, model.simulator
    facts, strategies = simulator.facts(config), compared(config)
    pairs = list(itertools.product(settings.slot_counts, strategies))
    questions = [
        Question(with_strategy(config, strategy, slots), 1, slots) for slots, strategy in pairs
    ]
    estimates = [
        closed_form.estimate(facts, asked.config, slots=asked.slots, micro_batch=1)
        for asked in questions
    ]
    if settings.exact or needs_simulation(config):
        with slow.logged(_log, f"simulating {len(questions)} lines of the table"):
            answers = simulator.estimates(questions)
        estimates = [
            replace(formula, note=answer) if isinstance(answer, str) else answer
            for formula, answer in zip(estimates, answers, strict=True)
        ]
    anchors = [
        Anchor(asked.config, 1, found, asked.slots)
        for asked, found in zip(questions, estimates, strict=True)
        if found.source == SIMULATED
    ]
    basis, length = Basis.of_model(facts, anchors), simulator.script.sequence_length
    lines = [
        _line(basis, strategy, asked, found, settings, length)
        for (_, strategy), asked, found in zip(pairs, questions, estimates, strict=True)
    ]
    cards = fewest_cards.fewest(
        basis, config, partial(with_strategy, config), strategies, settings.host_memory
    )
    advice = advise(facts, config, lines, length)
    return Estimate(model.name, facts, lines, advice, cards, length)


def needs_simulation(config: Mapping[str, Any]) -> bool:
    """Return whether the optimizer is one that the closed form, which is Adam's, does not cover."""
    kind = str((config.get("optimizer") or {}).get("type", "Adam"))
    return kind.lower() not in ("adam", "adamw")


def needed_bytes(basis: Basis, config: Mapping[str, Any], slots: int) -> int:
    """Return the memory that one sample needs, without the copies that DeepSpeed makes at will."""
    model = MemoryModel(basis, slots=slots, limit_bytes=0, on_device=True)
    return model.predicted_bytes(model.shape(config, {}), 1)


def _line(
    basis: Basis,
    strategy: Strategy,
    asked: Question,
    found: MemoryEstimate,
    settings: EstimateSettings,
    length: int | None,
) -> Line:
    config, slots, facts = asked.config, asked.slots, basis.variants[0].facts
    ranks, limit = host.ranks(slots), settings.host_memory
    largest, longest, host_bytes = {}, {}, 0
    for size in settings.slot_memories:
        model = MemoryModel(basis, slots=slots, limit_bytes=size, on_device=True)
        shape = model.shape(config, {})
        host_bytes = host.of_host(facts, config, shape.host_bytes, slots)
        has_room = fits_host(host_bytes, limit)
        most = min(model.largest(shape), float(LARGEST_MICRO_BATCH)) if has_room else 0.0
        largest[size] = int(most)
        if length is not None:
            longest[size] = int(most * length)
    needed = needed_bytes(basis, config, slots)
    saved = ranks * host.saved_without_pinning(facts, config, slots=slots)
    return Line(strategy, slots, found, needed, host_bytes, saved, largest, longest)


def _pinning(lines: Sequence[Line]) -> list[str]:
    """Return what memory that is not pinned would save, if it is much of a host's."""
    saved = [line for line in lines if line.saved > _MUCH * line.host]
    if not saved:
        return []
    most = max(saved, key=lambda line: line.saved)
    return [
        f'"pin_memory": false saves up to {fmt.memory(most.saved)} of a host '
        f"({most.strategy.label} on {most.slots}), at the cost of slower copies."
    ]


def _failures(lines: Sequence[Line]) -> list[str]:
    """Return the lines of a table that could not be simulated, by the reason."""
    reasons: dict[str, list[str]] = {}
    for line in lines:
        if line.estimate.note:
            named = f"{line.strategy.label} on {line.slots}"
            reasons.setdefault(line.estimate.note, []).append(named)
    return [
        f"By formula, because the simulation failed: {', '.join(named)} GPUs: {reason}"
        for reason, named in reasons.items()
    ]


def _table(lines: Sequence[Line]) -> list[str]:
    sizes = list(lines[0].largest)
    heads = ["strategy", "GPU at micro batch 1", "host"]
    heads += [f"largest on {fmt.memory(size)}" for size in sizes]
    if lines[0].longest:
        heads.append("longest sequence")
    rows = [
        [
            line.strategy.label,
            fmt.memory(line.needed),
            fmt.memory(line.host) if line.host else "-",
            *(str(count or "-") for count in line.largest.values()),
            *(f"{tokens:,}" if tokens else "-" for tokens in list(line.longest.values())[-1:]),
        ]
        for line in lines
    ]
    return Table(heads, rows, numbers=heads[1:]).markdown()


def _advice(advice: Sequence[Advice]) -> list[str]:
    if not advice:
        return ["", "No strategy fits."]
    heading = "Fastest strategy that fits, with its memory at micro batch 1:"
    return ["", heading, *(f"- {each}" for each in advice)]
