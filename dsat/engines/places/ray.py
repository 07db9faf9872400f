"""Place: equal parts of the nodes of a Ray cluster, with an actor on each to run commands."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from dsat.engines.machines.hosts import Host
from dsat.engines.places import ray_node
from dsat.engines.places.base import Environment, inspect_machines, place_option
from dsat.engines.places.ray_choice import NodeResources, Parts, choose, parse_slots
from dsat.errors import EngineError, UserInputError
from dsat.options import WORD, at_least

_log = logging.getLogger(__name__)
# Set in the driver of a submitted job (ray 2.60, `JobSupervisor`).
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_SETTLES_WITHIN_S, _RESERVED_WITHIN_S = 1.0, 10.0
_THREADS = 64  # of one actor; a running command needs up to three
_ENGINE = "--engine ray"
OPTIONS = (
    place_option(
        "--ray-address",
        f"with {_ENGINE}: address of the cluster (default: RAY_ADDRESS, or one on this machine)",
        kind=WORD,
        metavar="ADDRESS",
    ),
    place_option("--nodes", f"with {_ENGINE}: number of nodes", kind=at_least(1)),
    place_option(
        "--gpus-per-node",
        f"with {_ENGINE}: number of GPUs of each node",
        kind=WORD,
        metavar="[TYPE:]N",
    ),
)


def detect(environment: Environment) -> bool:
    """Return whether dsat runs as a job that was submitted to a Ray cluster."""
    return _JOB_VARIABLE in environment.variables


@contextlib.contextmanager
def acquire(environment: Environment, given: Mapping[str, Any]) -> Iterator[list[Host]]:
    """Reserve equal parts of a cluster's nodes: those that the user requests, or the freest."""
    gpus_per_node = given.get("gpus_per_node")
    kind, slots = parse_slots(gpus_per_node) if gpus_per_node else ("", None)
    address = given.get("ray_address")
    target = address or environment.variables.get("RAY_ADDRESS", "")
    if target.startswith("ray://"):
        raise UserInputError(
            f"{target} is an address for Ray Client, but dsat must run inside the cluster",
            where=_ENGINE,
            hint="Start dsat on a node of the cluster, or with ray job submit -- python3 -m dsat",
        )
    if importlib.util.find_spec("ray") is None:
        raise UserInputError(
            "needs Ray, which is not installed", where=_ENGINE, hint="Run pip install 'ray>=2.40'."
        )
    with reserved(address, given.get("nodes"), slots, kind) as nodes:
        yield inspect_machines(nodes)


@contextlib.contextmanager
def reserved(
    address: str | None, nodes: int | None = None, slots: int | None = None, kind: str = ""
) -> Iterator[list[Host]]:
    """Reserve equal parts of nodes until the context or this process ends; yield the nodes.

    The node of this process comes first, if it is reserved.

    Args:
        address: address of the cluster; None for one that Ray finds, or a new one on this machine.
        nodes: number of nodes; None to choose.
        slots: slots of each node; None to choose. If both are set, wait until so many are free.
        kind: kind of accelerator; empty to choose.

    Raises:
        EngineError: there is no cluster, or too little is free.
    """
    import ray

    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        try:
            ray.init(address, log_to_driver=False, include_dashboard=False)
            hosts = _start_actors(*_reserve(nodes, slots, kind))
        except (ray.exceptions.RayError, ConnectionError, RuntimeError, ValueError) as error:
            lines = str(error).strip().splitlines()
            raise EngineError(f"Ray: {(lines or [repr(error)])[0]}") from None
        finally:  # Ray replaces the handlers
            for number, handler in handlers.items():
                signal.signal(number, handler)
        yield hosts
    finally:
        ray.shutdown()  # releases all that was reserved


def _reserve(nodes: int | None, slots: int | None, kind: str) -> tuple[Parts, Any]:
    """Reserve parts of nodes; return them with Ray's placement group."""
    import ray
    from ray._private.state import available_resources_per_node  # the only source by node
    from ray.util.placement_group import placement_group

    time.sleep(_SETTLES_WITHIN_S)  # Ray learns late what other work has released
    free = available_resources_per_node()
    alive = [node for node in ray.nodes() if node["Alive"]]
    resources = [NodeResources(n["Resources"], free.get(n["NodeID"], {})) for n in alive]
    parts = choose(resources, nodes, slots, kind)
    if parts is None:
        raise EngineError(
            "Ray has no free devices that fit. Start dsat after other work has ended, or let it "
            "wait: give both --nodes and --gpus-per-node"
        )
    group = placement_group([parts.bundle] * parts.nodes, strategy="STRICT_SPREAD", name="dsat")
    if not group.wait(_SETTLES_WITHIN_S):
        _log.info("waiting for Ray to give %s", parts)
        while not group.wait(_RESERVED_WITHIN_S):
            if nodes is None or slots is None:
                raise EngineError(f"Ray no longer has {parts}: start dsat again")
    _log.info("tuning on free parts of a Ray cluster, %s", parts)
    return parts, group


def _start_actors(parts: Parts, group: Any) -> list[Host]:
    """Start an actor in each part; return the nodes, the local one first."""
    import ray
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(ray_node)  # so that nodes can load it without dsat
    here = ray.get_runtime_context().get_node_id()
    by_id = {node["NodeID"]: node for node in ray.nodes()}
    ids = placement_group_table(group)["bundles_to_node_id"]
    names = {index: by_id[node_id]["NodeManagerHostname"] for index, node_id in ids.items()}
    times = Counter(names.values())
    amounts = dict(parts.bundle)
    num_cpus, num_gpus = amounts.pop("CPU", 0), amounts.pop("GPU", 0)
    hosts = []
    for index in sorted(names, key=lambda index: (ids[index] != here, names[index])):
        options = ray.remote(ray_node.NodeActor).options(
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            resources=amounts,
            max_concurrency=_THREADS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        )
        actor = options.remote(None if parts.accelerator else parts.slots)
        name, node_id = names[index], ids[index]
        hosts.append(
            Host(
                name=name if times[name] == 1 else f"{name}-{node_id[:6]}",
                address=by_id[node_id]["NodeManagerAddress"],
                is_here=node_id == here,
                reach=lambda method, *args, actor=actor: ray.get(
                    getattr(actor, method).remote(*args)
                ),
            )
        )
    return hosts
