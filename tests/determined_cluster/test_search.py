"""Whole searches by the command with made-up trials: what users see at the end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.run.journal import FILE_NAME
from dsat.values.outcome import Metrics, ModelProfile, Outcome, OutcomeKind
from testing.master.made_up import Ending
from testing.on_cluster import (
    RUNNER,
    SEARCH,
    OnCluster,
    changed,
    ended,
    measured,
    quick_cluster,
    reported,
    spec_of,
)

pytestmark = pytest.mark.slow
OPTIONS = ("--max-trials", 9, "--max-concurrent-trials", 2, "--max-micro-batch", 16)
SECRET = "hf_0123456789abcdefABCD"


def is_whole(there: OnCluster, trials: int) -> None:
    """Check that each trial of the search was created once, and that both experiments completed."""
    ids = [each["requestId"] for each in there.created()]
    assert len(ids) == len(set(ids)) == trials == len(there.master.trials(SEARCH))
    assert (there.state(RUNNER), there.state(SEARCH)) == ("COMPLETED", "COMPLETED")


@pytest.mark.parametrize("method", ["model", "random", "asha", "binary", "gridsearch"])
def test_a_whole_search(method: str, tmp_path: Path) -> None:
    with quick_cluster(tmp_path) as there:
        told = there.search("pretend", *OPTIONS, "--json", method=method)
        assert told.status == 0, told
        found = json.loads(told.out)
        is_whole(there, len(found["trials"]))
        assert 4 <= len(found["trials"]) <= 9 and there.master.made_up is not None
        assert there.master.made_up.most == 2
        # The best trial by the master's numbers, or one as good with a smaller batch.
        best, rows = found["best"], [row for row in found["trials"] if row["kind"] != "final"]
        most = max(row["metrics"]["throughput"] for row in rows if row["metrics"])
        assert best["metrics"]["throughput"] >= 0.99 * most
        assert (found["experiment_id"], found["search_experiment_id"]) == (RUNNER, SEARCH)
        assert found["over"] and found["stop_reason"] and found["state"] == "COMPLETED"
        assert found["best_value"] / found["own_value"] == pytest.approx(found["gain"])
        files = there.home / found["run_dir"]
        for name in ("best_ds_config.json", "best_ds_metrics.json", "summary.md"):
            assert (files / name).read_text() == (there.files() / name).read_text()
        config = json.loads((files / "best_ds_config.json").read_text())
        assert config == found["best_ds_config"]
        size = best["train_micro_batch_size_per_gpu"]
        assert config["train_micro_batch_size_per_gpu"] == size
        assert json.loads((files / "best_ds_metrics.json").read_text())["trial"] == best["name"]
        # The web UI shows it too.
        runner = there.master.experiment(RUNNER)
        assert f"{found['gain']:.3f}x" in runner.config["description"] and runner.progress == 1
        assert there.master.metrics(there.runner)[-1] == {
            "search_failed": 0,
            "throughput": found["best_value"],
        }
        assert there.master.experiment(SEARCH).progress == 1
        for fact in ("parameters 1,000,000", "memory per device", "activations", best["name"]):
            assert fact in told.err


def test_a_clusters_run_is_a_run_like_others(tmp_path: Path) -> None:
    """Its folder can be shown, compared and exported, but another machine cannot resume it."""
    with quick_cluster(tmp_path) as there:
        found, other = (
            json.loads(there.search("pretend", *OPTIONS, "--json", method=method).out)
            for method in ("model", "random")
        )
        folder = found["run_dir"]
        shown = json.loads(there.dsat("show", folder, "--json").out)
        same = ("trials", "gain", "best_value", "own_value", "best_ds_config", "stop_reason")
        assert {key: shown[key] for key in same} == {key: found[key] for key in same}
        assert shown["state"] == "finished"
        assert json.loads(there.dsat("compare", folder, other["run_dir"], "--json").out)
        listed = json.loads(there.dsat("runs", "--json").out)
        assert {row["run_dir"] for row in listed} == {folder, other["run_dir"]}
        assert there.dsat("show", folder, "--trial", found["best"]["name"]).status == 0
        assert there.dsat("export", folder, "--to", "csv", "--output", "rows.csv").status == 0
        journal = (there.home / folder / FILE_NAME).read_text()
        for where in ((), ("--run-dir", folder)):
            refused = there.search("pretend", "--engine", "local", "--resume", *where)
            assert refused.status == 2, refused
        assert (there.home / folder / FILE_NAME).read_text() == journal


def test_results_that_cannot_be_written_here_are_in_a_checkpoint(tmp_path: Path) -> None:
    """A file is in the place of the run's folder; the message must not blame the master."""
    with quick_cluster(tmp_path) as there:
        there.home.mkdir(exist_ok=True)
        (there.home / "dsat_runs").write_text("mine")
        told = there.search("pretend", *OPTIONS, "--json")
        found = json.loads(told.out)
        assert found["run_dir"] is None and found["best"], told
        assert "dsat_runs: is not a folder" in told.err and "Check DET_MASTER" not in told.err
        assert f"checkpoint download {there.files().name}" in told.err
        assert (there.home / "dsat_runs").read_text() == "mine"


