"""Switches of real scripts: found, tried, named in the verdict and in the command to train with."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsat.run.run import Run
from dsat.values.trial import Trial
from testing.command import kinds_of, run_of, searched, typed
from testing.local import PROGRAMS, read_json

pytestmark = pytest.mark.slow

OPTIONS = """
    gridsearch --slots 1 -m throughput --train-batch-size own --finals 0
    --start-profile-step 3 --end-profile-step 6 --max-profile-steps 5 --memory-model formula
    --fix reduce_bucket_size contiguous_gradients --run-dir
""".split()


def tuned(program: str, run_dir: Path, *words: str) -> tuple[Run, str]:
    """A search, and what it says at its end."""
    told = typed(PROGRAMS / program, *OPTIONS, run_dir, *words, HF_HUB_OFFLINE="1", LOAD_S="0.02")
    assert told.status == 0, told
    run = run_of(run_dir)
    assert {kind.value for kind in kinds_of(run)} == {"OK"}, told.out
    return run, told.out


def waits_for_data(run: Run, trial: Trial | None) -> bool:
    """Whether a trial spent a part of its steps on it that is worth a sentence."""
    metrics = None if trial is None else run.outcomes[trial.id].metrics
    assert metrics is not None
    return metrics.data / metrics.latency >= 0.1


@pytest.mark.nightly
def test_a_trainer_script_without_a_flag(tmp_path: Path) -> None:
    import transformers

    words = "--zero-stages 1 --max-trials 8 --min-micro-batch 4 -- python in_code.py".split()
    run, said = tuned("hf_trainer", tmp_path / "run", *words)
    assert run.profile is not None
    found = {name: switch.values for name, switch in run.profile.switches.items()}
    ways = found["gradient_checkpointing"]
    # Older versions of the Trainer cannot leave out every second layer.
    assert ways in ((False, True, "every_2_layers"), (False, True))
    if hasattr(transformers.PreTrainedModel, "set_attn_implementation"):
        assert found["attn_implementation"] == ("sdpa", "eager")
    tried = searched(run)
    for trial in [run.trials[0], *tried]:
        changed, folder = trial.script_args, tmp_path / "run" / "trials" / trial.name
        kernel = changed.get("attn_implementation", "sdpa")
        assert ("# with attn_implementation=eager" in (folder / "cmd.txt").read_text()) is (
            kernel == "eager"
        )
        assert read_json(folder / "seen.json") == {
            "shapes": [[4, 16]],
            "checkpointing": changed.get("gradient_checkpointing", False) is not False,
            "attention": kernel,
            "workers": changed.get("dataloader_num_workers", 0),
        }
    tried_kernels = {trial.script_args.get("attn_implementation", "sdpa") for trial in tried}
    assert tried_kernels == set(found.get("attn_implementation", ["sdpa"]))
    tried_ways = {trial.script_args.get("gradient_checkpointing", False) for trial in tried}
    assert tried_ways == set(ways)
    # Of your step or of the best: within noise of each other they may be the same trial; and a busy
    # machine computes for so long that the wait is a small part.
    own_waits, best_waits = waits_for_data(run, run.baseline), waits_for_data(run, run.best)
    assert ("step waits for data" in said) is (own_waits or best_waits)
    if run.best is not run.baseline:  # a busy machine may leave it uncertain
        assert "Script: the best needs " in said
        assert "--run-full-experiment" in said  # no flag could say so


@pytest.mark.nightly
def test_a_slow_loader_with_a_flag_for_its_workers(tmp_path: Path) -> None:
    words = "--zero-stages 0 --max-trials 4 --end-profile-step 30 --max-profile-steps 60"
    words += " --fix reduce_bucket_size contiguous_gradients gradient_checkpointing"
    words += (
        " attn_implementation --min-micro-batch 2 --switch --num-workers=2 --switch ENV:DSAT_TEST=1"
    )
    script = "-- python plain.py --deepspeed --deepspeed_config ds.json --load-s 0.04"
    script += " --num-workers 0"
    run, said = tuned("frameworks", tmp_path / "run", *words.split(), *script.split())
    best = run.best
    assert best is not None and best.script_args["--num-workers"] == "2"
    assert "of your step waits for data, " in said
    [command] = [line for line in said.splitlines() if "--nproc-per-node=1 plain.py" in line]
    assert command.endswith("--num-workers 2")
    for trial in searched(run):
        text = (tmp_path / "run" / "trials" / trial.name / "cmd.txt").read_text()
        assert ("--num-workers 2" in text) is ("--num-workers" in trial.script_args)
        assert (" DSAT_TEST=1 " in text) is ("ENV:DSAT_TEST" in trial.script_args)
