"""Asks the script for simulations, and remembers what it answered."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from dsat.memory import closed_form
from dsat.memory.closed_form import ModelFacts
from dsat.memory.estimate import MemoryEstimate, as_simulated
from dsat.memory.remembered_script import RememberedScript, ScriptModel

# What memory depends on besides the model and the configuration; the last is this package's own.
_ANSWERS = 2  # what simulations count; raised when that changes
_VERSIONS = ("torch", "deepspeed", "dsat")
# Large enough for activations, and not gradients, to decide the peak of the backward pass.
_MICRO_BATCHES_FOR_SLOPES = (256, 512)
# What a model's own passes depend on; "auto" in them stands for what the script takes.
_OF_ACTIVATIONS = ("bf16", "bfloat16", "fp16", "torch_autocast", "activation_checkpointing")
# What comes of functions and fields that another version of torch or DeepSpeed has not got.
_OF_ANOTHER_VERSION = ("AttributeError", "ImportError", "ModuleNotFoundError", "TypeError")
_PATIENCE_S = 10.0  # with a script that itself ends a simulation in time


class SimulationHost(Protocol):
    """An engine that can run the user's script for simulations."""

    def start_simulation_server(self, address: Path, script_args: Mapping[str, Any]) -> Path: ...

    def has_simulation_server(self) -> bool: ...

    def stop_simulation_server(self) -> None: ...


class SimulationUnavailable(Exception):
    """The script does not come to where it could be simulated."""


