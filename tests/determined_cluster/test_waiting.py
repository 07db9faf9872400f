"""Long polls, and messages while trials wait."""

from __future__ import annotations

import pytest
import requests

from dsat.determined_cluster.master import in_words
from dsat.determined_cluster.waiting import StateWatch


def watched(*states: str | Exception, every_s: float = 10.0) -> tuple[list[bool], list[str]]:
    """Return the result of each look, and the printed lines."""
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
    assert said[0] == "trials wait for free slots (since 20 s)"
    assert len(said) == 3 and said[1].startswith("trials wait for free slots (since 5 min")
    assert said[2] == "trials run, after 6 min 40 s"


def test_a_short_wait_is_no_news() -> None:
    assert watched("QUEUED", "RUNNING", "QUEUED", "PULLING", "RUNNING")[1] == []


@pytest.mark.parametrize(
    ("state", "idle"),
    [("PAUSED", True), ("CANCELED", True), ("STOPPING_KILLED", True), ("RUNNING", False)],
)
def test_an_experiment_that_nothing_is_to_be_heard_of(state: str, *, idle: bool) -> None:
    assert watched(state) == ([idle], [])


def test_a_master_that_is_away_changes_nothing() -> None:
    away = requests.exceptions.ConnectionError("gone")
    assert watched("PAUSED", away, "RUNNING") == ([True, True, False], [])


def test_why_a_request_failed_is_told_without_the_objects_of_libraries() -> None:
    with pytest.raises(requests.exceptions.ConnectionError) as caught:
        requests.get("http://127.0.0.1:9/api", timeout=5)
    assert "HTTPConnectionPool" in str(caught.value)
    assert in_words(caught.value) == "connection refused"
    assert in_words(requests.exceptions.ReadTimeout("x")) == "no answer in time"
    assert in_words(ValueError("first\nsecond")) == "first"
