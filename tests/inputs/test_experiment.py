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
BUCKET = "zero_optimization.reduce_bucket_size"
LENGTH = "searcher.max_length"
SLOTS, VARIABLES = "resources.slots_per_trial", "environment.environment_variables"
WRONG: list[tuple[str, Any, str, str]] = [
    *(("entrypoint", bad, "entrypoint", "there is no entrypoint") for bad in (None, 5)),
    *(
        ("hyperparameters", bad, "hyperparameters", f"there is no {DS_CONFIG}")
        for bad in (None, "x")
    ),
    *((DS_CONFIG, bad, DS_CONFIG, "must be a path") for bad in (None, "", 3)),
    *((DS_CONFIG, bad, DS_CONFIG, f"there is no file {bad!r}") for bad in ("other.json", ".")),
    *(
        (
            f"hyperparameters.{key}",
            {"type": "log", "minval": 1},
            f"hyperparameters.{key}",
            "a range",
        )
        for key in ("lr", "deepspeed_config")
    ),
    *((SLOTS, bad, SLOTS, "must be a positive integer") for bad in (0, "two", True)),
    *(
        (f"{DS_CONFIG}.{STAGE}", bad, f"{DS_CONFIG}: {STAGE}", "must be 0, 1, 2 or 3")
        for bad in (4, None)
    ),
    *(
        (f"{DS_CONFIG}.zero_optimization", bad, f"{DS_CONFIG}: zero_optimization", "a mapping")
        for bad in ("most", 2)
    ),
    *(
        (f"{DS_CONFIG}.{BUCKET}", bad, f"{DS_CONFIG}: {BUCKET}", "must be an integer")
        for bad in ("most", -1)
    ),
    ("searcher", "single", "searcher", "must be a mapping"),
    *(
        (LENGTH, bad, LENGTH, "must be a whole number or a single unit with one")
        for bad in (None, "100 batches", True, {}, {"batches": None}, {"batches": 1, "epochs": 2})
    ),
    *((VARIABLES, bad, VARIABLES, "must be a list") for bad in ("A=1", {"cuda": "A=1"})),
    *((VARIABLES, ["B=1", bad], VARIABLES, "not of the form NAME=VALUE") for bad in ("A", "=1")),
]


@pytest.mark.parametrize(("path", "value", "where", "problem"), WRONG, ids=str)
def test_what_is_wrong_is_named_with_its_place(
    path: str, value: Any, where: str, problem: str
) -> None:
    first, *keys = path.split(".")
    for key in reversed(keys):
        value = {key: value}
    own = DATA.get(first)
    if isinstance(own, dict) and isinstance(value, dict) and keys != ["deepspeed_config"]:
        value = {**own, **value}
    refused(f"exp.yaml: {where}", problem, **{first: value})


def test_overrides_and_files_are_checked_as_the_experiment() -> None:
    bad = {"zero_optimization": {"stage": 4}}
    hparams = {"deepspeed_config": "ds.json", "overwrite_deepspeed_args": bad}
    problem = "must be 0, 1, 2 or 3"
    refused(f"{HPARAMS}.overwrite_deepspeed_args: {STAGE}", problem, hyperparameters=hparams)
    Path("model/ds.json").write_text(json.dumps(bad))
    refused(f"model/ds.json: {STAGE}", problem)


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


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:\n\t- b", "(line 2, column 1)"),
        ("a: [1\nb: 2", "is not valid YAML"),
        ("a: 1\na: 2", "(line 2, column 1)"),
        ("", "does not hold a mapping"),
        ("- a", "does not hold a mapping"),
        ("a: 2024-01-01", "does not know (NaN, or a date without quotes) at a: "),
        ("a: {b: 1}\nc: {d: [1, .nan]}", "a date without quotes) at c.d.1: "),
        ("? [a, b]\n: c", "does not know"),
    ],
)
def test_yaml(text: str, problem: str) -> None:
    Path("exp.yaml").write_text(text)
    with pytest.raises(UserInputError, match=r"^exp\.yaml: ") as caught:
        experiment.read(Path("exp.yaml"), Path("model"))
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_yaml_is_read_as_the_master_reads_it() -> None:
    """Neither as YAML 1.1, for which 1e-4 is a text, nor as 1.2, for which `on` is one."""
    text = "a: 1e-4\nb: on\nc: 'on'\nd: {e: 5e8, f: [No, \"no\", nO]}\ng: |\n  yes\n"
    Path("exp.yaml").write_text(text)
    found = experiment.read_mapping(Path("exp.yaml"))
    inner = {"e": 5e8, "f": [False, "no", "nO"]}
    assert found == {"a": 1e-4, "b": True, "c": "on", "d": inner, "g": "yes\n"}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{\n"a": 1,\n', "is not valid JSON: Bad key name (eof) (line 3, column 1)"),
        (b'{"a": {"b": 1,\n"b": 2, "c": 1}}', "gives a key more than once"),
        (b'{"b": 1, "a": {"c": 1e999}}', "(NaN, or a date without quotes) at a.c: "),
        (b'{"a": 1e999} // large', "a number that is too large"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"[1]", "does not hold a mapping"),
        (b'{"a":' * 20_000, "is nested too deeply"),
    ],
)
def test_configurations_that_deepspeed_refuses(content: bytes, problem: str) -> None:
    Path("model/ds.json").write_bytes(content)
    with pytest.raises(UserInputError, match=r"^model/ds\.json: ") as caught:
        read()
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_files_and_folders_that_are_not_there() -> None:
    Path("exp.yaml").write_text("")
    for config, folder, problem in (
        ("no.yaml", "model", "no.yaml: there is no such file"),
        ("model", "model", "model: cannot be read"),
        ("exp.yaml", "none", "none: does not exist"),
        ("exp.yaml", "exp.yaml", "exp.yaml: is not a folder"),
    ):
        with pytest.raises(UserInputError, match=f"^{problem}"):
            experiment.read(Path(config), Path(folder))
    with pytest.raises(UserInputError, match=r"^lost: does not exist"):
        read(DATA, "lost")
