"""The engine's side of the protocol with the supervisors of all hosts."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsat.engines.agent import leftovers
from dsat.engines.agent.supervisor import MARK
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.processes import Reach, spawn, variables_with_dsat
from dsat.errors import EngineError
from dsat.in_trial.hook import RUN_VARIABLE
from dsat.values import slow
from dsat.values.files import PRIVATE_FILE, digest

_log = logging.getLogger(__name__)
# Modules that `deepspeed.initialize` and the first steps import on demand (deepspeed 0.19.8: 1,512
# modules, 2.2 s); a supervisor imports them once instead of every rank.
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
LOST = "lost"
PING_EVERY_S = 10.0
# Longer than a host may stall because it swaps or reads files over a slow network.
SILENT_AFTER_S = 60.0
_WARM_UP_LIMIT_S = 300.0
_LOOK_LIMIT_S = 60.0
_END_LIMIT_S, _TERMINATE_LIMIT_S = 20.0, 5.0

_Messages = list[tuple[int, dict[str, Any]]]
# A `SimpleQueue` of Python 3.10 may wait for ever with a timeout of 0.
_Inbox = queue.Queue[tuple[int, dict[str, Any] | None]]


class Supervisors:
    """Connections to the supervisors of all hosts, which the constructor starts.

    Args:
        folder: folder of the run.
        env: the user's variables, which preloaded modules may read.

    Attributes:
        locks: lock files of the compilers that trials start.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path, *, env: Mapping[str, str]) -> None:
        self._hosts = hosts
        self._folder = folder.resolve()
        self._env = env
        self.locks = leftovers.CompilerLocks({**os.environ, **env})
        self._backlog: _Messages = []  # for `receive`
        self._ping_at_s = 0.0
        self._start(range(len(hosts)))

    def send(self, host: int, request: Mapping[str, Any]) -> None:
        """Send a request to a host without waiting; ignore lost hosts."""
        if host in self._clients:
            if request.get("port"):
                leftovers.note_port(self._folder, request["port"])
            self._clients[host].send(request)

    def receive(self, timeout_s: float) -> _Messages:
        """Return messages with their hosts; if there are none, wait up to `timeout_s` for one.

        If a host's supervisor ends or, with several hosts, does not answer in time, the host's last
        message is {"event": "lost", "reason": text}.
        """
        if self._backlog:
            backlog, self._backlog = self._backlog, []
            return backlog
        if len(self._hosts) == 1:  # trials could run nowhere else, so there is no limit
            return self._read(timeout_s)
        messages = self._read(min(timeout_s, max(0.0, self._ping_at_s - time.monotonic())))
        if time.monotonic() >= self._ping_at_s:
            self._ping_at_s = time.monotonic() + PING_EVERY_S
            messages += self._ping()
        return messages

    def check_files(self, folder: Path, files: Sequence[Path]) -> None:
        """Raise EngineError unless all hosts share the run's folder and have the same files.

        `folder` must exist on each; `files` must be the same as on this machine.
        """
        token = secrets.token_hex()
        probe = self._folder / f".seen-{token[:8]}"
        probe.write_text(token)
        own_probe, *digests = map(digest, (probe, *files))
        request = {"op": "look", "files": [str(probe), *map(str, files)], "folder": str(folder)}
        try:
            answers = self._ask(dict.fromkeys(self._clients, request), _LOOK_LIMIT_S)
        finally:
            probe.unlink()
        for host, answer in answers.items():
            name, (host_probe, *host_digests) = self._hosts[host].name, answer["digests"]
            if host_probe != own_probe:
                raise EngineError(
                    f"host {name} does not see the run's folder {self._folder}. Use a folder on a "
                    "file system that all hosts share (--run-dir)"
                )
            if not answer["is_folder"]:
                raise EngineError(
                    f"host {name} has no folder {folder}. Put it on a file system that all hosts "
                    "share"
                )
            for file, own_digest, host_digest in zip(files, digests, host_digests, strict=True):
                if own_digest != host_digest:
                    problem = (
                        f"a different {file} than this machine" if host_digest else f"no {file}"
                    )
                    raise EngineError(
                        f"host {name} has {problem}. Put it on a file system that all hosts share"
                    )

    def warm_up(self, modules: Sequence[str] = ()) -> str:
        """Make supervisors import `WARM_MODULES` and `modules`; no trial may be running.

        If a supervisor cannot fork afterwards, all restart and import only `WARM_MODULES`. If one
        still cannot fork, all restart without imports.

        Returns:
            Why ranks cannot be forked; empty if they can be.
        """
        reason = ""
        libraries = "your script's libraries" if modules else "torch and DeepSpeed"
        first = [(*WARM_MODULES, *modules)] if modules else []
        for names in (*first, WARM_MODULES):
            request = {"op": "warm", "modules": list(names)}
            requests = {
                number: {**request, "device": host.machine.variables_of((0,))}
                for number, host in enumerate(self._hosts)
            }
            with slow.logged(_log, f"importing {libraries} once"):
                answers = self._ask(requests, _WARM_UP_LIMIT_S)
            reason = next(filter(None, (answer["reason"] for answer in answers.values())), "")
            if not reason:
                break
            hosts = list(self._clients)
            self.close()
            self._start(hosts)
        return reason

    def close(self) -> None:
        """End the supervisors and all that they started; remove the locks of killed compilers."""
        for client in self._clients.values():
            client.send(None)
        try:
            for client in self._clients.values():
                client.wait_for_end()
        except KeyboardInterrupt:  # pressed twice: do not wait
            self.kill()
            raise
        self._clients.clear()
        leftovers.end_processes(self._folder)
        self.locks.remove()

    def kill(self) -> None:
        """End the supervisors at once, even while they import."""
        for client in self._clients.values():
            client.process.kill()
        self.close()

    def _start(self, hosts: Collection[int]) -> None:
        self._inbox: _Inbox = queue.Queue()
        self._clients: dict[int, _Client] = {}
        env = variables_with_dsat({**self._env, RUN_VARIABLE: str(self._folder)})
        env |= leftovers.owner_mark()
        # Keep torch and DeepSpeed from asking CUDA for its devices, after which no fork can use
        # them.
        env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        for number in hosts:
            host, log = self._hosts[number], self._folder / "supervisor.log"
            variables = {"DS_ACCELERATOR": name} if (name := host.machine.accelerator) else {}
            self._clients[number] = _Client(number, host.reach, log, env | variables, self._inbox)

    def _read(self, timeout_s: float) -> _Messages:
        messages: _Messages = []
        with contextlib.suppress(queue.Empty):
            while True:
                host, answer = self._inbox.get(timeout=0.0 if messages else timeout_s)
                if host not in self._clients:  # lost a moment ago
                    continue
                self._clients[host].unanswered = 0
                if answer is None:
                    messages.append(self._drop(host))
                elif answer["event"] != "pong":
                    messages.append((host, answer))
        return messages

    def _ping(self) -> _Messages:
        """Ping all hosts; give up those that left too many pings unanswered.

        Pings are counted instead of seconds, as this process itself may have been stopped or busy.
        """
        limit = SILENT_AFTER_S / PING_EVERY_S
        silent = [host for host, client in self._clients.items() if client.unanswered >= limit]
        reason = f"it has not answered for {SILENT_AFTER_S:g} s"
        losses = [self._drop(host, reason) for host in silent]
        for client in self._clients.values():
            client.unanswered += 1
            client.send({"op": "ping"})
        return losses

    def _drop(self, host: int, silence: str = "") -> tuple[int, dict[str, Any]]:
        """Give up a host, and return a LOST message.

        `silence`: the reason if the supervisor is silent; empty if it ended. A silent supervisor
        ends its trials as soon as it is disconnected.
        """
        client = self._clients.pop(host)
        if silence:
            client.process.kill()
        client.send(None)
        status, log = client.wait_for_end(), self._folder / "supervisor.log"
        end = f"the process that runs trials ended (exit status {status}; see {log})"
        return host, {"event": LOST, "reason": silence or end}

    def _ask(
        self, requests: Mapping[int, Mapping[str, Any]], limit_s: float
    ) -> dict[int, dict[str, Any]]:
        """Send requests to all hosts; return their answers, and keep other messages for `receive`.

        Lost hosts have no answer. Hosts that do not answer within `limit_s` are lost, too.

        Raises:
            EngineError: no host has answered within `limit_s`.
        """
        messages: _Messages = []
        answers: dict[int, dict[str, Any]] = {}
        for host in self._clients:
            self.send(host, requests[host])
        deadline = time.monotonic() + limit_s
        while pending := self._clients.keys() - answers.keys():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                is_import = any(request["op"] == "warm" for request in requests.values())
                task = "importing torch and deepspeed" if is_import else "an answer"
                reason = f"{task} took longer than {limit_s:g} s"
                if not answers:
                    raise EngineError(reason)
                messages += [self._drop(host, reason) for host in sorted(pending)]
                continue
            for host, answer in self._read(left_s):
                if answer["event"] == requests[host]["op"]:
                    answers[host] = answer
                else:
                    messages.append((host, answer))
        self._backlog += messages
        return answers


