"""Nodes that Ray gives while trials run, as a scripted reservation tells of them."""

from __future__ import annotations

import json
import logging
import re
import sys
from dataclasses import asdict, dataclass, field, replace
from typing import Any, cast

import pytest

from dsat.app.hosts import Hosts, check_equal
from dsat.app.ray_arrivals import RayArrivals
from dsat.engines.local import Host, Machine
from dsat.engines.ray import Node, Reservation
from testing.local import cpu_machine, wait_until

FIRST = Host(cpu_machine(2), "first")


@dataclass
class Scripted:
    """What a reservation tells, and is told."""

    nodes: list[Node] = field(default_factory=list)
    given_back: list[str] = field(default_factory=list)
    ended: bool = False
    most: int = 0

    def grow(self, most: int) -> None:
        self.most = most

    def come(self) -> list[Node]:
        come, self.nodes = self.nodes, []
        return come

    def give_back(self, node: Node) -> None:
        self.given_back.append(node.name)


def node_with(machine: Machine | str, name: str) -> Node:
    """A node that answers with a machine when it is looked at, or dies with a message."""
    if isinstance(machine, str):
        code = f"raise SystemExit({machine!r})"
    else:
        code = f"print('dsat-slots ' + {json.dumps(asdict(machine))!r})"
    return Node(1, name, "10.0.0.2", (sys.executable, "-S", "-c", code), False)


def arrivals_of(scripted: Scripted) -> RayArrivals:
    reservation = cast(Reservation, scripted)
    return RayArrivals(reservation, lambda host: check_equal([FIRST, host]))


def test_a_node_that_comes_is_a_host_once_it_has_been_looked_at() -> None:
    scripted = Scripted()
    arrivals = arrivals_of(scripted)
    assert arrivals.so_far() == [] and arrivals.more_may_come
    scripted.nodes = [node_with(FIRST.machine, "second")]
    [host] = wait_until(arrivals.so_far, "the look")
    assert (host.name, host.address, host.machine) == ("second", "10.0.0.2", FIRST.machine)
    assert arrivals.so_far() == [host], "and stays one"
    some = Hosts((FIRST,), arrivals).only([1], [])
    assert [each.machine.devices for each in (*some.first, *some.arrivals.so_far())] == [
        FIRST.machine.devices[1:]
    ] * 2
    some.arrivals.want(7)
    assert scripted.most == 7
    scripted.ended = True
    assert not arrivals.more_may_come


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (cpu_machine(1), "host first has 2 cpu slots .*, and host odd has 1 cpu slot"),
        (
            replace(FIRST.machine, software=("torch 2.0",)),
            "host first has , and host odd has torch 2.0",
        ),
        ("ImportError: no torch here", "accelerators of odd cannot be found: ImportError: no tor"),
    ],
)
def test_a_node_of_no_use_is_given_back_with_one_line(
    found: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    scripted = Scripted([node_with(found, "odd")])
    arrivals = arrivals_of(scripted)

    def is_decided() -> bool:
        assert not arrivals.so_far()
        return bool(scripted.given_back)

    with caplog.at_level(logging.WARNING):
        wait_until(is_decided, "the refusal")
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("node odd is not used: ")
    assert re.search(reason, line), line
