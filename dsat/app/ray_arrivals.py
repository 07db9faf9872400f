"""Nodes that a Ray cluster gives while trials run, as hosts of the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from dsat.engines.local import Host, Machine, MachineLook
from dsat.engines.ray import Node, Reservation
from dsat.errors import DsatError

_log = logging.getLogger(__name__)


def host_of(node: Node, machine: Machine) -> Host:
    return Host(machine, node.name, node.prefix, node.address, is_here=node.is_here)


class RayArrivals:
    """Has nodes looked at that come to a reservation; one that is of no use is given back.

    Args:
        reserved: which may grow.
        check: raises DsatError if a host is not equal to the others.
    """

    def __init__(self, reserved: Reservation, check: Callable[[Host], None]) -> None:
        self._reserved = reserved
        self._check = check
        self._looks: dict[Node, MachineLook] = {}
        self._hosts: list[Host] = []

    @property
    def more_may_come(self) -> bool:
        return bool(self._looks) or not self._reserved.ended

    def want(self, hosts: int) -> None:
        self._reserved.grow(hosts)

    def so_far(self) -> Sequence[Host]:
        for node in self._reserved.come():
            _log.info("Ray gives node %s as well", node.name)
            self._looks[node] = MachineLook(node.name, node.prefix)
        for node, look in list(self._looks.items()):
            try:
                machine = look.found()
                if machine is None:
                    continue
                host = host_of(node, machine)
                self._check(host)
                self._hosts.append(host)
            except DsatError as error:
                _log.warning("node %s is not used: %s", node.name, error)
                self._reserved.give_back(node)
            del self._looks[node]
        return self._hosts

    def end(self) -> None:
        """Asks no more."""
        for look in self._looks.values():
            look.end()
        self._looks.clear()
