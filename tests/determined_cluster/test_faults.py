"""A search on a cluster when things go wrong: real SDK and runner, trials that only pretend."""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

from dsat.report.run_view import RunView
from dsat.values.outcome import OutcomeKind
from testing.on_cluster import RUNNER, SEARCH, OnCluster, changed, cluster, ended

pytestmark = pytest.mark.slow

TRIALS = 6
OPTIONS = ("--max-trials", TRIALS, "--max-concurrent-trials", 2, "--max-micro-batch", 16)


def is_whole(there: OnCluster, trials: int = TRIALS) -> None:
    """The search made each of its trials once and came to its end."""
    run = there.run()
    assert len(run.outcomes) == trials and run.stop_reason is not None
    assert len(there.created()) == len(set(there.created())) == trials
    assert len(there.master.experiments) == 2
    assert there.master.wait_ended(SEARCH) == "STATE_COMPLETED"
    assert there.result()["over"] is True


ENDS = {  # of trials, by what they do; the first is the user's own configuration
    "runs": (OutcomeKind.OK, ""),
    "crashes": (OutcomeKind.ERROR, "KeyError: 'no such thing'"),
    "runs out of memory": (OutcomeKind.OOM, "out of memory, by its log"),
    "rejects": (OutcomeKind.INVALID, "the script raised InvalidHP"),
    "leaves": (OutcomeKind.INVALID, "the trial ended without a report"),
    "leaves with a status": (OutcomeKind.ERROR, "the trial failed"),
    "is killed": (OutcomeKind.HOST_OOM, "a rank was killed with SIGKILL"),
    "reports its own": (OutcomeKind.INVALID, "the script reported its own searcher metric, 0"),
}


def test_a_runner_that_is_killed_goes_on_where_it_was_however_trials_end(tmp_path: Path) -> None:
    behaviours = ["runs", *ENDS]
    program = changed("pretend", tmp_path, hyperparameters={"behaviours": behaviours})
    with cluster(tmp_path) as there:
        most = ("--max-trials", len(behaviours), "--finals", 0)
        process = there.begin_search(program, *OPTIONS[2:], *most, "--json")
        for reports in range(3):
            there.until_reported(reports)
            there.kill_runner()
        told = ended(process)
        assert told.status == 0, told
        is_whole(there, len(behaviours))
        assert there.master.trials(RUNNER)[0].restarts == 3
        result, run = json.loads(told.out), there.run()
        assert result["best"]["name"] == getattr(run.best, "name", None)
        assert (result["experiment_id"], result["search_experiment_id"]) == (RUNNER, SEARCH)
        found = [outcome for _, outcome in sorted(run.outcomes.items())]  # two run at a time
        assert [row["outcome"] for row in result["trials"]] == [o.kind.value for o in found]
        assert result["stop_reason"] == run.stop_reason and result["gain"] is not None
        for file in ("best_ds_config.json", "best_ds_metrics.json", "summary.md"):
            text = (there.home / result["run_dir"] / file).read_text()
            assert text == (there.files() / file).read_text()
        own, *_ = there.master.trials(SEARCH)
        assert own.hparams["_dsat"]["micro_batch"] == 2
        for behaviour, outcome in zip(behaviours, found, strict=True):
            kind, message = ENDS[behaviour]
            assert (outcome.kind, outcome.message[: len(message)]) == (kind, message), behaviour
        assert there.master.experiment(SEARCH).config["max_restarts"] == 0


@pytest.mark.nightly
def test_a_runner_that_dies_before_it_noted_its_experiment_makes_no_second_one(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path) as there:
        # The checkpoint that is to hold the experiment's id cannot be reported.
        fault = there.master.fault(r"POST /api/v1/checkpoints", status=502, times=None)
        process = there.begin_search("pretend", *OPTIONS)
        there.master.wait_until(lambda: fault.hits, "the first checkpoint")
        there.kill_runner()
        there.master.faults.clear()
        told = ended(process)
        assert told.status == 0, told
        is_whole(there)