def test_trials_get_their_whole_configuration_and_what_varies_is_plotted(tmp_path: Path) -> None:
    with quick_cluster(tmp_path) as there:
        told = there.search("pretend", *OPTIONS, "--json")
        rows = json.loads(told.out)["trials"]
        declared = there.master.experiment(SEARCH).config["hyperparameters"]["_dsat"]
        sizes = set()
        for number, (created, row) in enumerate(zip(there.created(), rows, strict=True)):
            hparams = json.loads(created["hyperparams"])
            assert hparams["_use_dsat_mode"] is True and hparams["lasts_s"] == 0.3
            assert hparams["deepspeed_config"]["train_micro_batch_size_per_gpu"] == 2
            assert hparams.get("overwrite_deepspeed_args", {}) == row["overrides"]
            assert hparams["_dsat_trial"]["id"] == number
            assert hparams["_dsat_trial"]["runner"] == RUNNER
            values = hparams["_dsat"]
            assert values["micro_batch"] == row["train_micro_batch_size_per_gpu"]
            assert values["stage"] == row["stage"] and values.keys() == declared.keys()
            sizes.add(values["micro_batch"])
            for name, value in values.items():
                kind = declared[name]
                if kind["type"] == "categorical":
                    assert value in kind["vals"], (name, value)
                elif kind["type"] == "int":
                    assert kind["minval"] <= value <= kind["maxval"], (name, value)
        assert len(sizes) > 2


def test_finals_run_alone(tmp_path: Path) -> None:
    """Pairs of the user's own configuration and the best begin after all of the search has
    ended."""
    running: list[int] = []
    with quick_cluster(tmp_path, lambda hparams: noted(hparams, running)) as there:
        told = there.search("pretend", *OPTIONS, "--finals", 4, "--max-trials", 12, "--json")
        rows = json.loads(told.out)["trials"]
        kinds = [row["kind"] for row in rows]
        finals = kinds.index("final")
        assert set(kinds[finals:]) == {"final"} and "final" not in kinds[:finals]
        assert sorted(running[:finals]) == list(range(finals))
        assert running[finals:] == list(range(finals, len(rows)))
        names = [row["name"].partition("_")[2] for row in rows[finals:]]
        assert len(set(names)) in (2, 3) and len(names) in (2, 3, 4), "one at your own batch"


def noted(hparams: Mapping[str, Any], running: list[int]) -> Ending:
    running.append(hparams["_dsat_trial"]["id"])
    return measured(hparams)


def test_no_secret_is_told(tmp_path: Path) -> None:
    """Secrets stay in the files that need them."""
    ds = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
        "monitor": {"wandb_token": SECRET, "url": "s3://u:pw9@x/y"},
    }
    environment = {"environment_variables": [f"HF_TOKEN={SECRET}"]}
    program = changed(tmp_path, hyperparameters={"deepspeed_config": ds}, environment=environment)
    with quick_cluster(tmp_path) as there:
        told = there.search(program, *OPTIONS, "--max-trials", 4, "--json")
        assert told.status == 0, told
        folder = there.home / json.loads(told.out)["run_dir"]
        written = folder / "best_ds_config.json"
        ours = [line for line in there.said.splitlines() if "[dsat" in line]
        for text in (told.out, told.err, *ours, str(there.result())):
            assert SECRET not in text and "pw9" not in text
        for path in (written, there.files() / "best_ds_config.json"):
            assert json.loads(path.read_text())["monitor"]["wandb_token"] == SECRET
        for path in (written, folder / FILE_NAME):
            assert path.stat().st_mode & 0o777 == 0o600
        given = there.master.experiment(SEARCH).config
        assert given["environment"]["environment_variables"] == [f"HF_TOKEN={SECRET}"]


def test_a_training_in_full_length_follows_once(tmp_path: Path) -> None:
    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 200}}
    kept = {"overwrite_deepspeed_args": {"gradient_clipping": 2.0}}
    program = changed(tmp_path, searcher=searcher, hyperparameters=kept)
    with quick_cluster(tmp_path) as there:
        # The runner dies before it knows that the training has begun.
        made = r"POST /api/v1/experiments$"
        there.master.fault(made, kind="drop_answer", after=2, also=there.kill_runner)
        told = there.search(program, *OPTIONS, "--run-full-experiment", "--json")
        assert told.status == 0, told
        found = json.loads(told.out)
        assert found["full_run_experiment_id"] == SEARCH + 1
        assert len(there.master.experiments) == SEARCH + 1
        full = there.master.experiment(SEARCH + 1).config
        assert {key: full["searcher"][key] for key in searcher} == searcher
        given = full["hyperparameters"]["overwrite_deepspeed_args"]["val"]
        assert given == {"gradient_clipping": 2.0, **found["best"]["overrides"]}
        assert "_use_dsat_mode" not in full["hyperparameters"]


