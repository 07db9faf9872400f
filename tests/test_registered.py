"""Searches and engines that a user registers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dsat
from dsat.errors import EngineError, UserInputError
from dsat.run import search_phase
from dsat.search import SEARCHES, Point, Problem, Proposal, RandomSearch, Search, Stop, Wait
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial
from testing import reference
from testing.api_place import Place


class AskAndTell:
    """A search with the interface of the last release."""

    def ask(self) -> None: ...

    def tell(self, proposal: object, outcome: object) -> None: ...


def test_an_own_search(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SEARCHES, "mine", RandomSearch)  # undone after the test
    del SEARCHES["mine"]

    class Mine(RandomSearch):
        def __init__(self, *args: Any, times: int, **options: Any) -> None:
            super().__init__(*args, trials_per_config=times, early_stopping=None, **options)

    dsat.register_search("mine", Mine)
    result = place.tune(method="mine", search_options={"times": 2})
    assert len(result.trials) == 6
    with pytest.raises(UserInputError, match=r"'mine'.*'tries'"):
        place.tune(method="mine", search_options={"tries": 2})
    dsat.register_search("mine", Mine)  # as when a notebook's cell runs again
    with pytest.raises(ValueError, match="'random'"):
        dsat.register_search("random", Mine)
    for wrong in (Search, dict):
        with pytest.raises(TypeError, match="Search"):
            dsat.register_search("other", wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="changelog"):
        dsat.register_search("old", AskAndTell)  # type: ignore[arg-type]
    for name in ("local", "auto"):
        with pytest.raises(ValueError, match=name):
            dsat.register_engine(name, place._engine)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        Point(0, 0, 1),
        Proposal(Point(99, 0, 1)),
        Proposal(Point(0, -1, 1)),
        Proposal(Point(0, 0, 0)),
        Proposal(Point(0, 0, 2.0)),  # type: ignore[arg-type]
        Proposal(Point(0, 0, 10**9)),
        Proposal((0, 0, 1)),  # type: ignore[arg-type]
        Proposal(Point(0, 0, 1), arm="a"),  # type: ignore[arg-type]
        Proposal(Point(0, 0, 1), note={"score": 0.5}),  # type: ignore[dict-item]
        Proposal(Point(0, 0, 1), note=None),  # type: ignore[arg-type]
        Stop(None),  # type: ignore[arg-type]
        Stop(3),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_answer_of_an_own_search_is_said(
    answer: Any, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(RandomSearch):
        def propose(self, *_: Any) -> Any:
            return answer

    monkeypatch.setitem(SEARCHES, "mine", Mine)
    with pytest.raises(UserInputError, match=r"search 'mine'.*Mine\.propose"):
        place.tune(method="mine", train_batch_size="own")


@pytest.mark.parametrize(
    ("answer", "trials", "reason"),
    [
        (Wait(), 1, "the search waits, but no trial is running"),
        (Proposal(Point(0, 0, 1)), 1, "the search proposed known configurations 3 times in a row"),
        (
            Proposal(Point(np.int64(1), np.int64(0), np.int64(2)), np.int64(3), {"r": np.int64(4)}),
            2,
            "the search proposed known configurations 3 times in a row",
        ),
    ],
)
def test_an_own_search_ends_for_a_true_reason(
    answer: Any, trials: int, reason: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(RandomSearch):
        def propose(self, *_: Any) -> Any:
            return answer

    monkeypatch.setitem(SEARCHES, "mine", Mine)
    monkeypatch.setattr(search_phase, "_MOST_REPEATED", 3)
    result = place.tune(method="mine")
    tried = [row for row in result.trials if row["kind"] != "profile"]
    assert (len(tried), result.stop_reason) == (trials, reason)
    assert result.run_dir is not None and dsat.load_run(result.run_dir) == result


def test_options_of_an_own_search_are_as_they_are_recorded(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = []

    class Mine(RandomSearch):
        def __init__(self, problem: Problem, sizes: Any) -> None:
            got.append(sizes)
            super().__init__(problem)

        def propose(self, *_: Any) -> Any:
            return Stop()

    monkeypatch.setitem(SEARCHES, "mine", Mine)
    options = {"sizes": (np.int64(1), {2: 3})}
    run_dir = place.tune(method="mine", search_options=options).run_dir
    place.tune(method="mine", search_options=options, run_dir=run_dir, resume=True, max_trials=8)
    assert got and all(each == [1, {"2": 3}] for each in got)
    for wrong in ({1}, Path("x"), float("nan")):
        with pytest.raises(UserInputError, match="search_options: cannot be recorded"):
            place.tune(method="mine", search_options={"sizes": wrong}, run_dir="wrong")
        assert not Path("wrong").exists()


class Idle:
    """An engine whose `poll` returns what it is told."""

    def __init__(self, num_slots: int, ended: list[Any]) -> None:
        self.num_slots, self.ended = num_slots, ended

    def launch(self, trial: Trial) -> None: ...

    def poll(self, timeout_s: float) -> list[Any]:
        return self.ended

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Idle(0, []), r"Idle\.num_slots` is 0, but a trial needs 1 device"),
        (Idle(1, [(99, Outcome(OutcomeKind.ERROR))]), r"Idle\.poll` returned \(99, "),
        (Idle(1, [(0, "OK")]), r"Idle\.poll` returned \(0, 'OK'\)"),
    ],
)
def test_a_wrong_answer_of_an_own_engine_is_said(engine: Idle, said: str, place: Place) -> None:
    dsat.register_engine("idle", lambda *_: engine)
    with pytest.raises(EngineError, match=said):
        place.tune(engine="idle")


def test_the_search_and_the_engine_of_the_page_work(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for example in reference.python_examples():
        if "dsat.register_" in example:
            exec(example, {"dsat": dsat, "__name__": "page"})
    try:
        result = place.tune(method="strategies", engine="computed", max_trials=20)
    finally:
        for name in ("strategies", "patient"):
            del SEARCHES[name]
    assert result.gain is not None and result.gain > 1
    searched = [row for row in result.trials if row["kind"] == "search"]
    tried = [(row["stage"], row["train_micro_batch_size_per_gpu"]) for row in searched]
    assert len(tried) > 10 and tried == sorted(set(tried))
