"""This machine as a card."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsat.engines.machines.machine import Machine
from dsat.inputs import cards
from dsat.inputs.cards import Card
from dsat.prepare import probe
from dsat.search.traced_work import Cluster

MEASURED = {
    "flops_2": 700e12,
    "flops_4": 50e12,
    "attention": 0.35,
    "memory_bandwidth": 2.8e12,
    "link_bandwidth": 3.6e11,
    "pcie_bandwidth": 5.5e10,
    "kernel_s": 6e-6,
    "hop_s": 4e-6,
}


def machine_of(name: str) -> Machine:
    """Eight cards, and 64 processor cores of two hardware threads each."""
    devices = tuple(map(str, range(8)))
    cores = tuple(range(64))
    return Machine("cuda", name, devices, (), 80 * 2**30, cores=cores, threads=128)


@pytest.mark.parametrize("slots", [1, 8])
def test_the_hosts_memory_is_that_of_the_table(slots: int) -> None:
    name = "NVIDIA H100 80GB HBM3"
    here = probe.card_of({**MEASURED, "device": name}, machine_of(name), slots)
    by_table, measured = (Cluster.of(card, slots) for card in (cards.find("H100"), here))
    assert measured.host_bandwidth == pytest.approx(by_table.host_bandwidth)
    alone = replace(machine_of(name), devices=("0",))
    one = Cluster.of(probe.card_of({**MEASURED, "device": name}, alone, 1), 1)
    assert one.host_bandwidth == pytest.approx(Cluster.of(cards.find("H100"), 1).host_bandwidth)
    unknown = probe.card_of({**MEASURED, "device": "of next year"}, machine_of("x"), slots)
    assert unknown.host_bandwidth == Card.host_bandwidth
    assert here.host_cores == 8, "hardware threads are no cores"
