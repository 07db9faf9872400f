"""Simulation server: answers candidates with the model, the batch and the loss of a script.

It runs in a rank process of its own. The script builds its model, calls `deepspeed.initialize` and
loads a batch as usual. Its large parameters are fake and take no memory (`fake_parameters`). Where
a script cannot work with them, the closed form answers.

At the script's first training step the process waits for candidates on a socket. It forks a child
for each, as many at once as there are processors. The child undoes what the engine did to the
model, builds DeepSpeed's engine for the candidate on fake tensors, runs an optimizer step, and
lets the script go on: the last forward pass is the script's call, so the loss is the script's own.
The child ends when the script calls `engine.backward`, or `engine.step` after `loss.backward()`.

Reasons: a model, a batch and a loss function cannot be sent to another process without pickling
the script's classes, and a loss computed outside the model can be half of the activations. Forking
costs milliseconds and keeps DeepSpeed's globals of one candidate away from the next.

The first dimension of a batch identifies it, so the script runs with a micro batch that is an
unlikely size of anything else (`CAPTURED_MICRO_BATCH`).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dsat.in_trial import config_injection, failures
from dsat.in_trial.clocks import ProcessMemory
from dsat.in_trial.simulation import checkpointing
from dsat.in_trial.simulation.files_read import FilesRead
from dsat.values import host_memory
from dsat.values.memory_size import readable
from dsat.values.outcome import OutcomeKind

CAPTURED_MICRO_BATCH = 7
# Limits of a simulation: part of the memory available at its start, and bytes.
_PART_OF_AVAILABLE, _MOST_BYTES = 0.5, 8 * 2**30
_WITH_CUDA = 79  # exit status that asks for another attempt, beyond those of sysexits.h


class ScriptSimulated(SystemExit):
    """End of the training script, with status 0, when no simulations are wanted any more."""

    def __init__(self) -> None:
        super().__init__(0)


class SimulationServer:
    """Answers candidates from the script's first training step on.

    Args:
        address: path of the client's listening socket.
        folder: folder of this process's own files.
    """

    def __init__(self, address: Path, folder: Path) -> None:
        self._address = address
        self._folder = folder
        self._files: FilesRead | None = None
        self._answer: int | None = None
        self._fakes: Any = None
        self._limit_bytes = 0
        self._pretends_cuda = False
        self.was_used = False

    def install(self) -> None:
        """Wrap `deepspeed.initialize`, limit memory, and make parameters and process group fake.

        Returns in a child process only.
        """
        import deepspeed
        import torch.distributed

        self._files = FilesRead(without=self._folder)
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
        communication: Any = importlib.import_module("deepspeed.comm.torch")
        communication.build_shm_op = lambda: None  # compiled for minutes, and of no use here
        checkpointing.watch()

        @functools.wraps(deepspeed.initialize)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            return self._initialize_borrowed(*args, **kwargs)

        deepspeed.initialize = initialize
        self._limit_bytes = _limit_memory()
        self._attempt_with_fakes()

    def _attempt_with_fakes(self) -> None:
        """Fork, and return in the child, with fake parameters; the parent ends as the child does.

        A script that fails for want of CUDA runs in a second child that pretends to have it.
        """
        from deepspeed.accelerator import get_accelerator

        from dsat.in_trial.simulation import named_cuda
        from dsat.in_trial.simulation.fake_parameters import FakeParameters

        get_accelerator()  # decides for itself what there is
        named_cuda.stand_in()
        code = 0
        for self._pretends_cuda in (False, True):
            child = os.fork()
            if child == 0:
                if self._pretends_cuda:
                    named_cuda.pretend()
                self._fakes = FakeParameters()
                self._fakes.install()
                return
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            if code != _WITH_CUDA:
                break
            print("dsat: repeating the script as if CUDA were available", file=sys.stderr)
            sys.stderr.flush()
        os._exit(code if code >= 0 else 128 - code)

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
        """Answer candidates. Returns in a child only, with the engine's outputs."""
        if self._fakes is not None:
            self._fakes.uninstall()
            self._fakes = None
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(self._address))
            model.keep_integers(args, kwargs)
            hello = {
                "sizes": model.sizes(),
                "sequence_length": model.sequence_length(args, kwargs),
                "files": None if self._files is None else self._files.stamps(),
            }
            connection.sendall(json.dumps(hello).encode() + b"\n")
            queue = _Queue(connection)
            for candidate in queue.to_be_begun():
                reader, writer = os.pipe()
                child = os.fork()
                if child == 0:
                    queue.forget()
                    connection.close()
                    os.close(reader)
                    self._answer = writer
                    return self._simulate(model, candidate, args, kwargs)
                os.close(writer)
                queue.add(_Child(candidate, child, reader))
        raise ScriptSimulated

    def _simulate(
        self, model: Any, candidate: Mapping[str, Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        try:
            return model.begin(candidate, args, kwargs, self._end_of_child)
        except Exception as error:
            self.failed(error)

    def failed(self, error: BaseException | None) -> str:
        """End a child whose script or simulation failed, or describe why the script failed.

        Returns:
            The reason, if it differs from the error's own message; otherwise an empty string.
        """
        if self._answer is not None:
            name = type(error).__name__ if error is not None else "the script ended"
            text = " ".join(str(error or "").split())
            if error is not None:
                traceback.print_exception(error)  # into the run's log
            self._end_of_child({"failed": f"{name}: {text}"[:500]})
        if error is None:
            return ""
        from dsat.in_trial.simulation.patches import SimulationUnsupported

        if isinstance(error, SimulationUnsupported):
            return str(error)
        if self._fakes is not None and not self._pretends_cuda and _may_want_cuda(error):
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(_WITH_CUDA)
        if failures.classify(error) in (OutcomeKind.OOM, OutcomeKind.HOST_OOM):
            limit = f"the {readable(self._limit_bytes)} of memory that a simulation may take"
            return f"it needs more than {limit}: {failures.message(error)}"
        has_fakes = self._fakes is not None and self._fakes.fake_bytes
        if has_fakes and not isinstance(error, SystemExit):
            return f"{failures.message(error)} (its large parameters were fake)"
        return ""

    def _end_of_child(self, answer: Mapping[str, Any]) -> NoReturn:
        assert self._answer is not None
        data = json.dumps(answer).encode()
        while data:
            data = data[os.write(self._answer, data) :]
        sys.stderr.flush()
        os._exit(0)


def _limit_memory() -> int:
    """Limit the memory of this process and each of its children; return the limit in bytes."""
    limit = min(_MOST_BYTES, int(_PART_OF_AVAILABLE * host_memory.available_bytes()))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = ProcessMemory.now().data_bytes + limit
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most),
    )
    return limit


