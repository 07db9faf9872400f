"""Waiting until a device's memory is free again after a process was killed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dsat.in_trial import clocks

GIB = 2**30
CUDA = SimpleNamespace(device_name=lambda: "cuda")


class Device:
    """A device of 80 GiB whose used memory changes with time; time passes only during a wait."""

    def __init__(self, held: list[tuple[float, int]]) -> None:
        self.now_s = 0.0
        self._held = held

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def mem_get_info(self, index: int) -> tuple[int, int]:
        held = next(gib for until_s, gib in self._held if self.now_s < until_s)
        if held > 79:  # no room for CUDA's context
            raise RuntimeError("CUDA error: out of memory")
        return (80 - held) * GIB, 80 * GIB


@pytest.mark.parametrize(
    ("held", "waits_s"),
    [
        ([(1e9, 1)], 0.0),  # a desktop
        ([(2.0, 70), (1e9, 1)], 2.0),  # a slow driver
        ([(2.0, 80), (1e9, 1)], 2.0),
        ([(1.0, 70), (3.5, 40), (5.0, 20), (1e9, 0)], 5.0),
        ([(1.0, 70), (1e9, 60)], 4.0),  # another program's
        ([(second, 20 + second % 2) for second in range(1, 1000)], 20.0),  # but not forever
    ],
)
def test_memory_that_comes_back_is_waited_for_and_no_other(
    monkeypatch: pytest.MonkeyPatch, held: list[tuple[float, int]], waits_s: float
) -> None:
    device = Device(held)
    monkeypatch.setattr(clocks, "time", device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", device.mem_get_info)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
    clocks.wait_for_memory(CUDA, 0)
    assert device.now_s == pytest.approx(waits_s, abs=0.25)
