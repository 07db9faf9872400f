"""Messages of simulations, put together from parts that several processes send."""

from __future__ import annotations

import itertools
import socket

import pytest

from dsat.simulation import protocol


def test_parts_of_several_senders_may_come_in_any_order() -> None:
    messages = [{"number": number, "text": str(number) * 40_000} for number in range(3)]
    packets = [list(protocol.split(message, sender)) for sender, message in enumerate(messages)]
    assert all(len(parts) > 1 for parts in packets)
    sending, receiving = socket.socketpair(socket.AF_UNIX, protocol.SOCKET_TYPE)
    with sending, receiving:
        receiver, found = protocol.Receiver(receiving), []
        mixed = [part for parts in itertools.zip_longest(*packets) for part in parts if part]
        for packet in mixed:
            sending.send(packet)
            if packet in [parts[-1] for parts in packets]:
                found.append(receiver.receive())
        sending.close()
        assert receiver.receive() is None
    assert found == messages


@pytest.mark.parametrize("size", [0, 1, 2**15 - 20, 2**15, 2**16])
def test_a_message_of_any_size_comes_whole(size: int) -> None:
    message = {"text": "x" * size}
    sending, receiving = socket.socketpair(socket.AF_UNIX, protocol.SOCKET_TYPE)
    with sending, receiving:
        protocol.send(sending, message, sender=7)
        assert protocol.Receiver(receiving).receive() == message