@pytest.mark.nightly
def test_a_master_that_is_away_for_a_while(tmp_path: Path) -> None:
    """Bad gateways, dropped connections, answers that never arrive, a restart; and events that come
    twice, and news of strangers."""
    with cluster(tmp_path) as there:
        process = there.begin_search("pretend", *OPTIONS)
        there.until_reported(1)
        there.master.fault(r"GET .*/searcher_events", status=502, times=2)
        there.master.fault(r"POST .*/searcher_operations", status=503, times=2)
        there.until_reported(2)
        there.master.fault(r"POST .*/searcher_operations", kind="drop_answer")
        there.master.fault(r"POST .*/searcher_operations", kind="drop", after=1)
        there.until_reported(3)
        stranger = "00000000-0000-0000-0000-000000000000"
        there.master.redeliver(
            SEARCH,
            {"id": 1, "initialOperations": {"placeholder": 0}},
            {"id": 2, "trialCreated": {"requestId": there.created()[0]}},
            {"id": 2, "trialClosed": {"requestId": stranger}},
        )
        there.until_reported(4)
        there.master.restart(down_s=1.0)
        told = ended(process)
        assert told.status == 0, told
        is_whole(there)
        said = told.out + there.master.log(there.runner)
        assert "the master does not answer (" in said
        for noise in ("HTTPConnectionPool", "object at 0x", "determined.searcher", "STATE_"):
            assert noise not in said


@pytest.mark.nightly
def test_answers_that_a_search_outlives_and_a_refusal_that_ends_it(tmp_path: Path) -> None:
    with cluster(tmp_path) as there:
        process = there.begin_search("pretend", *OPTIONS, "--max-trials", 60)
        there.until_reported(1)
        there.master.fault(r"GET .*/searcher_events", status=500)
        there.until_said("the master answers with an error (")
        there.master.fault(r"GET .*/searcher_events", status=401)
        there.until_said("fails, and may be restarted: Unauthenticated")
        there.until_said("continuing with experiment 2")
        there.until_said("; best ")
        there.master.fault(r"GET .*/searcher_events", status=400, times=None)
        told = ended(process)
        assert told.status == 1, told
        run = there.run()
        verdict = RunView.of(run).verdict.headline
        assert run.best is not None and verdict in told.out, "the best so far is told"
        assert there.master.trials(RUNNER)[0].restarts == 1
        assert there.master.wait_ended(SEARCH) == "STATE_CANCELED"


@pytest.mark.nightly
def test_what_users_do_in_the_web_ui(tmp_path: Path) -> None:
    """A trial is killed; the search, then its runner, are paused and go on, at once although the
    master lets whoever asks for events wait for a minute."""
    slow = changed("pretend", tmp_path, hyperparameters={"lasts_s": 1.0})
    with cluster(tmp_path, poll_s=60.0) as there:
        process = there.begin_search(slow, *OPTIONS)
        there.until_reported(1)
        user = client_of(there)
        victim = there.master.wait_until(
            lambda: [t for t in there.master.trials(SEARCH)[1:] if t.allocation is not None]
        )[0]
        user.get_trial(victim.id).kill()
        user.get_experiment(SEARCH).pause()
        there.until_said("is paused; waiting")
        user.get_experiment(SEARCH).activate()
        there.until_said("continues")
        there.master.wait_until(lambda: there.master.experiment(SEARCH).progress, "progress")
        user.get_experiment(RUNNER).pause()
        runner = there.master.trials(RUNNER)[0]
        there.master.wait_until(lambda: runner.allocation is None, "the runner's leave")
        assert not there.master.experiment(SEARCH).state.is_terminal
        user.get_experiment(RUNNER).activate()
        told = ended(process)
        assert told.status == 0, told
        is_whole(there)
        assert there.kinds().count(OutcomeKind.CANCELED) == 1


