"""What transformers refuses to build is said in its words, and is no error inside dsat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsat.errors import InvalidTrial
from dsat.in_trial.simulation import config_program

pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "of_next_year"}, r"refuses config.json: .*`of_next_year`.*Give another"),
        ({"model_type": "llama", "hidden_size": "wide"}, "refuses config.json: .*Give another"),
    ],
)
def test_a_refused_configuration(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    with pytest.raises(InvalidTrial, match=said):
        config_program.build(path, torch.bfloat16)
