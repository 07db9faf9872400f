"""Binary search: schedules written by hand."""

from __future__ import annotations

import pytest

from testing.search_contract import Driven, play, space_of, walk


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
    """30 is more than can fit."""
    search = Driven("binary", space_of(1, micro_batches=(2, 6, 10, 30)), ceiling=29)
    walk(search, "6 OK, 10 OK, end")
