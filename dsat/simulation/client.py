"""Client of the simulation server that runs in the user's script."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from dsat.memory import closed_form
from dsat.memory.estimate import MOST_TOKENS, PHASES, MemoryEstimate
from dsat.memory.facts import ModelFacts
from dsat.simulation import protocol
from dsat.simulation.protocol import Question, ScriptFacts
from dsat.values.step_trace import ModelTrace, StepTrace
from dsat.values.zero_strategy import read_strategy

# Micro batches to compare, large enough that activations, not gradients, decide the peak of the
# backward pass. For long sequences, the larger one is limited to this number of tokens.
_MICRO_BATCHES_FOR_SLOPES, _TOKENS_FOR_SLOPES = (256, 512), MOST_TOKENS // 2
# Sections on which a model's own passes depend; the script's values replace "auto" in them.
_OF_ACTIVATIONS = ("bf16", "bfloat16", "fp16", "torch_autocast", "activation_checkpointing")
_DEPENDS_ON_DATA = "DynamicOutputShapeException"  # torch._subclasses.fake_tensor
_MAY_BE_EXPERTS = (
    " (a shape depends on data, as in mixture-of-experts models before transformers 5)"
)
_POLL_S = 0.05
_PATIENCE_S = 10.0  # beyond the limit at which the server itself ends a simulation


class SimulationHost(Protocol):
    """An engine that can run the user's script for simulations."""

    def start_simulation_server(self, messages: Path, script_args: Mapping[str, Any]) -> Path: ...

    def has_simulation_server(self) -> bool: ...

    def stop_simulation_server(self) -> None: ...


class SimulationUnavailable(Exception):
    """The script did not reach its first training step, ended, or cannot be simulated."""


