"""Choice of the resources to reserve of a Ray cluster: equal parts of equal, free nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsat.errors import UserInputError

# Ray's names of the accelerators that DeepSpeed supports.
_ACCELERATORS = ("GPU", "NPU", "HPU")
_CPU = "CPU"
_KIND = "accelerator_type:"
# Any part of this resource says that a node has it.
_A_BIT = 0.001


@dataclass(frozen=True)
class NodeResources:
    """Amounts of each of Ray's resources that a node has, and that are free."""

    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True)
class ResourceRequest:
    """Resources that the user asks for; None for everything that is free.

    Attributes:
        nodes: number of nodes.
        slots: of each node.
        kind: of accelerators, as Ray has it, such as A100.
    """

    nodes: int | None = None
    slots: int | None = None
    kind: str = ""

    @classmethod
    def of(cls, nodes: int | None, slots: str | None) -> ResourceRequest:
        """Parse the slots of a command line: [TYPE:]N.

        Raises:
            UserInputError: they are something else.
        """
        if slots is None:
            return cls(nodes)
        kind, _, number = slots.rpartition(":")
        if not number.isdecimal() or int(number) == 0:
            raise UserInputError(
                "is not a number of GPUs, as 8 or A100:8 are", where=f"--gpus-per-node {slots}"
            )
        return cls(nodes, int(number), kind)

    @property
    def is_complete(self) -> bool:
        """Return whether both numbers are given, so that nothing depends on what is free."""
        return None not in (self.nodes, self.slots)


@dataclass(frozen=True)
class Parts:
    """Equal parts of several nodes.

    Attributes:
        nodes: number of nodes.
        accelerator: Ray's name of the slots; empty if they are processor cores.
        slots: of each node.
        cpus: of each node.
        kind: of the accelerators; empty for any.
    """

    nodes: int
    accelerator: str
    slots: int
    cpus: int
    kind: str = ""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources to reserve on each node."""
        found: dict[str, float] = {_CPU: self.cpus} if self.cpus else {}
        if self.accelerator:
            found[self.accelerator] = self.slots
        if self.kind:
            found[_KIND + self.kind] = _A_BIT
        return found

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
    default = "" if wanted.slots is None else _ACCELERATORS[0]
    accelerator = there[0] if there else default
    found = [
        parts
        for kind, alike in _by_kind(nodes, accelerator).items()
        if wanted.kind in ("", kind)
        for parts in _parts(alike, accelerator, kind, wanted)
    ]
    if found:
        return max(found, key=lambda parts: (parts.nodes * parts.slots, parts.slots))
    if wanted.nodes is not None and wanted.slots is not None:
        return Parts(wanted.nodes, accelerator, wanted.slots, wanted.slots, wanted.kind)
    return None


def _by_kind(
    nodes: Iterable[NodeResources], accelerator: str
) -> Mapping[str, Sequence[NodeResources]]:
    found = defaultdict(list)
    for node in nodes:
        if node.total.get(accelerator or _CPU, 0) >= 1:
            kinds = [name for name in node.total if accelerator and name.startswith(_KIND)]
            found["".join(kinds[:1]).removeprefix(_KIND)].append(node)
    return found


def _parts(
    nodes: Sequence[NodeResources], accelerator: str, kind: str, wanted: ResourceRequest
) -> Iterable[Parts]:
    """Return the parts that equal nodes can give."""
    resource = accelerator or _CPU
    free = {int(node.free.get(resource, 0)) for node in nodes}
    for slots in free if wanted.slots is None else {wanted.slots}:
        having = [node for node in nodes if slots and node.free.get(resource, 0) >= slots]
        count = len(having) if wanted.nodes is None else wanted.nodes
        if 0 < count <= len(having):
            shares = sorted((_cpus(node, resource, slots) for node in having), reverse=True)
            yield Parts(count, accelerator, slots, shares[count - 1], kind)


def _cpus(node: NodeResources, resource: str, slots: int) -> int:
    """Return as large a part of a node's processor cores as of its slots, if it is free."""
    share = node.total.get(_CPU, 0) * slots / node.total[resource]
    return int(min(share, node.free.get(_CPU, 0)))
