"""Parts of nodes of a Ray cluster, with an actor on each that runs commands."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dsat.engines.machines.hosts import Host
from dsat.engines.places import ray_node
from dsat.engines.places.base import Environment, place_option, with_machines
from dsat.engines.places.ray_choice import NodeResources, Parts, ResourceRequest, choose
from dsat.errors import EngineError, UserInputError
from dsat.options import WORD, at_least

_log = logging.getLogger(__name__)
# The driver of a job that was submitted has it (ray 2.60, `JobSupervisor`).
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_CONNECT_LIMIT_S, _LOOK_EVERY_S, _SETTLES_WITHIN_S = 15.0, 1.0, 0.5
_RESERVE_LIMIT_S = 10.0  # other work may be faster: then something else may be free
_THREADS = 64  # of one actor: one for each command that runs
_WHERE = "with --engine ray: "
OPTIONS = (
    place_option(
        "--ray-address",
        f"{_WHERE}of the cluster (default: as Ray finds it, by RAY_ADDRESS or on this machine)",
        kind=WORD,
        metavar="ADDRESS",
    ),
    place_option("--nodes", f"{_WHERE}take that many nodes", kind=at_least(1), metavar="N"),
    place_option(
        "--gpus-per-node",
        f"{_WHERE}take that many GPUs of each node",
        kind=WORD,
        metavar="[TYPE:]N",
    ),
)


def detect(environment: Environment) -> bool:
    """Return whether this is a job that was submitted to a cluster."""
    return _JOB_VARIABLE in environment.variables


@contextlib.contextmanager
def acquire(environment: Environment, given: Mapping[str, Any]) -> Iterator[list[Host]]:
    """Take everything that is free of a cluster, or the part of it that the user asks for."""
    request = ResourceRequest.of(given.get("nodes"), given.get("gpus_per_node"))
    address = given.get("ray_address")
    used = address or environment.variables.get("RAY_ADDRESS", "")
    if used.startswith("ray://"):
        raise UserInputError(
            f"{used} is for Ray Client, from outside of a cluster",
            where="--engine ray",
            hint="Start dsat on a node of it, or as a job: ray job submit -- python3 -m dsat ...",
        )
    with reserved(address, request, say=_log.info) as (nodes, text):
        _log.info("tuning on free parts of a Ray cluster, %s", text)
        yield with_machines(nodes)


@contextlib.contextmanager
def reserved(
    address: str | None, request: ResourceRequest, *, say: Callable[[str], object]
) -> Iterator[tuple[list[Host], str]]:
    """Reserve equal parts of nodes, until the context or this process ends.

    Args:
        address: of the cluster; None for the one that Ray finds by itself, or else this machine.
        request: resources to reserve.
        say: gets a line for people while it is waited for.

    Yields:
        The nodes, of which the one that this process runs on comes first, and a description of the
        resources for people.

    Raises:
        UserInputError: Ray is not installed.
        EngineError: the cluster is not reached, or gives nothing.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserInputError(
            "needs Ray, which is not installed",
            where="--engine ray",
            hint="Run pip install 'ray>=2.40'.",
        )
    import ray

    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        try:
            _connect(address)
            parts, group = _reserve(request, say)
            nodes = _start_actors(parts, group)
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            lines = str(error).strip().splitlines()
            raise EngineError(f"Ray: {(lines or [repr(error)])[0]}") from None
        finally:  # Ray has its own
            for number, handler in handlers.items():
                signal.signal(number, handler)
        yield nodes, str(parts)
    finally:
        ray.shutdown()  # gives everything back


def _connect(address: str | None) -> None:
    """Connect to the cluster that Ray finds; without one, start it on this machine alone."""
    import ray

    given = address or os.environ.get("RAY_ADDRESS", "")
    host, _, port = given.rpartition(":")
    if host and port.isdecimal():  # Ray itself tries for minutes
        try:
            socket.create_connection((host, int(port)), _CONNECT_LIMIT_S).close()
        except OSError as error:
            raise ConnectionError(f"no cluster answers at {given} ({error})") from None
    options: dict[str, Any] = {"log_to_driver": False, "include_dashboard": False}
    ray.init(address, **options)


def _reserve(wanted: ResourceRequest, say: Callable[[str], object]) -> tuple[Parts, Any]:
    """Take free resources, as soon as there are some; return them with Ray's group of them."""
    import ray
    from ray._private.state import available_resources_per_node  # told nowhere else by node
    from ray.util.placement_group import placement_group, remove_placement_group

    waited_for = set[str]()

    def wait(text: str) -> None:
        if text not in waited_for:
            say(f"waiting for Ray to give {text}")
        waited_for.add(text)

    before: Parts | None = None
    while True:
        free = available_resources_per_node()
        alive = [node for node in ray.nodes() if node["Alive"]]
        parts = choose(
            [NodeResources(n["Resources"], free.get(n["NodeID"], {})) for n in alive], wanted
        )
        if parts is None:
            wait("a node with something free")
            time.sleep(_LOOK_EVERY_S)
        elif parts != before:  # Ray learns of one node after the other what other work gives back
            time.sleep(_SETTLES_WITHIN_S)
        else:
            group = placement_group(
                [parts.bundle] * parts.nodes, strategy="STRICT_SPREAD", name=f"dsat-{os.getpid()}"
            )
            deadline = time.monotonic() + _RESERVE_LIMIT_S
            # A complete request stays: it may make an autoscaler start nodes.
            while None not in wanted or time.monotonic() < deadline:
                if group.wait(_LOOK_EVERY_S):
                    return parts, group
                wait(f"{parts} that nobody else uses")
            remove_placement_group(group)
        before = parts


def _start_actors(parts: Parts, group: Any) -> list[Host]:
    """Start an actor in each part; return their nodes, the one of this process first."""
    import ray
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # The class goes to nodes as it is: they need no dsat.
    ray.cloudpickle.register_pickle_by_value(ray_node)
    here = ray.get_runtime_context().get_node_id()
    known = {node["NodeID"]: node for node in ray.nodes()}
    ids = placement_group_table(group)["bundles_to_node_id"]
    names = {index: known[node_id]["NodeManagerHostname"] for index, node_id in ids.items()}
    times = Counter(names.values())
    amounts = parts.bundle
    hosts = []
    for index in sorted(names, key=lambda index: (ids[index] != here, names[index])):
        options = ray.remote(ray_node.NodeActor).options(
            num_cpus=amounts.get("CPU", 0),
            num_gpus=amounts.get("GPU", 0),
            resources={name: n for name, n in amounts.items() if name not in ("CPU", "GPU")},
            max_concurrency=_THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        actor = options.remote(None if parts.accelerator else parts.slots)
        name, node_id = names[index], ids[index]
        hosts.append(
            Host(
                name=name if times[name] == 1 else f"{name}-{node_id[:6]}",
                address=known[node_id]["NodeManagerAddress"],
                is_here=node_id == here,
                call=lambda method, *args, actor=actor: ray.get(
                    getattr(actor, method).remote(*args)
                ),
            )
        )
    return hosts
