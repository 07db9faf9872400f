"""Whole searches on a cluster with real processes; trials run DeepSpeed, or pretend to."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from dsat.show.view import RunView
from dsat.values.outcome import OutcomeKind
from testing.on_cluster import RUNNER, SEARCH, OnCluster, changed, cluster, ended
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

FAST = (
    "--start-profile-step 2 --end-profile-step 2 --max-profile-steps 1 --max-micro-batch 8".split()
)


def measured(there: OnCluster) -> dict[str, Any]:
    """Check the results of a search, and return the best trial's metrics, as in the web UI."""
    run = there.run()
    assert run.best is not None
    [trial] = [
        trial
        for trial in there.master.trials(SEARCH)
        if trial.hparams["_dsat_trial"]["id"] == run.best.id
    ]
    metrics = run.outcomes[run.best.id].metrics
    assert metrics is not None
    counted = {name: value for name, value in metrics.to_json().items() if value is not None}
    assert there.master.metrics(trial.id)[-1] == counted
    files = there.files()
    assert json.loads((files / "best_ds_metrics.json").read_text())["trial"] == run.best.name
    config: dict[str, Any] = json.loads((files / "best_ds_config.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == run.best.batch.micro_batch
    assert run.best.name in (files / "summary.md").read_text()
    return config


@pytest.mark.nightly
def test_the_core_api_example(tmp_path: Path) -> None:
    example = ROOT / "examples" / "core_api"
    with cluster(tmp_path) as there:
        options = [*FAST, "--max-trials", 2, "--run-full-experiment"]
        told = there.search(example, *options, method="asha")
        assert told.status == 0, told
        assert there.kinds() == [OutcomeKind.OK] * 2
        config = measured(there)
        verdict = RunView(there.run()).verdict.headline
        for fact in ("parameters 11,689,512", "memory per device", "activations", verdict):
            assert fact in told.err
        search = there.master.experiment(SEARCH).config
        assert search["description"] == "(#1) generated - torchvision-core-api"
        assert search["searcher"]["name"] == "custom" and search["max_restarts"] == 0
        assert there.master.experiment(RUNNER).config["name"] == "(DSAT) torchvision-core-api"
        full = there.master.experiment(SEARCH + 1).config
        assert full["searcher"]["max_length"] == {"batches": 200}
        given = full["hyperparameters"]["overwrite_deepspeed_args"]["val"]
        size = given["train_micro_batch_size_per_gpu"]
        assert size == config["train_micro_batch_size_per_gpu"]
        assert there.master.wait_ended(RUNNER) == "STATE_COMPLETED"


@pytest.mark.nightly
def test_a_deepspeed_trial(tmp_path: Path) -> None:
    example = ROOT / "examples" / "deepspeed_trial"
    with cluster(tmp_path) as there:
        told = there.search(example, *FAST, "--max-trials", 2)
        assert told.status == 0, told
        assert there.kinds() == [OutcomeKind.OK] * 2
        measured(there)


@pytest.mark.nightly
def test_a_hugging_face_trainer(tmp_path: Path) -> None:
    with cluster(tmp_path) as there:
        told = there.search("hf_determined", *FAST, "--max-trials", 2, "--slots", 1)
        assert told.status == 0, told
        assert there.kinds() == [OutcomeKind.OK] * 2
        own, best = there.run().baseline, there.run().best
        assert own is not None and own.batch.micro_batch == 8
        assert best is not None
        assert measured(there)["train_micro_batch_size_per_gpu"] == best.batch.micro_batch


@pytest.mark.nightly
def test_a_rank_that_runs_out_of_memory(tmp_path: Path) -> None:
    """First rank 1 does, which only the log shows; then rank 0, which reports it."""
    with cluster(tmp_path) as there:
        told = there.search("two_ranks", *FAST, "--max-trials", 3, "--zero-stages", 1, 2, 3)
        assert told.status == 1, told
        own, profile, other = there.outcomes().values()
        assert profile.kind is OutcomeKind.OK, "a smaller micro batch than your own"
        assert (own.kind, own.message[:7]) == (OutcomeKind.OOM, "rank 1:"), own
        assert (other.kind, other.message[:7]) == (OutcomeKind.OOM, "rank 0:"), other
        assert "No configuration ran" in told.err


ENDS = {  # outcomes of pretending trials, by behaviour; the first is the user's own configuration
    "runs": "OK",
    "crashes": "ERROR",
    "runs out of memory": "OOM",
    "rejects": "INVALID",
    "leaves": "INVALID",
    "leaves with a status": "ERROR",
    "is killed": "HOST_OOM",
    "reports its own": "INVALID",
}


def test_a_runner_that_is_killed_goes_on_where_it_was_however_trials_end(tmp_path: Path) -> None:
    program = changed(tmp_path, hyperparameters={"behaviours": list(ENDS)})
    with cluster(tmp_path) as there:
        most = ("--max-trials", len(ENDS), "--max-micro-batch", 16, "--finals", 0, "--json")
        process = there.begin_search(program, *most)
        there.until_reported(1)
        there.kill_runner()
        told = ended(process)
        assert told.status == 0, told
        rows = json.loads(told.out)["trials"]
        assert [row["outcome"] for row in rows] == list(ENDS.values())
        assert len(there.created()) == len(there.master.trials(SEARCH)) == len(ENDS)
        assert (there.state(RUNNER), there.state(SEARCH)) == ("COMPLETED", "COMPLETED")
        assert there.master.trials(RUNNER)[0].restarts == 1


@pytest.mark.nightly
def test_trials_end_a_search_whose_runner_is_gone(tmp_path: Path) -> None:
    """After the user has left the command, nothing else can end the search."""
    with cluster(tmp_path) as there:
        process = there.begin_search("pretend", "--max-micro-batch", 16, "--max-trials", 60)
        there.until_reported(1)
        os.killpg(process.pid, signal.SIGINT)
        assert ended(process).status == 130
        there.until_reported(3)
        there.user.get_experiment(RUNNER).kill()
        assert there.state(SEARCH) == "CANCELED"
        said = "the search runner, experiment 1, is gone"
        assert any(said in there.master.log(trial.id) for trial in there.master.trials(SEARCH))
