"""Simulation server: it simulates candidates with the model, the batch and the loss of a script.

A candidate is a configuration to simulate. The script runs as usual, with large parameters that
take no memory (`fake_parameters`), until its first training step. There the process waits for
candidates in a folder, and forks a child for each, at most one per CPU core at once.

The child undoes what the script's engine did to the model, builds DeepSpeed's engine for the
candidate on fake tensors, and runs up to the last forward pass of the second optimizer step. Then
the script continues with the outputs of this pass. So the loss, which can be half of the
activations, is the script's own. The child answers and ends when the script calls
`engine.backward`, or `engine.step` after `loss.backward()`. Candidates with `activations_only` run
the model without an engine.

Batch data are recognised by their first dimension, so the script runs with a micro batch that is
unlikely to be another size (`CAPTURED_MICRO_BATCH`); see `Captured.shape_for`.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from dsat.errors import InvalidTrial
from dsat.in_trial import config_injection, failures
from dsat.in_trial.adapters.trial import TRIAL
from dsat.in_trial.memory_limit import limit_data
from dsat.simulation import protocol
from dsat.simulation.protocol import WALL_FACTOR, SimulationUnsupported
from dsat.values import format as fmt
from dsat.values import host_limits
from dsat.values.outcome import OutcomeKind

CAPTURED_MICRO_BATCH = 13
AS_IF_CUDA = "DSAT_AS_IF_CUDA"  # environment variable: imitate CUDA if there is none
# Limits on memory: a fraction of what is available at the start, between two sizes. A simulation of
# 32 billion parameters takes 1 GiB of addresses, of which half is used.
_PART_OF_AVAILABLE, _LEAST_BYTES, _MOST_BYTES = 0.5, 2 * 2**30, 8 * 2**30
_POLL_S = 0.02
_NO_THREAD = "Resource temporarily unavailable"  # the limit leaves no memory for a thread's stack
_ANSWERED = 3  # exit status of a child that answered; a script itself may exit with 0


class SimulationServer:
    """Server that simulates candidates from the script's first training step on.

    Args:
        folder: folder of messages; see `protocol`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number: int | None = None  # of the candidate; None outside of a child
        self._fakes: Any = None
        self._limit_bytes = 0
        self._was_used = False

    def install(self) -> None:
        """Replace `deepspeed.initialize`, limit memory, and make large parameters fake."""
        import torch.distributed
        from deepspeed.accelerator import get_accelerator

        from dsat.simulation import named_cuda
        from dsat.simulation.fake_parameters import FakeParameters

        original = torch.distributed.init_process_group

        @functools.wraps(original)
        def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
            from dsat.simulation import patches

            if backend == patches.FAKE_GROUP:
                original(backend, *args, **kwargs)
            elif not torch.distributed.is_initialized():
                patches.make_process_group(1, "cpu")

        torch.distributed.init_process_group = init_process_group
        communication: Any = importlib.import_module("deepspeed.comm.torch")
        communication.build_shm_op = lambda: None  # takes minutes to compile, and is not needed

        TRIAL.calls.make_engine = self._initialize_borrowed
        if TRIAL.files is not None:
            TRIAL.files.add_scratch(self._folder)
        self._limit_bytes = limit_memory()
        get_accelerator()  # detects the device before CUDA is imitated
        named_cuda.stand_in(as_if_available=AS_IF_CUDA in os.environ)
        self._fakes = FakeParameters()
        self._fakes.install()

    def _initialize_borrowed(
        self, initialize: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        from dsat.simulation import borrowed_model

        bound = inspect.signature(initialize).bind(*args, **kwargs)
        config = config_injection.trained_config(bound.arguments)
        if config is None or self._was_used:
            return initialize(*args, **kwargs)
        model = borrowed_model.BorrowedModel(initialize, bound.arguments, config.content)
        model.uses_zero_init = self._fakes.partitions_in_stage_3(bound.arguments["model"])
        result = model.engine_for_the_script()
        model.on_first_training_forward(functools.partial(self._serve, model))
        self._was_used = True
        return result

    # -- candidates

    def _serve(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Simulate candidates until the client ends.

        Only a forked child returns, with the outputs of its forward pass.
        """
        self._fakes.uninstall()
        self._fakes = None
        TRIAL.progress.set_activity("")
        protocol.send(self._folder / protocol.SCRIPT_FILE, model.capture(args, kwargs)._asdict())
        gc.collect()
        gc.freeze()  # garbage collection in children skips the objects that exist now
        running: dict[int, Mapping[str, Any]] = {}
        capacity = len(host_limits.usable_cores())
        while True:
            self._report_deaths(running)
            questions = sorted(self._folder.glob(protocol.QUESTIONS))
            received = map(protocol.receive, questions if len(running) < capacity else [])
            candidate = next(filter(None, received), None)
            if candidate is None:
                if not self._folder.exists():  # the client has ended
                    os._exit(0)
                time.sleep(_POLL_S)
                continue
            child = os.fork()
            if child == 0:
                return self._simulate(model, candidate, args, kwargs)
            running[child] = candidate

    def _report_deaths(self, running: dict[int, Mapping[str, Any]]) -> None:
        """Remove children that ended, and report the failure of those that did not answer."""
        for child in list(running):
            pid, status = os.waitpid(child, os.WNOHANG)
            if not pid:
                continue
            candidate, code = running.pop(child), os.waitstatus_to_exitcode(status)
            reason = f"the simulation died with status {code}"
            if code == -signal.SIGPROF:
                reason = f"no result after {candidate['timeout_s']:g} s of processor time"
            elif code == -signal.SIGALRM:
                reason = f"no result after {WALL_FACTOR * candidate['timeout_s']:g} s"
            if code != _ANSWERED:
                self._answer(candidate["number"], {"failed": reason})

    def _answer(self, number: int, message: Mapping[str, Any]) -> None:
        protocol.send(self._folder / protocol.ANSWER_FILE.format(number), message)

    def _simulate(
        self, model: Any, candidate: Mapping[str, Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        self._number = candidate["number"]
        limit_time(candidate["timeout_s"])
        try:
            return model.begin(candidate, args, kwargs, self._end_of_child)
        except Exception as error:
            self.failed(error)

    def failed(self, error: BaseException | None) -> str:
        """In a child, answer with the failure and exit; otherwise, explain why the script failed.

        Returns:
            The reason, if it differs from the error's own message; otherwise an empty string.
        """
        if self._number is not None:
            self._end_of_child({"failed": _describe(error)[:500]})
        if error is None:
            return ""
        if isinstance(error, SimulationUnsupported):
            return str(error)
        is_short = failures.classify(error) in (OutcomeKind.OOM, OutcomeKind.HOST_OOM)
        if is_short or _NO_THREAD in str(error):
            limit = f"the {fmt.memory(self._limit_bytes)} of memory that a simulation may take"
            return f"it needs more than {limit}: {failures.message(error)}"
        has_fakes = self._fakes is not None and self._fakes.fake_bytes
        if has_fakes and not isinstance(error, (SystemExit, InvalidTrial)):
            return f"{failures.message(error)} (large parameters were simulated without data)"
        return ""

    def _end_of_child(self, answer: Mapping[str, Any]) -> NoReturn:
        assert self._number is not None
        self._answer(self._number, answer)
        sys.stderr.flush()
        os._exit(_ANSWERED)


def _describe(error: BaseException | None) -> str:
    if error is None:
        return "the script ended"
    traceback.print_exception(error)  # into the run's log
    text = " ".join(str(error).split())
    says_why = isinstance(error, (SimulationUnsupported, InvalidTrial))
    return text if says_why else f"{type(error).__name__}: {text}"


def limit_time(processor_s: float) -> None:
    """End this process by SIGPROF after this processor time, or by SIGALRM if it hangs.

    SIGALRM comes after `WALL_FACTOR` times as long, because a busy machine slows simulations down.
    """
    processor_s = max(1.0, processor_s)
    for name in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(name, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, processor_s)
    signal.alarm(math.ceil(WALL_FACTOR * processor_s))


def limit_memory() -> int:
    """Limit how much memory this process and each child may allocate; return the bytes."""
    part = int(_PART_OF_AVAILABLE * host_limits.available_bytes())
    limit = min(_MOST_BYTES, max(_LEAST_BYTES, part))
    limit_data(limit)
    return limit
