"""Ray's driver: reserves parts of nodes, and runs commands there with the pipes that it is handed.

    python3 -m dsat.engines.ray.driver

Its standard input has one line, with which parts to reserve, and is then kept open: when it ends,
the commands' standard inputs end, and Ray gets back what is reserved as soon as they have ended.
Each connection to its socket is a command, see `dsat.engines.ray.run`.

Request:
    {"socket": path, "address": of the cluster, or null, "nodes": n or null, "slots": n or null,
     "kind": of accelerators, or empty}
Answers, as JSON lines on the standard output:
    {"event": "waits", "text": what for}
    {"event": "reserved", "text": what, "nodes": [{"name", "address", "is_here"}]}
    {"event": "failed", "reason": text}
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dsat.engines.ray import node_actor
from dsat.engines.ray.choice import Parts, State, Wish, choose

_CHUNK = 1 << 16
_CONNECT_LIMIT_S = 15.0
_LOOK_EVERY_S = 1.0
_SETTLES_WITHIN_S = 0.5
# Others may be faster: then there may be something else.
_RESERVE_LIMIT_S = 10.0
_ACTORS_LIMIT_S = 120.0
_END_LIMIT_S = 20.0
_LOST = 255
# Of one actor: those that read from a command, write to it, and end it; few commands at a time.
_THREADS = 16


@dataclass(frozen=True)
class _Host:
    """A node of which a part is reserved."""

    actor: Any
    node_id: str
    name: str
    address: str


def main() -> None:
    request = json.loads(sys.stdin.readline())
    # What ends a Ray job signals all of its processes; Ctrl-C is for dsat itself, which ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _connect(request["address"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wish = Wish(request["nodes"], request["slots"], request["kind"])
        parts, group = _reserve(wish)
        hosts = _hosts_of(group, parts)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(request["socket"])
            listener.listen(64)
            here = ray.get_runtime_context().get_node_id()
            nodes = [
                {"name": host.name, "address": host.address, "is_here": host.node_id == here}
                for host in hosts
            ]
            _answer({"event": "reserved", "text": str(parts), "nodes": nodes})
            _serve(listener, hosts)
        remove_placement_group(group)
    except _NobodyWaits:
        pass
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        _answer({"event": "failed", "reason": _first_line(error)})
    finally:
        shutil.rmtree(Path(request["socket"]).parent, ignore_errors=True)
        ray.shutdown()


class _NobodyWaits(Exception):
    """Whoever wanted the reservation is gone, or does not want it any more."""


def _connect(address: str | None) -> None:
    """To the cluster that Ray itself finds; if there is none, one of this machine alone begins.

    Raises:
        ConnectionError: nothing answers at the address.
    """
    given = address or os.environ.get("RAY_ADDRESS", "")
    host, _, port = given.rpartition(":")
    if host and port.isdecimal():  # Ray itself tries for minutes
        try:
            socket.create_connection((host, int(port)), _CONNECT_LIMIT_S).close()
        except OSError as error:
            raise ConnectionError(f"no cluster answers at {given} ({error})") from None
    options: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False}
    ray.init(address, **options)


# -- reserving


def _reserve(wish: Wish) -> tuple[Parts, PlacementGroup]:
    """Takes what is free, as soon as there is something."""
    told = ""
    before: Parts | None = None
    while True:
        parts = choose(_states(), wish)
        # What others give back, Ray learns of one node after the other.
        if parts is not None and parts != before:
            before = parts
            _check_wanted(_SETTLES_WITHIN_S)
            continue
        text = f"{parts} that nobody else uses" if parts else "a node with something free"
        if parts is not None:
            group = placement_group(
                [parts.bundle] * parts.nodes, strategy="STRICT_SPREAD", name=f"dsat-{os.getpid()}"
            )
            deadline = time.monotonic() + _RESERVE_LIMIT_S
            while not group.wait(_LOOK_EVERY_S):
                _check_wanted()
                if told != text:
                    told = text
                    _answer({"event": "waits", "text": text})
                # What the user asks for stays asked for: it may be why a node is started.
                if time.monotonic() > deadline and None in (wish.nodes, wish.slots):
                    break
            else:
                return parts, group
            remove_placement_group(group)
        elif told != text:
            told = text
            _answer({"event": "waits", "text": text})
        before = None
        _check_wanted(_LOOK_EVERY_S)


def _states() -> list[State]:
    # What is free of each node, Ray tells here alone.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        State(node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def _check_wanted(wait_s: float = 0.0) -> None:
    """Raises _NobodyWaits if the standard input ends, for which it waits so long."""
    if node_actor.readable(sys.stdin.fileno(), limit_s=wait_s):
        raise _NobodyWaits


def _hosts_of(group: PlacementGroup, parts: Parts) -> list[_Host]:
    """The actors of all nodes; the one of this node comes first."""
    bundle = parts.bundle
    known = ("CPU", "GPU")
    resources = {name: amount for name, amount in bundle.items() if name not in known}
    # Its class goes to nodes as it is: they need no dsat.
    ray.cloudpickle.register_pickle_by_value(node_actor)
    actor_class = ray.remote(node_actor.NodeActor)
    actors = [
        actor_class.options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources=resources,
            max_concurrency=_THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote(None if parts.accelerator else parts.slots, not parts.accelerator)
        for index in range(parts.nodes)
    ]
    found = ray.get([actor.where.remote() for actor in actors], timeout=_ACTORS_LIMIT_S)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    times = Counter(name for _, name in found)
    hosts = [
        _Host(
            actor,
            node_id,
            name if times[name] == 1 else f"{name}-{node_id[:6]}",
            addresses[node_id],
        )
        for actor, (node_id, name) in zip(actors, found, strict=True)
    ]
    here = ray.get_runtime_context().get_node_id()
    return sorted(hosts, key=lambda host: (host.node_id != here, host.name))


def _answer(message: Mapping[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(message).encode() + b"\n")


# -- commands


def _serve(listener: socket.socket, hosts: Sequence[_Host]) -> None:
    """Runs commands until the standard input ends, and then until they have ended."""
    begun: list[_Command] = []
    end = sys.stdin.fileno()
    while end not in node_actor.readable(listener.fileno(), end):
        connection, _ = listener.accept()
        begun = [command for command in begun if command.thread.is_alive()]
        begun.append(_Command(connection, hosts))
    now_s = time.monotonic()
    for command in begun:
        since_s = now_s if command.given_up_s is None else command.given_up_s
        command.thread.join(max(0.0, since_s + _END_LIMIT_S - time.monotonic()))


class _Command:
    """A command that a connection asks for.

    Attributes:
        thread: in which it is run; ends with it.
        given_up_s: when whoever asked for it was gone; None as long as it is there.
    """

    def __init__(self, connection: socket.socket, hosts: Sequence[_Host]) -> None:
        self._connection = connection
        self.given_up_s: float | None = None
        self.thread = threading.Thread(target=self._run, args=(hosts,), daemon=True)
        self.thread.start()

    def _run(self, hosts: Sequence[_Host]) -> None:
        """Runs the command, and says how it ended."""
        with self._connection:
            _, pipes, _, _ = socket.recv_fds(self._connection, 1, 3)
            given, out, err = pipes
            start = json.loads(self._connection.makefile().readline())
            host = hosts[start["node"]]
            hand_on: threading.Thread | None = None
            try:
                begin = host.actor.start.remote(start["command"], start["cwd"], start["env"])
                number = ray.get(begin)
                hand_on = threading.Thread(
                    target=self._hand_on, args=(host, number, given), daemon=True
                )
                hand_on.start()
                status = _hand_back(host, number, {1: out, 2: err})
            except RayError as error:
                status, reason = _LOST, _first_line(error)
                os.write(err, f"Ray has lost {host.name}: {reason}\n".encode())
            for pipe in (out, err):
                os.close(pipe)
            with contextlib.suppress(OSError):
                self._connection.sendall(b"%d\n" % status)
                self._connection.shutdown(socket.SHUT_RDWR)  # which ends the handing on
            if hand_on is not None:
                hand_on.join()
            os.close(given)

    def _hand_on(self, host: _Host, number: int, given: int) -> None:
        """Hands on what the command is given, until that ends or whoever gives it is gone."""
        with contextlib.suppress(RayError):
            whoever = self._connection.fileno()
            while True:
                ready = node_actor.readable(given, whoever)
                data = os.read(given, _CHUNK) if given in ready else b""
                if not data:
                    break
                ray.get(host.actor.write.remote(number, data))
            if whoever in ready:
                self.given_up_s = time.monotonic()
            ray.get(host.actor.end.remote(number))
            if whoever in ready:
                ray.get(host.actor.terminate.remote(number))


def _hand_back(host: _Host, number: int, pipes: Mapping[int, int]) -> int:
    """Writes what a command writes; returns its exit status."""
    while True:
        found = ray.get(host.actor.read.remote(number))
        if isinstance(found, int):
            return found
        target, data = found
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(pipes[target], data) :]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


if __name__ == "__main__":
    main()
