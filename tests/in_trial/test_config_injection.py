"""The trial's configuration reaches `deepspeed.initialize`, whatever the script passes."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dsat.in_trial import config_injection
from dsat.inputs import ds_config

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
}
OVERRIDES = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
OWN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
}


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 2}, {"a": 1}, False),
        ({}, {"a": 1}, False),
        ({"z": {"stage": 1, "more": 5}}, {"z": {"stage": 1}}, True),
        ({"z": {"stage": 1}}, {"z": {"stage": 2}}, False),
        ({"z": {"stage": 1}}, {"z": {"stage": 1, "overlap": False}}, False),
        ({"z": 1}, {"z": {"stage": 1}}, False),
        ({"a": "auto"}, {"a": 1}, False),
    ],
)
def test_agrees(config: dict[str, Any], overrides: dict[str, Any], expected: bool) -> None:
    assert config_injection.agrees(config, overrides) is expected


def test_auto_values_are_the_scripts() -> None:
    config = {"lr": "auto", "zero": {"stage": 2, "size": "auto"}, "clip": "auto"}
    passed = {"lr": 0.5, "zero": {"stage": 1, "size": 7}, "extra": 1}
    expected = {"lr": 0.5, "zero": {"stage": 2, "size": 7}, "clip": "auto"}
    assert ds_config.completed(config, passed) == expected
    assert ds_config.completed({"zero": {"size": "auto"}}, {"zero": 3}) == {
        "zero": {"size": "auto"}
    }


class Calls:
    """DeepSpeed's `initialize`, as much of it as finds the configuration."""

    def __init__(self) -> None:
        self.configs: list[Any] = []

    def initialize(
        self,
        args: Any = None,
        model: Any = None,
        optimizer: Any = None,
        model_parameters: Any = None,
        config: Any = None,
        config_params: Any = None,
    ) -> tuple[str, ...]:
        assert model == "model"
        if config is None and config_params is not None:
            config = config_params
        if getattr(args, "deepspeed_config", None) is not None:
            assert config is None, "two configurations"
            config = args.deepspeed_config
        assert config is not None, "no configuration"
        if isinstance(config, str):
            config = json.loads(Path(config).read_text())
        self.configs.append(config)
        return ("engine",)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    calls = Calls()
    module = ModuleType("deepspeed")
    module.initialize = calls.initialize  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    config_injection.install(CONFIG, OVERRIDES, path)
    return calls


def initialize(*args: Any, **kwargs: Any) -> Any:
    return sys.modules["deepspeed"].initialize(*args, **kwargs)


def own_file(folder: Path) -> str:
    path = folder / "own.json"
    path.write_text(json.dumps(OWN))
    return str(path)


WAYS: dict[str, Callable[[Path], Any]] = {
    "dict": lambda _: initialize(model="model", config=copy.deepcopy(OWN)),
    "path": lambda folder: initialize(model="model", config=own_file(folder)),
    "config_params": lambda _: initialize(model="model", config_params=copy.deepcopy(OWN)),
    "positional": lambda _: initialize(None, "model", None, None, copy.deepcopy(OWN)),
    "args": lambda folder: initialize(
        SimpleNamespace(deepspeed_config=own_file(folder)), "model", model_parameters=[1]
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_trials_configuration_replaces_the_scripts(
    calls: Calls, tmp_path: Path, way: str
) -> None:
    assert WAYS[way](tmp_path) == ("engine",)
    assert calls.configs == [CONFIG]


def test_a_dict_is_changed_in_place_unless_it_agrees(calls: Calls) -> None:
    """A library may have filled the trial's file in, and changed what the trial is not about."""
    own = copy.deepcopy(OWN)
    filled = {**CONFIG, "gradient_clipping": 1.0, "optimizer": {"type": "AdamW"}}
    before = copy.deepcopy(filled)
    for config in (own, filled):
        initialize(model="model", config=config)
    assert calls.configs[0] is own and own == CONFIG
    assert calls.configs[1] is filled and filled == before


def test_a_second_model_keeps_a_configuration_of_its_own(calls: Calls) -> None:
    """With the trial's batch sizes, if it has those of the first: it is fed the same batches."""
    critic = {**OWN, "gradient_clipping": 5.0}
    other = {**critic, "train_micro_batch_size_per_gpu": 2}
    for config in (OWN, OWN, critic, other):
        initialize(model="model", model_parameters=[1], config=copy.deepcopy(config))
    assert calls.configs == [
        CONFIG,
        CONFIG,
        {**critic, "train_micro_batch_size_per_gpu": 4},
        other,
    ]


@pytest.mark.parametrize("accelerated", [False, True])
def test_a_reference_model_does_not_keep_the_trained_one_from_the_configuration(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, accelerated: bool
) -> None:
    """accelerate names what its engine trains; else a reference has no optimizer."""
    plugins = {"deepspeed_plugins": {"default": "a plugin"}} if accelerated else {}
    state = SimpleNamespace(AcceleratorState=SimpleNamespace(_shared_state=plugins))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    reference = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": 0}}
    reference |= {"optimizer": {"type": "AdamW"}} if accelerated else {}
    initialize(model="model", config=copy.deepcopy(reference))
    initialize(model="model", model_parameters=[1], config=copy.deepcopy(OWN))
    assert calls.configs == [reference, CONFIG]


@pytest.mark.parametrize(
    ("stage", "passes", "file", "is_warned_of"),
    [
        (2, "", "train.py", True),
        (2, "enabled=False", "train.py", False),
        (2, "", "/lib/site-packages/transformers/modeling_utils.py", False),
        (3, "", "train.py", False),
    ],
)
def test_a_script_that_partitions_its_model_in_every_stage_is_told_so(
    stage: int, passes: str, file: str, is_warned_of: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.runtime.zero.partition_parameters import Init

    opened: list[bool] = []
    is_on = inspect.signature(Init.__init__)

    @functools.wraps(Init.__init__)
    def init(*args: Any, **kwargs: Any) -> None:
        opened.append(is_on.bind(*args, **kwargs).arguments.get("enabled", True))

    monkeypatch.setattr(Init, "__init__", init)
    said: list[str] = []
    config_injection.keep_models_whole({"zero_optimization": {"stage": stage}}, said.append)
    exec(compile(f"Init({passes})", file, "exec"), {"Init": Init})
    assert opened == [stage == 3]
    assert said == [config_injection.ZERO_INIT] * is_warned_of


def test_the_scripts_own_mistakes_stay_its_own(calls: Calls, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no configuration"):
        initialize(model="model")
    args = SimpleNamespace(deepspeed_config=own_file(tmp_path))
    with pytest.raises(AssertionError, match="two configurations"):
        initialize(args, "model", config=copy.deepcopy(OWN))
    with pytest.raises(TypeError, match="unexpected keyword"):
        initialize(modle="model")
    with pytest.raises(FileNotFoundError):
        initialize(model="model", config="nowhere.json")


def test_wrappers_compose(calls: Calls) -> None:
    """A second one, as a meter's, sees the same names and what the first made of them."""
    seen: list[dict[str, Any]] = []
    config_injection.on_initialize(lambda arguments: seen.append(dict(arguments)))
    initialize(None, "model", config=copy.deepcopy(OWN))
    assert seen == [{"args": None, "model": "model", "config": CONFIG}]
    assert calls.configs == [CONFIG]
