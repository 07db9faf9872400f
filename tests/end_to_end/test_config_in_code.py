"""Scripts that build their DeepSpeed configuration in code, from the search to the training.

`tests/in_trial/test_config_injection.py` tests only the trials of such scripts.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dsat.values.outcome import OutcomeKind
from testing.command import FAST, kinds_of, run_of, typed
from testing.local import PROGRAMS, bench_of, processes_of, read_json, warnings_of

pytestmark = pytest.mark.slow


def test_a_search_learns_it_from_the_first_run(tmp_path: Path) -> None:
    place = tmp_path / "work"
    shutil.copytree(PROGRAMS / "in_code", place)
    options = ["-mt", 4, *FAST, "-m", "throughput", "--max-micro-batch", 64, "--run-dir", "run"]
    words = ["random", *options, "--finals", 0, "--run-full-experiment", "--", "python3"]
    told = typed(place, *words, "train.py")
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


@pytest.mark.nightly
def test_two_ranks_of_a_model_that_is_partitioned_while_it_is_made(tmp_path: Path) -> None:
    with bench_of("in_code", tmp_path, slots_per_trial=2, imported=True) as bench:
        trial = bench.trial("zero init", micro_batch=5, stage=3)
        outcome = bench.run(trial)
        assert outcome.ok, bench.log(trial)
    assert warnings_of(outcome) == ()
