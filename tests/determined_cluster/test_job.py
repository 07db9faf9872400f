"""The experiment configurations of a search, and what the search runner is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsat.determined_cluster import job as jobs
from dsat.determined_cluster import submit
from dsat.determined_cluster.job import Job
from dsat.errors import UserInputError
from dsat.inputs import experiment
from dsat.values.trial import TrialOptions
from testing.helpers import plan_of
from testing.master.config import complete
from testing.master.errors import ApiError

SECRET = "hunter2"
USER = {
    "name": "my-model",
    "description": "a try",
    "workspace": "Vision",
    "project": "resnets",
    "labels": ["gpu", "try"],
    "entrypoint": "python3 -m determined.launch.deepspeed python3 train.py",
    "hyperparameters": {
        "deepspeed_config": {"train_micro_batch_size_per_gpu": 4},
        "overwrite_deepspeed_args": {"gradient_clipping": 2.0},
        "width": {"type": "const", "val": 3},
    },
    "environment": {
        "image": "my/image:1",
        "environment_variables": [f"TOKEN={SECRET}"],
        "registry_auth": {"password": SECRET},
    },
    "checkpoint_storage": {"type": "s3", "secret_key": SECRET, "save_trial_latest": 0},
    "resources": {"slots_per_trial": 4, "resource_pool": "a100", "shm_size": "8g"},
    "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 100}},
    "min_validation_period": {"batches": 10},
    "profiling": {"enabled": True},
}


def user(tmp_path: Path, **changes: Any) -> experiment.Experiment:
    path = tmp_path / "deepspeed.yaml"
    path.write_text(yaml.safe_dump({**USER, **changes}))
    return experiment.read(path, tmp_path)


def job(tmp_path: Path, **changes: Any) -> Job:
    found = user(tmp_path)
    values: dict[str, Any] = {
        "plan": plan_of(slots_per_trial=4),
        "info": {"name": found.name},
        "config": jobs.without_secrets(found.config),
        "hparams": found.hparams,
        "trial": TrialOptions(timeout_s=60.0, slot_memory_bytes=5),
        "max_concurrent_trials": 3,
    }
    return Job(**{**values, **changes})


def test_the_runner_takes_no_slot_and_keeps_what_is_the_users(tmp_path: Path) -> None:
    config = jobs.runner_config(user(tmp_path), plan_of(), max_restarts=7, changes={})
    assert config["name"] == "(DSAT) my-model"
    for key in ("workspace", "project", "labels", "environment", "description"):
        assert config[key] == USER[key]
    assert config["resources"] == {"slots_per_trial": 0, "resource_pool": "a100"}
    assert config["max_restarts"] == 7
    assert config["searcher"]["name"] == "single"
    assert config["entrypoint"] == ["python3", "-m", jobs.RUNNER_MODULE, jobs.JOB_FILE]
    assert config["checkpoint_storage"]["save_trial_latest"] == 1, "it holds the result"
    assert not {"min_validation_period", "profiling"} & config.keys()


def test_the_job_survives_its_file_and_holds_no_secret(tmp_path: Path) -> None:
    told = job(tmp_path, max_slots=8)
    path = tmp_path / jobs.JOB_FILE
    path.write_text(told.to_text())
    assert Job.read(path) == told
    assert SECRET not in told.to_text()


def test_the_custom_experiment_is_the_users_with_another_searcher(tmp_path: Path) -> None:
    runner = jobs.runner_config(user(tmp_path), plan_of(), max_restarts=5, changes={})
    config = jobs.custom_config(job(tmp_path, max_slots=8), 17, runner)
    assert config["description"] == "(#17) generated - a try"
    assert config["searcher"] == {
        "name": "custom",
        "metric": "throughput",
        "smaller_is_better": False,
    }
    assert config["entrypoint"] == USER["entrypoint"]
    assert config["environment"] == USER["environment"], "variables are where they were put"
    assert config["resources"] == {
        "slots_per_trial": 4,
        "resource_pool": "a100",
        "shm_size": "8g",
        "max_slots": 8,
    }
    assert config["max_restarts"] == 0, "unless the user has a number"
    assert config["hyperparameters"]["_use_dsat_mode"] is True
    assert config["hyperparameters"]["width"] == 3
    assert config["hyperparameters"]["_dsat"]["stage"]["type"] == "categorical"
    json.dumps(config)


def test_changes_for_the_runner_alone_do_not_reach_its_trials(tmp_path: Path) -> None:
    changes = {
        "environment": {"image": "small:1", "environment_variables": ["A=1"]},
        "checkpoint_storage": {"type": "shared_fs", "host_path": "/scratch"},
        "data": {"url": "x"},
    }
    found = job(tmp_path)
    for mine in (changes, {}):
        runner = jobs.runner_config(user(tmp_path), plan_of(), max_restarts=5, changes=mine)
        for config in (
            jobs.custom_config(found, 17, runner),
            jobs.full_run_config(found, 17, runner, {}),
        ):
            for key in ("environment", "checkpoint_storage", "data"):
                assert config.get(key) == USER.get(key)
    bare = {key: value for key, value in USER.items() if key not in changes}
    (tmp_path / "bare.yaml").write_text(yaml.safe_dump(bare))
    plain = experiment.read(tmp_path / "bare.yaml", tmp_path)
    runner = jobs.runner_config(plain, plan_of(), max_restarts=5, changes=changes)
    assert runner["environment"] == changes["environment"]
    told = job(tmp_path, config=jobs.without_secrets(plain.config))
    assert not jobs.custom_config(told, 17, runner).keys() & changes.keys()


def test_the_runner_keeps_what_the_batch_system_needs_but_for_gpus(tmp_path: Path) -> None:
    args = ["--account=abc", "--partition=gpu", "--mem-per-gpu=1g", "--gres=gpu:4", "-G4"]
    slurm = {"slots_per_node": 4, "gpu_type": "tesla", "sbatch_args": args}
    pbs = {"slots_per_node": 4, "pbsbatch_args": ["-A abc"]}
    found = user(tmp_path, slurm=slurm, pbs=pbs, max_restarts=2)
    config = jobs.runner_config(found, plan_of(), max_restarts=5, changes={})
    assert config["slurm"] == {"sbatch_args": args[:2]}
    assert config["pbs"] == {"pbsbatch_args": ["-A abc"]}
    told = job(tmp_path, config=jobs.without_secrets(found.config))
    trials = jobs.custom_config(told, 17, config)
    assert trials["slurm"] == slurm and trials["max_restarts"] == 2
    apart = user(tmp_path, slurm={"sbatch_args": ["--gres", "gpu:4", "-G", 2, "-A", "abc", "x.sh"]})
    config = jobs.runner_config(apart, plan_of(), max_restarts=5, changes={})
    assert config["slurm"] == {"sbatch_args": ["-A", "abc", "x.sh"]}


def test_a_section_that_is_no_mapping_is_left_for_the_master_to_refuse(tmp_path: Path) -> None:
    found = user(tmp_path, slurm="text", pbs=["a"], data=3)
    changes = {"checkpoint_storage": {"type": "shared_fs"}}
    config = jobs.runner_config(found, plan_of(), max_restarts=5, changes=changes)
    assert (config["slurm"], config["pbs"], config["data"]) == ("text", ["a"], 3)


def test_words_of_an_entrypoint_are_texts_for_the_master(tmp_path: Path) -> None:
    found = user(tmp_path, entrypoint=["python3", "train.py", "--lr", 0.5])
    told = job(tmp_path, config=jobs.without_secrets(found.config))
    config = jobs.full_run_config(told, 17, {}, {})
    assert config["entrypoint"] == [*found.entrypoint] == ["python3", "train.py", "--lr", "0.5"]


def test_the_full_run_is_the_users_with_the_best_configuration(tmp_path: Path) -> None:
    runner = jobs.runner_config(user(tmp_path), plan_of(), max_restarts=5, changes={})
    best = {"zero_optimization": {"stage": 2}}
    config = jobs.full_run_config(job(tmp_path), 17, runner, best)
    assert config["searcher"] == USER["searcher"]
    assert config["checkpoint_storage"] == USER["checkpoint_storage"]
    overrides = {"gradient_clipping": 2.0, **best}
    given = config["hyperparameters"]["overwrite_deepspeed_args"]
    assert given == {"type": "const", "val": overrides}
    assert "_use_dsat_mode" not in config["hyperparameters"]
    assert config["description"].startswith(jobs.full_run_tag(17))
    assert not jobs.full_run_tag(17).startswith(jobs.search_tag(17))


def test_sections_with_a_type_are_no_ranges_for_the_master(tmp_path: Path) -> None:
    """It takes any object with a key `type` for a range; DeepSpeed's optimizers have one."""
    ds = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {}}}
    own = {"deepspeed_config": ds, "overwrite_deepspeed_args": {"scheduler": {"type": "WarmupLR"}}}
    runner = jobs.runner_config(user(tmp_path), plan_of(), max_restarts=5, changes={})
    found = job(tmp_path, hparams=own)
    for config in (
        jobs.custom_config(found, 17, runner),
        jobs.full_run_config(found, 17, runner, {}),
    ):
        kept = complete(json.dumps(config), str(tmp_path))["hyperparameters"]
        assert kept["deepspeed_config"] == {"type": "const", "val": ds}
    raw = {**runner, "hyperparameters": own}
    with pytest.raises(ApiError, match="must be one of"):
        complete(json.dumps(raw), str(tmp_path))


@pytest.mark.parametrize(
    ("searcher", "problem"),
    [
        (None, "there is no name"),
        ({"name": "single", "max_length": {"batches": 1}}, "there is no metric"),
        ({"name": "random", "metric": "loss", "max_length": {"batches": 1}}, "makes many trials"),
    ],
)
def test_a_training_in_full_length_needs_a_searcher_of_one_trial(
    tmp_path: Path, searcher: Any, problem: str
) -> None:
    submit._check_full_run(user(tmp_path))
    with pytest.raises(UserInputError, match=problem):
        submit._check_full_run(user(tmp_path, searcher=searcher))
