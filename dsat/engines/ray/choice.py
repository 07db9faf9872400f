"""What to reserve of a Ray cluster: equal parts of equal nodes, out of what nobody uses now."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsat.errors import UserInputError

# Ray's names of what DeepSpeed has an accelerator for.
_ACCELERATORS = ("GPU", "NPU", "HPU")
_CPU = "CPU"
_KIND = "accelerator_type:"
# Any part of this resource says that a node has it.
_A_BIT = 0.001


@dataclass(frozen=True)
class State:
    """What a node has of each of Ray's resources, and what of it nobody uses."""

    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True)
class Wish:
    """What the user asks for; None for as much as is free.

    Attributes:
        nodes: how many.
        slots: on each.
        kind: of accelerators, as Ray has it, such as A100.
    """

    nodes: int | None = None
    slots: int | None = None
    kind: str = ""

    @classmethod
    def of(cls, nodes: int | None, slots: str | None) -> Wish:
        """From what the command line has: [TYPE:]N slots.

        Raises:
            UserInputError: it is something else.
        """
        if slots is None:
            return cls(nodes)
        kind, _, number = slots.rpartition(":")
        if not number.isdecimal() or int(number) == 0:
            raise UserInputError(
                "is not a number of GPUs, as 8 or A100:8 are", where=f"--gpus-per-node {slots}"
            )
        return cls(nodes, int(number), kind)


@dataclass(frozen=True)
class Parts:
    """Equal parts of so many nodes.

    Attributes:
        accelerator: Ray's name of what the slots are; empty if they are processor cores.
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
        """What Ray is asked for on each node."""
        found: dict[str, float] = {_CPU: self.cpus} if self.cpus else {}
        if self.accelerator:
            found[self.accelerator] = self.slots
        if self.kind:
            found[_KIND + self.kind] = _A_BIT
        return found

    def __str__(self) -> str:
        of_kind = f" {self.kind}" if self.kind else ""
        what = f"{self.slots}{of_kind} {self.accelerator or _CPU}{'s' * (self.slots > 1)}"
        each = " each" if self.nodes > 1 else ""
        return f"{self.nodes} node{'s' * (self.nodes > 1)} with {what}{each}"


def choose(nodes: Sequence[State], wish: Wish) -> Parts | None:
    """The equal parts with most slots of all that are free; the fewest nodes if several have.

    Nodes with other kinds of accelerators, and those without any beside nodes with some, are left
    out. If the user asks for nodes and slots, that is it, whatever there is now: an autoscaler may
    bring it.

    Returns:
        None if there is nothing now that is asked for.
    """
    accelerator = next((name for name in _ACCELERATORS if _any_has(nodes, name)), "")
    if wish.slots is not None:
        accelerator = accelerator or _ACCELERATORS[0]
    found = [
        parts
        for kind, alike in _by_kind(nodes, accelerator).items()
        if wish.kind in ("", kind)
        for parts in _parts(alike, accelerator, kind, wish)
    ]
    if found:
        return max(found, key=lambda parts: (parts.nodes * parts.slots, parts.slots))
    if wish.nodes is not None and wish.slots is not None:
        return Parts(wish.nodes, accelerator, wish.slots, wish.slots, wish.kind)
    return None


def fits(node: State, parts: Parts) -> bool:
    """Whether one more of the parts can be taken of a node, which is of the same kind as theirs."""
    if not parts.accelerator and any(node.total.get(name, 0) >= 1 for name in _ACCELERATORS):
        return False
    return all(node.free.get(name, 0) >= amount for name, amount in parts.bundle.items())


def _any_has(nodes: Iterable[State], name: str) -> bool:
    return any(node.total.get(name, 0) >= 1 for node in nodes)


def _by_kind(nodes: Iterable[State], accelerator: str) -> dict[str, list[State]]:
    found = defaultdict(list)
    for node in nodes:
        if node.total.get(accelerator or _CPU, 0) >= 1:
            kinds = [name for name in node.total if accelerator and name.startswith(_KIND)]
            found["".join(kinds[:1]).removeprefix(_KIND)].append(node)
    return found


def _parts(nodes: Sequence[State], accelerator: str, kind: str, wish: Wish) -> Iterable[Parts]:
    """What may be taken of equal nodes."""
    resource = accelerator or _CPU
    for slots in (
        {int(node.free.get(resource, 0)) for node in nodes} if wish.slots is None else {wish.slots}
    ):
        having = [node for node in nodes if slots and node.free.get(resource, 0) >= slots]
        count = len(having) if wish.nodes is None else wish.nodes
        if not 0 < count <= len(having):
            continue
        shares = sorted((_cpus(node, resource, slots) for node in having), reverse=True)
        yield Parts(count, accelerator, slots, shares[count - 1], kind)


def _cpus(node: State, resource: str, slots: int) -> int:
    """Of a node's processor cores, as large a part as of its slots, if it is free."""
    share = node.total.get(_CPU, 0) * slots / node.total[resource]
    return int(min(share, node.free.get(_CPU, 0)))
