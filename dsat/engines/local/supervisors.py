"""The supervisors of all hosts, and the engine's end of their protocol."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsat.engines.local import heartbeats
from dsat.engines.local.heartbeats import Heartbeats
from dsat.engines.local.hosts import Host
from dsat.engines.local.joining import Joining, SharedFolder
from dsat.engines.local.process_record import ProcessRecord, where
from dsat.engines.local.supervisor_client import SupervisorClient
from dsat.errors import EngineError

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
LOST = "lost"
READY = "ready"
_WARM_UP_LIMIT_S = 300.0
_LOOK_LIMIT_S = 60.0
_MEANWHILE_S = 0.1
# A supervisor that is cut off ends its trials; earlier ones of them run elsewhere by then.
_FORSAKEN_AFTER_S = 600.0


class Supervisors:
    """Starts a supervisor on each host, and talks with all of them.

    Args:
        hosts: where at first.
        folder: of the run.
        env: the user's own variables, for what is imported in advance.
    """

    def __init__(self, hosts: Sequence[Host], folder: Path, *, env: Mapping[str, str]) -> None:
        self._hosts = list(hosts)
        self._folder = folder.resolve()
        self._env = env
        self._record = ProcessRecord(self._folder)
        self._unheard: list[tuple[int, dict[str, Any]]] = []
        self._imported: list[Sequence[str]] = []
        self._joining: dict[int, Joining] = {}
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, SupervisorClient] = {}
        self._pids: dict[int, set[int]] = {}  # of this machine, by host
        self._start(range(len(hosts)))

    def add(self, host: Host, folders: Sequence[Path]) -> int:
        """Starts the supervisor of a host that has come; does not wait for it.

        `receive` tells when it is ready: {"event": "ready"}; or that it is lost.

        Args:
            folders: that trials need there.

        Returns:
            The host's number among all.
        """
        number = len(self._hosts)
        self._hosts.append(host)
        self._join(number, folders)
        self._heartbeats.restart()  # of a single host none is expected
        return number

    def send(self, host: int, request: Mapping[str, Any]) -> None:
        """Sends a request to a host; on one that is lost, what is launched has ended at once."""
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
            self._unheard.append((host, {"event": "ended", "trial": request["trial"], **ended}))

    def receive(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        """Answers that came, each with its host, after waiting for one at most so long.

        The last of a host whose supervisor is gone is {"event": "lost", "reason": text}. So it is
        of one of several hosts that gives no sign of life: what that has is ended when it does.
        """
        if self._unheard:
            unheard, self._unheard = self._unheard, []
            return unheard
        if len(self._hosts) == 1:  # its trials could run nowhere else: it may take its time
            return self._hear(timeout_s)
        found = self._hear(min(timeout_s, self._heartbeats.left_s()))
        for host, joining in list(self._joining.items()):
            if reason := joining.overdue():
                found.append(self._abandon(host, reason))
        asked = self._heartbeats.to_ask()
        for host in self._heartbeats.silent(asked):
            reason = f"nothing was heard of it for {heartbeats.SILENT_AFTER_S:g} s"
            found.append(self._abandon(host, reason))
        for host in asked:
            if host in self._clients and not self._clients[host].has_unsent:
                limit_s = None if self._hosts[host].is_here else _FORSAKEN_AFTER_S
                self.send(host, {"op": "ping", "limit_s": limit_s})
        return found

    def _hear(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        """Answers that came, as `receive` returns them; sends what could not be sent before."""
        found: list[tuple[int, dict[str, Any]]] = []
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
            for answer in answers or ():
                if host in self._joining:
                    found += self._hear_of_joining(host, answer)
                elif host in self._clients and answer["event"] != "pong":
                    found.append((host, answer))
            if answers is None:
                found.append((host, {"event": LOST, "reason": self._lose(host)}))
        return found

    def check_folders(self, folders: Sequence[Path]) -> None:
        """Checks that all hosts have the same run folder, and folders that trials need.

        Raises:
            EngineError: a host has not.
        """
        shared = SharedFolder(self._folder)
        try:
            for host, answer in self._look(shared.file).items():
                if problem := shared.problem(answer):
                    raise EngineError(f"host {self._hosts[host].name} {problem}")
        finally:
            shared.remove()
        for folder in folders:
            for host, answer in self._look(folder).items():
                if not answer["is_folder"]:
                    raise EngineError(f"host {self._hosts[host].name} has no folder {folder}")

    def warm_up(
        self,
        modules: Sequence[str] = (),
        meanwhile: Callable[[], None] | None = None,
        *,
        broken: Mapping[int, Collection[int]] | None = None,
    ) -> str:
        """Has the supervisors import what ranks need, or more modules later on.

        If one can no longer fork afterwards, all are started again without them. Nothing may be
        running.

        Args:
            modules: to import; what every rank needs by default.
            meanwhile: called now and then while that is waited for; what it raises ends that.
            broken: slots whose devices no longer work, by host: whether a forked process can use
                a device is tried on another one.

        Returns:
            Why no ranks can be forked even with only torch and DeepSpeed imported: they must be
            fresh processes. Empty if they can be.

        Raises:
            EngineError: the imports take too long.
        """
        reason = ""
        for names in (modules, WARM_MODULES) if modules else (WARM_MODULES,):
            reason = self._warm(names, broken or {}, meanwhile)
            if not reason:
                self._imported.append(names)
                break
            self._restart()
        return reason

    def close(self) -> None:
        """Ends the supervisors, and with them everything that they started; does nothing twice."""
        self._end_joining()
        self._selector.close()
        for client in self._clients.values():
            client.ask_to_end()
        try:
            for client in self._clients.values():
                client.wait_for_end()
        except KeyboardInterrupt:  # whoever does not want to wait
            for client in self._clients.values():
                client.kill()
            self._record.sweep()
            raise
        self._clients.clear()
        self._record.sweep()

    def kill(self) -> None:
        """Ends the supervisors, which may be busy importing, at once. Nothing may be running."""
        self._end_joining()
        self._selector.close()
        for client in self._clients.values():
            client.kill()
        self._clients.clear()
        self._record.sweep()

    def _start(self, hosts: Iterable[int]) -> None:
        for number in hosts:
            self._begin(number)
        self._heartbeats = Heartbeats(self._clients)

    def _begin(self, number: int) -> None:
        """Starts the supervisor of a host."""
        log = self._folder / "supervisor.log"
        client = SupervisorClient(self._hosts[number], log, env=self._env, folder=self._folder)
        self._record.began(client.pid)
        self._clients[number] = client
        self._pids[number] = {client.pid}
        self._selector.register(client, selectors.EVENT_READ, number)

    def _join(self, number: int, folders: Sequence[Path]) -> None:
        """Starts the supervisor of a host, and asks it what one has to know before it is used."""
        self._begin(number)
        warm = [_warm_request(names, self._hosts[number]) for names in self._imported]
        joining = Joining(self._folder, folders, warm, limit_s=_WARM_UP_LIMIT_S)
        self._joining[number] = joining
        for request in joining.requests:
            self.send(number, request)

    def _hear_of_joining(
        self, host: int, answer: Mapping[str, Any]
    ) -> list[tuple[int, dict[str, Any]]]:
        """Takes in what a host says that has come; returns what is told of it, if anything is."""
        joining = self._joining[host]
        self._note_where(host, answer)
        if reason := joining.hear(answer):
            return [self._abandon(host, reason)]
        if not joining.is_ready:
            return []
        self._joining.pop(host).end()
        self._heartbeats.expect(host)
        return [(host, {"event": READY})]

    def _end_joining(self) -> None:
        for joining in self._joining.values():
            joining.end()
        self._joining.clear()

    def _note_where(self, host: int, answer: Mapping[str, Any]) -> None:
        """Notes the supervisor of a host if it turns out to be on this machine."""
        if answer["event"] == "look" and answer["where"] == where():
            self._pids[host].add(answer["pid"])

    def _restart(self) -> None:
        hosts = [host for host in self._clients if host not in self._joining]
        joining = {host: joining.folders for host, joining in self._joining.items()}
        self.close()
        self._imported = []
        self._selector = selectors.DefaultSelector()
        self._start(hosts)
        for host, folders in joining.items():
            self._join(host, folders)
        if len(hosts) > 1:
            self._look(self._folder)

    def _look(self, path: Path) -> dict[int, dict[str, Any]]:
        """What the hosts see at a path; notes which supervisors turn out to be on this machine."""
        request = {"op": "look", "path": str(path)}
        answers = self._ask(dict.fromkeys(self._clients, request), "look")
        for host, answer in answers.items():
            self._note_where(host, answer)
        return answers

    def _abandon(self, host: int, reason: str) -> tuple[int, dict[str, Any]]:
        """Does without a host that does not answer; returns what is told of it.

        Its supervisor ends what it has as soon as it sees that its requests have ended.
        """
        self._clients[host].kill()
        self._lose(host)
        return host, {"event": LOST, "reason": reason}

    def _lose(self, host: int) -> str:
        """Ends what a host has left behind here; says what became of it."""
        client = self._clients.pop(host)
        self._heartbeats.forget(host)
        if host in self._joining:
            self._joining.pop(host).end()
        self._selector.unregister(client)
        if self._waits_to_send(client):
            self._selector.unregister(client.requests)
        reason = client.reason_of_end()
        del self._pids[host]
        self._record.sweep(spare={pid for pids in self._pids.values() for pid in pids})
        return reason

    def _waits_to_send(self, client: SupervisorClient) -> bool:
        return client.requests in self._selector.get_map()

    def _warm(
        self,
        modules: Sequence[str],
        broken: Mapping[int, Collection[int]],
        meanwhile: Callable[[], None] | None = None,
    ) -> str:
        """Why one of the supervisors cannot fork after it has imported modules."""
        requests = {
            number: _warm_request(modules, host, without=broken.get(number, ()))
            for number, host in enumerate(self._hosts)
        }
        answers = self._ask(requests, "warm", _WARM_UP_LIMIT_S, meanwhile)
        return next((answer["reason"] for answer in answers.values() if not answer["ok"]), "")

    def _ask(
        self,
        requests: Mapping[int, Mapping[str, Any]],
        event: str,
        limit_s: float = _LOOK_LIMIT_S,
        meanwhile: Callable[[], None] | None = None,
    ) -> dict[int, dict[str, Any]]:
        """The answers of all hosts to their requests; what else is said meanwhile is kept.

        A host that is lost meanwhile gives none; nor does one that takes too long if others do
        not, which is lost with that.

        Raises:
            EngineError: all take too long.
        """
        kept: list[tuple[int, dict[str, Any]]] = []
        answers: dict[int, dict[str, Any]] = {}
        asked = self._clients.keys() - self._joining.keys()
        for host in asked:
            self.send(host, requests[host])
        deadline = time.monotonic() + limit_s
        while missing := (asked & self._clients.keys()) - answers.keys():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                what = "importing torch and deepspeed" if event == "warm" else "an answer"
                reason = f"{what} took longer than {limit_s:g} s"
                if not answers:
                    raise EngineError(reason)
                kept += [self._abandon(host, reason) for host in sorted(missing)]
                continue
            if meanwhile is not None:
                meanwhile()
                left_s = min(left_s, _MEANWHILE_S)
            for host, answer in self._hear(left_s):
                if answer["event"] == event:
                    answers[host] = answer
                else:
                    kept.append((host, answer))
        self._heartbeats.restart()
        self._unheard += kept
        return answers


def _warm_request(
    modules: Sequence[str], host: Host, *, without: Collection[int] = ()
) -> dict[str, Any]:
    """Has a host's supervisor import modules, and try that on the first device that works.

    Args:
        modules: to import.
        host: of the supervisor.
        without: its slots whose devices no longer work.
    """
    working = [slot for slot in range(host.machine.num_slots) if slot not in without]
    device = host.machine.variables_of(working[:1]) if working else None
    return {"op": "warm", "modules": list(modules), "device": device}
