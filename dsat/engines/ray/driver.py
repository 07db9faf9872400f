"""Ray's driver: reserves parts of nodes, and runs commands there with the pipes that it is handed.

    python3 -m dsat.engines.ray.driver

The first line of its standard input is the request. When the input ends, the commands' standard
inputs end, and Ray gets the reservation back as soon as the commands have ended. Each connection to
its socket is a command, see `dsat.engines.ray.run`.

Request:
    {"socket": path, "address": of the cluster, or null, "nodes": n or null, "slots": n or null,
     "kind": of accelerators, or empty}
Answers, as JSON lines on the standard output:
    {"event": "waits", "text": resources that are not free}
    {"event": "reserved", "text": resources, "nodes": [{"name", "address", "is_here"}]}
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dsat.engines.ray import node_actor
from dsat.engines.ray.choice import NodeResources, Parts, ResourceRequest, choose

_CHUNK = 1 << 16
_CONNECT_LIMIT_S = 15.0
_LOOK_EVERY_S = 1.0
_SETTLES_WITHIN_S = 0.5
# Other work may be faster: then something else may be free.
_RESERVE_LIMIT_S = 10.0
_ACTORS_LIMIT_S = 120.0
# Of one actor: three calls wait for each command, and a check of devices has one for each device.
_THREADS = 64
_END_LIMIT_S = 20.0
_LOST = 255

_Tell = Callable[[Mapping[str, Any]], None]


def main() -> None:
    """Serve one reservation."""
    # The answers get a descriptor of their own, so that nothing Ray prints can break them.
    answers = os.dup(1)
    os.dup2(2, 1)

    def tell(message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(answers, json.dumps(message).encode() + b"\n")

    request = json.loads(sys.stdin.readline())
    # The end of a Ray job signals all of its processes; Ctrl-C is for dsat, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _connect(request["address"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wanted = ResourceRequest(request["nodes"], request["slots"], request["kind"])
        parts, group = _reserve(wanted, tell)
        hosts = _start_actors(parts, group)
        here = ray.get_runtime_context().get_node_id()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(request["socket"])
            listener.listen(64)
            nodes = [
                {"name": host.name, "address": host.address, "is_here": host.node_id == here}
                for host in hosts
            ]
            tell({"event": "reserved", "text": str(parts), "nodes": nodes})
            _serve(listener, hosts)
        remove_placement_group(group)
    except _NobodyWaits:
        pass
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        tell({"event": "failed", "reason": _first_line(error)})
    finally:
        shutil.rmtree(Path(request["socket"]).parent, ignore_errors=True)
        ray.shutdown()


class _NobodyWaits(Exception):
    """The standard input has ended before anything was reserved."""


def _connect(address: str | None) -> None:
    """Connect to the cluster that Ray finds; without one, start it on this machine alone.

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


def _resources() -> list[NodeResources]:
    """Return the resources of all live nodes."""
    # Ray tells only here what is free of each node.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return [
        NodeResources(node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    ]


def _reserve(wanted: ResourceRequest, tell: _Tell) -> tuple[Parts, PlacementGroup]:
    """Take free resources, as soon as there are some."""
    told = set[str]()
    before: Parts | None = None

    def say_waiting(text: str) -> None:
        if text not in told:
            told.add(text)
            tell({"event": "waits", "text": text})

    while True:
        parts = choose(_resources(), wanted)
        if parts is None:
            say_waiting("a node with something free")
        elif parts != before:
            # Ray learns of one node after the other what other work gives back.
            before = parts
            _check_wanted(_SETTLES_WITHIN_S)
            continue
        elif group := _group_of(parts, wanted, say_waiting):
            return parts, group
        before = None
        _check_wanted(_LOOK_EVERY_S)


def _group_of(
    parts: Parts, wanted: ResourceRequest, say_waiting: Callable[[str], None]
) -> PlacementGroup | None:
    """Reserve parts; None if other work was faster."""
    group = placement_group(
        [parts.bundle] * parts.nodes, strategy="STRICT_SPREAD", name=f"dsat-{os.getpid()}"
    )
    deadline = time.monotonic() + _RESERVE_LIMIT_S
    while not group.wait(_LOOK_EVERY_S):
        say_waiting(f"{parts} that nobody else uses")
        _check_wanted()
        # A complete request stays: it may make an autoscaler start nodes.
        if time.monotonic() > deadline and not wanted.is_complete:
            remove_placement_group(group)
            return None
    return group


def _check_wanted(wait_s: float = 0.0) -> None:
    """Raise _NobodyWaits if the standard input ends within this time."""
    if node_actor.readable(sys.stdin.fileno(), limit_s=wait_s):
        raise _NobodyWaits


