"""The user's files: what is read from them, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsat.errors import UserInputError
from dsat.inputs import experiment
from dsat.inputs.experiment import Experiment, trial_hparams

DS: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}}
DATA: dict[str, Any] = {
    "entrypoint": "python3 train.py",
    "hyperparameters": {"deepspeed_config": "ds.json"},
}


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
    assert user.name == "model"
    assert user.entrypoint == "python3 train.py"
    assert user.slots_per_trial == 1
    assert user.ds_config_path == Path("model/ds.json")
    assert user.ds_config == DS == user.base_config
    assert (user.overrides, user.env, user.includes) == ({}, {}, ())


def test_all_of_it() -> None:
    overrides = {"zero_optimization": {"overlap_comm": True}, "gradient_clipping": 1.0}
    user = read(
        name="my experiment",
        entrypoint=["python3", "train.py", 3],
        resources={"slots_per_trial": 4},
        hyperparameters={
            "deepspeed_config": {"type": "const", "val": "ds.json"},
            "overwrite_deepspeed_args": overrides,
            "lr": {"type": "const", "val": 0.5},
            "nested": {"a": 1},
        },
        environment={"environment_variables": ["A=1", "B=x=y", "EMPTY="]},
        searcher={"name": "custom", "max_length": {"batches": 100}},
    )
    assert user.name == "my experiment"
    assert list(user.entrypoint) == ["python3", "train.py", 3]
    assert user.slots_per_trial == 4
    assert user.env == {"A": "1", "B": "x=y", "EMPTY": ""}
    assert user.hparams["lr"] == 0.5
    assert user.hparams["nested"] == {"a": 1}
    assert user.base_config == {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": 1, "overlap_comm": True},
        "gradient_clipping": 1.0,
    }
    assert user.ds_config == DS, "as it is in the file"


def test_environment_variables_by_device() -> None:
    given = {"cpu": ["A=1"], "cuda": ["B=2"], "rocm": None}
    assert read(environment={"environment_variables": given}).env == {"A": "1", "B": "2"}


def test_the_configuration_may_be_inline() -> None:
    user = read(hyperparameters={"deepspeed_config": DS})
    assert user.ds_config_path is None
    assert user.ds_config == DS
    assert user.ds_config_name == "exp.yaml: hyperparameters.deepspeed_config"


def test_the_experiment_may_be_json() -> None:
    Path("exp.json").write_text(json.dumps(DATA))
    user = experiment.read(Path("exp.json"), Path("model"))
    assert user.ds_config == DS


def test_the_configuration_may_be_among_the_includes() -> None:
    Path("elsewhere").mkdir()
    Path("elsewhere/shared.json").write_text(json.dumps(DS))
    named = {"hyperparameters": {"deepspeed_config": "shared.json"}}
    assert read(DATA | named, "elsewhere/shared.json").ds_config == DS
    inside = {"hyperparameters": {"deepspeed_config": "elsewhere/shared.json"}}
    assert read(DATA | inside, "elsewhere").ds_config == DS


def test_the_configuration_is_json_whatever_its_name() -> None:
    Path("model/ds.conf").write_text(json.dumps(DS))
    assert read(hyperparameters={"deepspeed_config": "ds.conf"}).ds_config == DS
    Path("model/ds.conf").write_text("{'zero_optimization': {'stage': 1}")
    refused("model/ds.conf", "is not valid JSON", hyperparameters={"deepspeed_config": "ds.conf"})
    Path("model/ds.conf").write_text("zero_optimization:\n  stage: 1\n")  # a text, not a section
    refused(
        "model/ds.conf: zero_optimization",
        "must be a mapping",
        hyperparameters={"deepspeed_config": "ds.conf"},
    )


def test_the_configuration_may_have_comments() -> None:
    lines = json.dumps(DS, indent=2).splitlines()
    text = "# mine\n" + "  // why\n".join(line + "\n" for line in lines) + "/* the end */"
    Path("model/ds.json").write_text(text)
    assert read().ds_config == DS


def test_a_trials_hyperparameters() -> None:
    own = {"gradient_clipping": 1.0, "zero_optimization": {"overlap_comm": True}}
    user = read(
        hyperparameters={"deepspeed_config": "ds.json", "lr": 1, "overwrite_deepspeed_args": own}
    )
    chosen = {"zero_optimization": {"stage": 2, "overlap_comm": False}}
    assert experiment.trial_hparams(user.hparams, chosen) == {
        "deepspeed_config": "ds.json",
        "lr": 1,
        "overwrite_deepspeed_args": {
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 2, "overlap_comm": False},
        },
    }
    assert user.overrides == own


# -- what is refused

HPARAMS = "exp.yaml: hyperparameters"


@pytest.mark.parametrize("value", [None, "", [], 5, {"a": 1}])
def test_no_entrypoint(value: Any) -> None:
    assert "deepspeed train.py" in refused(
        "exp.yaml: entrypoint", "no entrypoint", entrypoint=value
    )


@pytest.mark.parametrize("value", [None, [], {}, "x", {"lr": 1}])
def test_no_configuration(value: Any) -> None:
    refused(HPARAMS, "there is no hyperparameters.deepspeed_config", hyperparameters=value)


@pytest.mark.parametrize("value", [None, "", 3, ["ds.json"]])
def test_a_configuration_that_is_no_path(value: Any) -> None:
    hparams = {"deepspeed_config": value}
    refused(f"{HPARAMS}.deepspeed_config", "must be a path", hyperparameters=hparams)


@pytest.mark.parametrize("value", ["other.json", ".", "exp.yaml"])
def test_a_configuration_that_is_not_there(value: str) -> None:
    hparams = {"deepspeed_config": value}
    text = refused(f"{HPARAMS}.deepspeed_config", "there is no file", hyperparameters=hparams)
    assert repr(value) in text and "relative to the model folder" in text


@pytest.mark.parametrize("kind", ["int", "double", "log", "categorical"])
def test_ranges_are_for_another_search(kind: str) -> None:
    hparams = {**DATA["hyperparameters"], "lr": {"type": kind, "minval": 1, "maxval": 2}}
    refused(f"{HPARAMS}.lr", f"is a range ({kind})", hyperparameters=hparams)


@pytest.mark.parametrize("value", [0, -1, "two", 1.5, True, None, [1]])
def test_slots(value: Any) -> None:
    where = "exp.yaml: resources.slots_per_trial"
    refused(where, "must be a positive integer", resources={"slots_per_trial": value})


@pytest.mark.parametrize("stage", [4, -1, "2", None, {"a": 1}, True])
def test_zero_stages(stage: Any) -> None:
    """In the configuration's own file, inline, and in the overrides."""
    problem = f'must be 0, 1, 2, 3 or "all", or a list of them, not {stage!r}'
    bad = {"zero_optimization": {"stage": stage}}
    hparams = {"deepspeed_config": "ds.json", "overwrite_deepspeed_args": bad}
    overwrite = f"{HPARAMS}.overwrite_deepspeed_args: zero_optimization.stage"
    refused(overwrite, problem, hyperparameters=hparams)
    inline = {"deepspeed_config": bad}
    where = f"{HPARAMS}.deepspeed_config: zero_optimization.stage"
    refused(where, problem, hyperparameters=inline)
    Path("model/ds.json").write_text(json.dumps(bad))
    refused("model/ds.json: zero_optimization.stage", problem)


