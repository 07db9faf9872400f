"""Every kind of script, with the commands that the documents give, on real processes."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from dsat.run.run import Run
from dsat.values.outcome import OutcomeKind
from testing.command import FAST, Told, kinds_of, run_of, searched, typed
from testing.local import buffers_of, processes_of, read_json
from testing.tuned_scripts import documented_commands

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ADAM = {"type": "AdamW", "params": {"lr": 0.0003, "torch_adam": True}}
STEPS = FAST[: FAST.index("--memory-model")]
SMALL = [*STEPS, *"--max-trials 3 --slot-memory 600MiB -m throughput".split()]
SMALL_MODEL = "--width 64 --layers 1 --length 8 --steps 12".split()


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """The example of a plain script, in a folder of its own."""
    shutil.copytree(ROOT / "examples" / "plain", tmp_path / "plain")
    return tmp_path / "plain"


def assert_found(run_dir: Path, told: Told) -> Run:
    assert told.status == 0, told
    assert "Traceback" not in told.out + told.err
    run = run_of(run_dir)
    assert run.best is not None and run.stop_reason is not None
    assert not {OutcomeKind.ERROR, OutcomeKind.INVALID} & set(kinds_of(run)), told.out
    assert processes_of(run_dir) == []
    assert buffers_of(run_dir) == []
    return run


# -- the documents' own commands


@pytest.mark.parametrize(
    "section",
    [
        "Coming from `deepspeed --autotuning`",
        # The kinds of script of these are searched elsewhere in each run of the tests.
        *(
            pytest.param(section, marks=pytest.mark.nightly)
            for section in (
                "How do I tune a plain DeepSpeed script?",
                "How do I tune a Hugging Face Trainer?",
                "DeepSpeedTrial",
            )
        ),
    ],
)
def test_a_documented_command(tmp_path: Path, section: str) -> None:
    folder, (method, *rest) = documented_commands()[section]
    shutil.copytree(ROOT / folder, tmp_path / "example")
    small: Sequence[str] = [*SMALL, "--memory-model", "formula", "--run-dir", "run"]
    if method == "asha":
        small = [*small, "--search-range-factor", "0.2"]
    run_dir = tmp_path / "example" / "run"
    if "ds_config_autotuning.json" in rest:
        small = ["--slot-memory", "600MiB", "--memory-model", "formula"]
        config = tmp_path / "example" / "ds_config_autotuning.json"
        changed = read_json(config)
        changed["autotuning"] |= {"tuner_num_trials": 2, "start_step": 2, "end_step": 3}
        config.write_text(json.dumps(changed))
        run_dir = tmp_path / "example" / "dsat_runs" / "train-1"
    if folder == "examples/plain":
        rest = [*rest, *SMALL_MODEL]
    told = typed(tmp_path / "example", method, *small, *rest)
    run = assert_found(run_dir, told)
    own = None if run.baseline is None else run.value(run.baseline)
    assert own is not None
    assert run.best_value is not None
    assert run.finals is not None or run.best_value >= own  # finals measure both anew


# -- what the model needs


@pytest.mark.nightly
def test_a_model_that_does_not_fit_is_tuned_in_a_higher_stage(plain: Path) -> None:
    """25 M parameters in fp32: 24 bytes each at the peak of stage 0, 14 of stage 1 on two slots."""
    buckets = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": ADAM,
        "zero_optimization": {"stage": 0, **buckets},
    }
    (plain / "ds_config.json").write_text(json.dumps(config))
    script = "train.py --deepspeed --deepspeed_config ds_config.json --width 1024 --layers 1"
    limits = ["--slot-memory", "560MiB", "--slots", 2, "-mt", 4, "--max-micro-batch", 2]
    steps = FAST[: FAST.index("--slot-memory")]
    told = typed(
        plain, "binary", *limits, *steps, "-m", "throughput", "--run-dir", "run", "--",
        *script.split(), "--length", 8,
    )  # fmt: skip
    assert told.status == 0, told
    run = run_of(plain / "run")
    profiles = [t for t in run.trials.values() if t.profiles]
    *failed, fitted = [run.outcomes[t.id].kind for t in profiles]
    assert failed and set(failed) == {OutcomeKind.OOM} and fitted is OutcomeKind.OK
    assert [t.strategy for t in profiles] == ["z0", "z1", "z3"][: len(profiles)]
    assert run.best is not None and run.best.stage >= 1
    assert "your configuration runs out of memory (stage 0, micro batch" in told.out


# -- the vocabulary of DeepSpeed's autotuner


@pytest.mark.nightly
def test_the_autotuners_configuration_with_lists(plain: Path) -> None:
    zero = {"stage": "all", "reduce_bucket_size": [1e6, 2e6], "contiguous_gradients": True}
    config = {
        "train_micro_batch_size_per_gpu": [2, 4],
        "optimizer": ADAM,
        "zero_optimization": zero,
        "autotuning": {
            "enabled": True,
            "fast": False,
            "metric": "FLOPS",
            "start_step": 2,
            "end_step": 3,
            "results_dir": "results",
            "exps_dir": "exps",
            "arg_mappings": {"train_micro_batch_size_per_gpu": " length "},
        },
    }
    (plain / "ds.json").write_text(json.dumps(config))
    script = ["train.py", "--deepspeed", "--deepspeed_config", "ds.json", *SMALL_MODEL]
    words = ["tune", "--memory-model", "formula", "--num_gpus", 1, *script]
    told = typed(plain, *words)
    run = assert_found(plain / "dsat_runs" / "train-1", told)
    assert run.plan.metric == "FLOPS_per_gpu"
    assert run.plan.micro_batches == (2, 4)
    assert {trial.stage for trial in run.trials.values()} == {0, 1, 2, 3}
    buckets = {
        trial.overrides["zero_optimization"]["reduce_bucket_size"]
        for trial in searched(run)
        if trial.stage == 1
    }
    assert buckets <= set(run.plan.choices["reduce_bucket_size"]) == {10**6, 2 * 10**6}
    # The files that people look for.
    best = read_json(plain / "results" / "ds_config_optimal.json")
    assert "autotuning" not in best and best["train_micro_batch_size_per_gpu"] in (2, 4)
    command = shlex.split((plain / "results" / "cmd_optimal.txt").read_text())
    start = [Path(word).name for word in command].index("torchrun")
    assert "OMP_NUM_THREADS=1" in command[:start], "the conditions of a trial"
    assert command[start + 1 : start + 4] == ["--standalone", "--nproc-per-node=1", "train.py"]
    assert str(plain / "results" / "ds_config_optimal.json") in command
    assert command[command.index("--length") + 1] == str(best["train_micro_batch_size_per_gpu"])
    heading, *rows = (plain / "results" / "summary.txt").read_text().splitlines()
    for name in ("tuning_space", "num_experiments", "best_metric_val", "best_exp_name"):
        assert name in heading
    assert [row.split()[1] for row in rows[1:6]] == ["z0", "z1", "z2", "z3", "global"]
    for trial in run.trials.values():
        assert (plain / "dsat_runs/train-1/trials" / trial.name / "metrics.json").exists()
        assert read_json(plain / "exps" / f"{trial.name}.json")["name"] == trial.name
    assert {"z1_gas1_tmbspg2", "z1_gas1_tmbspg4"} <= {trial.name for trial in run.trials.values()}

    config["autotuning"] |= {"tuner_num_trials": 2}  # type: ignore[operator]
    (plain / "ds.json").write_text(json.dumps(config))
    told = typed(plain, "run", "--num_gpus", 1, *script)
    fresh = assert_found(plain / "dsat_runs" / "train-2", told)
    assert len(fresh.trials) == 4
    assert "trained; checkpoints and reports in dsat_runs/train-2/full" in told.err
