"""The experiments of a search, and the part of the user's configuration in each of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsat.cli import main
from testing.master import StandIn
from testing.on_cluster import SEARCH, OnCluster, changed, quick_cluster

SECRET = "hunter2"
DS = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {}}}
HPARAMS: dict[str, Any] = {
    "deepspeed_config": DS,
    "overwrite_deepspeed_args": {"gradient_clipping": 2.0, "scheduler": {"type": "WarmupLR"}},
    "width": {"type": "const", "val": 3},
    "model": {"type": "const", "val": {"type": "bert", "norm": {"type": "rms"}}},
    "data": {"seed": 1, "sampler": {"type": "const", "val": {"type": "random"}}},
}
ENVIRONMENT = {
    "image": "my/image:1",
    "environment_variables": [f"TOKEN={SECRET}"],
    "registry_auth": {"password": SECRET},
    "pod_spec": {"spec": {"containers": [{"env": [{"name": "TOKEN", "value": SECRET}]}]}},
}
SEARCHER = {"name": "single", "metric": "loss", "max_length": {"batches": 100}}
TRAINING = {"min_validation_period": {"batches": 10}, "profiling": {"enabled": True}}
USERS = {
    "name": "my-model",
    "description": "a try",
    "workspace": "Vision",
    "project": "nets",
    "labels": ["gpu", "try"],
    "entrypoint": ["python3", "train.py", "--lr", 0.5],
    "environment": ENVIRONMENT,
    "data": {"token": SECRET},
    "resources": {"slots_per_trial": 4, "resource_pool": "a100", "shm_size": "8g", "max_slots": 8},
    "searcher": SEARCHER,
    **TRAINING,
}


def searched(there: OnCluster, folder: Path, storage: object, *options: object) -> list[Any]:
    """Return the submitted configurations of runner, search and full-length training."""
    program = changed(folder, **USERS, hyperparameters=HPARAMS, checkpoint_storage=storage)
    config = program / "deepspeed.yaml"
    data = yaml.safe_load(config.read_text())
    del data["max_restarts"]  # otherwise, trials get the user's number
    config.write_text(yaml.safe_dump(data))
    most = ("--max-trials", 2, "--finals", 0, "--run-full-experiment")
    told = there.search(program, *most, *options)
    assert told.status == 0, told
    return [json.loads(each.original_config) for each in there.master.experiments]


@pytest.mark.slow
def test_each_experiment_has_what_is_the_users_and_what_is_its_own(tmp_path: Path) -> None:
    storage = {"type": "shared_fs", "host_path": str(tmp_path / "s"), "save_trial_latest": 0}
    with quick_cluster(tmp_path, nodes=(4,), projects=[("Vision", "nets")]) as there:
        runner, search, full = searched(there, tmp_path, storage)
        for config in (runner, search, full):
            for key in ("workspace", "project", "environment", "data"):
                assert config[key] == USERS[key]
        assert runner["labels"] == search["labels"] == ["gpu", "try", "dsat", "my-model"]
        assert full["labels"] == USERS["labels"]
        assert runner["name"] == "(DSAT) my-model" and runner["max_restarts"] > 0
        assert runner["resources"] == {"slots_per_trial": 0, "resource_pool": "a100"}
        assert runner["searcher"]["name"] == "single"
        assert runner["checkpoint_storage"] == {**storage, "save_trial_latest": 1}, "the result"
        assert not TRAINING.keys() & runner.keys()
        assert search["checkpoint_storage"] == full["checkpoint_storage"] == storage
        assert search["description"] == "(#1) generated - a try"
        metric = {"metric": "throughput", "smaller_is_better": False}
        assert search["searcher"] == {"name": "custom", **metric}
        assert search["resources"] == full["resources"] == USERS["resources"]
        assert search["entrypoint"] == ["python3", "train.py", "--lr", "0.5"], "texts"
        assert search["max_restarts"] == 0, "unless the user has a number"
        hparams = search["hyperparameters"]
        assert hparams["_use_dsat_mode"] is True and hparams["width"] == 3
        # The master must not take DeepSpeed's sections with a `type` for ranges.
        assert hparams["deepspeed_config"] == {"type": "const", "val": DS}
        for found in (hparams, full["hyperparameters"]):
            assert {name: found[name] for name in ("model", "data")} == {
                name: HPARAMS[name] for name in ("model", "data")
            }
        assert full["searcher"] == SEARCHER and full["profiling"] == {"enabled": True}
        assert full["hyperparameters"]["deepspeed_config"] == {"type": "const", "val": DS}
        given = full["hyperparameters"]["overwrite_deepspeed_args"]["val"]
        assert given.items() >= HPARAMS["overwrite_deepspeed_args"].items()
        assert given["train_micro_batch_size_per_gpu"] and "stage" in given["zero_optimization"]
        assert SECRET not in there.master.context(1)["dsat_job.json"]


@pytest.mark.slow
def test_changes_for_the_runner_alone_do_not_reach_its_trials(tmp_path: Path) -> None:
    """This holds with and without a value in the user's configuration."""
    own, scratch = ({"type": "shared_fs", "host_path": str(tmp_path / n)} for n in "ab")
    changes = {
        "environment": {"image": "small:1", "environment_variables": ["A=1"]},
        "checkpoint_storage": scratch,
        "data": {"url": "x"},
        "integrations": {"pachyderm": {"token": "abc"}},
    }
    path = tmp_path / "runner.yaml"
    path.write_text(yaml.safe_dump(changes))
    with quick_cluster(tmp_path, nodes=(4,), projects=[("Vision", "nets")]) as there:
        option = ("--search-runner-config", path)
        runner, search, full = searched(there, tmp_path, own, *option)
        for key in ("environment", "checkpoint_storage", "data", "integrations"):
            changed_to = changes[key]
            assert isinstance(changed_to, dict) and runner[key].items() >= changed_to.items()
            users = {**USERS, "checkpoint_storage": own}.get(key)
            assert search.get(key) == full.get(key) == users
        assert SECRET not in there.master.context(1)["dsat_job.json"]


