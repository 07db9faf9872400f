"""Options: their allowed values."""

from __future__ import annotations

import pytest

from dsat.options import AMOUNT, DURATION, LORA, MEMORY_SIZE, SWITCH, Kind, write_memory_size


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (MEMORY_SIZE, "1048576", 2**20),
        (MEMORY_SIZE, "24 gib", 24 * 2**30),
        (MEMORY_SIZE, "1.5MiB", 3 * 2**19),
        (MEMORY_SIZE, "16GB", 16 * 10**9),
        (MEMORY_SIZE, "24G", 24 * 2**30),
        (MEMORY_SIZE, "1.5t", 3 * 2**39),
        (DURATION, "90", 90.0),
        (DURATION, "90s", 90.0),
        (DURATION, "2min", 120.0),
        (DURATION, "1.5h", 5400.0),
        (AMOUNT, "300B", 3e11),
        (AMOUNT, "1.5e9", 1.5e9),
        (AMOUNT, "1E9", 1e9),
    ],
)
def test_measures(kind: Kind, text: str, value: float) -> None:
    assert kind.read(text) == value
    if kind is MEMORY_SIZE:
        assert kind.read(write_memory_size(int(value))) == value


def test_switches_from_python() -> None:
    assert SWITCH.read(("--flag", [True])) == ("--flag", (True,))
    assert SWITCH.read(("--flag", [True, False])) == ("--flag", (True, False))
    with pytest.raises(ValueError, match="1 is not the name of a switch"):
        SWITCH.read((1, [2]))


def test_adapters() -> None:
    found = {"r": "16", "target": "q_proj+v_proj"}
    assert LORA.read("r=16,target=q_proj+v_proj") == LORA.read(found) == found
    assert LORA.read({"r": 16, "target": ["q_proj", "v_proj"]}) == found
    for wrong in ("16", "r=", "r=0", "rank=8", "r=x", "r=8,dropout=2"):
        with pytest.raises(ValueError, match=r"invalid|less than|not a"):
            LORA.read(wrong)
