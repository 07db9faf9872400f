"""Settings of a search that an `autotuning` section asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsat.app.autotuning import settings_of
from dsat.inputs import autotuning_section, experiment
from dsat.inputs.settings import Settings
from dsat.search import options_of


@pytest.mark.parametrize(
    ("section", "method", "given"),
    [
        ({}, "gridsearch", {"early_stopping": 5, "num_micro_batches": 3}),
        ({"tuner_type": "random", "tuner_early_stopping": 0}, "random", {"early_stopping": None}),
        ({"tuner_type": "model_based"}, "model", {"early_stopping": 5}),
    ],
)
def test_what_a_section_does_not_say_is_as_in_any_search(
    section: dict[str, Any], method: str, given: dict[str, Any]
) -> None:
    config = {"autotuning": {"enabled": True, **section}}
    user = experiment.of_command(["python3", "train.py"], "train", Path(), config, "it")
    read = autotuning_section.read(config, where="it")
    settings = settings_of(Settings(method="tune"), read, user)
    usual = {name: option.initial for name, option in options_of(method).items()}
    assert settings.method == method
    assert settings.search_options == {**usual, **given}
