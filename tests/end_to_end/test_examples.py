"""The example whose command is in no document: a real model, without a master."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsat.values.outcome import OutcomeKind
from testing.command import FAST, dsat, kinds_of, run_of, searched

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = [*FAST, *"--slot-memory 400MiB --max-trials 3 --metric throughput".split()]


def test_the_core_api_example_is_tuned(tmp_path: Path) -> None:
    folder = EXAMPLES / "core_api"
    told = dsat(
        "binary",
        "core_api",
        tmp_path,
        *SMALL,
        *("--slots", 1, "--zero-stages", 0, "--search-range-factor", 0.2),
        config=folder / "deepspeed.yaml",
        model_dir=folder,
    )
    assert told.status == 0, told.err
    run = run_of(tmp_path)
    assert run.baseline is not None
    assert OutcomeKind.ERROR not in kinds_of(run)
    assert run.profile is not None
    assert run.profile.num_params == 11_689_512  # torchvision's ResNet-18
    own, best = run.value(run.baseline), run.best_value
    assert own is not None
    assert best is not None
    assert best >= own
    best_config = json.loads((tmp_path / "best_ds_config.json").read_text())
    assert best_config["gradient_clipping"] == 1.0
    assert run.best is not None
    assert best_config["train_micro_batch_size_per_gpu"] == run.best.batch.micro_batch
    assert max(trial.batch.micro_batch for trial in searched(run)) > 4