class _Client:
    """Client of one supervisor.

    One thread writes requests, because that may block if the host is cut off. Another thread puts
    answers with the host's number into the inbox, and None after the last one.
    """

    def __init__(
        self, number: int, reach: Reach, log: Path, env: Mapping[str, str], inbox: _Inbox
    ) -> None:
        self.unanswered = 0  # pings since the last answer
        self._requests = queue.SimpleQueue[Mapping[str, Any] | None]()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        with open(os.open(log, flags, PRIVATE_FILE), "ab") as file:
            command = [sys.executable, "-m", "dsat.engines.agent.supervisor"]
            self.process = spawn(reach, command, env, file)
        threading.Thread(target=self._write, daemon=True).start()
        threading.Thread(target=self._read, args=(number, inbox), daemon=True).start()

    def send(self, request: Mapping[str, Any] | None) -> None:
        """Send a request; None makes the supervisor end, with everything that it started."""
        self._requests.put(request)

    def wait_for_end(self) -> int:
        """Wait for the end of the supervisor, or else kill it; return its exit status."""
        for insist, limit_s in (
            (self.process.terminate, _END_LIMIT_S),
            (self.process.kill, _TERMINATE_LIMIT_S),
        ):
            try:
                return self.process.wait(limit_s)
            except subprocess.TimeoutExpired:
                insist()
        return self.process.wait()

    def _write(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self.process.stdin as stdin:
            while (request := self._requests.get()) is not None:
                stdin.write(json.dumps(request).encode() + b"\n")
                stdin.flush()

    def _read(self, number: int, inbox: _Inbox) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            for line in stdout:
                _, mark, answer = line.partition(MARK)
                if mark and answer.endswith(b"}\n"):  # a killed supervisor may leave half a line
                    inbox.put((number, json.loads(answer)))
        inbox.put((number, None))
