"""What users read while the trials wait for slots."""

from __future__ import annotations

import threading

import pytest
import requests

from dsat.determined_cluster.waiting import StateWatch, TimeLimit, long_poll


def watched(*states: str | Exception, every_s: float = 10.0) -> tuple[list[bool], list[str]]:
    """Return the result of each check, and the printed lines."""
    answers, now, said = list(states), [0.0], list[str]()

    def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watch, found = StateWatch(ask, said.append, lambda: now[0]), list[bool]()
    while answers:
        now[0] += every_s
        found.append(watch.is_idle())
    return found, said


def test_trials_that_wait_for_slots_are_told_of_after_a_while_and_again() -> None:
    _, said = watched("RUNNING", *["QUEUED"] * 40, "RUNNING", "RUNNING")
    assert [line for line in said if "wait for free slots" in line] == said[:2]
    assert "for 20 s" in said[0] and "for 5 min" in said[1]
    assert len(said) == 3 and "run" in said[2] and "6 min 40 s" in said[2]
    assert watched("QUEUED", "RUNNING", "QUEUED", "PULLING", "RUNNING")[1] == [], "a short wait"


@pytest.mark.parametrize(
    ("states", "idle"),
    [
        (["PAUSED"], [True]),
        (["CANCELED"], [True]),
        (["STOPPING_KILLED"], [True]),
        (["RUNNING"], [False]),
        # An unavailable master changes nothing.
        (["PAUSED", requests.exceptions.ConnectionError("gone"), "RUNNING"], [True, True, False]),
    ],
)
def test_an_experiment_that_nothing_is_to_be_heard_of(
    states: list[str | Exception], idle: list[bool]
) -> None:
    assert watched(*states) == (idle, [])


class Left(Exception):
    pass


def test_a_long_poll_of_an_idle_experiment_is_repeated_and_can_be_left() -> None:
    """It also can if the last known state is idle, and the master answers no request."""
    never, asked = threading.Event(), list[int]()

    def ask() -> None:
        asked.append(1)
        never.wait(60)

    checks = iter(range(5))

    def check() -> None:
        if next(checks) == 4:
            raise Left

    with pytest.raises(Left):
        long_poll(ask, check, lambda: True, every_s=0.01)
    assert len(asked) == 2
    never.set()


def test_a_long_poll_whose_connection_has_died_is_repeated() -> None:
    never, asked, now = threading.Event(), list[int](), [0.0]

    def ask() -> str:
        asked.append(1)
        if len(asked) == 1:
            never.wait(60)
        return "events"

    def check() -> None:
        now[0] += 50.0
        assert now[0] < 500.0, "it would wait forever"

    answer = long_poll(ask, check, lambda: False, every_s=0.05, clock=lambda: now[0])
    assert (answer, len(asked)) == ("events", 2)
    assert now[0] >= 200.0, "a master may answer late"
    never.set()


@pytest.mark.parametrize(
    ("running", "overdue"),
    [
        ([{(0, 0)}] * 7, [False] * 6 + [True]),  # 100 s, and 60 s for its start
        ([{(0, 0)}] * 3 + [{(0, 1)}] * 7, [False] * 9 + [True]),  # it was restarted
        ([{(0, 0)}] * 3 + [set()] + [{(0, 0)}] * 3, [False] * 7),  # it was paused
        ([{(0, 0)}] * 3 + [ConnectionError("gone")] * 3 + [{(0, 0)}], [False] * 6 + [True]),
    ],
)
def test_when_a_running_trial_is_over_the_time_limit(
    running: list[set[tuple[int, int]] | Exception], overdue: list[bool]
) -> None:
    answers, now = list(running), [0.0]

    def ask() -> dict[tuple[int, int], int]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return dict.fromkeys(answer, 7)

    limit, found = TimeLimit(ask, 100.0, lambda: now[0]), []
    while answers:
        now[0] += 30.0
        found.append(limit.overdue() == {0: 7})
        now[0] += 0.1
        assert limit.overdue() == {}, "it asked just before"
    assert found == overdue
