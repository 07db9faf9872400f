"""A simulation server without a script: a function makes its answers."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsat.command.switches import CHECKPOINTING
from dsat.memory import closed_form
from dsat.memory.facts import ModelFacts
from dsat.simulation import protocol
from dsat.values.zero_strategy import read_strategy

MIB = 2**20
Answer = Callable[[Mapping[str, Any]], Mapping[str, Any]]
SIZES = ("num_params", "trainable_params", "largest_param", "param_bytes", "hidden_size")


def facts_of(num_params: int) -> ModelFacts:
    """Return facts of a model in fp32 that is fully trained, with 30 MiB of activations per
    sample."""
    return ModelFacts(
        num_params=num_params,
        trainable_params=num_params,
        largest_param=MIB,
        forward_bytes_per_sample=20.0 * MIB,
        backward_bytes_per_sample=30.0 * MIB,
        first_gradient_bytes_per_sample=25.0 * MIB,
        param_bytes=4,
    )


class FakeSimulationHost:
    """An engine whose simulation server answers each request with `answer`.

    Args:
        facts, answer: the model's facts, and the function that makes answers.
        fails: if set, every request fails with this message.
        fails_early: if set, the script itself fails with this message before the first request.
        sequence_length, model_takes: tokens of a sample, and the most that the model accepts.
        is_quadratic: whether memory grows with the square of the length.
        optimizer: the configuration section for the optimizer that the script passes.

    Attributes:
        asked: all requests received.
    """

    def __init__(
        self,
        facts: ModelFacts,
        answer: Answer,
        *,
        fails: str = "",
        fails_early: str = "",
        sequence_length: int | None = None,
        model_takes: int = 0,
        is_quadratic: bool = False,
        optimizer: Mapping[str, Any] | None = None,
    ) -> None:
        self._hello: dict[str, Any] = {
            "sizes": {name: getattr(facts, name) for name in SIZES},
            "sequence_length": sequence_length,
            "model_takes": model_takes,
            "is_quadratic": is_quadratic,
            "optimizer": dict(optimizer or {}),
        }
        self._facts, self._answer = facts, answer
        self._fails, self._fails_early = fails, fails_early
        self.asked: list[dict[str, Any]] = []

    def start_simulation_server(self, messages: Path, script_args: Mapping[str, Any]) -> Path:
        failure = messages / "failure.json"
        self._ended = threading.Event()
        if self._fails_early:
            failure.write_text(json.dumps({"message": self._fails_early}))
        else:
            threading.Thread(target=self._serve, args=(messages,), daemon=True).start()
        return failure

    def has_simulation_server(self) -> bool:
        return True

    def stop_simulation_server(self) -> None:
        self._ended.set()

    def _serve(self, messages: Path) -> None:
        with contextlib.suppress(FileNotFoundError):  # the client has removed the folder
            protocol.send(messages / protocol.SCRIPT_FILE, self._hello)
            while not self._ended.wait(0.01):
                for path in sorted(messages.glob(protocol.QUESTIONS)):
                    if request := protocol.receive(path):
                        self.asked.append(request)
                        answer = messages / protocol.ANSWER_FILE.format(request["number"])
                        protocol.send(answer, self._answered(request))

    def _answered(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._fails:
            return {"failed": self._fails}
        if not request["activations_only"]:
            return self._answer(request)
        size, facts = float(request["micro_batch"]), self._facts
        if request["switches"].get(CHECKPOINTING):
            size /= 4
        peaks = {
            "forward": size * facts.forward_bytes_per_sample,
            "backward": size * facts.backward_bytes_per_sample,
            "first_gradient": size * facts.first_gradient_bytes_per_sample,
            "matmul": size * facts.matmul_bytes_per_sample,
            "before": 0,
            "held": size * facts.held_bytes_per_sample,
        }
        return {"activations": peaks}


def by_formula(facts: ModelFacts) -> Answer:
    """Return answers that agree with the closed form."""

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        size, slots = request["micro_batch"], request["slots"]
        found = closed_form.estimate(facts, request["config"], slots=slots, micro_batch=size)
        return {"estimate": {**found.to_json(), "source": "simulated"}}

    return answer


def failing_in(stages: set[int], other: Answer) -> Answer:
    """Return answers that fail in some ZeRO stages, and come from `other` in the rest.

    The failure is torch's error for an operator without an implementation for fake tensors.
    """

    def answer(request: Mapping[str, Any]) -> Mapping[str, Any]:
        if read_strategy(request["config"]).stage in stages:
            return {"failed": "NotImplementedError: no fake kernel"}
        return other(request)

    return answer
