"""Ray's driver: reserves parts of nodes, and runs commands there with the pipes that it is handed.

    python3 -m dsat.engines.ray.driver

The first line of its standard input is the request. The process ends with its standard input: Ray
then takes the reservation back and ends the actors, and with them the inputs of all commands. Each
connection to its socket is a command, see `dsat.engines.ray.run`.

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
import itertools
import json
import os
import select
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dsat.engines.ray import node_actor
from dsat.engines.ray.choice import NodeResources, Parts, ResourceRequest, choose

_CHUNK = 1 << 16
_CONNECT_LIMIT_S = 15.0
_LOOK_EVERY_S = 1.0
_SETTLES_WITHIN_S = 0.5
# Other work may be faster: then something else may be free.
_RESERVE_LIMIT_S = 10.0
# Of one actor: two calls wait for each command, and a check of devices has one for each device.
_THREADS = 64
_LOST = 255
_numbers = itertools.count()


def main() -> None:
    """Serve one reservation."""
    # The answers get a descriptor of their own, so that nothing Ray prints can break them.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(event: str, **message: Any) -> None:
        answers.write(json.dumps({"event": event, **message}) + "\n")

    with open(0, "rb", buffering=0, closefd=False) as stdin:
        request = json.loads(stdin.readline())
    threading.Thread(target=_end_with_input, args=(request["socket"],), daemon=True).start()
    # The end of a Ray job signals all of its processes; Ctrl-C is for dsat, which ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _connect(request["address"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wanted = ResourceRequest(request["nodes"], request["slots"], request["kind"])
        parts, group = _reserve(wanted, lambda text: tell("waits", text=text))
        actors, nodes = _start_actors(parts, group)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(request["socket"])
            listener.listen(64)
            tell("reserved", text=str(parts), nodes=nodes)
            while True:
                connection, _ = listener.accept()
                arguments = (connection, actors, nodes)
                threading.Thread(target=_serve, args=arguments, daemon=True).start()
    except (RayError, ConnectionError, RuntimeError, ValueError) as error:
        tell("failed", reason=_first_line(error))


def _end_with_input(address: str) -> None:
    while os.read(0, _CHUNK):
        pass
    shutil.rmtree(os.path.dirname(address), ignore_errors=True)
    os._exit(0)


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


def _reserve(
    wanted: ResourceRequest, on_wait: Callable[[str], None]
) -> tuple[Parts, PlacementGroup]:
    """Take free resources, as soon as there are some.

    Args:
        wanted: resources.
        on_wait: takes each description of resources that are not free, once.
    """
    waited_for = set[str]()

    def say_waiting(text: str) -> None:
        if text not in waited_for:
            waited_for.add(text)
            on_wait(text)

    before: Parts | None = None
    while True:
        parts = choose(_resources(), wanted)
        if parts is None:
            say_waiting("a node with something free")
            time.sleep(_LOOK_EVERY_S)
        elif parts != before:
            # Ray learns of one node after the other what other work gives back.
            time.sleep(_SETTLES_WITHIN_S)
        elif group := _group_of(parts, wanted, say_waiting):
            return parts, group
        before = parts


def _group_of(
    parts: Parts, wanted: ResourceRequest, say_waiting: Callable[[str], None]
) -> PlacementGroup | None:
    """Reserve parts; None if other work took them first."""
    group = placement_group(
        [parts.bundle] * parts.nodes, strategy="STRICT_SPREAD", name=f"dsat-{os.getpid()}"
    )
    deadline = time.monotonic() + _RESERVE_LIMIT_S
    while not group.wait(_LOOK_EVERY_S):
        say_waiting(f"{parts} that nobody else uses")
        # A complete request stays: it may make an autoscaler start nodes.
        if time.monotonic() > deadline and not wanted.is_complete:
            remove_placement_group(group)
            return None
    return group


def _start_actors(parts: Parts, group: PlacementGroup) -> tuple[list[Any], list[dict[str, Any]]]:
    """Start an actor in each bundle; return them and their nodes, the one on this node first."""
    # The class goes to nodes as it is: they need no dsat.
    ray.cloudpickle.register_pickle_by_value(node_actor)
    here = ray.get_runtime_context().get_node_id()
    known = {node["NodeID"]: node for node in ray.nodes()}
    ids = placement_group_table(group)["bundles_to_node_id"]
    hosts = {index: known[node_id]["NodeManagerHostname"] for index, node_id in ids.items()}
    times = Counter(hosts.values())
    bundle = parts.bundle
    actors, nodes = [], []
    for index in sorted(hosts, key=lambda index: (ids[index] != here, hosts[index])):
        options = ray.remote(node_actor.NodeActor).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources={name: n for name, n in bundle.items() if name not in ("CPU", "GPU")},
            max_concurrency=_THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        actors.append(options.remote(None if parts.accelerator else parts.slots))
        name, node_id = hosts[index], ids[index]
        nodes.append(
            {
                "name": name if times[name] == 1 else f"{name}-{node_id[:6]}",
                "address": known[node_id]["NodeManagerAddress"],
                "is_here": node_id == here,
            }
        )
    return actors, nodes


# -- commands


def _serve(
    connection: socket.socket, actors: Sequence[Any], nodes: Sequence[Mapping[str, Any]]
) -> None:
    """Run the command that a connection asks for, and answer with its exit status."""
    with connection:
        _, pipes, _, _ = socket.recv_fds(connection, 1, 3)
        start = json.loads(connection.makefile().readline())
        actor, number = actors[start["node"]], next(_numbers)
        given, *outputs = pipes
        arguments = (actor, number, given, connection)
        relay = threading.Thread(target=_relay_input, args=arguments, daemon=True)
        status = _LOST
        try:
            run = actor.run.options(num_returns="streaming")
            for item in run.remote(number, start["command"], start["cwd"], start["env"]):
                target, data = ray.get(item)
                if target:
                    _write(outputs[target - 1], data)
                elif data:
                    status = int(data)
                else:
                    relay.start()
        except RayError as error:
            name = nodes[start["node"]]["name"]
            os.write(outputs[1], f"Ray has lost {name}: {_first_line(error)}\n".encode())
        except BrokenPipeError:
            pass  # nobody reads any more
        connection.shutdown(socket.SHUT_RD)  # which ends the relay of the input
        if relay.ident is not None:
            relay.join()
        for pipe in pipes:
            os.close(pipe)
        with contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % status)


def _relay_input(actor: Any, number: int, given: int, connection: socket.socket) -> None:
    """Relay a command's input, until that ends or the other end of the connection goes."""
    waiting = select.poll()  # select(2) takes fewer descriptors than Ray's processes have
    for descriptor in (given, connection.fileno()):
        waiting.register(descriptor, select.POLLIN)
    try:
        while given in (ready := dict(waiting.poll())) and (data := os.read(given, _CHUNK)):
            ray.get(actor.write.remote(number, data))
        ray.get(actor.end.remote(number, terminate=connection.fileno() in ready))
    except RayError:
        pass  # `_serve` says so


def _write(pipe: int, data: bytes) -> None:
    while data:
        data = data[os.write(pipe, data) :]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]


if __name__ == "__main__":
    main()
