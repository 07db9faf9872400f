"""Messages between the client of a simulation and its server: JSON objects of any size.

The socket keeps packets apart (SOCK_SEQPACKET), but a packet must fit in its buffer. A message is
therefore sent in parts. Simulations are processes that share one socket, so each part names its
sender.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dsat.values import parallelism
from dsat.values.parallelism import Parallelism

SOCKET_TYPE = socket.SOCK_SEQPACKET
# A socket that can be written to takes this much without waiting: Linux calls it writable while
# three quarters of its buffer (208 KiB by default) are free.
_PART_BYTES = 2**15
_MORE, _LAST = b"+", b"."
WALL_FACTOR = 5  # seconds on the clock in which a simulation may use one of its processor time


class Question(NamedTuple):
    """A configuration to simulate.

    Attributes:
        config: the whole DeepSpeed configuration, in which "auto" is the script's to decide.
        micro_batch: whatever the configuration says.
        slots: ranks.
        switches: of the model, beside the simulator's own.
        activations_only: the model's passes alone.
        traced: kernels and collectives are recorded.
        as_cpu: the ranks run on a CPU. The simulator sets this and `workspace_bytes`.
        workspace_bytes: what cuBLAS takes on a device while it multiplies.
    """

    config: Mapping[str, Any]
    micro_batch: int
    slots: int
    switches: Mapping[str, Any] = {}
    activations_only: bool = False
    traced: bool = False
    as_cpu: bool = False
    workspace_bytes: int = 0

    @property
    def parallelism(self) -> Parallelism:
        """Division of layers and sequences among the ranks."""
        return parallelism.of_config(self.config)

    @property
    def gas(self) -> int:
        """Micro steps of an optimizer step."""
        return int(self.config.get("gradient_accumulation_steps", 1))


class ScriptFacts(NamedTuple):
    """Facts of a script at its first training step.

    Attributes:
        sequence_length: tokens of a sample of its first batch, if samples are sequences of tokens.
        hidden_size: of its model, by which a Trainer fills in "auto"; None if it is not known.
        model_takes: the model's `max_position_embeddings`; 0 if it has none.
        sizes: of its model for `ModelFacts`, with the type in which DeepSpeed trains it, and
            whether stage 3 partitions it while the script makes it.
        optimizer: the `optimizer` section that stands for what it passes to
            `deepspeed.initialize`; empty if it passes none.
    """

    sequence_length: int | None
    hidden_size: int | None
    model_takes: int
    sizes: Mapping[str, Any] = {}
    optimizer: Mapping[str, Any] = {}


def split(message: Mapping[str, Any], sender: int) -> Iterator[bytes]:
    """Yield the packets of a message.

    Args:
        sender: a number that no other process uses on the same socket.
    """
    data, head = json.dumps(message).encode(), b"%d " % sender
    for begin in range(0, len(data), _PART_BYTES):
        mark = _LAST if begin + _PART_BYTES >= len(data) else _MORE
        yield head + mark + data[begin : begin + _PART_BYTES]


def send(connection: socket.socket, message: Mapping[str, Any], sender: int) -> None:
    """Send a message; wait until there is room for all of it."""
    for packet in split(message, sender):
        connection.send(packet)


class Receiver:
    """Messages that arrive on a socket, put together from their parts."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._parts: dict[bytes, list[bytes]] = {}

    def receive(self) -> dict[str, Any] | None:
        """Return the next message; None if the other side has ended."""
        while packet := self._connection.recv(2 * _PART_BYTES):
            if (message := self._add(packet)) is not None:
                return message
        return None

    def _add(self, packet: bytes) -> dict[str, Any] | None:
        """Add a part; return its message if that was the last one."""
        sender, _, rest = packet.partition(b" ")
        parts = self._parts.setdefault(sender, [])
        parts.append(rest[1:])
        if rest[:1] == _MORE:
            return None
        message: dict[str, Any] = json.loads(b"".join(self._parts.pop(sender)))
        return message
