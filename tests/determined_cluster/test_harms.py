"""Whole searches on a cluster in which something goes wrong, or users interfere."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from testing.forked import AHEAD
from testing.on_cluster import RUNNER, SEARCH, Command, OnCluster, ended, quick_cluster

pytestmark = pytest.mark.slow
TRIALS = 6
OPTIONS = (
    *("--max-trials", TRIALS, "--finals", 2, "--max-concurrent-trials", 2, "--max-micro-batch", 16),
    *("--max-search-runner-restarts", 1000, "--json"),
)
STRANGER = "00000000-0000-0000-0000-000000000000"
POSTS = r"POST .*/searcher_operations"
AT = 3  # number of trials that have ended when the harm happens

Harm = Callable[[OnCluster], None]


def search_with(harm: Harm, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Run a search with a harm to its end; return its result, its trials and the runner's log."""
    with quick_cluster(folder, limit=AT) as there:
        process = there.begin_search("pretend", *OPTIONS)
        there.let_end(AT)
        harm(there)
        there.let_end()
        told = ended(process)
        assert told.status == 0, told
        assert (there.state(RUNNER), there.state(SEARCH)) == ("COMPLETED", "COMPLETED")
        return without_times(json.loads(told.out)), there.created(), there.said


def without_times(result: Mapping[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in result if key not in ("wall_s", "url", "run_dir")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return the result and the trials of a search without harm."""
    found, created, _ = search_with(lambda there: None, tmp_path_factory.mktemp("undisturbed"))
    assert len(created) == len(found["trials"]) == TRIALS
    return found, created


def fails_at_first(*patterns: str, **how: Any) -> Harm:
    """Make every matching request fail at its first attempt."""

    def harm(there: OnCluster) -> None:
        for pattern in patterns:
            there.master.fault(pattern, every=2, times=None, **how)

    return harm


REPEATED = (
    *(POSTS, r"GET .*/searcher_events", r"POST .*/checkpoints", r"GET .*/logs"),
    *(r"GET .*/experiments/\d+$", r"POST .*/progress"),
)


def events_come_again(there: OnCluster) -> None:
    """Repeat old events, one of them with another id, and send events of unknown trials."""
    known = there.created()[0]["requestId"]
    there.master.redeliver(
        SEARCH,
        {"id": 1, "initialOperations": {"placeholder": 0}},
        {"id": 2, "trialCreated": {"requestId": known}},
        *({"id": 2, "trialClosed": {"requestId": request_id}} for request_id in (known, STRANGER)),
        *(
            {"id": 3, "validationCompleted": {"requestId": request_id, "metric": 1e9}}
            for request_id in (known, STRANGER)
        ),
    )


def trial_is_gone_before_it_is_closed(there: OnCluster) -> None:
    """Let the second post for the next trial that ends fail: it answers the report, and closes
    the trial."""
    there.master.fault(POSTS, status=400, message="trial could not be found", after=1)


def master_restarts(there: OnCluster) -> None:
    there.master.http.stop()
    there.until_said("the master does not answer (")
    there.master.http.start()


def search_is_paused(there: OnCluster) -> None:
    there.user.get_experiment(SEARCH).pause()
    there.until_said("is paused; waiting")
    there.user.get_experiment(SEARCH).activate()


def runner_is_paused(there: OnCluster) -> None:
    there.user.get_experiment(RUNNER).pause()
    runner = there.master.trials(RUNNER)[0]
    there.master.wait_until(lambda: runner.allocation is None, "the runner's leave")
    assert not there.master.experiment(SEARCH).state.is_terminal
    there.user.get_experiment(RUNNER).activate()


def runner_moves_to_another_agent(there: OnCluster) -> None:
    there.master.preempt(there.runner)
    there.until_said("preempted: running trials continue")


def token_expires(there: OnCluster) -> None:
    """Reject the token, so the runner must restart, which gives it another token."""
    there.master.fault(r"GET .*/searcher_events", status=401)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (fails_at_first(*REPEATED, status=500), "the master answers with an error ("),
        (fails_at_first(*REPEATED, status=502), "the master does not answer (status 502)"),
        (fails_at_first(*REPEATED, kind="drop"), ""),
        (fails_at_first(*REPEATED, kind="drop_answer"), ""),
        (master_restarts, "the master answers again"),
        (events_come_again, ""),
        (trial_is_gone_before_it_is_closed, ""),
        (search_is_paused, "continues"),
        (runner_is_paused, "paused: running trials continue"),
        (runner_moves_to_another_agent, "continuing with experiment 2"),
        (token_expires, "may be restarted: Unauthenticated"),
    ],
)
def test_a_harm_that_leaves_no_trace(
    harm: Harm, said: str, undisturbed: tuple[Any, Any], tmp_path: Path
) -> None:
    found, created, log = search_with(harm, tmp_path)
    assert (found, created) == undisturbed
    assert said in log
    ours = "\n".join(line for line in log.splitlines() if "[dsat] " in line)
    for noise in ("HTTPConnectionPool", "object at 0x", "determined.searcher", "STATE_"):
        assert noise not in ours


@pytest.mark.parametrize(
    ("pattern", "faults"),
    [
        (r"POST .*/checkpoints", [{"kind": "drop", "every": 2}]),  # decided, but not saved
        # In turns: saved but not posted, then posted but not answered.
        (POSTS, [{"kind": "drop", "every": 3}, {"kind": "drop_answer", "after": 1, "every": 2}]),
    ],
)
def test_a_runner_that_dies_at_every_event_leaves_no_trace(
    pattern: str,
    faults: Sequence[Mapping[str, Any]],
    undisturbed: tuple[Any, Any],
    tmp_path: Path,
) -> None:
    with quick_cluster(tmp_path) as there:
        in_force = [
            there.master.fault(pattern, times=None, also=there.kill_runner, **how) for how in faults
        ]
        told = there.search("pretend", *OPTIONS)
        assert told.status == 0, told
        assert (without_times(json.loads(told.out)), there.created()) == undisturbed
        hits = [fault.hits for fault in in_force]
        assert sum(hits) == there.master.trials(RUNNER)[0].restarts > TRIALS
        assert max(hits) - min(hits) <= 1
        assert len(there.master.experiments) == 2
        assert (there.state(RUNNER), there.state(SEARCH)) == ("COMPLETED", "COMPLETED")


def test_a_trial_that_a_user_kills_is_lost_and_the_search_goes_on(tmp_path: Path) -> None:
    with quick_cluster(tmp_path, limit=AT) as there:
        process = there.begin_search("pretend", *OPTIONS, "--max-trials", 9)
        there.let_end(AT)
        there.master.wait_until(lambda: len(there.master.trials(SEARCH)) == AT + 2, timeout_s=60)
        there.user.get_trial(there.master.trials(SEARCH)[-1].id).kill()
        there.let_end()
        told = ended(process)
        rows = json.loads(told.out)["trials"]
        assert told.status == 0 and len(rows) == 9 == len(there.created())
        [lost] = [row for row in rows if row["outcome"] == "CANCELED"]
        assert lost == rows[AT + 1] and "user" in lost["message"]


JUMP_S = 1e6


def dies(there: OnCluster, ahead: Path, jump_s: float) -> None:
    def die() -> None:
        ahead.write_text(str(JUMP_S + jump_s))
        there.kill_runner()

    fault = there.master.fault(POSTS, kind="drop", also=die)
    there.let_end(AT + 1)
    there.master.wait_until(lambda: fault.hits)


def pauses(there: OnCluster, ahead: Path, jump_s: float) -> None:
    there.user.get_experiment(RUNNER).pause()
    runner = there.master.trials(RUNNER)[0]
    there.master.wait_until(lambda: runner.allocation is None, "the runner's leave")
    ahead.write_text(str(JUMP_S + jump_s))
    there.user.get_experiment(RUNNER).activate()


@pytest.mark.parametrize(
    ("harm", "jump_s", "counted"),
    [(dies, JUMP_S, True), (pauses, JUMP_S, False), (dies, -JUMP_S, False)],
    ids=["dead", "paused", "a clock that is set back"],
)
def test_the_time_of_a_search_goes_on_while_its_runner_is_dead_but_not_while_it_pauses(
    harm: Callable[[OnCluster, Path, float], None], jump_s: float, counted: bool, tmp_path: Path
) -> None:
    ahead = tmp_path / "ahead"
    ahead.write_text(str(JUMP_S))
    with quick_cluster(tmp_path, limit=AT, variables={AHEAD: str(ahead)}) as there:
        process = there.begin_search("pretend", *OPTIONS)
        there.let_end(AT)
        harm(there, ahead, jump_s)
        there.let_end()
        told = ended(process)
        assert told.status == 0, told
        assert (json.loads(told.out)["wall_s"] >= JUMP_S) is counted
        assert json.loads(told.out)["wall_s"] >= 0


# Harms that end a search: the best so far is reported, with its files, and no trial runs on.


def runner_is_canceled(there: OnCluster, command: Command) -> None:
    there.user.get_experiment(RUNNER).cancel()


def runner_is_killed(there: OnCluster, command: Command) -> None:
    there.user.get_experiment(RUNNER).kill()


def search_is_killed(there: OnCluster, command: Command) -> None:
    there.user.get_experiment(SEARCH).kill()


def search_is_canceled(there: OnCluster, command: Command) -> None:
    there.user.get_experiment(SEARCH).cancel()


def master_refuses_events(there: OnCluster, command: Command) -> None:
    there.master.fault(r"GET .*/searcher_events", status=400, times=None)


def master_refuses_operations_once(there: OnCluster, command: Command) -> None:
    there.master.fault(POSTS, status=400)


@pytest.mark.parametrize(
    ("harm", "runner", "said"),
    [
        (runner_is_canceled, "CANCELED", "canceled, together with experiment 2"),
        (search_is_killed, "COMPLETED", "experiment 2 was ended from outside"),
        (search_is_canceled, "COMPLETED", "experiment 2 was ended from outside"),
        (master_refuses_events, "COMPLETED", "the master refuses: "),
        (master_refuses_operations_once, "COMPLETED", "the master refuses: "),
    ],
)
def test_a_harm_that_ends_a_search_leaves_the_best_so_far(
    harm: Callable[[OnCluster, Command], None], runner: str, said: str, tmp_path: Path
) -> None:
    with quick_cluster(tmp_path, limit=AT) as there:
        process = there.begin_search("pretend", *OPTIONS)
        there.let_end(AT)
        there.until_said(f"[{AT}/{TRIALS}]")
        harm(there, process)
        there.let_end()
        told = ended(process)
        assert told.status == 1, told
        assert (there.state(RUNNER), there.state(SEARCH)) == (runner, "CANCELED")
        assert there.master.trials(RUNNER)[0].restarts == 0
        found = json.loads(told.out)
        assert not found["over"] and found["state"] == runner
        assert len([row for row in found["trials"] if row["outcome"] == "OK"]) >= 1
        assert found["best"] is not None and said in told.err
        assert (there.home / found["run_dir"] / "best_ds_config.json").exists()
        headline = found["verdict"][0]
        assert headline in told.err
        assert headline in there.master.experiment(RUNNER).config["description"]


def test_a_search_whose_trials_are_refused_looks_failed(tmp_path: Path) -> None:
    """One possible reason is a cluster with fewer slots than a trial needs."""
    with quick_cluster(tmp_path) as there:
        refusal = {"status": 400, "message": "too few slots"}
        there.master.fault(r"POST /api/v1/experiments$", after=1, times=None, **refusal)
        told = there.search("pretend", *OPTIONS)
        assert told.status == 1, told
        found, runner = json.loads(told.out), there.master.experiment(RUNNER)
        assert there.state(RUNNER) == found["state"] == "CANCELED"
        for text in (found["stop_reason"], runner.config["description"], told.err):
            assert "too few slots" in text
        assert runner.config["description"].startswith("FAILED: ")
        assert there.master.metrics(there.runner) == [{"search_failed": 1}]
        assert (found["best"], found["search_experiment_id"]) == (None, None)
        assert len(there.master.experiments) == 1 and runner.all_trials


def test_a_command_ends_the_trials_of_a_runner_that_is_gone(tmp_path: Path) -> None:
    with quick_cluster(tmp_path, limit=AT) as there:
        process = there.begin_search("pretend", *OPTIONS)
        there.let_end(AT)
        there.user.get_experiment(RUNNER).kill()
        told = ended(process)
        assert told.status == 1, told
        assert (there.state(RUNNER), there.state(SEARCH)) == ("CANCELED", "CANCELED")
        assert "also ended the trials of the search, experiment 2" in told.err
        found = json.loads(told.out)
        assert (found["state"], found["run_dir"]) == ("CANCELED", None)
        assert f"checkpoint download {there.files().name}" in told.err
        assert (there.files() / "best_ds_config.json").exists()


def test_ctrl_c_ends_the_command_and_not_the_search(tmp_path: Path) -> None:
    """Another command then follows the search to its end."""
    with quick_cluster(tmp_path, limit=AT) as there:
        process = there.begin_search("pretend", *OPTIONS)
        there.let_end(AT)
        there.until_said(f"[{AT}/{TRIALS}]")
        there.master.wait_until(
            lambda: any(seen.path.endswith("/logs") for seen in there.master.seen)
        )
        os.killpg(process.pid, signal.SIGINT)
        told = ended(process)
        assert told.status == 130
        for line in ("detached", "dsat watch 1", "experiment cancel 1"):
            assert line in told.err
        there.let_end()
        told = there.dsat("watch", 1, "--json")
        assert told.status == 0 and len(json.loads(told.out)["trials"]) == TRIALS
        assert (there.state(RUNNER), there.state(SEARCH)) == ("COMPLETED", "COMPLETED")
