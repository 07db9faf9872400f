"""dsat reports that there is no accelerator only if no part of one exists."""

from __future__ import annotations

import glob
import importlib.util
from typing import Any

import pytest

from dsat.engines.machines import machine
from dsat.engines.machines.machine import find_machine_for_simulations


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without any part of an accelerator."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(glob, "glob", lambda pattern: [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(machine, "has_library", lambda library: False)


def test_a_bare_machine_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(machine, "find_machine")  # torch must not be asked
    found = find_machine_for_simulations()
    assert (found.accelerator, found.visible_devices) == ("cpu", ())
    assert found.num_slots == len(found.devices) > 0


@pytest.mark.parametrize(
    ("module", "function", "answer"),
    [
        (glob, "glob", lambda pattern: ["/dev/nvidiactl"] * (pattern == "/dev/nvidia*")),
        (glob, "glob", lambda pattern: ["/dev/kfd"] * (pattern == "/dev/kfd")),
        (importlib.util, "find_spec", lambda name: name == "torch_npu"),
        (machine, "has_library", lambda library: library == "libcuda.so.1"),
    ],
)
def test_anything_of_one_is_a_doubt(
    monkeypatch: pytest.MonkeyPatch, module: Any, function: str, answer: Any
) -> None:
    monkeypatch.setattr(module, function, answer)
    assert not machine.has_no_accelerator()


def test_the_users_word_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, certain in (("cpu", True), ("cuda", False)):
        monkeypatch.setenv("DS_ACCELERATOR", word)
        assert machine.has_no_accelerator() is certain
