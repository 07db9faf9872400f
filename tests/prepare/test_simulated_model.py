"""Names and sequence lengths of models to simulate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsat.errors import UserInputError
from dsat.prepare import installed_deepspeed
from dsat.prepare.simulated_model import name_of, simulate, warn_of_length
from dsat.prepare.target import ModelSettings
from dsat.simulation.protocol import ScriptFacts


def test_a_model_has_its_name_on_the_hub_or_its_folders_or_that_of_its_type(tmp_path: Path) -> None:
    path = tmp_path / "models--of-somebody--tiny-model-1b" / "snapshots" / "4567" / "config.json"
    assert name_of("somebody/tiny-model-1b", path) == "tiny-model-1b"
    named = tmp_path / "my-llama" / "config.json"
    assert name_of(str(named), named) == name_of(str(named.parent), named) == "my-llama"
    assert name_of("my-llama.json", tmp_path / "my-llama.json") == "my-llama"
    here = tmp_path / "config.json"
    here.write_text('{"model_type": "llama"}')
    for word in ("config.json", ".", "../config.json", ".."):
        assert name_of(word, here) == "llama"


@pytest.mark.parametrize(("length", "warnings"), [(4096, 0), (4097, 1)])
def test_samples_beyond_the_models_positions_are_warned_of(
    length: int, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ModelSettings(model="config.json", seq_length=length)
    warn_of_length(settings, ScriptFacts(length, model_takes=4096))
    assert len(caplog.records) == warnings


def test_memory_and_speed_with_zenflow_are_not_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installed_deepspeed, "check", lambda *args: None)
    model, own = tmp_path / "model.json", tmp_path / "ds.json"
    model.write_text('{"model_type": "llama"}')
    own.write_text(json.dumps({"zero_optimization": {"stage": 2, "zenflow": {}}}))
    settings = ModelSettings(model=str(model), ds_config=own)
    with pytest.raises(UserInputError, match="ZenFlow"), simulate(settings):
        pass