def _may_want_cuda(error: BaseException) -> bool:
    """Return True if a script may have failed for want of CUDA."""
    from dsat.in_trial.simulation import named_cuda

    if named_cuda.is_there():
        return False
    text = str(error)
    return not text or re.search("cuda|gpu|nvidia|bf16", text, re.IGNORECASE) is not None


@dataclass
class _Child:
    """Running simulation."""

    candidate: Mapping[str, Any]
    pid: int
    reader: int
    data: bytes = b""
    began_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.began_s + float(self.candidate["timeout_s"]) - time.monotonic()

    def answer(self) -> dict[str, Any]:
        """Wait for the child, kill it if it is late, and return its answer."""
        if self.left_s <= 0:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.reader)
        _, status = os.waitpid(self.pid, 0)
        if self.left_s <= 0 and os.WIFSIGNALED(status):
            found = {"failed": f"no result after {self.candidate['timeout_s']:g} s"}
        elif self.data:
            found = json.loads(self.data)
        else:
            code = os.waitstatus_to_exitcode(status)
            found = {"failed": f"the simulation died with status {code}"}
        return {**found, "number": self.candidate["number"]}


class _Queue:
    """Queue of candidates, of which as many run as there are processors.

    Args:
        connection: source of candidates and destination of answers, one line of JSON each.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._running: dict[int, _Child] = {}
        self._capacity = len(os.sched_getaffinity(0))
        self._open = True

    def to_be_begun(self) -> Iterator[Mapping[str, Any]]:
        """Yield candidates as processors become free, until the client disconnects."""
        while self._open:
            if self._waiting and len(self._running) < self._capacity:
                yield self._waiting.popleft()
                continue
            self._wait()
        for child in self._running.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)

    def add(self, child: _Child) -> None:
        self._running[child.reader] = child

    def forget(self) -> None:
        """Close the pipes of other children; called in a child."""
        for reader in self._running:
            os.close(reader)

    def _wait(self) -> None:
        left_s = [child.left_s for child in self._running.values()]
        timeout = max(0.0, min(left_s)) if left_s else None
        incoming = self._connection.fileno()
        ready, _, _ = select.select([incoming, *self._running], [], [], timeout)
        for source in ready:
            if source == incoming:
                self._receive()
            elif part := os.read(source, 2**16):
                self._running[source].data += part
            else:
                self._end(source)
        for reader in [r for r, child in self._running.items() if child.left_s <= 0]:
            self._end(reader)

    def _receive(self) -> None:
        part = self._connection.recv(2**16)
        self._open = bool(part)
        *lines, self._received = (self._received + part).split(b"\n")
        self._waiting.extend(json.loads(line) for line in lines)

    def _end(self, reader: int) -> None:
        child = self._running.pop(reader)
        answer = child.answer()
        with contextlib.suppress(BrokenPipeError):  # seen when it is next read from
            self._connection.sendall(json.dumps(answer).encode() + b"\n")
