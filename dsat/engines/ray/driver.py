"""Ray's driver: reserves parts of nodes, and runs commands there with the pipes that it is handed.

    python3 -m dsat.engines.ray.driver

The first line of its standard input says which parts to reserve, and others what is not needed any
more; when it ends, the commands' standard inputs end, and Ray gets back what is reserved as soon as
they have ended. Each connection to its socket is a command, see `dsat.engines.ray.run`.

Requests:
    {"socket": path, "address": of the cluster, or null, "nodes": n or null, "slots": n or null,
     "kind": of accelerators, or empty}
    {"give_back": number of a node}
    {"most": so many nodes may be taken in all, if the user wants no number of them}
Answers, as JSON lines on the standard output:
    {"event": "waits", "text": what for}
    {"event": "reserved", "text": what, "nodes": [{"number", "name", "address", "is_here"}]}
    {"event": "came", "node": one more of these}
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from dsat.engines.ray import node_actor
from dsat.engines.ray.choice import Parts, Wish, choose
from dsat.engines.ray.nodes import Host, Nodes, states

_CHUNK = 1 << 16
_CONNECT_LIMIT_S = 15.0
_LOOK_EVERY_S = 1.0
_SETTLES_WITHIN_S = 0.5
# Others may be faster: then there may be something else.
_RESERVE_LIMIT_S = 10.0
_END_LIMIT_S = 20.0
_LOST = 255
_LOOK_FOR_MORE_EVERY_S = 2.0

_Tell = Callable[[Mapping[str, Any]], None]


def main() -> None:
    # The answers get a descriptor of their own, so that nothing Ray prints can break them.
    answers = os.dup(1)
    os.dup2(2, 1)

    def tell(message: Mapping[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(answers, json.dumps(message).encode() + b"\n")

    request = json.loads(sys.stdin.readline())
    # What ends a Ray job signals all of its processes; Ctrl-C is for dsat itself, which ends this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _connect(request["address"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wish = Wish(request["nodes"], request["slots"], request["kind"])
        parts, group = _reserve(wish, tell)
        nodes = Nodes(parts, group)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(request["socket"])
            listener.listen(64)
            first = [_told_of(nodes, number) for number in range(len(nodes.hosts))]
            tell({"event": "reserved", "text": str(parts), "nodes": first})
            with _looking_for_more(nodes, tell):
                _serve(listener, nodes, may_grow=wish.nodes is None)
        remove_placement_group(group)
    except _NobodyWaits:
        pass
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        tell({"event": "failed", "reason": _first_line(error)})
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


def _reserve(wish: Wish, tell: _Tell) -> tuple[Parts, PlacementGroup]:
    """Takes what is free, as soon as there is something."""
    told = ""
    before: Parts | None = None
    while True:
        parts = choose(list(states().values()), wish)
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
                    tell({"event": "waits", "text": text})
                # What the user asks for stays asked for: it may be why a node is started.
                if time.monotonic() > deadline and None in (wish.nodes, wish.slots):
                    break
            else:
                return parts, group
            remove_placement_group(group)
        elif told != text:
            told = text
            tell({"event": "waits", "text": text})
        before = None
        _check_wanted(_LOOK_EVERY_S)


def _check_wanted(wait_s: float = 0.0) -> None:
    """Raises _NobodyWaits if the standard input ends, for which it waits so long."""
    if node_actor.readable(sys.stdin.fileno(), limit_s=wait_s):
        raise _NobodyWaits


@contextlib.contextmanager
def _looking_for_more(nodes: Nodes, tell: _Tell) -> Iterator[None]:
    """Tells of nodes that come, from a thread: Ray itself may keep it waiting."""
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_FOR_MORE_EVERY_S):
            try:
                come = nodes.look()
            except (RayError, RuntimeError):  # a head that does not answer now may do so again
                continue
            for number in come:
                tell({"event": "came", "node": _told_of(nodes, number)})

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join(_SETTLES_WITHIN_S)


def _told_of(nodes: Nodes, number: int) -> dict[str, Any]:
    host, here = nodes.hosts[number], ray.get_runtime_context().get_node_id()
    is_here = host.node_id == here
    return {"number": number, "name": host.name, "address": host.address, "is_here": is_here}


# -- commands


def _serve(listener: socket.socket, nodes: Nodes, *, may_grow: bool) -> None:
    """Runs commands until the standard input ends, and then until they have ended."""
    begun: list[_Command] = []
    given, rest = sys.stdin.fileno(), b""
    while True:
        ready = node_actor.readable(listener.fileno(), given)
        if given in ready:
            data = os.read(given, _CHUNK)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for request in map(json.loads, lines):
                if "give_back" in request:
                    nodes.give_back(request["give_back"])
                elif may_grow:
                    nodes.most = request["most"]
        if listener.fileno() in ready:
            connection, _ = listener.accept()
            begun = [command for command in begun if command.thread.is_alive()]
            begun.append(_Command(connection, nodes))
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

    def __init__(self, connection: socket.socket, nodes: Nodes) -> None:
        self._connection = connection
        self.given_up_s: float | None = None
        self.thread = threading.Thread(target=self._run, args=(nodes,), daemon=True)
        self.thread.start()

    def _run(self, nodes: Nodes) -> None:
        """Runs the command, and says how it ended."""
        with self._connection:
            _, pipes, _, _ = socket.recv_fds(self._connection, 1, 3)
            given, out, err = pipes
            start = json.loads(self._connection.makefile().readline())
            host = nodes.hosts[start["node"]]
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

    def _hand_on(self, host: Host, number: int, given: int) -> None:
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


def _hand_back(host: Host, number: int, pipes: Mapping[int, int]) -> int:
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
