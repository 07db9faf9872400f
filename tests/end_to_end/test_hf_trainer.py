"""Real `transformers.Trainer` scripts, tuned by the real command."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from dsat.command.switches import OTHER_BATCH, OTHER_CONFIG
from dsat.engines.start import FULL_RUN_ID
from dsat.in_trial.adapters.hf_trainer import NO_CPU_RANKS
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import Trial, TrialKind
from testing.command import FAST, dsat, experiment_of, run_of, run_to_end, searched
from testing.local import (
    PATIENCE_S,
    PROGRAMS,
    bench_of,
    read_json,
    warnings_of,
)
from testing.printed import printed_in
from testing.started import Told

pytestmark = pytest.mark.slow

TRAINER = PROGRAMS / "hf_trainer"
FLAGS = "--per_device_train_batch_size 8 --gradient-accumulation-steps=1 --record seen.json"


@pytest.fixture(scope="module", autouse=True)
def _no_downloads() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def tune(
    folder: Path, program: str, method: str, *options: object, flags: str = FLAGS
) -> tuple[Path, Told]:
    """Tune a program that writes its checkpoints into `folder/output`."""
    text = (PROGRAMS / program / "deepspeed.yaml").read_text()
    entrypoint = yaml.safe_load(text)["entrypoint"].replace("--output_dir output", "")
    entrypoint += f" --output_dir {folder / 'output'} {flags}"
    config = experiment_of(folder, program, entrypoint=entrypoint)
    told = dsat(method, program, folder / "run", *FAST, *options, config=config)
    assert told.status == 0, told
    return folder / "run", told


def check_what_the_models_saw(run_dir: Path) -> list[Trial]:
    """Check that each successful trial fed its own batch in every micro step; return these
    trials."""
    run = run_of(run_dir)
    ran = [run.trials[number] for number, outcome in run.outcomes.items() if outcome.ok]
    for trial in ran:
        seen = read_json(run_dir / "trials" / trial.name / "seen.json")
        assert seen["shapes"] == [[trial.batch.micro_batch, 16]] * trial.batch.gas
    return ran


# -- one slot, nothing of dsat in the script


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Told]:
    options = ["--max-trials", 6, "--search-range-factor", 0.2, "--metric", "throughput"]
    options += ["--fix", "attn_implementation"]  # no flag of the script sets it
    options += ["--zero-stages", 1, 2, 3]
    options += ["--max-concurrent-trials", 2]  # if more ran at once, all would have the first size
    return tune(tmp_path_factory.mktemp("alone"), "hf_trainer", "asha", *options)


def test_the_model_sees_each_trials_batch(alone: tuple[Path, Told]) -> None:
    run = run_of(alone[0])
    assert run.baseline is not None
    assert (run.baseline.batch.micro_batch, run.baseline.batch.gas) == (8, 1)
    ran = check_what_the_models_saw(alone[0])
    assert len({trial.batch.micro_batch for trial in ran}) >= 3
    assert all(warnings_of(outcome) == () for outcome in run.outcomes.values())
    assert not (alone[0].parent / "output").exists(), "no trial leaves a checkpoint or a folder"
    for trial in run.trials.values():
        folder = alone[0] / "trials" / trial.name
        words = shlex.split((folder / "cmd.txt").read_text().splitlines()[0])
        assert words[words.index("--deepspeed") + 1] == str(folder / "ds_config.json")
        micro_batch = words[words.index("--per_device_train_batch_size") + 1]
        assert micro_batch == str(trial.batch.micro_batch)
        assert f"--gradient-accumulation-steps={trial.batch.gas}" in words
    # "auto" stays, except where the search decided.
    own, best = read_json(TRAINER / "ds_config.json"), read_json(alone[0] / "best_ds_config.json")
    for section in ("gradient_clipping", "fp16", "bf16", "optimizer", "scheduler"):
        assert best[section] == own[section]
    assert best["zero_optimization"]["stage3_prefetch_bucket_size"] == "auto"
    trials = searched(run_of(alone[0]))
    sizes = [trial.overrides["zero_optimization"]["reduce_bucket_size"] for trial in trials]
    assert all(isinstance(size, int) for size in sizes)  # "auto" does not fix it


@pytest.mark.nightly
def test_the_best_is_trained_with_by_hand(alone: tuple[Path, Told], tmp_path: Path) -> None:
    best, line = run_of(alone[0]).best, printed_in(alone[0])
    seen, output = tmp_path / "seen.json", tmp_path / "output"
    more = f"--record {seen} --output_dir {output} --max_steps 1"
    trained = run_to_end(["bash", "-c", f"{line} {more}"])
    assert trained.status == 0, trained.err
    assert best is not None
    assert read_json(seen)["shapes"] == [[best.batch.micro_batch, 16]] * best.batch.gas
    assert (output / "checkpoint-1").is_dir()


# -- two slots


@pytest.mark.nightly
def test_on_two_ranks_with_accumulation(tmp_path: Path) -> None:
    options = ["--slots", 2, "--max-trials", 6, "--train-batch-size", 48]
    options += ["--zero-stages", 0, 1, 2, 3]
    run_dir, _ = tune(tmp_path, "hf_trainer", "random", *options)
    ran = check_what_the_models_saw(run_dir)
    assert len(ran) == 6
    searched = [trial for trial in ran if trial.kind is TrialKind.SEARCH]
    assert {trial.batch.train_batch_size for trial in searched} == {48}
    assert max(trial.batch.gas for trial in ran) > 1
    for outcome in run_of(run_dir).outcomes.values():
        # Earlier versions of accelerate (1.1 and 1.8 were checked) connect CPU ranks by themselves.
        by_itself = Version(version("accelerate")) < Version("1.9")
        assert warnings_of(outcome) == (() if by_itself else (NO_CPU_RANKS,))


@pytest.mark.nightly
def test_with_determineds_callback(tmp_path: Path) -> None:
    options = ["--max-trials", 4, "--slot-memory", "500MiB", "--train-batch-size", 48]
    run_dir, _ = tune(
        tmp_path, "hf_determined", "random", *options, "--run-full-experiment", flags=""
    )
    run = run_of(run_dir)
    assert [outcome.kind for outcome in run.outcomes.values()] == [OutcomeKind.OK] * 4
    reports = reports_of(run_dir / "full")
    losses = [r["metrics"]["eval_loss"] for r in reports if r["group"] == "validation"]
    assert len(losses) == 2


def reports_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "reports.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


# -- arguments in the code


def test_arguments_in_code_follow_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "output"
    monkeypatch.setenv("OUTPUT_DIR", str(output))
    (output / "checkpoint-3").mkdir(parents=True)  # of an earlier training
    with bench_of("hf_trainer", tmp_path, entry="python3 in_code.py", imported=True) as bench:
        own = bench.trial(micro_batch=4, stage=2, kind=TrialKind.PROFILE)  # warms up for others
        outcome = bench.run(own)
        assert outcome.ok, bench.log(own)
        assert warnings_of(outcome) == ()
        seen = read_json(bench.path(own) / "seen.json")
        assert (seen["shapes"], seen["checkpointing"]) == ([[4, 16]], False)

        other = replace(
            bench.trial(micro_batch=3, gas=2, stage=3), script_args={"gradient_checkpointing": True}
        )
        outcome = bench.run(other)
        assert outcome.ok, bench.log(other)
        assert warnings_of(outcome) == (OTHER_BATCH, OTHER_CONFIG)
        seen = read_json(bench.path(other) / "seen.json")
        assert (seen["shapes"], seen["checkpointing"]) == ([[3, 16], [3, 16]], True)
        assert [path.name for path in output.iterdir()] == ["checkpoint-3"]

        fresh = tmp_path / "fresh"
        monkeypatch.setenv("OUTPUT_DIR", str(fresh))
        full = bench.engine.train(other)
        [(trial_id, outcome)] = bench.engine.poll(PATIENCE_S)
        assert trial_id == FULL_RUN_ID
        assert outcome.ok, (full / "stderr.log").read_text()
        assert read_json(full / "seen.json") == seen
        assert "eval_loss" in (full / "stdout.log").read_text()
        assert list(fresh.glob("checkpoint-*"))
