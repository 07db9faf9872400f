"""A seeded share of the attacks; `make soak` makes the whole."""

from __future__ import annotations

import pytest

from testing.soak.attacks import ATTACKS

SHARE = {
    "inputs": 120,
    "journals": 120,
    "kills": 3,
    "failing_calls": 3,
    "surroundings": 2,
    "several_at_once": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARE)
def test_nothing_breaks(name: str) -> None:
    attack, *_ = ATTACKS[name]
    tally = attack(20_261_122, SHARE[name])
    assert tally.tried == SHARE[name]
    assert tally.findings == []
