"""What of a script's code and settings counts as another model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import dsat
from dsat.in_trial.simulation import script_key


class Layer(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        for name, value in attributes.items():
            setattr(self, name, value)


@dataclass
class Config:
    attention: str
    inner: dict[str, Any]


def module_of(name: str, file: Path) -> ModuleType:
    module = ModuleType(name)
    module.__file__ = str(file)
    return module


def test_only_the_users_own_files_are_sources(tmp_path: Path) -> None:
    main, helper = tmp_path / "train.py", tmp_path / "nets.py"
    main.write_text("a")
    helper.write_text("b")
    compiled = tmp_path / "fused.so"
    compiled.write_text("c")
    installed = tmp_path / ".venv" / "lib" / "site-packages" / "nets2.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("d")
    modules = {
        "__main__": module_of("__main__", main),
        "nets": module_of("nets", helper),
        "fused": module_of("fused", compiled),
        "nets2": module_of("nets2", installed),
        "generated": module_of("generated", tmp_path / "gone.py"),
        "nothing": ModuleType("nothing"),
        "json": json,
        "dsat": dsat,
        "dsat.in_trial.simulation.script_key": script_key,
        "torch": torch,
    }
    found = script_key.user_sources(modules)
    assert set(found) == {"__main__", "nets"}
    helper.write_text("b = 1")
    assert {n for n, d in script_key.user_sources(modules).items() if d != found[n]} == {"nets"}


@pytest.mark.parametrize(
    "change",
    [
        lambda: Layer(flash=False),
        lambda: Layer(flash=True, p=0.1),
        lambda: Layer(flash=True, config=Config("eager", {"rope": 1})),
        lambda: Layer(flash=True, config=Config("sdpa", {"rope": 2})),
        lambda: Layer(flash=True, config={"attention": "sdpa"}),
        lambda: nn.Sequential(Layer(flash=True, config=Config("sdpa", {"rope": 1}))),
    ],
)
def test_settings_tell_models_apart(change: Callable[[], nn.Module]) -> None:
    def told(model: nn.Module) -> Any:
        return script_key.of_script(model.modules())["settings"]

    own = told(Layer(flash=True, config=Config("sdpa", {"rope": 1})))
    assert told(Layer(flash=True, config=Config("sdpa", {"rope": 1}))) == own
    assert told(change()) != own


def test_what_differs_from_run_to_run_does_not_count() -> None:
    one, two = (Layer(_calls=n, hook=object(), config=SimpleNamespace(a=object())) for n in (1, 2))
    assert script_key.settings_of([one]) == script_key.settings_of([two])


def test_a_configuration_that_holds_itself_has_an_end() -> None:
    config: dict[str, Any] = {}
    config["self"] = config
    assert script_key.settings_of([Layer(config=config)])


@pytest.mark.slow  # imports transformers
def test_the_attention_of_hugging_face_counts() -> None:
    def model(attention: str) -> Any:
        config = transformers.LlamaConfig(
            hidden_size=8,
            intermediate_size=8,
            num_attention_heads=2,
            num_hidden_layers=1,
            vocab_size=10,
            attn_implementation=attention,
        )
        return transformers.LlamaForCausalLM(config)

    sdpa, again, eager = (
        script_key.of_script(model(name).modules()) for name in ("sdpa", "sdpa", "eager")
    )
    assert sdpa == again != eager
    assert sdpa["versions"]["transformers"] == transformers.__version__


def test_the_scripts_switches_count_and_its_paths_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train.py", "--chunked-loss", "--deepspeed_config", "/tmp/run-1/ds_config.json"]
    monkeypatch.setattr(sys, "argv", words)
    assert script_key.of_script([])["arguments"] == ["--chunked-loss", "--deepspeed_config"]
