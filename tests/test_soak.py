"""A seeded share of the attacks; `make soak` runs them at full size."""

from __future__ import annotations

import pytest

from testing.soak.__main__ import ATTACKS

SHARE = {
    "inputs": 120,
    "searches": 20,
    "journals": 120,
    "secrets": 15,
    "kills": 3,
    "failing_calls": 3,
    "several_at_once": 1,
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", SHARE)
def test_nothing_breaks(name: str) -> None:
    tally = ATTACKS[name].run(20_261_122, SHARE[name])
    assert tally.tried == SHARE[name]
    assert tally.findings == []
