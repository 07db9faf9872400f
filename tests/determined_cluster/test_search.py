"""The search over searcher events: what it answers, and that no death of the runner shows."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from dsat.determined_cluster.engine import CLOSE, CREATE, SHUTDOWN, VALIDATE
from dsat.determined_cluster.search import ClusterSearch
from dsat.report import format as fmt
from dsat.space.plan import Plan
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import TrialKind
from testing.cluster import Event, FakeMaster, answer, metric_of, search_of
from testing.helpers import World, plan_of, ran
from tests.tuning.test_finals_phase import Buckets, finals_plan

OOM_LOG = "RuntimeError: CUDA error: out of memory"


class Theatre:
    """A whole search against a made-up machine, its runner killed where a test says.

    Args:
        kill: the runner dies at the event of this number, at this point: `handled` (the state not
            saved), `saved` (the operations not posted) or `posted`.
    """

    def __init__(self, plan: Plan, kill: tuple[int, str] | None = None) -> None:
        self.plan, self.kill = plan, kill
        self.master, self.world = FakeMaster(), World()
        self.saved: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.handled = 0

    def play(self) -> ClusterSearch:
        search = self.start()
        while True:
            if not self.master.events:
                if not self.master.active:
                    return search
                self.let_one_end(search)
            event = self.master.events[0]
            self.handled += 1
            operations = answer(search, event)
            if self.dies("handled"):
                search = self.start()
                continue
            self.saved = json.loads(json.dumps(search.journal.events))
            if self.dies("saved"):
                search = self.start()
                continue
            self.master.post(event.id, operations)
            if self.dies("posted"):
                search = self.start()

    def start(self) -> ClusterSearch:
        return search_of(self.plan, self.master, self.saved, say=self.said.append)

    def dies(self, point: str) -> bool:
        if self.kill != (self.handled, point):
            return False
        self.kill = None
        return True

    def let_one_end(self, search: ClusterSearch) -> None:
        running = [search.run.trials[number] for number in self.master.active.values()]
        trial = self.world.next_to_end(running)
        request_id = search.engine.request_id(trial.id)
        outcome = self.world.outcome(trial)
        if outcome.kind in (OutcomeKind.OK, OutcomeKind.HOST_OOM):
            self.master.report(request_id, metric_of(outcome))
        elif outcome.kind is OutcomeKind.OOM:
            self.master.fail(request_id, OOM_LOG)
        elif outcome.kind is OutcomeKind.TIMEOUT:
            self.master.kill(trial.id)
        else:
            self.master.fail(request_id, "ValueError: the script crashed")


def decisions(journal: list[dict[str, Any]]) -> list[Any]:
    """A journal without times."""
    kept = []
    for event in json.loads(json.dumps(journal)):
        event.pop("elapsed_s", None)
        event.pop("at_s", None)
        event.pop("time_s", None)
        if "outcome" in event:
            event["outcome"].pop("duration_s")
        kept.append(event)
    return kept


@pytest.mark.parametrize("method", ["binary", "random", "asha"])
def test_a_search_goes_from_the_profile_to_the_shutdown(method: str) -> None:
    theatre = Theatre(plan_of(method, max_trials=12))
    search = theatre.play()
    kinds = [kind for kind, _ in theatre.master.posted]
    assert kinds.count(CREATE) == 12 == len(search.run.outcomes)
    assert kinds[-1] == SHUTDOWN and kinds.count(SHUTDOWN) == 1
    assert search.over and search.progress == 1.0
    assert search.run.best is not None
    said = "\n".join(theatre.said)
    for fact in ("parameters 200,000,000", "memory per slot", "activations", "largest micro batch"):
        assert fact in said
    assert f"best {search.run.best.name}" in said


POINTS = ["handled", "saved", "posted"]


@pytest.mark.parametrize("point", POINTS)
def test_finals_run_alone_on_a_cluster_too(point: str, random_seed: int) -> None:
    undisturbed = Theatre(finals_plan(finals=6))
    undisturbed.world = Buckets({10: 1.2}, spread=0.02)
    other = undisturbed.play().run
    theatre = Theatre(
        finals_plan(finals=6), (random.Random(random_seed).randrange(undisturbed.handled), point)
    )
    theatre.world = undisturbed.world
    run = theatre.play().run
    finals = [t.id for t in run.trials.values() if t.kind is TrialKind.FINAL]
    assert 4 <= len(finals) <= 6 and finals == list(range(finals[0], len(run.trials)))
    assert list(run.trials.values()) == list(other.trials.values())
    assert run.best is not None and other.best is not None and run.best.id == other.best.id
    ended = list(run.outcomes)
    assert ended.index(finals[0]) == finals[0], "it began when all of the search had ended"


PLAN = plan_of("asha", max_trials=9)


@pytest.mark.parametrize("point", POINTS)
def test_a_runner_that_dies_anywhere_leaves_no_trace(point: str, random_seed: int) -> None:
    undisturbed = Theatre(PLAN)
    expected = undisturbed.play()
    assert undisturbed.handled > 20
    moments = random.Random(random_seed).sample(range(2, undisturbed.handled), 4)
    for number in (1, *moments, undisturbed.handled):
        theatre = Theatre(PLAN, kill=(number, point))
        search = theatre.play()
        assert theatre.kill is None, "it did die"
        assert theatre.master.posted == undisturbed.master.posted, number
        assert decisions(search.journal.events) == decisions(expected.journal.events), number


def begun(*, slots: int = 2) -> tuple[ClusterSearch, FakeMaster, list[str]]:
    """A search whose model is profiled, and the request ids of the trials that run."""
    master = FakeMaster()
    search = search_of(plan_of("random", max_trials=9), master, num_slots=slots)
    master.post(1, answer(search, master.events[0]))
    drain(search, master)
    [own] = master.active
    master.report(own, metric_of(replace(ran(), profile=World.profile)))
    drain(search, master)
    return search, master, list(master.active)


def drain(search: ClusterSearch, master: FakeMaster) -> None:
    while master.events:
        event = master.events[0]
        master.post(event.id, answer(search, event))


def test_only_news_changes_anything() -> None:
    """An event gets the same answer again; under another number, or of a stranger, it is none."""
    search, master, [request_id, _] = begun()
    master.report(request_id, metric_of(ran(3.0)))
    [event] = master.events
    first = answer(search, event)
    assert [*map(list, first)] == [[CLOSE], [CREATE], [VALIDATE]]
    journal = list(search.journal.events)
    assert answer(search, event) == first
    for request in (request_id, "00000000-0000-0000-0000-000000000000"):
        for kind in ("validated", "failed", "canceled", "closed"):
            assert answer(search, Event(99, kind, request, metric_of(ran(1e9)))) == []
    assert search.journal.events == journal


def test_a_trial_that_a_user_kills_is_lost_and_the_search_goes_on() -> None:
    search, master, [request_id, _] = begun()
    master.kill(master.active[request_id])
    drain(search, master)
    [lost] = [o for o in search.run.outcomes.values() if o.kind is OutcomeKind.CANCELED]
    assert "user" in lost.message
    assert len(master.active) == 2


def test_the_time_of_a_search_goes_on_while_its_runner_is_dead_but_not_while_it_pauses() -> None:
    now = [1000.0]

    def search_at(events: list[dict[str, Any]]) -> ClusterSearch:
        return search_of(plan_of("random", max_trials=9), master, events, clock=lambda: now[0])

    master = FakeMaster()
    search = search_at([])
    drain(search, master)
    now[0] += 50.0  # it dies, and another process hears the next event
    search = search_at(list(search.journal.events))
    [own] = master.active
    master.report(own, metric_of(replace(ran(), profile=World.profile)))
    drain(search, master)
    assert search.run.running_s == 50.0
    assert list(search.run.ended_at_s.values()) == [now[0]]
    search.tuner.pause()
    now[0] += 3600.0
    search = search_at(list(search.journal.events))
    now[0] += 7.0
    master.report(next(iter(master.active)), metric_of(ran(3.0)))
    drain(search, master)
    assert search.run.running_s == 57.0
    now[0] -= 3600.0  # the clock of the machine is set
    master.report(next(iter(master.active)), metric_of(ran(3.0)))
    drain(search, master)
    assert search.run.running_s == 57.0


class Tight(World):
    """A slot that the formula finds too small for what runs there all the same."""

    profile = replace(World.profile, slot_memory_bytes=42 * 10**8)


def test_one_estimate_is_told_and_no_stage_is_called_unfit_that_ran() -> None:
    base = {**plan_of().base_config, "zero_optimization": {"stage": 2}}
    stages = (0, 1, 2, 3)
    theatre = Theatre(plan_of("random", max_trials=4, zero_stages=stages, base_config=base))
    theatre.world = Tight()
    run = theatre.play().run
    lines = {line.partition(":")[0]: line for line in theatre.said if line.startswith("stage ")}
    assert "predicted not to fit" in lines["stage 2"] and "micro batch 4 ran" in lines["stage 2"]
    assert "does not fit" in lines["stage 3"] and "ran" not in lines["stage 3"]
    [smallest] = [t for t in run.trials.values() if t.name == "z0_gas1_tmbspg1"]
    assert smallest.predicted_bytes is not None
    told = fmt.memory(smallest.predicted_bytes)
    assert f"{told} per slot at micro batch 1" in lines["stage 0"]
    [result] = [line for line in theatre.said if f" {smallest.name}: " in line]
    assert f"{told} predicted" in result
