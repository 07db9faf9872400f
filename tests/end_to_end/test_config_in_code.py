"""Scripts that build their DeepSpeed configuration in code, from the search to the training.

`tests/in_trial/test_config_injection.py` tests only the trials of such scripts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsat.in_trial.adapters.deepspeed_calls import ZERO_INIT
from dsat.values.outcome import OutcomeKind
from testing.command import FAST, kinds_of, run_of, typed
from testing.local import (
    PROGRAMS,
    Bench,
    bench_of,
    processes_of,
    read_json,
    warnings_of,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("way", ["positional", pytest.param("args", marks=pytest.mark.nightly)])
def test_a_search_learns_it_from_the_first_run(tmp_path: Path, way: str) -> None:
    place = tmp_path / "work"
    shutil.copytree(PROGRAMS / "in_code", place)
    options = ["-mt", 4, *FAST, "-m", "throughput", "--max-micro-batch", 64, "--run-dir", "run"]
    words = ["random", *options, "--finals", 0, "--run-full-experiment", "--", "python3"]
    told = typed(place, *words, "train.py", WAY=way)
    assert told.status == 0, told
    run = run_of(place / "run")
    assert set(kinds_of(run)) == {OutcomeKind.OK}, told.out
    own = read_json(place / "own.json")
    assert run.plan.own_batch.micro_batch == own["train_micro_batch_size_per_gpu"]
    assert len({trial.batch.micro_batch for trial in run.trials.values()}) > 2
    best = read_json(place / "run" / "best_ds_config.json")
    assert best["gradient_clipping"] == own["gradient_clipping"]
    assert best["zero_optimization"]["reduce_bucket_size"] == 10**6, "as it is in the code"
    # The first run leaves the files of every trial, without the variables that it recorded.
    folder = place / "run" / "trials" / run.trials[0].name
    left = {path.name for path in folder.iterdir()}
    assert {"cmd.txt", "stdout.log", "stderr.log", "metrics.json", "modules.json"} <= left
    assert not {"records", "hook", "packages"} & left
    assert run.profile is not None and run.profile.num_params > 0
    # The training that follows has it as well.
    assert run.best is not None
    assert read_json(place / "run" / "full" / "facts0.json") == {
        "micro_batch": run.best.batch.micro_batch,
        "gas": run.best.batch.gas,
        "stage": run.best.stage,
        "clipping": own["gradient_clipping"],
        "fed": run.best.batch.micro_batch,
        "steps": 100,
    }
    assert not processes_of(place / "run")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench_of(
        "in_code", tmp_path_factory.mktemp("pair"), slots_per_trial=2, imported=True
    ) as bench:
        yield bench


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_two_ranks_of_a_model_that_is_partitioned_while_it_is_made(pair: Bench, stage: int) -> None:
    """Only stage 3 needs this; stage 2 gets a warning."""
    trial = pair.trial("zero init", micro_batch=5, stage=stage)
    outcome = pair.run(trial)
    assert outcome.ok, pair.log(trial)
    assert warnings_of(outcome) == ((ZERO_INIT,) if stage == 2 else ())