class Simulator:
    """Simulator of configurations of one script.

    As a context manager, it starts the script, waits for its first training step, and ends the
    script at exit.

    Args:
        as_cpu: whether ranks run on a CPU.
        script_args: values of the script's switches, by name.
        timeout_s: limit for the script to reach its first step, and for the processor time of each
            simulation.
        model_switches: switches to set on the script's model (`gradient_checkpointing`); others
            stay as the script sets them.

    Raises:
        SimulationUnavailable: the script does not reach its first step.
    """

    script: ScriptFacts

    def __init__(
        self,
        engine: SimulationHost,
        *,
        as_cpu: bool,
        script_args: Mapping[str, Any] | None = None,
        timeout_s: float = 120.0,
        model_switches: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine = engine
        self._as_cpu = as_cpu
        self._script_args = script_args or {}
        self._timeout_s = timeout_s
        self._workspace_bytes = 0 if as_cpu else closed_form.MATMUL_WORKSPACE_BYTES
        self._model_switches = model_switches or {}
        self._problem, self._number = "", 0
        self._facts: dict[str, ModelFacts] = {}

    def __enter__(self) -> Simulator:
        with contextlib.ExitStack() as stack:
            try:
                temporary = tempfile.TemporaryDirectory(prefix="dsat-", ignore_cleanup_errors=True)
            except OSError as error:
                raise SimulationUnavailable(f"no folder for its answers: {error}") from None
            self._folder = Path(stack.enter_context(temporary))
            stack.callback(self._engine.stop_simulation_server)
            self.script = self._start()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> ScriptFacts:
        """Run the script up to its first training step, and return its facts."""
        failure = self._engine.start_simulation_server(self._folder, self._script_args)
        deadline = time.monotonic() + self._timeout_s
        while True:
            is_running = self._engine.has_simulation_server()  # before its files are read
            facts = protocol.receive(self._folder / protocol.SCRIPT_FILE)
            if facts is not None:
                return ScriptFacts(**facts)
            if failure.exists():
                message = json.loads(failure.read_text(encoding="utf-8"))["message"]
                raise SimulationUnavailable(message)
            if not is_running:
                raise SimulationUnavailable(
                    "the script's process ended before its first step without an error message"
                )
            if time.monotonic() > deadline:
                raise SimulationUnavailable(
                    f"the script did not reach its first step within {self._timeout_s:g} s"
                )
            time.sleep(_POLL_S)

    def estimates(self, questions: Sequence[Question]) -> list[MemoryEstimate | str]:
        """Return the memory of each configuration, or the reason why it cannot be simulated."""
        estimates = dict(self.estimate_each(questions))
        return [estimates[number] for number in range(len(questions))]

    def estimate_each(
        self, questions: Sequence[Question]
    ) -> Iterator[tuple[int, MemoryEstimate | str]]:
        """Yield each question's number and answer (see `estimates`) as soon as it arrives."""
        for number, answers in self._answers_of_ranks(questions):
            yield number, _largest(answers)

    def trace_each(
        self, questions: Sequence[Question]
    ) -> Iterator[tuple[int, tuple[MemoryEstimate, StepTrace] | str]]:
        """Yield as `estimate_each` does; add a trace of the first rank's step to each estimate."""
        traced = [question._replace(traced=True) for question in questions]
        for number, answers in self._answers_of_ranks(traced):
            estimate = _largest(answers)
            if isinstance(estimate, str):
                yield number, estimate
            else:
                yield number, (estimate, StepTrace.from_json(answers[0]["trace"]))

    def _answers_of_ranks(
        self, questions: Sequence[Question]
    ) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Yield each question's number and the answers of its `_ranks`, once all have arrived."""
        rank_questions = [
            (number, question._replace(rank=rank, traced=question.traced and rank == 0))
            for number, question in enumerate(questions)
            for rank in _ranks(question)
        ]
        received = defaultdict[int, dict[int, dict[str, Any]]](dict)
        for place, answer in self._answers([question for _, question in rank_questions]):
            number, question = rank_questions[place]
            received[number][question.rank] = answer
            ranks = _ranks(question)
            if len(received[number]) == len(ranks):
                yield number, [received[number][rank] for rank in ranks]

    def facts(
        self, config: Mapping[str, Any], switches: Mapping[str, Any] | None = None
    ) -> ModelFacts:
        """Return facts of the model for the formulas, from its passes at two micro batches.

        `switches` are set on the model in addition to the simulator's `model_switches`.

        Raises:
            SimulationUnavailable: the passes cannot be simulated.
        """
        key = json.dumps([_activations_config(config), switches or {}], sort_keys=True)
        if key not in self._facts:
            question = Question(config, 1, 1, switches=switches or {})
            self._facts[key] = self._passes(question)[0]
        return self._facts[key]

    def traced_facts(self, config: Mapping[str, Any]) -> tuple[ModelFacts, ModelTrace]:
        """Return the facts of the model as `facts` does, and the trace of the same passes."""
        facts, answers = self._passes(Question(config, 1, 1, traced=True))
        small, large = (StepTrace.from_json(answer["trace"]) for answer in answers)
        return facts, ModelTrace(small, large)

    def _passes(self, question: Question) -> tuple[ModelFacts, list[dict[str, Any]]]:
        """Simulate the model's own passes at two micro batches; return facts and both answers."""
        question = question._replace(
            config=_activations_config(question.config), activations_only=True
        )
        sizes = _MICRO_BATCHES_FOR_SLOPES
        length = self.script.sequence_length
        if length:
            small = max(1, min(sizes[0], _TOKENS_FOR_SLOPES // (2 * length)))
            sizes = (small, 2 * small)
        questions = [question._replace(micro_batch=size) for size in sizes]
        by_number = dict(self._answers(questions))
        answers = [by_number[number] for number in range(len(questions))]
        for answer in answers:
            if "failed" in answer:
                raise SimulationUnavailable(answer["failed"])
        small, large = (answer["activations"] for answer in answers)
        slopes = {name: (large[name] - small[name]) / (sizes[1] - sizes[0]) for name in small}
        fixed = {name: small[name] - sizes[0] * slopes[name] for name in ("matmul", "before")}
        facts = ModelFacts(
            **self.script.sizes,
            forward_bytes_per_sample=slopes["forward"],
            backward_bytes_per_sample=slopes["backward"],
            first_gradient_bytes_per_sample=slopes["first_gradient"],
            matmul_bytes_per_sample=slopes["matmul"],
            held_bytes_per_sample=slopes["held"],
            matmul_bytes=max(0.0, fixed["matmul"] - fixed["before"]) + self._workspace_bytes,
            workspace_bytes=self._workspace_bytes,
        )
        return facts, answers

    # -- the script

    def _answers(self, questions: Sequence[Question]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Send questions; yield the index and the answer of each, as they arrive.

        `failed` in an answer says why it has no result.
        """
        first, self._number = self._number, self._number + len(questions)
        pending = list(range(first, self._number))
        patience_s = protocol.WALL_FACTOR * self._timeout_s + _PATIENCE_S
        try:
            if not self._problem:
                self._send(questions, first)
            deadline = time.monotonic() + patience_s
            while pending and not self._problem:
                is_running = self._engine.has_simulation_server()
                for number in list(pending):
                    answer = protocol.receive(self._folder / protocol.ANSWER_FILE.format(number))
                    if answer is not None:
                        deadline = time.monotonic() + patience_s
                        pending.remove(number)
                        if _DEPENDS_ON_DATA in answer.get("failed", ""):
                            answer["failed"] += _MAY_BE_EXPERTS
                        yield number - first, answer
                if pending and not is_running:
                    self._problem = "the script has ended"
                elif time.monotonic() > deadline:
                    self._problem = "no answer from the script: timed out"
                time.sleep(_POLL_S if pending else 0.0)
        except OSError as error:  # a full disk, for example
            self._problem = str(error)
        finally:  # withdraw questions that nobody waits for any more
            for number in pending:
                (self._folder / protocol.QUESTION_FILE.format(number)).unlink(missing_ok=True)
        for number in pending:
            yield number - first, {"failed": self._problem}

    def _send(self, questions: Sequence[Question], first: int) -> None:
        for number, question in enumerate(questions, first):
            whole = question._replace(
                switches={**self._model_switches, **question.switches},
                as_cpu=self._as_cpu,
                workspace_bytes=self._workspace_bytes,
            )
            message = {**whole._asdict(), "number": number, "timeout_s": self._timeout_s}
            protocol.send(self._folder / protocol.QUESTION_FILE.format(number), message)


def _ranks(question: Question) -> list[int]:
    """Return the ranks that may need the most memory.

    Ranks differ only in stages 1 and 2. The first rank holds gradients of the first layers, which
    come at the end of the backward pass. The last rank allocates all its gradients at the start of
    that pass, while all activations exist.
    """
    last = question.slots - 1
    return [0, last] if last > 0 and read_strategy(question.config).stage in (1, 2) else [0]


def _largest(answers: Sequence[dict[str, Any]]) -> MemoryEstimate | str:
    """Return each phase's maximum over the ranks, or why a rank could not be simulated."""
    reasons = [answer["failed"] for answer in answers if answer.get("failed")]
    if reasons:
        return str(reasons[0])
    estimates = [MemoryEstimate.from_json(answer["estimate"]) for answer in answers]
    sizes = (*PHASES, "host_pinned", "host_pageable")
    maxima = {name: max(getattr(estimate, name) for estimate in estimates) for name in sizes}
    return replace(estimates[0], **maxima)


def _activations_config(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key in _OF_ACTIVATIONS}
