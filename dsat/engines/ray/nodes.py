"""The nodes of which Ray has reserved a part, each with an actor; in the driver alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from dsat.engines.ray import node_actor
from dsat.engines.ray.choice import Parts, State, fits

_ACTORS_LIMIT_S = 120.0
# Others may be faster: then a node has no room any more.
_TAKE_LIMIT_S = 10.0
# Of one actor: those that read from a command, write to it, and end it; few commands at a time.
_THREADS = 16


def states() -> dict[str, State]:
    """What nodes have, by Ray's number of each, of those that live."""
    # What is free of each node, Ray tells here alone.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return {
        node["NodeID"]: State(node["Resources"], free.get(node["NodeID"], {}))
        for node in ray.nodes()
        if node["Alive"]
    }


@dataclass(frozen=True)
class Host:
    """A node of which a part is reserved."""

    actor: Any
    node_id: str
    name: str
    address: str


@dataclass(frozen=True)
class _Asked:
    """An actor that has yet to begin, in a bundle of the placement group or on a node."""

    actor: Any
    where: Any
    began_s: float
    bundle: int | None = None
    node_id: str = ""


class Nodes:
    """An actor on each node, which holds that part of the node's resources that is reserved.

    Args:
        parts: equal ones of how many nodes.
        group: in which there is a bundle for each of these. Ray has one that was lost with its node
            stand as a demand, for which an autoscaler starts another node.

    Attributes:
        most: while there are fewer hosts, parts of nodes that come, or that others give back, are
            taken as well.
        hosts: all that there were so far; those of the beginning first, and of these the one that
            is this node.

    Raises:
        RayError: an actor does not begin.
    """

    def __init__(self, parts: Parts, group: PlacementGroup) -> None:
        self._parts = parts
        self._group = group
        self.most = 0
        self._refused: set[str] = set()
        # Its class goes to nodes as it is: they need no dsat.
        ray.cloudpickle.register_pickle_by_value(node_actor)
        asked = [self._ask_for_bundle(index) for index in range(parts.nodes)]
        found = ray.get([each.where for each in asked], timeout=_ACTORS_LIMIT_S)
        here, addresses = ray.get_runtime_context().get_node_id(), _addresses()
        order = sorted(range(parts.nodes), key=lambda at: (found[at][0] != here, found[at][1]))
        times = Counter(name for _, name in found)
        self._names = {name for name in times if times[name] > 1}  # that tell too little
        self.hosts: list[Host] = []
        for index in order:
            node_id, name = found[index]
            self._add(asked[index].actor, node_id, name, addresses)
        self._bundles = dict(enumerate(order))  # of hosts that have one, by number
        self._asked: list[_Asked] = []

    def look(self) -> list[int]:
        """Asks for what has been lost, and for what has come.

        Returns:
            Numbers of hosts that have been added.
        """
        alive = states()
        for number, bundle in list(self._bundles.items()):
            if self.hosts[number].node_id not in alive:
                del self._bundles[number]
                self._asked.append(self._ask_for_bundle(bundle))
        # What was lost has precedence, and Ray chooses its node.
        if all(each.bundle is None for each in self._asked):
            used = self._used(alive) | {each.node_id for each in self._asked}
            for node_id in alive.keys() - used - self._refused:
                if len(used) < self.most and fits(alive[node_id], self._parts):
                    self._asked.append(self._ask_for_node(node_id))
                    used.add(node_id)
        return [number for each in list(self._asked) for number in self._hear(each, alive)]

    def give_back(self, number: int) -> None:
        """Does without a host, and without its node in future."""
        self._refused.add(self.hosts[number].node_id)
        ray.kill(self.hosts[number].actor)

    def _used(self, alive: Collection[str]) -> set[str]:
        return {host.node_id for host in self.hosts if host.node_id in alive}

    def _hear(self, asked: _Asked, alive: Collection[str]) -> list[int]:
        """Adds a host whose actor has begun; returns its number, or nothing."""
        overdue = asked.bundle is None and time.monotonic() > asked.began_s + _TAKE_LIMIT_S
        try:
            node_id, name = ray.get(asked.where, timeout=0)
        except GetTimeoutError:
            if overdue:
                self._drop(asked)
            return []
        except RayError:  # its node has gone
            self._asked.remove(asked)
            if asked.bundle is not None:
                self._asked.append(self._ask_for_bundle(asked.bundle))
            return []
        if node_id in self._used(alive) | self._refused:  # a node's processor cores are one part
            self._drop(asked)
            return []
        self._asked.remove(asked)
        number = self._add(asked.actor, node_id, name, _addresses())
        if asked.bundle is not None:
            self._bundles[number] = asked.bundle
        return [number]

    def _drop(self, asked: _Asked) -> None:
        self._asked.remove(asked)
        ray.kill(asked.actor)

    def _add(self, actor: Any, node_id: str, name: str, addresses: Mapping[str, str]) -> int:
        unique = f"{name}-{node_id[:6]}" if name in self._names else name
        self._names.add(name)
        self.hosts.append(Host(actor, node_id, unique, addresses[node_id]))
        return len(self.hosts) - 1

    def _ask_for_bundle(self, index: int) -> _Asked:
        actor = self._actor(
            PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        )
        return _Asked(actor, actor.where.remote(), time.monotonic(), bundle=index)

    def _ask_for_node(self, node_id: str) -> _Asked:
        actor = self._actor(NodeAffinitySchedulingStrategy(node_id, soft=False))
        return _Asked(actor, actor.where.remote(), time.monotonic(), node_id=node_id)

    def _actor(self, strategy: Any) -> Any:
        parts, bundle = self._parts, self._parts.bundle
        known = ("CPU", "GPU")
        options = ray.remote(node_actor.NodeActor).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            resources={name: amount for name, amount in bundle.items() if name not in known},
            max_concurrency=_THREADS,
            scheduling_strategy=strategy,
        )
        return options.remote(None if parts.accelerator else parts.slots, not parts.accelerator)


def _addresses() -> dict[str, str]:
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
