"""The user's files, and what a search reads from them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from testing.scenarios import User
from tests.command.plans import Reader, listed

MICRO, ZERO = "train_micro_batch_size_per_gpu", "zero_optimization"
DS: dict[str, Any] = {MICRO: 4, ZERO: {"stage": 1}}


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    return Reader(User(tmp_path))


def test_the_least_that_is_needed(reader: Reader) -> None:
    plan = reader.experiment({"entrypoint": "python3 train.py"}, DS)
    assert plan["base_config"] == DS and plan["slots_per_trial"] == 1


def test_all_of_it(reader: Reader) -> None:
    """Overrides of the file, constants in hyperparameters, and variables."""
    overrides = {ZERO: {"overlap_comm": True}, "gradient_clipping": 1.0}
    hparams = {
        "deepspeed_config": {"type": "const", "val": "ds.json"},
        "overwrite_deepspeed_args": overrides,
        "optimizer": {"lr": {"type": "const", "val": 0.5}, "kind": "a"},
    }
    data = {
        "entrypoint": ["python3", "train.py", 3],
        "resources": {"slots_per_trial": 2},
        "hyperparameters": hparams,
        "environment": {"environment_variables": ["A=1", "B=x=y", "EMPTY="]},
    }
    plan = reader.experiment(data, DS)
    zero = {"stage": 1, "overlap_comm": True}
    assert plan["base_config"] == {MICRO: 4, "gradient_clipping": 1.0, ZERO: zero}
    assert plan["slots_per_trial"] == 2 and reader.command[-2:] == ["train.py", "3"]


def test_deprecated_settings_are_read_as_what_replaces_them(reader: Reader) -> None:
    """Otherwise a search could not change a setting whose deprecated form is set."""
    deprecated = {MICRO: 4, ZERO: {"stage": 2, "cpu_offload": True}}
    current = {MICRO: 4, ZERO: {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    inline = {"deepspeed_config": deprecated, "overwrite_deepspeed_args": deprecated}
    assert reader.experiment({"hyperparameters": inline}, DS)["base_config"] == current
    assert reader.command_line(deprecated)["base_config"] == current


@pytest.mark.parametrize(
    ("name", "include"),
    [("shared.json", "elsewhere/shared.json"), ("elsewhere/shared.json", "elsewhere")],
)
def test_the_configuration_may_be_among_the_includes(
    reader: Reader, name: str, include: str
) -> None:
    reader.user.has(DS)
    (reader.user.folder / "elsewhere").mkdir()
    (reader.user.folder / "elsewhere" / "shared.json").write_text(json.dumps(DS))
    data = {"hyperparameters": {"deepspeed_config": name}}
    assert reader.experiment(data, {}, "--include", include)["base_config"] == DS


def test_the_configuration_is_json_whatever_its_name(reader: Reader) -> None:
    reader.user.has(DS)
    path = reader.user.folder / "ds.conf"
    path.write_text(f"# mine\n{json.dumps(DS)} /* the end */")
    data = {"hyperparameters": {"deepspeed_config": "ds.conf"}}
    assert reader.experiment(data, {})["base_config"] == DS


def test_yaml_is_read_as_the_master_reads_it(reader: Reader) -> None:
    """In YAML 1.1, 1e-4 would be text; in YAML 1.2, `on` would be text."""
    reader.user.has(DS)
    text = (
        "entrypoint: python3 train.py\nhyperparameters:\n  deepspeed_config:\n"
        f"    {MICRO}: 2\n    gradient_clipping: 1e-4\n"
        "    own: {a: on, b: 'on', c: 5e8, d: [No, \"no\", nO]}\n"
    )
    config = reader.text(text)["base_config"]
    assert (config["gradient_clipping"], config[MICRO]) == (1e-4, 2)
    assert config["own"] == {"a": True, "b": "on", "c": 5e8, "d": [False, "no", "nO"]}


def test_lists_are_what_may_be_searched(reader: Reader) -> None:
    """Lists may be in the configuration file or in the overrides, in two forms."""
    file = {MICRO: [2, 4], ZERO: {"stage": "all", "overlap_comm": [True, False]}}
    vals = {"type": "categorical", "vals": [5e8, 1e6]}
    overrides = {ZERO: {"stage": [3, 1], "reduce_bucket_size": vals}}
    hparams: Mapping[str, Any] = {
        "deepspeed_config": "ds.json",
        "overwrite_deepspeed_args": overrides,
    }
    plan = reader.experiment({"hyperparameters": hparams}, file)
    assert listed(plan) == {
        MICRO: [2, 4],
        "stage": [1, 3],
        "overlap_comm": [True, False],
        "reduce_bucket_size": [5 * 10**8, 10**6],
    }
    zero = {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 5 * 10**8}
    assert plan["base_config"] == {MICRO: 2, ZERO: zero}