@pytest.mark.parametrize("is_faster", [False, True])
def test_trials_that_differ_in_a_switch_differ_in_their_hyperparameters(
    is_faster: bool, tmp_path: Path
) -> None:
    """A full-length training also gets the switches of the best trial."""
    name = "ENV:NCCL_BUFFSIZE"

    def behave(hparams: Mapping[str, Any]) -> Ending:
        size = int(hparams.get("_dsat_switches", {}).get(name, 0))
        metrics = Metrics(100.0 + is_faster * size / 2**20, 1.0, 1.0, 1.0, 1.0, 1e6, 3, 0.01)
        return measured(hparams, metrics=metrics)

    searcher = {"name": "single", "metric": "loss", "max_length": {"batches": 200}}
    program = changed(tmp_path, searcher=searcher)
    options = ("--max-micro-batch", 2, "--max-trials", 6, "--finals", 0, "--run-full-experiment")
    with quick_cluster(tmp_path, behave) as there:
        told = there.search(program, *options, "--zero-stages", 0, "--search", name, "--json")
        assert told.status == 0, told
        different = {"_dsat_trial", "_dsat"}
        given = [json.loads(each["hyperparams"]) for each in there.created()]
        texts = [json.dumps({k: h[k] for k in sorted(h.keys() - different)}) for h in given]
        assert len(set(texts)) == len(texts) and len(texts) >= 3
        full = there.master.experiment(SEARCH + 1).config["hyperparameters"]
        assert full.get("_dsat_switches", {}).get("val") == (
            {name: "16777216"} if is_faster else None
        )


@pytest.mark.parametrize(
    ("searcher", "problem"),
    [
        (None, "no name"),
        ({"name": "single", "max_length": {"batches": 1}}, "no metric"),
        ({"name": "random", "metric": "loss", "max_length": {"batches": 1}}, "many trials"),
    ],
)
def test_a_training_in_full_length_needs_a_searcher_of_one_trial(
    searcher: Any, problem: str, tmp_path: Path
) -> None:
    program = changed(tmp_path, searcher=searcher)
    with quick_cluster(tmp_path) as there:
        told = there.search(program, "--run-full-experiment")
        assert told.status == 2 and "searcher" in told.err and problem in told.err
        assert there.master.experiments == []


def test_trials_on_another_kind_of_device_are_not_compared(tmp_path: Path) -> None:
    """The runner restarts after the first trial, and must still know that trial's device."""

    def behave(hparams: Mapping[str, Any]) -> Ending:
        number = hparams["_dsat_trial"]["id"]
        return measured(hparams, device_name="V100" if number in (2, 3) else "A100")

    with quick_cluster(tmp_path, behave, limit=1) as there:
        process = there.begin_search("pretend", *OPTIONS, "--finals", 0, "--json")
        there.let_end(1)
        there.kill_runner()
        there.let_end()
        rows = json.loads(ended(process).out)["trials"]
        assert [row["outcome"] == "INVALID" for row in rows] == [n in (2, 3) for n in range(9)]
        for name in ("A100", "V100", "resources.resource_pool"):
            assert name in rows[2]["message"]


def test_no_stage_is_called_unfit_that_ran(tmp_path: Path) -> None:
    """By the formula, stage 2 does not fit a slot, yet the user's own configuration runs."""
    ds = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam"},
        "zero_optimization": {"stage": 2},
    }
    profile = ModelProfile(2 * 10**8, 2 * 10**8, 4, 10**9, 1e12, 42 * 10**8)

    def behave(hparams: Mapping[str, Any]) -> Ending:
        spec = spec_of(hparams)
        metrics = Metrics(10.0 + spec["micro_batch"], 1.0, 1.0, 1.0, 1.0, 1e6, 3, 0.01)
        ran = Outcome(OutcomeKind.OK, metrics=metrics, duration_s=1.0)
        return reported(replace(ran, profile=profile) if spec["profile"] else ran)

    program = changed(tmp_path, hyperparameters={"deepspeed_config": ds})
    with quick_cluster(tmp_path, behave) as there:
        told = there.search(program, "--max-trials", 4, "--finals", 0, "--json")
        lines = [line for line in told.err.splitlines() if line.startswith("stage ")]
        said = {line.partition(":")[0]: line for line in lines}
        assert "predicted not to fit" in said["stage 2"] and "micro batch 4 ran" in said["stage 2"]
        assert "does not fit" in said["stage 3"] and "ran" not in said["stage 3"]
