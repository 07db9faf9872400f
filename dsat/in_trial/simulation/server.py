"""Simulates candidates with the model, the batch and the loss of a script.

Runs in a rank process of its own, that does nothing else: the script builds its model, calls
`deepspeed.initialize` and loads a batch as ever. Its large parameters are fake and take no memory
(`fake_parameters`), as are all of the engine that it gets. A script that cannot work with them is
run a second time, with real ones, if they fit the memory that a simulation may take.

When the script calls the engine for the first time in training, the process stops and waits for
candidates on a socket. For each it forks, as many at once as there are processors; the child undoes
what the engine did to the model, builds DeepSpeed's engine for the candidate on fake tensors, runs
an optimizer step by itself, and then lets the script go on: the last forward pass is the script's
call, so the loss is whatever the script makes of the outputs, and the child ends when the script
calls `engine.backward`, or `engine.step` after a `loss.backward()` of its own.

Why so: a model, a batch and a loss function have no form in which they could be handed to another
process without pickling the script's own classes, and a loss that is computed outside of the model
(a cross entropy over a vocabulary, say) can be half of the activations. Forking costs milliseconds,
keeps DeepSpeed's many globals of one candidate away from the next, and leaves the script's process
unpatched.

A batch is recognised by its first dimension, which is why the script is run with a micro batch that
is an unlikely size of anything else (`CAPTURED_MICRO_BATCH`).
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
# What a simulation may take of the memory that is available when it begins, and at most.
_PART_OF_AVAILABLE, _MOST_BYTES = 0.5, 8 * 2**30
_ABORTED = "aborted"  # in a candidate that is simulated a second time
# In the SystemError that takes the place of an exception that C++ has lost.
_LOST = "without setting an exception"
# Exit statuses that ask for another attempt: EX_TEMPFAIL of sysexits.h, and one beyond these.
_AGAIN, _WITH_CUDA = 75, 79


class ScriptSimulated(SystemExit):
    """Ends the training script when nobody wants simulations any more, with exit status 0."""

    def __init__(self) -> None:
        super().__init__(0)


class SimulationServer:
    """Waits for the script's first training step, and answers candidates from there.

    Args:
        address: path of the socket where whoever wants simulations listens.
        folder: of this process's own files.
    """

    def __init__(self, address: Path, folder: Path) -> None:
        self._address = address
        self._folder = folder
        self._files: FilesRead | None = None
        self._answer: int | None = None
        self._fakes: Any = None
        self._undo = contextlib.ExitStack()
        self._limit_bytes = 0
        self._told_of_cuda = False
        self._is_traced = False
        self.was_used = False

    def install(self) -> None:
        """Wraps `deepspeed.initialize`, limits memory and makes parameters fake.

        The process group will be a fake one. Returns in a child process, and a second time in the
        process itself if the script has to be run with real parameters.
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
        """Forks; returns in the child, with fake parameters, and here only if that was in vain.

        A script that cannot do without CUDA, and has none, is told in a second child that it has.
        """
        from deepspeed.accelerator import get_accelerator

        from dsat.in_trial.simulation import named_cuda
        from dsat.in_trial.simulation.fake_parameters import FakeParameters, without_zero_init

        get_accelerator()  # decides for itself what there is
        named_cuda.stand_in()
        for self._told_of_cuda in (False, True):
            child = os.fork()
            if child == 0:
                if self._told_of_cuda:
                    named_cuda.pretend()
                self._fakes = FakeParameters()
                self._fakes.install()
                return
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            if code == _WITH_CUDA:
                print("dsat: once more, as if there were CUDA", file=sys.stderr, flush=True)
            elif code == _AGAIN:
                break
            else:
                os._exit(code if code >= 0 else 128 - code)
        if self._told_of_cuda:
            named_cuda.pretend()
        without_zero_init(self._undo)
        print("dsat: once more, with real parameters", file=sys.stderr, flush=True)

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
        if self._fakes is not None:
            self._fakes.uninstall()
            self._fakes = None
        self._undo.close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(str(self._address))
            model.keep_integers(args, kwargs)
            hello = {
                "model": model.description(args, kwargs),
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
                    self._is_traced = bool(candidate.get(_ABORTED))
                    if self._is_traced:
                        _tell_of_exceptions(writer)
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
        """Ends a child whose script, or whose simulation, failed, or an attempt with fakes.

        Returns:
            Elsewhere, if there is something to be told of the error, what.
        """
        if self._answer is not None:
            name = type(error).__name__ if error is not None else "the script ended"
            text = " ".join(str(error or "").split())
            if error is not None:
                traceback.print_exception(error)  # into the run's log
            if isinstance(error, SystemError):  # autograd has lost what a hook raised
                sys.stderr.flush()
                if self._is_traced:
                    os._exit(0)
                os.abort()
            self._end_of_child({"failed": f"{name}: {text}"[:500]})
        if error is None:
            return ""
        from dsat.in_trial.simulation.patches import SimulationUnsupported

        if isinstance(error, SimulationUnsupported):
            return str(error)
        if self._fakes is not None and not self._told_of_cuda and _may_want_cuda(error):
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(_WITH_CUDA)
        fake_bytes = 0 if self._fakes is None else self._fakes.fake_bytes
        limit = f"the {readable(self._limit_bytes)} of memory that a simulation may take"
        if failures.classify(error) in (OutcomeKind.OOM, OutcomeKind.HOST_OOM):
            return f"it needs more than {limit}: {failures.message(error)}"
        if 0 < fake_bytes < self._limit_bytes:
            traceback.print_exception(error)
            sys.stderr.flush()
            os._exit(_AGAIN)
        if fake_bytes and not isinstance(error, SystemExit):
            return (
                f"{failures.message(error)} (with fake parameters; real ones take "
                f"{readable(fake_bytes)}, more than {limit})"
            )
        return ""

    def _end_of_child(self, answer: Mapping[str, Any]) -> NoReturn:
        assert self._answer is not None
        data = json.dumps(answer).encode()
        while data:
            data = data[os.write(self._answer, data) :]
        sys.stderr.flush()
        os._exit(0)


def _limit_memory() -> int:
    """Lets this process and each of its children allocate only a part of what is available.

    Returns:
        How much, in bytes.
    """
    limit = min(_MOST_BYTES, int(_PART_OF_AVAILABLE * host_memory.available_bytes()))
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = ProcessMemory.now().data_bytes + limit
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most),
    )
    return limit