@pytest.mark.parametrize("zero", ["most", 2, [1], True])
def test_zero_sections(zero: Any) -> None:
    bad = {"zero_optimization": zero}
    where = f"{HPARAMS}.deepspeed_config: zero_optimization"
    refused(where, "must be a mapping", hyperparameters={"deepspeed_config": bad})
    Path("model/ds.json").write_text(json.dumps(bad))
    refused("model/ds.json: zero_optimization", "must be a mapping")


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
    assert trial_hparams(found.hparams, {})["deepspeed_config"] == {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 0, "overlap_comm": True},
    }


@pytest.mark.parametrize("value", ["single", [1], 3])
def test_searchers(value: Any) -> None:
    refused("exp.yaml: searcher", "must be a mapping", searcher=value)


@pytest.mark.parametrize(
    "value", ["ten", 1.5, [1], {}, {"batches": "x"}, {"batches": 1, "epochs": 2}, None]
)
def test_lengths(value: Any) -> None:
    """Found now, and not when the best configuration is to be trained with."""
    searcher = {"name": "single", "max_length": value}
    refused("exp.yaml: searcher.max_length", "whole number", searcher=searcher)


@pytest.mark.parametrize("value", ["A=1", 5, {"cpu": 5}, {"cuda": "A=1"}])
def test_environments(value: Any) -> None:
    where = "exp.yaml: environment.environment_variables"
    refused(where, "must be a list", environment={"environment_variables": value})


@pytest.mark.parametrize("entry", ["A", "=1", 5])
def test_environment_entries(entry: Any) -> None:
    where = "exp.yaml: environment.environment_variables"
    problem = "is not of the form NAME=VALUE"
    refused(where, problem, environment={"environment_variables": ["B=1", entry]})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a:\n\t- b", "(line 2, column 1)"),
        ("a: [1\nb: 2", "is not valid YAML"),
        ("a: \x01", "is not valid YAML"),
        ("", "does not hold a mapping"),
        ("- a", "does not hold a mapping"),
        ("just words", "does not hold a mapping"),
    ],
)
def test_yaml(text: str, problem: str) -> None:
    Path("exp.yaml").write_text(text)
    with pytest.raises(UserInputError, match=r"^exp\.yaml: ") as caught:
        experiment.read(Path("exp.yaml"), Path("model"))
    assert problem in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{\n"a": 1,\n', "is not valid JSON: Bad key name (eof) (line 3, column 1)"),
        (b'{"a": {"b": 1,\n"b": 2, "c": 1}}', "gives a key more than once"),
        (b'{"a": 1e999}', "holds NaN or Infinity"),
        (b'{"a": 1e999} // large', "a number that is too large"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"[1]", "does not hold a mapping"),
    ],
)
def test_configurations_that_deepspeed_refuses(content: bytes, problem: str) -> None:
    Path("model/ds.json").write_bytes(content)
    with pytest.raises(UserInputError, match=r"^model/ds\.json: ") as caught:
        read()
    assert problem in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_cannot_be_read() -> None:
    for config, problem in (("no.yaml", "there is no such file"), ("model", "cannot be read")):
        with pytest.raises(UserInputError, match=f"^{config}: {problem}"):
            experiment.read(Path(config), Path("model"))


def test_model_folders() -> None:
    for folder, problem in (("none", "does not exist"), ("exp.yaml", "is not a folder")):
        Path("exp.yaml").write_text("")
        with pytest.raises(UserInputError, match=f"^{folder}: {problem}"):
            experiment.read(Path("exp.yaml"), Path(folder))
    with pytest.raises(UserInputError, match=r"^lost: does not exist"):
        read(DATA, "lost")