@dataclass(frozen=True)
class _Host:
    """A node of which a part is reserved."""

    actor: Any
    node_id: str
    name: str
    address: str


def _start_actors(parts: Parts, group: PlacementGroup) -> list[_Host]:
    """Start an actor in each bundle; the one on this node comes first.

    Raises:
        RayError: an actor does not begin.
    """
    # The class goes to nodes as it is: they need no dsat.
    ray.cloudpickle.register_pickle_by_value(node_actor)
    bundle = parts.bundle
    actors = []
    for index in range(parts.nodes):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = ray.remote(node_actor.NodeActor).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources={name: n for name, n in bundle.items() if name not in ("CPU", "GPU")},
            max_concurrency=_THREADS,
            scheduling_strategy=strategy,
        )
        cores = None if parts.accelerator else parts.slots
        actors.append(options.remote(cores, not parts.accelerator))
    found = ray.get([actor.where.remote() for actor in actors], timeout=_ACTORS_LIMIT_S)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    here = ray.get_runtime_context().get_node_id()
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
    return sorted(hosts, key=lambda host: (host.node_id != here, host.name))


# -- commands


def _serve(listener: socket.socket, hosts: Sequence[_Host]) -> None:
    """Run commands until the standard input ends, and then until they have ended."""
    begun: list[_Command] = []
    stdin = sys.stdin.fileno()
    while stdin not in node_actor.readable(listener.fileno(), stdin):
        connection, _ = listener.accept()
        begun.append(_Command(connection, hosts))
    deadline = time.monotonic() + _END_LIMIT_S
    for command in begun:
        # A node that was given up may not answer: its command is not waited for again.
        command.thread.join(0 if command.given_up else max(0.0, deadline - time.monotonic()))


class _Command:
    """A command that a connection asks for.

    Attributes:
        thread: relays its pipes, and ends with it.
        given_up: whether the other end of the connection has gone.
    """

    def __init__(self, connection: socket.socket, hosts: Sequence[_Host]) -> None:
        self._connection = connection
        self.given_up = False
        self.thread = threading.Thread(target=self._run, args=(hosts,), daemon=True)
        self.thread.start()

    def _run(self, hosts: Sequence[_Host]) -> None:
        """Run the command, and answer with its exit status."""
        with self._connection:
            _, pipes, _, _ = socket.recv_fds(self._connection, 1, 3)
            start = json.loads(self._connection.makefile().readline())
            host = hosts[start["node"]]
            try:
                begin = host.actor.start.remote(start["command"], start["cwd"], start["env"])
                status = self._relay(host, ray.get(begin), *pipes)
            except RayError as error:
                status, reason = _LOST, _first_line(error)
                os.write(pipes[2], f"Ray has lost {host.name}: {reason}\n".encode())
            for pipe in pipes:
                os.close(pipe)
            with contextlib.suppress(OSError):
                self._connection.sendall(b"%d\n" % status)

    def _relay(self, host: _Host, number: int, given: int, out: int, err: int) -> int:
        """Relay all pipes of a command; return its exit status."""
        relays = [
            threading.Thread(target=self._relay_input, args=(host, number, given), daemon=True),
            threading.Thread(target=_relay_output, args=(host, number, 2, err), daemon=True),
        ]
        for relay in relays:
            relay.start()
        try:
            _relay_output(host, number, 1, out)
            return int(ray.get(host.actor.wait.remote(number)))
        finally:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RD)  # which ends the relay of the input
            for relay in relays:
                relay.join()
            host.actor.forget.remote(number)

    def _relay_input(self, host: _Host, number: int, given: int) -> None:
        """Relay the command's input, until that ends or the other end of the connection goes."""
        connection = self._connection.fileno()
        with contextlib.suppress(RayError):
            while True:
                ready = node_actor.readable(given, connection)
                data = os.read(given, _CHUNK) if given in ready else b""
                if not data:
                    break
                ray.get(host.actor.write.remote(number, data))
            self.given_up = connection in ready
            ray.get(host.actor.end.remote(number))
            if self.given_up:
                ray.get(host.actor.terminate.remote(number))


def _relay_output(host: _Host, number: int, target: int, pipe: int) -> None:
    """Relay output of a command until its end, or until its node is lost."""
    with contextlib.suppress(BrokenPipeError, RayError):
        while data := ray.get(host.actor.read.remote(number, target)):
            while data:
                data = data[os.write(pipe, data) :]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


if __name__ == "__main__":
    main()