def _may_want_cuda(error: BaseException) -> bool:
    """Whether a script may have failed because there is no CUDA."""
    from dsat.in_trial.simulation import named_cuda

    if named_cuda.is_there():
        return False
    text = str(error)
    return not text or re.search("cuda|gpu|nvidia|bf16", text, re.IGNORECASE) is not None


def _tell_of_exceptions(writer: int) -> None:
    """Writes each exception that is raised from now on as an answer, a line each.

    Autograd aborts the process where a hook raises and the device's backend is a Python module, or
    loses the exception.
    """

    def trace(frame: Any, event: str, value: Any) -> Any:
        frame.f_trace_lines = False
        if event == "exception" and issubclass(value[0], Exception):
            text = " ".join(f"{value[0].__name__}: {value[1]}".split())[:500]
            if value[0] not in (StopIteration, AttributeError, KeyError, ImportError):
                os.write(writer, json.dumps({"failed": text}).encode() + b"\n")
        return trace

    sys.settrace(trace)


@dataclass
class _Child:
    """A simulation that runs."""

    candidate: Mapping[str, Any]
    pid: int
    reader: int
    data: bytes = b""
    began_s: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float:
        return self.began_s + float(self.candidate["timeout_s"]) - time.monotonic()

    def answer(self) -> dict[str, Any] | None:
        """What it answered, once it has ended; None if it aborted, or lost what was raised, and
        should say why."""
        if self.left_s <= 0:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.reader)
        _, status = os.waitpid(self.pid, 0)
        if self.left_s <= 0 and os.WIFSIGNALED(status):
            found = {"failed": f"no result after {self.candidate['timeout_s']:g} s"}
        elif self.data:
            answers = [json.loads(line) for line in self.data.splitlines()]
            telling = [one for one in answers if _LOST not in one.get("failed", "")]
            if not telling and not self.candidate.get(_ABORTED):
                return None
            found = (telling or answers)[-1]
        else:
            code = os.waitstatus_to_exitcode(status)
            if code == -signal.SIGABRT and not self.candidate.get(_ABORTED):
                return None
            found = {"failed": f"the simulation died with status {code}"}
        return {**found, "number": self.candidate["number"]}


class _Queue:
    """Candidates that came and those that run, as many as there are processors.

    Args:
        connection: where candidates come from, a line of JSON each, and where answers go.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""
        self._waiting: deque[Mapping[str, Any]] = deque()
        self._running: dict[int, _Child] = {}
        self._capacity = len(os.sched_getaffinity(0))
        self._open = True

    def to_be_begun(self) -> Iterator[Mapping[str, Any]]:
        """Candidates, each when there is room for it, until nobody asks any more."""
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
        """Closes what belongs to other children; in a child."""
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
        if answer is None:
            self._waiting.append({**child.candidate, _ABORTED: True})
            return
        with contextlib.suppress(BrokenPipeError):  # seen when it is next read from
            self._connection.sendall(json.dumps(answer).encode() + b"\n")