@pytest.mark.nightly
def test_a_script_that_fails_before_its_engine(tmp_path: Path) -> None:
    """It is run once, and people see why wherever they look, but no secret of theirs."""
    hparams = {"behaviours": ["crashes"], "auth_token": "hunter2"}
    environment = {"environment_variables": ["HF_TOKEN=hunter2"]}
    program = changed("pretend", tmp_path, hyperparameters=hparams, environment=environment)
    with cluster(tmp_path) as there:
        told = there.search(program, *OPTIONS)
        assert told.status == 1, told
        assert len(there.master.trials(SEARCH)) == 1
        for line in ("Traceback (most recent call last):", "KeyError: 'no such thing'"):
            assert line in told.out.splitlines()
        assert there.master.wait_ended(RUNNER) == "STATE_COMPLETED"
        said = there.master.experiment(RUNNER).config["description"]
        assert said.startswith("FAILED: ") and said.endswith("KeyError: 'no such thing'")
        assert there.master.metrics(there.runner) == [{"search_failed": 1}]
        # Determined's own launcher prints the experiment's configuration, as of any other.
        ours = [line for line in there.master.log(there.runner).splitlines() if "[dsat" in line]
        assert "hunter2" not in "\n".join([told.out, told.err, *ours])
        assert there.master.wait_ended(SEARCH) == "STATE_ERROR"


@pytest.mark.nightly
@pytest.mark.parametrize("ended_by", ["cancel of the runner", "kill of the search"])
def test_a_search_that_is_ended_early_tells_the_best_so_far(ended_by: str, tmp_path: Path) -> None:
    with cluster(tmp_path, poll_s=60.0) as there:
        slow = changed("pretend", tmp_path, hyperparameters={"lasts_s": 2.0})
        process = there.begin_search(slow, *OPTIONS)
        there.until_said("; best ")
        if ended_by == "cancel of the runner":
            client_of(there).get_experiment(RUNNER).cancel()
        else:
            client_of(there).get_experiment(SEARCH).kill()
        told = ended(process)
        assert told.status == 1, told
        run = there.run()
        verdict = RunView.of(run).verdict.headline
        assert run.best is not None and verdict in told.out
        assert there.result()["best"]["name"] == run.best.name
        assert (there.files() / "best_ds_config.json").exists()
        assert there.master.wait_ended(SEARCH) == "STATE_CANCELED"
        assert there.master.trials(RUNNER)[0].restarts == 0
        if ended_by == "cancel of the runner":
            assert f"canceled; {verdict}" in there.master.experiment(RUNNER).config["description"]
        else:
            assert "experiment 2 was ended from outside" in told.out
            assert there.master.wait_ended(RUNNER) == "STATE_COMPLETED"


@pytest.mark.nightly
def test_a_command_that_leaves_does_not_end_the_search_but_a_runner_that_is_gone_does(
    tmp_path: Path,
) -> None:
    """The trials notice that a runner was killed, or first the command that follows it."""
    with cluster(tmp_path) as there:
        process = there.begin_search("pretend", *OPTIONS, "--max-trials", 60)
        there.until_reported(1)
        os.killpg(process.pid, signal.SIGINT)
        told = ended(process)
        assert told.status == 130
        for line in ("detached", "dsat watch 1", "experiment cancel 1"):
            assert line in told.out
        there.until_reported(3)
        user = client_of(there)
        user.get_experiment(RUNNER).kill()
        assert there.master.wait_ended(SEARCH) == "STATE_CANCELED"
        said = "the search runner, experiment 1, is gone (canceled): ending experiment 2"
        assert any(said in there.master.log(trial.id) for trial in there.master.trials(SEARCH))
        process = there.begin_search("pretend", *OPTIONS, "--max-trials", 60)
        there.until_started(SEARCH + 2)
        user.get_experiment(RUNNER + 2).kill()
        told = ended(process)
        assert told.status == 1, told
        assert "ended the trials of the search, experiment 4, too" in told.out
        assert there.master.wait_ended(SEARCH + 2) == "STATE_CANCELED"


def client_of(there: OnCluster) -> Any:
    """Determined's own client, as another user of the cluster."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from determined.experimental import Determined

    [(name, password), *_] = there.master.users.items()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DET_DEBUG_CONFIG_PATH", str(there.home))
        return Determined(there.master.url, name, password)
