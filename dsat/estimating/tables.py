"""The tables of `dsat estimate`: memory by strategy, number of devices and their memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsat.command.switches import CHECKPOINTING
from dsat.estimating import edges, fewest_gpus
from dsat.estimating.advice import Advice, advise
from dsat.estimating.edges import Edge
from dsat.estimating.fewest_gpus import Choice
from dsat.estimating.line import Line
from dsat.estimating.options import EstimateSettings
from dsat.memory import closed_form, host
from dsat.memory.estimate import METHODS, SIMULATED, MemoryEstimate
from dsat.memory.facts import ModelFacts
from dsat.memory.predictor import Anchor, Basis, MemoryModel, fits_host
from dsat.memory.strategies import apply_strategy, compared
from dsat.prepare.simulated_model import SimulatedModel, simulate
from dsat.simulation.client import SimulationUnavailable
from dsat.simulation.protocol import Question
from dsat.values import format as fmt
from dsat.values import slow
from dsat.values.table import Table
from dsat.values.zero_strategy import Strategy

_log = logging.getLogger(__name__)
_MUCH = 0.1  # of what the ranks of a host need
_FASTER = "; a smaller --seq-length takes less"


@dataclass(frozen=True)
class Estimate:
    """The answer of `dsat estimate`: memory of each strategy.

    Attributes:
        lines: one for every strategy and number of devices.
        advice: the strategy to use, for each number of devices and memory of a device.
        edges: strategies that nearly fit.
        gpus: the fewest GPUs of each usual memory size.
        sequence_length: tokens of a sample; None if samples are not sequences.
        dtype: type of the parameters; None if a script decides it.
    """

    name: str
    model: ModelFacts
    lines: Sequence[Line]
    advice: Sequence[Advice]
    edges: Sequence[Edge]
    gpus: Sequence[Choice]
    sequence_length: int | None
    dtype: str | None

    @property
    def is_complete(self) -> bool:
        """Return False if the simulation of every line failed, so that all are by formula."""
        return not all(line.estimate.note for line in self.lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "model": vars(self.model),
            "sequence_length": self.sequence_length,
            "dtype": self.dtype,
            "lines": [line.to_json() for line in self.lines],
            "advice": [a.to_json() for a in self.advice],
            "edges": [edge.to_json() for edge in self.edges],
            "gpus": [choice.to_json() for choice in self.gpus],
        }

    def __str__(self) -> str:
        facts, lines = self.model, self.lines
        dtype = f" in {self.dtype}" if self.dtype else ""
        tokens = f" of {self.sequence_length:,} tokens" if self.sequence_length else ""
        text = [
            f"{self.name}: {facts.num_params:,} parameters{dtype}, {facts.trainable_params:,} of "
            f"them trained; activations {fmt.memory(facts.backward_bytes_per_sample)} per sample"
            f"{tokens}"
        ]
        for slots in dict.fromkeys(line.slots for line in lines):
            group = [line for line in lines if line.slots == slots]
            text += ["", f"{fmt.count(slots, 'GPU')}:", "", *_table(group).markdown()]
            text += _advice([a for a in self.advice if a.slots == slots], group)
            text += [f"- {edge}" for edge in self.edges if edge.slots == slots]
        methods = " and ".join(dict.fromkeys(METHODS[line.estimate.source] for line in lines))
        text += [
            "",
            f"Predicted by {methods}. Largest micro batches leave 5 % free. The CUDA context and "
            "NCCL need additional memory. Host memory is for all ranks of a host of up to 8 GPUs.",
            *_pinning(lines),
            *_failures(lines),
            "",
            "The fewest GPUs of each size, with 5 % free:",
            "",
        ]
        return "\n".join([*text, *fewest_gpus.table(self.gpus)])


class LineByLine:
    """The tables of a model: first by formula, then updated with each simulated line."""

    def __init__(
        self,
        model: SimulatedModel,
        settings: EstimateSettings,
        switches: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self._settings = model, settings
        self._length = model.simulator.script.sequence_length
        with slow.logged(_log, "counting the model's parameters and activations", hint=_FASTER):
            self._facts = model.simulator.facts(model.config, switches)
        self._strategies = compared(model.config)
        self._questions = [
            (strategy, Question(apply_strategy(model.config, strategy, slots), 1, slots))
            for slots in settings.slot_counts
            for strategy in self._strategies
        ]
        self._estimates = [self._use_formula(self._facts, q) for _, q in self._questions]
        self._simulated = 0

    @property
    def progress(self) -> str:
        """Return a phrase with the number of simulated lines."""
        return f"{self._simulated} of {len(self._questions)} lines are simulated"

    def simulate(self) -> Iterator[int]:
        """Simulate the lines, the likely advice first; do nothing if `--formula` suffices.

        Yields:
            The number of devices of each line, once it is simulated. Before the first line, the
            first number of devices.
        """
        if self._settings.formula and not needs_simulation(self._model.config):
            return
        order = self._order()
        questions = [self._questions[line][1] for line in order]
        with slow.logged(_log, "simulating", hint=lambda: f", {self.progress}"):
            yield self._settings.slot_counts[0]
            for number, answer in self._model.simulator.estimate_each(questions):
                line = order[number]
                if isinstance(answer, str):
                    answer = replace(self._estimates[line], note=answer)
                self._estimates[line] = answer
                self._simulated += 1
                yield questions[number].slots

    def _order(self) -> list[int]:
        """Order lines by number of devices; for each, advised strategies and neighbours come first.

        Neighbours of a strategy are the ones before and after it in the usual order.
        """
        first = set()
        for tip in advise(self._facts, self._model.config, self.lines(), self._length):
            for strategy in filter(None, (tip.strategy, tip.other)):
                place = self._strategies.index(strategy)
                first |= {(tip.slots, s) for s in self._strategies[max(0, place - 1) : place + 2]}
        counts = list(self._settings.slot_counts)

        def key(line: int) -> tuple[int, bool]:
            strategy, question = self._questions[line]
            return counts.index(question.slots), (question.slots, strategy) not in first

        return sorted(range(len(self._questions)), key=key)

    @property
    def _basis(self) -> Basis:
        anchors = [
            Anchor(question.config, 1, memory, question.slots)
            for (_, question), memory in zip(self._questions, self._estimates, strict=True)
            if memory.source == SIMULATED
        ]
        return Basis.of_model(self._facts, anchors)

    def table(self, slots: int) -> Table:
        """Return the current table for a number of devices."""
        return _table(self.lines(slots))

    def lines(self, slots: int | None = None) -> list[Line]:
        """Return the current lines for a number of devices, or for all if `slots` is None."""
        basis = self._basis
        return [
            self._line(basis, strategy, question, memory)
            for (strategy, question), memory in zip(self._questions, self._estimates, strict=True)
            if slots in (None, question.slots)
        ]

    def _line(
        self, basis: Basis, strategy: Strategy, question: Question, memory: MemoryEstimate
    ) -> Line:
        config, slots, facts = question.config, question.slots, self._facts
        largest, longest, host_bytes, has_room = {}, {}, 0, True
        for size in self._settings.slot_memories:
            model = MemoryModel(basis, slots=slots, limit_bytes=size, on_device=True)
            shape = model.shape(config, {})
            host_bytes = host.bytes_of_host(facts, config, shape.host_bytes, slots)
            has_room = fits_host(host_bytes, self._settings.host_memory)
            most = model.largest(shape) if has_room else 0.0
            largest[size] = int(most)
            script = self._model.simulator.script
            if self._length is not None and not script.is_quadratic:
                # One sample may have all tokens of the largest micro batch, up to the model's
                # maximum.
                tokens = int(most * self._length)
                longest[size] = min(tokens, script.model_takes or tokens)
        need = needed_bytes(basis, config, slots)
        saved = host.saved_without_pinning(facts, config, slots=slots)
        return Line(strategy, slots, memory, need, host_bytes, saved, largest, longest, has_room)

    def estimate(self) -> Estimate:
        """Return the current tables with advice, edges and fewest GPUs."""
        config, lines = self._model.config, self.lines()
        gpus = fewest_gpus.fewest(self._basis, config, self._settings.host_memory)
        advice = advise(self._facts, config, lines, self._length)
        near = self._edges(lines)
        name, dtype = self._model.name, self._model.dtype
        return Estimate(name, self._facts, lines, advice, near, gpus, self._length, dtype)

    def fastest_first(self) -> Iterator[Strategy]:
        """Yield the strategies that fit the first number of devices, in order of advice."""
        lines = self.lines(self._settings.slot_counts[0])
        while advice := advise(self._facts, self._model.config, lines, self._length):
            strategy = advice[0].strategy
            yield strategy
            lines = [line for line in lines if line.strategy != strategy]

    def _edges(self, lines: Sequence[Line]) -> list[Edge]:
        """Return the strategies that nearly fit.

        Once all lines are simulated, add what activation checkpointing would save.
        """
        partial = self._settings.formula or self._simulated < len(self._questions)  # or interrupted
        usual = [line for line in lines if line.strategy == lines[0].strategy]
        is_needless = all(all(line.largest.values()) for line in usual)
        recomputed = None
        if not (partial or is_needless or self._settings.activation_checkpointing == "on"):
            with contextlib.suppress(SimulationUnavailable):
                recomputed = self._model.simulator.facts(self._model.config, {CHECKPOINTING: True})
        if recomputed is None:
            return edges.nearly_fitting(lines)

        def saved_bytes(line: Line) -> int:
            config = apply_strategy(self._model.config, line.strategy, line.slots)
            question = Question(config, 1, line.slots)
            now, less = (self._use_formula(facts, question) for facts in (self._facts, recomputed))
            return max(0, now.peak - less.peak)

        return edges.nearly_fitting(lines, saved_bytes)

    @staticmethod
    def _use_formula(facts: ModelFacts, question: Question) -> MemoryEstimate:
        return closed_form.estimate(facts, question.config, slots=question.slots, micro_batch=1)


@contextlib.contextmanager
def opened(settings: EstimateSettings) -> Iterator[LineByLine]:
    """Run a model on fake tensors; yield its tables, so far predicted by formula.

    Raises:
        UserInputError: the settings or the files are wrong.
        DsatError: the model cannot be simulated.
    """
    with simulate(settings) as model:
        yield LineByLine(model, settings)


def estimate(settings: EstimateSettings) -> Estimate:
    """Simulate a model and return its tables; raise the same errors as `opened`."""
    with opened(settings) as tables:
        for _ in tables.simulate():
            pass
        return tables.estimate()


def needs_simulation(config: Mapping[str, Any]) -> bool:
    """Return whether the optimizer is neither Adam nor AdamW, which the formulas cover."""
    kind = str((config.get("optimizer") or {}).get("type", "Adam"))
    return kind.lower() not in ("adam", "adamw")


def needed_bytes(basis: Basis, config: Mapping[str, Any], slots: int) -> int:
    """Return the bytes that a device needs at micro batch 1.

    Copies that DeepSpeed makes only if there is room do not count.
    """
    model = MemoryModel(basis, slots=slots, limit_bytes=0, on_device=True)
    return model.predicted_bytes(model.shape(config, {}), 1)


def _pinning(lines: Sequence[Line]) -> list[str]:
    """Return a sentence on the memory that `"pin_memory": false` saves; nothing if it is little."""
    saved = [line for line in lines if line.saved > _MUCH * line.host]
    if not saved:
        return []
    most = max(saved, key=lambda line: line.saved)
    return [
        f'"pin_memory": false saves up to {fmt.memory(most.saved)} of host memory '
        f"({most.strategy.label}, {fmt.count(most.slots, 'GPU')}), but slows copies down."
    ]


def _failures(lines: Sequence[Line]) -> list[str]:
    """Return a sentence for each reason why lines could not be simulated."""
    reasons: dict[str, list[str]] = {}
    for line in lines:
        if line.estimate.note:
            place = f"{line.strategy.label} on {line.slots}"
            reasons.setdefault(line.estimate.note, []).append(place)
    return [
        f"By formula, because the simulation failed: {', '.join(places)} GPUs: {reason}"
        for reason, places in reasons.items()
    ]


def _fits_device(line: Line) -> bool:
    return any(edges.missing(line.needed, size) <= 0 for size in line.largest)


def _table(lines: Sequence[Line]) -> Table:
    sizes = list(lines[0].largest)
    heads = ["strategy", "GPU at micro batch 1", "host"]
    heads += [f"largest on {fmt.memory(size)}" for size in sizes]
    if lines[0].longest:
        heads.append("longest sequence")
    rows = [
        [
            line.strategy.label + ("" if line.estimate.source == SIMULATED else " (formula)"),
            fmt.memory(line.needed),
            fmt.memory(line.host) if line.host else "-",
            *(str(count or "-") for count in line.largest.values()),
            *(f"{tokens:,}" if tokens else "-" for tokens in list(line.longest.values())[-1:]),
        ]
        for line in lines
    ]
    return Table(heads, rows, numbers=heads[1:])


def _advice(advice: Sequence[Advice], lines: Sequence[Line]) -> list[str]:
    if not advice:
        too_much = [line.host for line in lines if not line.fits_host and _fits_device(line)]
        if too_much:
            least = fmt.memory(min(too_much))
            return ["", f"No strategy fits the host: those that fit the GPUs need {least} or more."]
        return ["", "No strategy fits these GPUs."]
    heading = "Fastest strategy that fits, with its memory at micro batch 1:"
    return ["", heading, *(f"- {tip}" for tip in advice)]