@pytest.mark.slow
def test_a_number_of_restarts_of_the_user_holds_for_trials(tmp_path: Path) -> None:
    program = changed(tmp_path, max_restarts=2)
    with quick_cluster(tmp_path) as there:
        there.search(program, "--max-trials", 2, "--finals", 0, "--max-search-runner-restarts", 7)
        assert there.master.experiment(1).config["max_restarts"] == 7
        assert there.master.experiment(SEARCH).config["max_restarts"] == 2


def test_a_limit_of_slots_in_the_experiment_is_the_searchs_too(
    nowhere: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = changed(tmp_path, resources={"slots_per_trial": 2, "max_slots": 4})
    words = ["random", str(program / "deepspeed.yaml"), str(program), "--dry-run"]
    assert main.main([*words, "--slots", "5"]) == 2
    err = capsys.readouterr().err
    assert "resources.max_slots" in err and "4" in err and "5 devices" in err


def test_the_autotuning_section_sets_defaults_on_a_cluster_too(
    master: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"enabled": True, "tuner_num_trials": 8, "metric": "latency", "fast": True}
    program = changed(tmp_path, hyperparameters={"deepspeed_config": {**DS, "autotuning": section}})
    words = ["tune", str(program / "deepspeed.yaml"), str(program), "--detach"]
    assert main.main(words) == 0
    plan = json.loads(master.context(1)["dsat_job.json"])["plan"]
    assert (plan["max_trials"], plan["metric"]) == (9, "latency") and plan["fix"]
    assert main.main([*words, "--max-trials", "5"]) == 0
    assert json.loads(master.context(2)["dsat_job.json"])["plan"]["max_trials"] == 5
    section["arg_mappings"] = {"train_micro_batch_size_per_gpu": "--batch"}
    config = program / "deepspeed.yaml"
    data = yaml.safe_load(config.read_text())
    data["hyperparameters"]["deepspeed_config"]["autotuning"] = section
    config.write_text(yaml.safe_dump(data))
    capsys.readouterr()
    assert main.main(words) == 2
    assert "autotuning.arg_mappings" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("options", "at_once"), [((), 2), (("--max-slots", 2), 1)])
def test_trials_at_once_take_no_more_slots_than_are_allowed(
    options: tuple[object, ...], at_once: int, tmp_path: Path
) -> None:
    program = changed(tmp_path, resources={"slots_per_trial": 2, "max_slots": 4})
    with quick_cluster(tmp_path, nodes=(8,)) as there:
        most = ("--max-trials", 5, "--max-concurrent-trials", 4, "--finals", 0)
        assert there.search(program, *most, *options).status == 0
        assert there.master.made_up is not None and there.master.made_up.most == at_once
        resources = there.master.experiment(SEARCH).config["resources"]
        assert resources["max_slots"] == 2 * at_once


AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": DS["optimizer"],
}
SIZES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}


@pytest.mark.parametrize(
    ("words", "hparams", "batch"),
    [
        ("train.py --deepspeed ds.json", {}, (8, 1)),
        ("train.py --deepspeed ds.json", SIZES, (2, 3)),
        ("train.py --deepspeed ds.json", {"training_arguments": SIZES}, (2, 3)),
        ("train.py --deepspeed ds.json --per_device_train_batch_size 4", {"a": SIZES}, (2, 3)),
        ("train.py", {"training_arguments": {**SIZES, "deepspeed": "ds.json"}}, (2, 3)),
    ],
)
def test_batch_sizes_of_a_trainer_may_be_hyperparameters(
    words: str, hparams: dict[str, Any], batch: tuple[int, int], master: StandIn, tmp_path: Path
) -> None:
    hparams = {"deepspeed_config": "ds.json", **hparams}
    program = changed(tmp_path, entrypoint=f"python3 {words}", hyperparameters=hparams)
    (program / "ds.json").write_text(json.dumps(AUTO))
    assert main.main(["tune", str(program / "deepspeed.yaml"), str(program), "--detach"]) == 0
    own = json.loads(master.context(1)["dsat_job.json"])["plan"]["own_batch"]
    assert (own["micro_batch"], own["gas"]) == batch


def test_an_auto_batch_size_that_a_wrapped_script_gets_is_to_be_written(
    master: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hparams: dict[str, Any] = {"deepspeed_config": AUTO}
    program = changed(tmp_path, entrypoint="cd . && bash launch.sh", hyperparameters=hparams)
    config = program / "deepspeed.yaml"
    words = ["tune", str(config), str(program), "--detach"]
    assert main.main(words) == 2
    err = capsys.readouterr().err
    key = "overwrite_deepspeed_args.train_micro_batch_size_per_gpu: N"
    assert f"Write hyperparameters.{key}" in err
    data = yaml.safe_load(config.read_text())
    data["hyperparameters"]["overwrite_deepspeed_args"] = {"train_micro_batch_size_per_gpu": 3}
    config.write_text(yaml.safe_dump(data))
    assert main.main(words) == 0
    plan = json.loads(master.context(1)["dsat_job.json"])["plan"]
    assert plan["own_batch"]["micro_batch"] == 3
