from __future__ import annotations

import pytest

from testing.helpers import play, search_of, space_of


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(
            """
            ask 0@8
            tell 0@8 OK 1
            ask 0@12
            tell 0@12 OK 1
            ask 0@14
            tell 0@14 OK 1
            ask 0@15
            tell 0@15 OK 1
            ask nothing
            """,
            id="all fit",
        ),
        pytest.param(
            """
            ask 0@8
            tell 0@8 OOM
            ask 0@4
            tell 0@4 OOM
            ask 0@2
            tell 0@2 OOM
            ask 0@1
            tell 0@1 OOM
            ask nothing
            """,
            id="none fits",
        ),
        pytest.param(
            """
            ask 0@8
            tell 0@8 OK 1
            ask 0@12
            tell 0@12 OOM
            ask 0@10
            tell 0@10 OK 1
            ask 0@11
            tell 0@11 OOM
            ask nothing
            """,
            id="ten fit",
        ),
        pytest.param(
            """
            ask 0@8
            tell 0@8 HOST_OOM
            ask 0@4
            tell 0@4 OK 1
            ask 0@6
            tell 0@6 HOST_OOM
            ask 0@5
            tell 0@5 OK 1
            ask nothing
            """,
            id="host memory shrinks like device memory",
        ),
        pytest.param(
            """
            ask 0@8
            tell 0@8 OK 9
            ask 0@12
            tell 0@12 OK 1   # slower, yet what is larger stays open: only memory bounds it
            ask 0@14
            tell 0@14 OOM
            ask 0@13
            """,
            id="a worse value does not end it",
        ),
        pytest.param(
            """
            ask 0@8
            tell 0@8 TIMEOUT
            ask 0@4
            tell 0@4 OK 1
            ask 0@6
            tell 0@6 OK 1
            ask 0@7
            tell 0@7 OK 1
            ask nothing
            """,
            id="nothing slower than a time-out",
        ),
        pytest.param(
            """
            ask 0@8
            tell 0@8 OK 1
            ask 0@12
            tell 0@12 TIMEOUT
            ask 0@10
            tell 0@10 OOM
            ask 0@9
            tell 0@9 OK 1
            ask nothing
            """,
            id="time-out above, then memory",
        ),
        pytest.param(
            """
            ask 0@8
            tell 0@8 TIMEOUT
            ask 0@4
            tell 0@4 TIMEOUT
            ask nothing
            """,
            id="the second time-out ends it",
        ),
        pytest.param("ask 0@8\ntell 0@8 ERROR\nask nothing", id="error"),
        pytest.param("ask 0@8\ntell 0@8 INVALID\nask nothing", id="invalid"),
        pytest.param("ask 0@8\ntell 0@8 CANCELED\nask nothing", id="canceled"),
    ],
)
def test_binary_bisects_one_configuration(script: str) -> None:
    play(search_of("binary", space_of(1)), script)


def test_binary_replaces_what_is_finished_until_all_is_drawn() -> None:
    play(
        search_of("binary", space_of(3), ceiling=2),
        """
        ask 0@1
        tell 0@1 ERROR
        ask 1@1
        tell 1@1 OK 1
        ask 1@2
        tell 1@2 OOM
        ask 2@1
        tell 2@1 OOM
        ask nothing
        ask nothing
        """,
    )


def test_binary_asked_ahead_of_tells() -> None:
    play(
        search_of("binary", space_of(3)),
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
        ask 2@4     # waits the longest
        ask 0@12
        ask nothing
        tell 0@12 ERROR
        ask nothing
        """,
    )


def test_binary_finishes_what_it_began_before_it_draws() -> None:
    play(
        search_of("binary", space_of(2)),
        """
        ask 0@8
        tell 0@8 OK 1
        ask 0@12
        ask 1@8
        """,
    )


def test_binary_tries_only_allowed_micro_batches() -> None:
    play(
        search_of("binary", space_of(1, micro_batches=(2, 6, 10, 30)), ceiling=29),
        """
        ask 0@6
        tell 0@6 OK 1
        ask 0@10
        tell 0@10 OK 1
        ask nothing     # 30 is more than can fit
        """,
    )
