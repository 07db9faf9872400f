"""Choice of the resources to reserve of a Ray cluster: equal parts of equal, free nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dsat.errors import UserInputError

# Ray's names of the accelerators that DeepSpeed supports.
_ACCELERATORS = ("GPU", "NPU", "HPU")
_CPU, _KIND = "CPU", "accelerator_type:"
_A_BIT = 0.001  # of a kind: any part of this resource says that a node has it


class NodeResources(NamedTuple):
    """Amounts of each of Ray's resources that a node has, and that are free."""

    total: Mapping[str, float]
    free: Mapping[str, float]


class ResourceRequest(NamedTuple):
    """Nodes, slots of each, and kind of accelerators (A100); None for everything that is free."""

    nodes: int | None = None
    slots: int | None = None
    kind: str = ""

    @classmethod
    def of(cls, nodes: int | None, slots: str | None) -> ResourceRequest:
        """Parse the slots of a command line, `[TYPE:]N`; raise UserInputError if they are not."""
        kind, _, number = (slots or "").rpartition(":")
        if slots is None:
            return cls(nodes)
        if not number.isdecimal() or int(number) == 0:
            raise UserInputError(
                "is not a number of GPUs, as 8 or A100:8 are", where=f"--gpus-per-node {slots}"
            )
        return cls(nodes, int(number), kind)


class Parts(NamedTuple):
    """Equal parts of nodes; without Ray's name of an accelerator, slots are processor cores."""

    nodes: int
    accelerator: str
    slots: int
    cpus: int
    kind: str = ""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources to reserve on each node."""
        kind = {_KIND + self.kind: _A_BIT} if self.kind else {}
        amounts = {_CPU: self.cpus, self.accelerator: self.slots} | kind
        return {name: amount for name, amount in amounts.items() if name and amount}

    def __str__(self) -> str:
        of_kind = f" {self.kind}" if self.kind else ""
        slots = f"{self.slots}{of_kind} {self.accelerator or _CPU}{'s' * (self.slots > 1)}"
        each = " each" if self.nodes > 1 else ""
        return f"{self.nodes} node{'s' * (self.nodes > 1)} with {slots}{each}"


def choose(nodes: Sequence[NodeResources], wanted: ResourceRequest) -> Parts | None:
    """Return the free equal parts with most slots in all; the fewest nodes if several have.

    Nodes with other kinds of accelerators, and those without any beside nodes with some, are left
    out. A complete request is returned even if nothing is free: an autoscaler may bring it.
    """
    there = [name for name in _ACCELERATORS if any(node.total.get(name, 0) >= 1 for node in nodes)]
    accelerator = there[0] if there else "" if wanted.slots is None else _ACCELERATORS[0]
    kinds: dict[str, list[NodeResources]] = {}
    for node in nodes:
        if node.total.get(accelerator or _CPU, 0) >= 1:
            of_node = [name for name in node.total if accelerator and name.startswith(_KIND)]
            kinds.setdefault("".join(of_node[:1]).removeprefix(_KIND), []).append(node)
    found = [
        parts
        for kind, alike in kinds.items()
        if wanted.kind in ("", kind)
        for parts in _parts(alike, accelerator, kind, wanted)
    ]
    if found:
        return max(found, key=lambda parts: (parts.nodes * parts.slots, parts.slots))
    if wanted.nodes is None or wanted.slots is None:
        return None
    return Parts(wanted.nodes, accelerator, wanted.slots, wanted.slots, wanted.kind)


def _parts(
    nodes: Sequence[NodeResources], accelerator: str, kind: str, wanted: ResourceRequest
) -> Iterator[Parts]:
    """Yield the parts that equal nodes can give, with as many free cores as go with the slots."""
    resource = accelerator or _CPU
    for slots in {wanted.slots or int(node.free.get(resource, 0)) for node in nodes} - {0}:
        cpus = sorted(
            int(min(node.total.get(_CPU, 0) * slots / node.total[resource], node.free.get(_CPU, 0)))
            for node in nodes
            if node.free.get(resource, 0) >= slots
        )
        count = wanted.nodes or len(cpus)
        if 0 < count <= len(cpus):
            yield Parts(count, accelerator, slots, cpus[-count], kind)
