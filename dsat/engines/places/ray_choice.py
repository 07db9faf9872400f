"""Choice of the resources to reserve in a Ray cluster: equal parts of nodes of one kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dsat.errors import UserInputError

# Ray's names of the accelerators that DeepSpeed supports.
_ACCELERATORS = ("GPU", "NPU", "HPU")
_CPU, _KIND = "CPU", "accelerator_type:"


class NodeResources(NamedTuple):
    """Total and free amounts of a node's Ray resources."""

    total: Mapping[str, float]
    free: Mapping[str, float]

    @property
    def kind(self) -> str:
        names = [name for name in self.total if name.startswith(_KIND)]
        return "".join(names[:1]).removeprefix(_KIND)


class Parts(NamedTuple):
    """Equal parts of nodes: the number of nodes, then the slots and cores of each.

    Slots are CPU cores if `accelerator` is empty.
    """

    nodes: int
    accelerator: str
    slots: int
    cpus: int
    kind: str = ""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources to reserve on each node; a tiny amount of `kind` selects nodes of this kind."""
        kind = {_KIND + self.kind: 0.001} if self.kind else {}
        amounts = {_CPU: self.cpus, self.accelerator: self.slots} | kind
        return {name: amount for name, amount in amounts.items() if name and amount}

    def __str__(self) -> str:
        slots = " ".join(filter(None, (str(self.slots), self.kind, self.accelerator or _CPU)))
        return f"{slots} of {self.nodes} node{'s' * (self.nodes > 1)}"


def parse_slots(text: str) -> tuple[str, int]:
    """Parse `[TYPE:]N` into a kind of accelerator and a number.

    Raises:
        UserInputError: the text has another form.
    """
    kind, _, number = text.rpartition(":")
    if not number.isdecimal() or int(number) == 0:
        raise UserInputError(
            "is not a number of GPUs, such as 8 or A100:8", where=f"--gpus-per-node {text}"
        )
    return kind, int(number)


def choose(
    nodes: Sequence[NodeResources], count: int | None, slots: int | None, kind: str = ""
) -> Parts | None:
    """Choose equal parts of the freest node and of similar nodes; None if too little is free.

    Args:
        count: number of nodes; None for all that have enough free slots.
        slots: slots of each node; None for as many as are free on the freest node. If `count` is
            set, too, the parts need not be free, because an autoscaler may add nodes.
        kind: kind of accelerator; empty for the kind of the freest node.
    """
    accelerators = [
        name for name in _ACCELERATORS if any(node.total.get(name, 0) >= 1 for node in nodes)
    ]
    accelerator = accelerators[0] if accelerators else "" if slots is None else _ACCELERATORS[0]
    resource = accelerator or _CPU
    if count is not None and slots is not None:
        return Parts(count, accelerator, slots, slots, kind)
    freest_first = sorted(
        (node for node in nodes if kind in ("", node.kind)),
        key=lambda node: -int(node.free.get(resource, 0)),
    )
    if not freest_first:
        return None
    first = freest_first[0]
    slots = slots or int(first.free.get(resource, 0))
    able = [n for n in freest_first if n.kind == first.kind and n.free.get(resource, 0) >= slots]
    count = count or len(able)
    if not slots or len(able) < count:
        return None
    # Reserve the same share of a node's cores as of its slots, unless fewer cores are free.
    cpus = (
        min(n.total.get(_CPU, 0) * slots / n.total[resource], n.free.get(_CPU, 0)) for n in able
    )
    return Parts(count, accelerator, slots, int(min(cpus)), first.kind if accelerator else "")
