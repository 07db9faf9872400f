"""Slots of one resource pool, handed out first come, first served among those that fit."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from testing.master.allocation import Allocation, Container


class Scheduler:
    """The agents of a pool.

    A task gets its slots on one node where it can; if it needs more than any node has, it gets
    whole nodes. Tasks without slots always run, on the first node.

    Args:
        nodes: The number of slots of every agent.
    """

    def __init__(self, nodes: Sequence[int]) -> None:
        self.nodes = tuple(nodes)
        self.waiting: list[Allocation] = []
        self._taken: dict[str, list[tuple[int, int]]] = {}

    def fits_ever(self, slots: int) -> bool:
        """Return whether so many slots can be had once nothing else runs."""
        return self._place(slots, [list(range(size)) for size in self.nodes]) is not None

    def request(self, allocation: Allocation) -> None:
        self.waiting.append(allocation)

    def release(self, allocation: Allocation) -> None:
        self._taken.pop(allocation.id, None)
        if allocation in self.waiting:
            self.waiting.remove(allocation)

    def start_what_fits(self) -> list[Allocation]:
        """Assigns slots to waiting allocations; returns those that got some."""
        started = []
        for allocation in list(self.waiting):
            shares = self._place(allocation.slots, self._free())
            if shares is not None:
                self.waiting.remove(allocation)
                self._taken[allocation.id] = [
                    (node, slot) for node, slots in shares for slot in slots
                ]
                allocation.assigned(_containers(shares))
                started.append(allocation)
        return started

    @property
    def used(self) -> int:
        return sum(len(slots) for slots in self._taken.values())

    def _free(self) -> list[list[int]]:
        taken = {pair for pairs in self._taken.values() for pair in pairs}
        return [
            [slot for slot in range(size) if (node, slot) not in taken]
            for node, size in enumerate(self.nodes)
        ]

    def _place(self, slots: int, free: list[list[int]]) -> list[tuple[int, list[int]]] | None:
        if slots == 0:
            return [(0, [])]
        for node, those in enumerate(free):
            if len(those) >= slots:
                return [(node, those[:slots])]
        shares: list[tuple[int, list[int]]] = []
        missing = slots
        for node, those in enumerate(free):
            if slots > max(self.nodes) and len(those) == self.nodes[node] <= missing and those:
                shares.append((node, those))
                missing -= len(those)
        return shares if missing == 0 else None


def _containers(shares: Sequence[tuple[int, Sequence[int]]]) -> list[Container]:
    return [
        Container(
            rank=rank,
            node=node,
            slot_ids=tuple(slots),
            # All of 127.0.0.0/8 is this machine, so that every node has an address of its own.
            address=f"127.0.0.{node + 1}",
            resources_id=str(uuid.uuid4()),
            container_id=str(uuid.uuid4()),
        )
        for rank, (node, slots) in enumerate(shares)
    ]
