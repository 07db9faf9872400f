"""The user's files: what is read from them, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsat.errors import UserInputError
from dsat.inputs import experiment
from dsat.inputs.experiment import Experiment

DS: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
DATA: dict[str, Any] = {
    "entrypoint": "python3 train.py",
    "hyperparameters": {"deepspeed_config": "ds.json"},
}
HPARAMS = "exp.yaml: hyperparameters"


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/ds.json").write_text(json.dumps(DS))


def read(data: Any = DATA, *includes: str, **changes: Any) -> Experiment:
    Path("exp.yaml").write_text(yaml.safe_dump({**data, **changes}))
    return experiment.read(Path("exp.yaml"), Path("model"), [Path(name) for name in includes])


def refused(where: str, problem: str, data: Any = DATA, **changes: Any) -> str:
    with pytest.raises(UserInputError) as caught:
        read(data, **changes)
    text = str(caught.value)
    assert caught.value.where == where
    assert problem in caught.value.problem
    assert text.startswith(f"{where}: ") and "\n" not in text
    return text


# -- what is read


def test_the_least_that_is_needed() -> None:
    user = read()
    assert (user.name, user.entrypoint, user.slots_per_trial) == ("model", "python3 train.py", 1)
    assert user.ds_config_name == str(Path("model/ds.json"))
    assert user.ds_config == DS == user.base_config
    assert (user.overrides, user.env, user.includes) == ({}, {}, ())
    Path("exp.json").write_text(json.dumps(DATA))
    assert experiment.read(Path("exp.json"), Path("model")).ds_config == DS


def test_all_of_it() -> None:
    overrides = {"zero_optimization": {"overlap_comm": True}, "gradient_clipping": 1.0}
    lr = {"type": "const", "val": 0.5}
    hparams: dict[str, Any] = {
        "deepspeed_config": {"type": "const", "val": "ds.json"},
        "overwrite_deepspeed_args": overrides,
        "optimizer": {"lr": lr, "kind": "a"},
    }
    user = read(
        name="my experiment",
        entrypoint=["python3", "train.py", 3],
        resources={"slots_per_trial": 4},
        hyperparameters=hparams,
        environment={"environment_variables": ["A=1", "B=x=y", "EMPTY="]},
    )
    assert (user.name, user.slots_per_trial) == ("my experiment", 4)
    assert list(user.entrypoint) == ["python3", "train.py", "3"]
    assert user.env == {"A": "1", "B": "x=y", "EMPTY": ""}
    assert user.hparams["optimizer"] == {"lr": 0.5, "kind": "a"}
    zero = {"stage": 1, "overlap_comm": True}
    own = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0}
    assert user.base_config == {**own, "zero_optimization": zero}
    assert user.ds_config == DS, "as it is in the file"
    chosen = {"zero_optimization": {"stage": 2, "overlap_comm": False}}
    assert experiment.trial_hparams(user.hparams, chosen) == {
        **user.hparams,
        "overwrite_deepspeed_args": {**overrides, **chosen},
    }
    hparams["optimizer"]["kind"] = {"type": "categorical", "vals": ["a", "b"]}
    refused(f"{HPARAMS}.optimizer.kind", "is a range", hyperparameters=hparams)


def test_variables_by_device_and_a_configuration_inline() -> None:
    given = {"cpu": ["A=1"], "cuda": ["B=2"], "rocm": None}
    inline = {"deepspeed_config": DS}
    user = read(environment={"environment_variables": given}, hyperparameters=inline)
    assert user.env == {"A": "1", "B": "2"}
    assert user.ds_config == DS
    assert user.ds_config_name == "exp.yaml: hyperparameters.deepspeed_config"


def test_deprecated_settings_are_read_as_what_replaces_them() -> None:
    """Wherever a configuration is: a search could set nothing beside a deprecated setting."""
    deprecated = {**DS, "zero_optimization": {"stage": 2, "cpu_offload": True}}
    current = {**DS, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    inline = {"deepspeed_config": deprecated, "overwrite_deepspeed_args": deprecated}
    user = read(hyperparameters=inline)
    assert user.ds_config == user.overrides == user.hparams["deepspeed_config"] == current
    passed = experiment.of_command(["train.py"], "train", Path(), deprecated)
    assert passed.ds_config == passed.hparams["deepspeed_config"] == current


def test_the_configuration_may_be_among_the_includes() -> None:
    Path("elsewhere").mkdir()
    Path("elsewhere/shared.json").write_text(json.dumps(DS))
    named = {"hyperparameters": {"deepspeed_config": "shared.json"}}
    assert read(DATA | named, "elsewhere/shared.json").ds_config == DS
    inside = {"hyperparameters": {"deepspeed_config": "elsewhere/shared.json"}}
    assert read(DATA | inside, "elsewhere").ds_config == DS


def test_the_configuration_is_json_whatever_its_name() -> None:
    Path("model/ds.conf").write_text(f"# mine\n{json.dumps(DS)} /* the end */")
    assert read(hyperparameters={"deepspeed_config": "ds.conf"}).ds_config == DS
    Path("model/ds.conf").write_text("zero_optimization:\n  stage: 1\n")  # a text, not a section
    refused(
        "model/ds.conf: zero_optimization",
        "must be a mapping",
        hyperparameters={"deepspeed_config": "ds.conf"},
    )


# -- what is refused


DS_CONFIG, STAGE = "hyperparameters.deepspeed_config", "zero_optimization.stage"
SLOTS, VARIABLES = "resources.slots_per_trial", "environment.environment_variables"


def test_lists_are_what_may_be_searched() -> None:
    """Of the configuration's own file and of the overrides, in either form of a list."""
    file = {
        "train_micro_batch_size_per_gpu": [2, 4],
        "zero_optimization": {"stage": "all", "overlap_comm": [True, False]},
    }
    Path("model/ds.json").write_text(json.dumps(file))
    vals = {"type": "categorical", "vals": [5e8, 1e6]}
    overrides = {"zero_optimization": {"stage": [3, 1], "reduce_bucket_size": vals}}
    hparams = {"deepspeed_config": "ds.json", "overwrite_deepspeed_args": overrides}
    found = read(hyperparameters=hparams)
    assert found.choices == {
        "train_micro_batch_size_per_gpu": [2, 4],
        "stage": [3, 1],
        "overlap_comm": [True, False],
        "reduce_bucket_size": [5 * 10**8, 10**6],
    }
    assert found.base_config == {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": 5 * 10**8,
        },
    }
    # The script must not read the lists from the file.
    assert experiment.trial_hparams(found.hparams, {})["deepspeed_config"] == {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 0, "overlap_comm": True},
    }


def test_yaml_is_read_as_the_master_reads_it() -> None:
    """Neither as YAML 1.1, for which 1e-4 is a text, nor as 1.2, for which `on` is one."""
    text = "a: 1e-4\nb: on\nc: 'on'\nd: {e: 5e8, f: [No, \"no\", nO]}\ng: |\n  yes\n"
    Path("exp.yaml").write_text(text)
    found = experiment.read_mapping(Path("exp.yaml"))
    inner = {"e": 5e8, "f": [False, "no", "nO"]}
    assert found == {"a": 1e-4, "b": True, "c": "on", "d": inner, "g": "yes\n"}
