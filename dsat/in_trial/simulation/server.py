"""Simulates candidates with the model, the batch and the loss of a script.

Runs in a rank process of its own, that does nothing else: the script builds its model, calls
`deepspeed.initialize` and loads a batch as ever. The engine that it gets is made from fake
parameters and takes no memory. When the script calls it for the first time in training, the process
stops and waits for candidates on a socket. For each it forks; the child undoes what the engine did
to the model, builds DeepSpeed's engine for the candidate on fake tensors, runs an optimizer step by
itself, and then lets the script go on: the last forward pass is the script's call, so the loss is
whatever the script makes of the outputs, and the child ends when the script calls `backward`.

Why so: a model, a batch and a loss function have no form in which they could be handed to another
process without pickling the script's own classes, and a loss that is computed outside of the model
(a cross entropy over a vocabulary, say) can be half of the activations. Forking costs milliseconds,
keeps DeepSpeed's many globals of one candidate away from the next, and leaves the script's process
unpatched.

A batch is recognised by its first dimension, which is why the script is run with a micro batch that
is an unlikely size of anything else (`CAPTURED_MICRO_BATCH`).
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from dsat.in_trial import config_injection

CAPTURED_MICRO_BATCH = 7


class ScriptSimulated(SystemExit):
    """Ends the training script when nobody wants simulations any more, with exit status 0."""

    def __init__(self) -> None:
        super().__init__(0)


class SimulationServer:
    """Waits for the script's first training step, and answers candidates from there.

    Args:
        address: path of the socket where whoever wants simulations listens.
    """

    def __init__(self, address: Path) -> None:
        self._address = address
        self._answer: int | None = None
        self.was_used = False

    def install(self) -> None:
        """Wraps `deepspeed.initialize`; the process group will be a fake one."""
        import deepspeed
        import torch.distributed

        self._initialize = deepspeed.initialize
        original = torch.distributed.init_process_group

        @functools.wraps(original)
        def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
            from dsat.in_trial.simulation import patches

            if backend == patches.FAKE_GROUP:
                original(backend, *args, **kwargs)
            elif not torch.distributed.is_initialized():
                patches.make_process_group(1, "cpu")

        torch.distributed.init_process_group = init_process_group

        @functools.wraps(deepspeed.initialize)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            return self._initialize_borrowed(*args, **kwargs)

        deepspeed.initialize = initialize

    def _initialize_borrowed(self, *args: Any, **kwargs: Any) -> Any:
        from dsat.in_trial.simulation import borrowed_model

        bound = inspect.signature(self._initialize).bind(*args, **kwargs)
        passed = config_injection.passed_config(bound.arguments)
        if passed is None or not config_injection.trains(bound.arguments, passed) or self.was_used:
            return self._initialize(*args, **kwargs)
        model = borrowed_model.BorrowedModel(self._initialize, bound.arguments, passed.content)
        result = model.engine_for_the_script()
        model.on_first_training_forward(functools.partial(self._serve, model))
        self.was_used = True
        return result

    # -- candidates

    def _serve(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Answers candidates; only in a child it returns, with what the engine's forward gives."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(self._address))
            stream = connection.makefile("rw", encoding="utf-8", newline="\n")
            hello = {"model": model.description(args, kwargs), "sizes": model.sizes()}
            stream.write(json.dumps(hello) + "\n")
            stream.flush()
            for line in stream:
                candidate = json.loads(line)
                reader, writer = os.pipe()
                child = os.fork()
                if child == 0:
                    connection.close()
                    os.close(reader)
                    self._answer = writer
                    return self._simulate(model, candidate, args, kwargs)
                os.close(writer)
                stream.write(_read(reader, child, candidate["timeout_s"]) + "\n")
                stream.flush()
        raise ScriptSimulated

    def _simulate(
        self, model: Any, candidate: Mapping[str, Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        try:
            return model.begin(candidate, args, kwargs, self._end_of_child)
        except Exception as error:
            self.failed(error)

    def failed(self, error: BaseException | None) -> None:
        """Ends a child whose script, or whose simulation, failed; elsewhere does nothing."""
        if self._answer is None:
            return
        name = type(error).__name__ if error is not None else "the script ended"
        text = " ".join(str(error or "").split())
        if error is not None:
            traceback.print_exception(error)  # into the run's log
        self._end_of_child({"failed": f"{name}: {text}"[:500]})

    def _end_of_child(self, answer: Mapping[str, Any]) -> NoReturn:
        assert self._answer is not None
        data = json.dumps(answer).encode()
        while data:
            data = data[os.write(self._answer, data) :]
        sys.stderr.flush()
        os._exit(0)


def _read(reader: int, child: int, timeout_s: float) -> str:
    """A child's answer, once it has ended."""
    data, deadline = b"", time.monotonic() + timeout_s
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            data = json.dumps({"failed": f"no result after {timeout_s:g} s"}).encode()
            break
        if not (part := os.read(reader, 2**16)):
            break
        data += part
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if not data:
        reason = f"the simulation died with status {os.waitstatus_to_exitcode(status)}"
        data = json.dumps({"failed": reason}).encode()
    return data.decode()