class Simulator:
    """Memory of configurations of one script, simulated where possible.

    The script is started at the first question, because only it can tell what its model is, and
    goes on until the simulator is closed; it is not where it has been asked everything before, and
    nothing has changed since. Used as a context manager.

    Args:
        engine: runs the script.
        as_cpu: trials run on a CPU.
        cache: folder of the answers of earlier runs.
        script_args: switches of the script.
        start: `start_of` the script, the key of the cache; None: nothing is cached.
        timeout_s: for the script to reach its first step, and for each simulation.
        workspace_bytes: what cuBLAS takes on the device while it multiplies; by default as much as
            on the devices where it is most, and nothing on a CPU.
    """

    def __init__(
        self,
        engine: SimulationHost,
        *,
        as_cpu: bool,
        cache: Path | None = None,
        script_args: Mapping[str, Any] | None = None,
        start: Mapping[str, Any] | None = None,
        timeout_s: float = 120.0,
        workspace_bytes: int | None = None,
    ) -> None:
        self._engine = engine
        self._model: ScriptModel | None = None
        self._answers: dict[str, dict[str, Any]] = {}
        self._remembered_script = None
        if cache is not None and start is not None:
            key = {
                **start,
                "engine": type(engine).__name__,
                "script_args": dict(script_args or {}),
                "versions": {name: version(name) for name in _VERSIONS},
                "answers": _ANSWERS,
            }
            self._remembered_script = RememberedScript(cache, key)
            self._model = self._remembered_script.model
            self._answers = self._remembered_script.answers
        self._facts: ModelFacts | None = None
        self._recompute: bool | None = None
        self._recomputes = False
        self._as_cpu = as_cpu
        most = 0 if as_cpu else closed_form.MATMUL_WORKSPACE_BYTES
        self._workspace_bytes = most if workspace_bytes is None else workspace_bytes
        self._script_args = dict(script_args or {})
        self._timeout_s = timeout_s
        self._connection: _Connection | None = None
        self._problem = ""

    def __enter__(self) -> Simulator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def recompute(self, wanted: bool | None) -> None:
        """Recompute activations in all later simulations, keep them, or do as the script (None)."""
        self._recompute, self._facts, self._recomputes = wanted, None, False

    @property
    def recomputes(self) -> bool:
        """True if the model did recompute activations; False if it has no switch for that."""
        return self._recomputes

    def estimate(
        self, config: Mapping[str, Any], *, micro_batch: int, slots: int
    ) -> MemoryEstimate:
        """Memory of a configuration.

        Args:
            config: the whole DeepSpeed configuration; "auto" stands for what the script takes.
            micro_batch: its micro batch, whatever the configuration says.
            slots: data-parallel ranks.

        Returns:
            The simulation's answer, or, once the facts are known, the closed form's with a note
            that tells why.

        Raises:
            SimulationUnavailable: there is no simulation, and no facts for the closed form.
        """
        try:
            return self._simulated(config, micro_batch, slots)
        except SimulationUnavailable as error:
            if self._facts is None:
                raise
            return closed_form.estimate(
                self._facts, config, slots=slots, micro_batch=micro_batch, note=str(error)
            )

    def facts(self, config: Mapping[str, Any]) -> ModelFacts:
        """Facts of the model for the closed form, from its own passes with two micro batches.

        From then on the closed form answers where a simulation fails.

        Args:
            config: of which the types and whatever else activations depend on are taken.

        Raises:
            SimulationUnavailable: there is no simulation.
        """
        peaks = self._activations(config)
        self._facts = ModelFacts(
            **self._script_model().sizes,
            forward_bytes_per_sample=peaks["forward"],
            backward_bytes_per_sample=peaks["backward"],
            first_gradient_bytes_per_sample=peaks["first_gradient"],
            matmul_bytes_per_sample=peaks["matmul"],
            held_bytes_per_sample=peaks["held"],
            matmul_bytes=peaks["matmul fixed"] + self._workspace_bytes,
            workspace_bytes=self._workspace_bytes,
        )
        return self._facts

    def _activations(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Bytes of each sample at the peaks of the model's own passes.

        "matmul fixed" has the bytes that matrix products need besides samples and parameters.

        Raises:
            SimulationUnavailable: there is no simulation.
        """
        kept = {key: value for key, value in config.items() if key in _OF_ACTIVATIONS}
        sizes = _MICRO_BATCHES_FOR_SLOPES
        questions = [self._question(kept, size, 1, activations_only=True) for size in sizes]
        self._ask(questions)
        answers = [self._answered(question) for question in questions]
        self._recomputes = bool(answers[0].get("recomputes"))
        small, large = (answer["activations"] for answer in answers)
        found = {name: (large[name] - small[name]) / (sizes[1] - sizes[0]) for name in small}
        fixed = {name: small[name] - sizes[0] * found[name] for name in ("matmul", "before")}
        return {**found, "matmul fixed": max(0.0, fixed["matmul"] - fixed["before"])}

    def _simulated(self, config: Mapping[str, Any], micro_batch: int, slots: int) -> MemoryEstimate:
        """A simulation's answer.

        Raises:
            SimulationUnavailable: there is none.
        """
        question = self._question(config, micro_batch, slots)
        self._ask([question])
        return MemoryEstimate.from_json(self._answered(question)["estimate"])

    def _answered(self, question: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._answers[_key(question)]
        if "failed" in answer:
            raise SimulationUnavailable(_explained(str(answer["failed"])))
        return answer

    @property
    def sequence_length(self) -> int | None:
        """Tokens of a sample of the script's first batch, if samples are sequences of tokens.

        Raises:
            SimulationUnavailable: there is no simulation.
        """
        return self._script_model().sequence_length

    def prepare(self, questions: Sequence[tuple[Mapping[str, Any], int, int]]) -> None:
        """Simulates side by side what will be asked for one by one.

        Args:
            questions: configuration, micro batch and slots of each.

        Raises:
            SimulationUnavailable: there is no simulation of anything.
        """
        self._ask([self._question(*question) for question in questions])

    def _question(
        self,
        config: Mapping[str, Any],
        micro_batch: int,
        slots: int,
        *,
        activations_only: bool = False,
    ) -> dict[str, Any]:
        return {
            "activations_only": activations_only,
            "recompute": self._recompute,
            "config": as_simulated(config),
            "micro_batch": micro_batch,
            "slots": slots,
            "as_cpu": self._as_cpu,
            "workspace_bytes": self._workspace_bytes,
        }

    def close(self) -> None:
        """Ends the script."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._engine.stop_simulation_server()

    # -- the script

    def _ask(self, questions: Sequence[Mapping[str, Any]]) -> None:
        """Makes the answers known that are not yet.

        Raises:
            SimulationUnavailable: the script cannot be asked.
        """
        unknown = self._unknown(questions)
        if unknown and self._connection is None:
            self._connected()
            unknown = self._unknown(questions)  # the script may be another than was remembered
        if not unknown:
            return
        try:
            answers = self._connected().ask(list(unknown.values()), self._timeout_s + _PATIENCE_S)
        except SimulationUnavailable as error:
            self._problem = str(error)
            raise
        for key, answer in zip(unknown, answers, strict=True):
            self._answers[key] = answer
        if self._remembered_script is not None:
            self._remembered_script.keep(self._script_model(), self._answers)

    def _unknown(self, questions: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Return the questions without an answer, by their keys."""
        keyed = {_key(question): question for question in questions}
        return {
            key: {**question, "timeout_s": self._timeout_s}
            for key, question in keyed.items()
            if key not in self._answers
        }

    def _script_model(self) -> ScriptModel:
        if self._problem:
            raise SimulationUnavailable(self._problem)
        if self._model is None:
            self._connected()
        assert self._model is not None
        return self._model

    def _connected(self) -> _Connection:
        if self._problem:
            raise SimulationUnavailable(self._problem)
        if self._connection is None:
            try:
                self._connection = _connect(self._engine, self._script_args, self._timeout_s)
            except SimulationUnavailable as error:
                self._problem = str(error)
                self._engine.stop_simulation_server()
                raise
            if self._model not in (None, self._connection.model):
                self._answers.clear()  # the script is another one than was remembered
            self._model = self._connection.model
        return self._connection


class _Connection:
    """JSON lines to and from the script."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self._socket = connection
        self._stream = connection.makefile(encoding="utf-8", newline="\n")
        self.model = ScriptModel.from_json(self._receive(timeout_s))

    def ask(self, requests: Sequence[Mapping[str, Any]], timeout_s: float) -> list[dict[str, Any]]:
        """Return the answers, in the order of the requests.

        Args:
            requests: simulations to make.
            timeout_s: from one answer to the next, in whatever order they come.
        """
        try:
            for number, request in enumerate(requests):
                self._socket.sendall(json.dumps({**request, "number": number}).encode() + b"\n")
        except OSError as error:
            raise SimulationUnavailable(f"the script has ended: {error}") from error
        answers = [self._receive(timeout_s) for _ in requests]
        return sorted(answers, key=lambda answer: int(answer.pop("number")))

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        self._socket.settimeout(timeout_s)
        try:
            line = self._stream.readline()
        except OSError as error:
            raise SimulationUnavailable(f"no answer from the script: {error}") from error
        if not line:
            raise SimulationUnavailable("the script has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


def _key(question: Mapping[str, Any]) -> str:
    return json.dumps(question, sort_keys=True, default=str)


def _explained(message: str) -> str:
    """An error's message, with the versions if it may be for them."""
    if not message.startswith(_OF_ANOTHER_VERSION):
        return message
    versions = " and ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    return f"{message} (the simulation may not know {versions})"


def _connect(
    engine: SimulationHost, script_args: Mapping[str, Any], timeout_s: float
) -> _Connection:
    with contextlib.ExitStack() as stack:
        # Paths of sockets have some hundred characters at most.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="dsat-"))
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        address = Path(folder) / "s"
        listener.bind(str(address))
        listener.listen(1)
        failure = engine.start_simulation_server(address, script_args)
        deadline = time.monotonic() + timeout_s
        while not select.select([listener], [], [], 0.1)[0]:
            goes_on = engine.has_simulation_server()  # before a look at what it wrote
            if failure.exists():
                message = json.loads(failure.read_text(encoding="utf-8"))["message"]
                raise SimulationUnavailable(
                    f"the script cannot be simulated: {_explained(message)}"
                )
            if not goes_on:
                raise SimulationUnavailable(
                    "the script's process died before its first step, without a word"
                )
            if time.monotonic() > deadline:
                raise SimulationUnavailable(
                    f"the script did not reach its first step within {timeout_s:g} s"
                )
        connection, _ = listener.accept()
        return _Connection(connection, timeout_s)
