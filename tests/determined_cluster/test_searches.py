"""Whole searches on a cluster: the real command, SDK and runner, with real DeepSpeed trials."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsat.report.run_view import RunView
from dsat.values.outcome import OutcomeKind
from testing.on_cluster import RUNNER, SEARCH, OnCluster, cluster
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

FAST = (
    "--start-profile-step 2 --end-profile-step 2 --max-profile-steps 1 --max-micro-batch 8".split()
)


def measured(there: OnCluster) -> dict[str, Any]:
    """The best trial's metrics, which the web UI has as well; checks that all is as it should."""
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


def test_the_core_api_example(tmp_path: Path) -> None:
    example = ROOT / "examples" / "core_api"
    with cluster(tmp_path) as there:
        options = [*FAST, "--max-trials", 2, "--run-full-experiment"]
        told = there.search(example, *options, method="asha")
        assert told.status == 0, told
        assert there.kinds() == [OutcomeKind.OK] * 2
        config = measured(there)
        verdict = RunView.of(there.run()).verdict.headline
        for fact in ("parameters 11,689,512", "memory per slot", "activations", verdict):
            assert fact in told.out
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
    """The second one, of which only the log knows; then the first, which reports it."""
    with cluster(tmp_path) as there:
        told = there.search("two_ranks", *FAST, "--max-trials", 3, "--zero-stages", 1, 2, 3)
        assert told.status == 1, told
        own, profile, other = there.outcomes().values()
        assert profile.kind is OutcomeKind.OK, "a smaller micro batch than your own"
        assert (own.kind, own.message[:7]) == (OutcomeKind.OOM, "rank 1:"), own
        assert (other.kind, other.message[:7]) == (OutcomeKind.OOM, "rank 0:"), other
        assert "No configuration ran" in told.out
