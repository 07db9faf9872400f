"""The engine's end of the supervisor's protocol."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsat.engines.local.process_record import RUN_VARIABLE, ProcessRecord
from dsat.errors import EngineError
from dsat.values.files import PRIVATE_FILE

# What `deepspeed.initialize` and the first steps import by and by (deepspeed 0.19.8: 1,512 modules,
# 2.2 s); imported once here instead of in every rank.
WARM_MODULES = (
    "psutil",
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.utils.data",
    "torch.utils.flop_counter",
    "deepspeed",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.parameter_offload",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.fp16.fused_optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer",
    "deepspeed.ops.adam",
    "deepspeed.ops.op_builder",
    "dsat.in_trial.rank",
)
_WARM_UP_LIMIT_S = 300.0
_CLOSE_LIMIT_S = 20.0


class SupervisorClient:
    """Starts a supervisor and talks with it.

    Args:
        accelerator: DeepSpeed's name of the accelerator.
        log: where the supervisor's own messages go.
        env: the user's own variables, for what is imported in advance.
        trials: the run's folder, below which are those of the trials.
    """

    def __init__(
        self, accelerator: str, log: Path, *, env: Mapping[str, str], trials: Path
    ) -> None:
        self._accelerator = accelerator
        self._log = log
        self._env = env
        self._folder = trials
        self._record = ProcessRecord(trials)
        self._buffer = b""
        self._reason = ""
        self._start()

    def send(self, request: Mapping[str, Any]) -> None:
        """Sends a request.

        Raises:
            EngineError: the supervisor is gone.
        """
        assert self._process.stdin is not None
        if request["op"] == "launch":
            self._record.uses(request["port"])
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def receive(self, timeout_s: float) -> list[dict[str, Any]]:
        """Answers that came, after waiting for one at most so long.

        Raises:
            EngineError: the supervisor is gone.
        """
        if not self._selector.select(timeout_s):
            return []
        assert self._process.stdout is not None
        chunk = os.read(self._process.stdout.fileno(), 65536)
        if not chunk:
            raise self._gone()
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def warm_up(self, modules: Sequence[str] = ()) -> str:
        """Has the supervisor import what ranks need, or more modules later on.

        If the supervisor can no longer fork afterwards, it is started again without them. Nothing
        may be running.

        Returns:
            Why no ranks can be forked even with only torch and DeepSpeed imported: they must be
            fresh processes. Empty if they can be.

        Raises:
            EngineError: the imports take too long.
        """
        if self._warm(modules or WARM_MODULES):
            return ""
        self._restart()
        if modules and self._warm(WARM_MODULES):
            return ""
        reason = self._reason
        if modules:
            self._restart()
        return reason

    def _restart(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        """Ends the supervisor, and with it everything that it started; does nothing twice."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._selector.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        except KeyboardInterrupt:  # whoever does not want to wait
            self._process.kill()
            self._record.sweep()
            raise
        self._process.stdout.close()
        self._record.sweep()

    def _start(self) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with open(os.open(self._log, flags, PRIVATE_FILE), "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dsat.engines.local.supervisor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
            )
        self._record.began(self._process.pid)
        assert self._process.stdout is not None
        self._buffer = b""
        self._selector: selectors.BaseSelector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def _environment(self) -> dict[str, str]:
        package = str(Path(__file__).resolve().parents[3])
        env = {**os.environ, **self._env}
        path = [*filter(None, [env.get("PYTHONPATH")]), package]
        return {
            **env,
            "PYTHONPATH": os.pathsep.join(path),
            # Neither asks CUDA for its devices, which would keep the process from forking.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "DS_ACCELERATOR": self._accelerator,
            "PYTHONSAFEPATH": "1",
            # Of all that is forked below it, whatever that makes of its variables.
            RUN_VARIABLE: str(self._folder),
        }

    def _warm(self, modules: Sequence[str]) -> bool:
        self.send({"op": "warm", "modules": list(modules)})
        deadline = time.monotonic() + _WARM_UP_LIMIT_S
        while time.monotonic() < deadline:
            for answer in self.receive(deadline - time.monotonic()):
                if answer["event"] == "warm":
                    self._reason = answer["reason"]
                    return bool(answer["ok"])
        raise EngineError(f"importing torch and deepspeed took longer than {_WARM_UP_LIMIT_S:g} s")

    def _gone(self) -> EngineError:
        status = self._process.wait()
        self._record.sweep()
        return EngineError(
            f"the process that runs trials ended (exit status {status}; see {self._log}). "
            "Continue with --resume."
        )
