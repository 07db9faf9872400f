"""Supervisors of all hosts, and the engine's end of their protocol."""

from __future__ import annotations

import secrets
import selectors
import signal
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsat.engines.local import heartbeats
from dsat.engines.local.heartbeats import Heartbeats
from dsat.engines.local.hosts import Host
from dsat.engines.local.process_record import ProcessRecord, where
from dsat.engines.local.supervisor_client import SupervisorClient
from dsat.errors import EngineError

# Modules that `deepspeed.initialize` and the first steps import on demand (deepspeed 0.19.8: 1,512
# modules, 2.2 s); imported once here instead of in every rank.
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
_WARM_UP_LIMIT_S = 300.0
_LOOK_LIMIT_S = 60.0
# A supervisor that is cut off ends its trials; earlier ones of them run elsewhere by then.
_ORPHANED_AFTER_S = 600.0

_Messages = list[tuple[int, dict[str, Any]]]


class Supervisors:
    """Start a supervisor on each host, and talk with all of them.

    Args:
        hosts: where.
        folder: of the run.
        env: the user's own variables, for modules that are imported in advance.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path, *, env: Mapping[str, str]) -> None:
        self._hosts = hosts
        self._folder = folder.resolve()
        self._env = env
        self._record = ProcessRecord(self._folder)
        self._undelivered: _Messages = []
        self._start(range(len(hosts)))

    def send(self, host: int, request: Mapping[str, Any]) -> None:
        """Send a request to a host; a launch on a lost host ends at once."""
        is_launch = request["op"] == "launch"
        if host in self._clients:
            if is_launch:
                self._record.uses(request["port"])
            client = self._clients[host]
            client.send(request)
            if client.has_unsent and not self._waits_to_send(client):
                self._selector.register(client.requests, selectors.EVENT_WRITE, host)
        elif is_launch:
            ranks = len(request["ranks"])
            ended = {"statuses": [-signal.SIGKILL] * ranks, "killed": [True] * ranks}
            self._undelivered.append((host, {"event": "ended", "trial": request["trial"], **ended}))

    def receive(self, timeout_s: float) -> _Messages:
        """Return messages, each with its host, after waiting at most this long for one.

        The last message of a host whose supervisor is gone, or of one of several hosts that fell
        silent, is {"event": "lost", "reason": text}.
        """
        if self._undelivered:
            undelivered, self._undelivered = self._undelivered, []
            return undelivered
        if len(self._hosts) == 1:  # its trials could run nowhere else: it may take its time
            return self._read(timeout_s)
        found = self._read(min(timeout_s, self._heartbeats.left_s()))
        silent, asked = self._heartbeats.due()
        reason = f"nothing was heard of it for {heartbeats.SILENT_AFTER_S:g} s"
        found += [self._abandon(host, reason) for host in silent]
        for host in asked:
            if not self._clients[host].has_unsent:
                limit_s = None if self._hosts[host].is_here else _ORPHANED_AFTER_S
                self.send(host, {"op": "ping", "limit_s": limit_s})
        return found

    def check_folders(self, folders: Sequence[Path]) -> None:
        """Check that all hosts share the run's folder and have the folders that trials need.

        Raises:
            EngineError: a host does not.
        """
        token = secrets.token_hex()
        seen = self._folder / f".seen-{token[:8]}"
        seen.write_text(token)
        try:
            for host, answer in self._look(seen).items():
                if answer["text"] != token:
                    raise EngineError(
                        f"host {self._hosts[host].name} does not share the run's folder "
                        f"{self._folder} with this one: put it on a file system that all hosts "
                        "have (--run-dir)"
                    )
        finally:
            seen.unlink()
        for folder in folders:
            for host, answer in self._look(folder).items():
                if not answer["is_folder"]:
                    raise EngineError(f"host {self._hosts[host].name} has no folder {folder}")

    def warm_up(
        self,
        modules: Sequence[str] = (),
        *,
        broken: Mapping[int, Collection[int]] | None = None,
    ) -> str:
        """Import the modules that ranks need, or more modules later on; nothing may be running.

        If a supervisor can no longer fork afterwards, all are started again without them.

        Args:
            modules: to import; the needs of every rank by default.
            broken: slots whose devices no longer work, by host: forking is tried on another one.

        Returns:
            Why no ranks can be forked even with only torch and DeepSpeed imported; empty if they
            can be.

        Raises:
            EngineError: the imports take too long.
        """
        reason = ""
        for names in (modules, WARM_MODULES) if modules else (WARM_MODULES,):
            requests = {
                number: _warm_request(names, host, without=(broken or {}).get(number, ()))
                for number, host in enumerate(self._hosts)
            }
            answers = self._ask(requests, "warm", _WARM_UP_LIMIT_S)
            reasons = [answer["reason"] for answer in answers.values() if not answer["ok"]]
            if not reasons:
                return ""
            reason = reasons[0]
            self._restart()
        return reason

    def close(self) -> None:
        """End the supervisors and everything that they started; does nothing twice."""
        self._selector.close()
        for client in self._clients.values():
            client.ask_to_end()
        try:
            for client in self._clients.values():
                client.wait_for_end()
        except KeyboardInterrupt:  # pressed twice: do not wait
            self.kill()
            raise
        self._clients.clear()
        self._record.sweep()

    def kill(self) -> None:
        """End the supervisors at once, even while they import."""
        self._selector.close()
        for client in self._clients.values():
            client.kill()
        self._clients.clear()
        self._record.sweep()

    def _start(self, hosts: Collection[int]) -> None:
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, SupervisorClient] = {}
        self._pids: dict[int, set[int]] = {}  # of this machine, by host
        log = self._folder / "supervisor.log"
        for number in hosts:
            client = SupervisorClient(self._hosts[number], log, env=self._env, folder=self._folder)
            self._record.began(client.pid)
            self._clients[number] = client
            self._pids[number] = {client.pid}
            self._selector.register(client, selectors.EVENT_READ, number)
        self._heartbeats = Heartbeats(hosts)

    def _restart(self) -> None:
        hosts = list(self._clients)
        self.close()
        self._start(hosts)
        if len(hosts) > 1:
            self._look(self._folder)

    def _read(self, timeout_s: float) -> _Messages:
        """Read messages, as `receive` returns them; send queued requests."""
        found: _Messages = []
        for key, _ in self._selector.select(timeout_s):
            host: int = key.data
            client = self._clients.get(host)
            if client is None:  # lost a moment ago
                continue
            if key.fileobj is client.requests:
                client.flush()
                if not client.has_unsent:
                    self._selector.unregister(client.requests)
                continue
            answers = client.read()
            self._heartbeats.heard(host)
            if answers is None:
                found.append((host, {"event": LOST, "reason": self._drop(host)}))
            else:
                found += [(host, answer) for answer in answers if answer["event"] != "pong"]
        return found

    def _look(self, path: Path) -> dict[int, dict[str, Any]]:
        """Ask all hosts about a path; note which supervisors turn out to be on this machine."""
        request = {"op": "look", "path": str(path)}
        answers = self._ask(dict.fromkeys(self._clients, request), "look")
        for host, answer in answers.items():
            if answer["where"] == where():
                self._pids[host].add(answer["pid"])
        return answers

    def _abandon(self, host: int, reason: str) -> tuple[int, dict[str, Any]]:
        """Give up a host that does not answer; return its last message.

        Its supervisor ends its trials as soon as it sees the end of its requests.
        """
        self._clients[host].kill()
        self._drop(host)
        return host, {"event": LOST, "reason": reason}

    def _drop(self, host: int) -> str:
        """End everything that a lost host left on this machine; return how its supervisor ended."""
        client = self._clients.pop(host)
        self._heartbeats.forget(host)
        self._selector.unregister(client)
        if self._waits_to_send(client):
            self._selector.unregister(client.requests)
        reason = client.reason_of_end()
        del self._pids[host]
        self._record.sweep(spare={pid for pids in self._pids.values() for pid in pids})
        return reason

    def _waits_to_send(self, client: SupervisorClient) -> bool:
        return client.requests in self._selector.get_map()

    def _ask(
        self,
        requests: Mapping[int, Mapping[str, Any]],
        event: str,
        limit_s: float = _LOOK_LIMIT_S,
    ) -> dict[int, dict[str, Any]]:
        """Return the answers of all hosts; other messages are kept for `receive`.

        A host that is lost gives none. One that takes too long while others answer is given up.

        Raises:
            EngineError: all take too long.
        """
        kept: _Messages = []
        answers: dict[int, dict[str, Any]] = {}
        for host in self._clients:
            self.send(host, requests[host])
        deadline = time.monotonic() + limit_s
        while missing := self._clients.keys() - answers.keys():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                task = "importing torch and deepspeed" if event == "warm" else "an answer"
                reason = f"{task} took longer than {limit_s:g} s"
                if not answers:
                    raise EngineError(reason)
                kept += [self._abandon(host, reason) for host in sorted(missing)]
                continue
            for host, answer in self._read(left_s):
                if answer["event"] == event:
                    answers[host] = answer
                else:
                    kept.append((host, answer))
        self._heartbeats.restart()
        self._undelivered += kept
        return answers


def _warm_request(
    modules: Sequence[str], host: Host, *, without: Collection[int] = ()
) -> dict[str, Any]:
    """Make a request to import modules, and to try a fork on the first device that works."""
    working = [slot for slot in range(host.machine.num_slots) if slot not in without]
    device = host.machine.variables_of(working[:1]) if working else None
    return {"op": "warm", "modules": list(modules), "device": device}
