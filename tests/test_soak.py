"""A seeded share of the attacks; `make soak` makes the whole."""

from __future__ import annotations

import pytest

from testing.soak.attacks import ATTACKS

SHARE = {
    "inputs": 120,
    "searches": 20,
    "journals": 120,
    "losses": 1000,
    "secrets": 15,
    "page": 6,
    "kills": 3,
    "failing_calls": 3,
    "read_only_folders": 2,
    "surroundings": 2,
    "several_at_once": 1,
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHARE)
def test_nothing_breaks(name: str) -> None:
    tally = ATTACKS[name].run(20_261_122, SHARE[name])
    assert tally.tried == SHARE[name]
    assert tally.findings == []
