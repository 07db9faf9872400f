"""Binary search: schedules written by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from testing.helpers import ran
from testing.search_contract import Driven, play, proposals_of, space_of, walk


@pytest.mark.parametrize(
    "trials",
    [
        "8 OK, 12 OK, 14 OK, 15 OK, end",
        "8 OOM, 4 OOM, 2 OOM, 1 OOM, end",
        "8 OK, 12 OOM, 10 OK, 11 OOM, end",
        "8 HOST_OOM, 4 OK, 6 HOST_OOM, 5 OK, end",
        # Nothing slower than a time-out; the second one ends it.
        "8 TIMEOUT, 4 OK, 6 OK, 7 OK, end",
        "8 OK, 12 TIMEOUT, 10 OOM, 9 OK, end",
        "8 TIMEOUT, 4 TIMEOUT, end",
        "8 ERROR, end",
        "8 INVALID, end",
        "8 CANCELED, end",
    ],
)
def test_binary_bisects_one_configuration(trials: str) -> None:
    walk(Driven("binary", space_of(1)), trials)


def test_binary_asked_ahead_of_tells() -> None:
    play(
        Driven("binary", space_of(3)),
        """
        ask 0@8
        ask 1@8
        ask 2@8
        ask nothing
        tell 1@8 OK 1
        ask 1@12
        ask nothing
        tell 2@8 OOM
        tell 0@8 OK 1
        ask 0@12    # its latest trial began first
        ask 2@4
        ask nothing
        tell 0@12 ERROR
        ask nothing
        """,
    )


def test_binary_finishes_what_it_began_before_it_draws() -> None:
    play(
        Driven("binary", space_of(2)),
        """
        ask 0@8
        tell 0@8 OK 1
        ask 0@12
        ask 1@8
        """,
    )


def test_binary_tries_only_allowed_micro_batches() -> None:
    """30 samples do not fit."""
    search = Driven("binary", space_of(1, micro_batches=(2, 6, 10, 30)), ceiling=29)
    walk(search, "6 OK, 10 OK, end")


def test_binary_rises_in_steps_until_more_samples_are_no_faster() -> None:
    """Throughput grows up to 64 samples; above, the open range is bisected."""
    search = Driven("binary", space_of(1, micro_batches=range(1, 1025)), ceiling=1000, ramp=True)
    search.observe(4, ran(4.0))
    asked = proposals_of(search, lambda p: ran(float(min(p.micro_batch, 64))), limit=4)
    assert [proposal.micro_batch for proposal in asked] == [16, 64, 256, 628]


def test_binary_rises_to_the_end_of_the_data() -> None:
    search = Driven("binary", space_of(1, micro_batches=range(1, 1025)), ceiling=1000, ramp=True)
    search.observe(4, replace(ran(4.0), most_samples=40))
    asked = proposals_of(search, lambda p: replace(ran(float(p.micro_batch)), most_samples=40))
    sizes = [proposal.micro_batch for proposal in asked]
    assert sizes[0] == 16 and max(sizes) == 40


def test_binary_tries_what_is_beside_an_own_micro_batch_that_is_not_listed() -> None:
    """The user's own micro batch is three; four must be tried nevertheless."""
    search = Driven("binary", space_of(1, micro_batches=(1, 2, 4, 8)), ceiling=15)
    search.observe(3, ran(1.0))
    asked = proposals_of(search, lambda p: ran(float(p.micro_batch)))
    assert 4 in [proposal.micro_batch for proposal in asked]
