"""Determined's DeepSpeedTrial without a master: what users may write, and their mistakes."""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dsat.engines.start import FULL_RUN_ID
from dsat.in_trial.config_injection import SEVERAL_ENGINES
from dsat.values.outcome import OutcomeKind
from testing.local import PATIENCE_S, PROGRAMS, Bench, bench_of, read_json, warnings_of

pytestmark = pytest.mark.slow

BROKEN = "def broken(:\n"


@contextlib.contextmanager
def bench_with(folder: Path, slots: int = 1, **changes: Any) -> Iterator[Bench]:
    """Make an engine for the program, with other values in its experiment's configuration."""
    program, run = folder / "program", folder / "run"
    shutil.copytree(PROGRAMS / "deepspeed_trial", program)
    path = program / "deepspeed.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **changes}))
    (program / "syntax.py").write_text(BROKEN)
    run.mkdir()
    with bench_of(
        str(program), run, slots_per_trial=slots, own_micro_batch=2, imported=True
    ) as bench:
        yield bench


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench_with(tmp_path_factory.mktemp("single")) as bench:
        yield bench


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench_with(tmp_path_factory.mktemp("pair"), slots=2) as bench:
        yield bench


def diary(folder: Path, rank: int = 0) -> list[str]:
    return (folder / f"diary{rank}.txt").read_text().splitlines()


# -- measured trials


@pytest.mark.parametrize(
    "way",
    [
        "runs",
        "args",
        "overwrite",
        "determined's own",
        "accumulates itself",
        "two engines",
        "own loader",
    ],
)
def test_a_trial_is_measured(single: Bench, way: str) -> None:
    trial = single.trial(way, micro_batch=4, gas=3, stage=2)
    outcome = single.run(trial)
    assert outcome.ok, single.log(trial)
    assert warnings_of(outcome) == ((SEVERAL_ENGINES,) if way == "two engines" else ())
    began, training, epoch, *batches, shutdown = diary(single.path(trial))
    assert (began, training, epoch, shutdown) == (
        "startup 0 None",
        "training",
        "epoch 0",
        "shutdown",
    )
    # Between the steps, there are neither validations nor checkpoints.
    assert {line.split()[0] for line in batches} == {"batch"}
    assert {line.split()[2] for line in batches} == {"4"}
    # The harness calls train_batch for each micro batch; the last call does not return.
    calls = Counter(int(line.split()[1]) for line in batches)
    per_batch = 1 if way == "accumulates itself" else 3
    assert set(list(calls.values())[:-1]) == {per_batch}
    assert list(calls) == list(range(len(calls)))


def test_on_two_ranks(pair: Bench) -> None:
    trial = pair.trial("args", micro_batch=4, gas=2, stage=1)
    outcome = pair.run(trial)
    assert outcome.ok, pair.log(trial)
    for rank in (0, 1):
        assert "batch 0 4" in diary(pair.path(trial), rank)


# -- full-length runs


def train(bench: Bench, way: str, micro_batch: int, gas: int = 1) -> Path:
    """Train at full length; return the run's folder."""
    folder = bench.engine.train(bench.trial(way, micro_batch=micro_batch, gas=gas))
    [(trial_id, outcome)] = bench.engine.poll(PATIENCE_S)
    assert trial_id == FULL_RUN_ID and outcome.ok, (folder / "stderr.log").read_text()
    return folder


def shortened(lines: list[str]) -> str:
    """Return a letter per line: B for a call of train_batch, V for a validation, C for a
    checkpoint."""
    letters = {"batch": "B", "validated": "V", "checkpoint": "C"}
    return "".join(letters.get(line.split()[0], "") for line in lines)


def test_training_in_full_length_on_two_ranks(pair: Bench) -> None:
    """Every second batch is validated; checkpoints are made of better models and every fourth
    batch."""
    folder = train(pair, "runs", 2, gas=2)
    for rank in (0, 1):
        lines = diary(folder, rank)
        assert shortened(lines).replace("C", "") == "VBBBBVBBBBVBBBBV"
        assert lines[-1] == "shutdown"
    reports = (folder / "reports.jsonl").read_text().splitlines()
    assert sum('"group": "validation"' in line for line in reports) == 4
    assert any('"samples": 40' in line for line in reports), "the reducer's sum over both ranks"
    assert list((folder / "tensorboard").iterdir())
    checkpoint = next((folder / "checkpoints").iterdir())
    assert read_json(checkpoint / "metadata.json")["steps_completed"] in (2, 4, 6)
    assert (checkpoint / "det_state_dict_rank1.pth").exists()


def test_a_worse_model_makes_no_checkpoint(single: Bench) -> None:
    folder = train(single, "gets worse", 2)
    assert shortened(diary(folder)) == "VBBVBBVCBBVC"
    assert len(list((folder / "checkpoints").iterdir())) == 2


def test_a_length_in_epochs(tmp_path: Path) -> None:
    with bench_with(
        tmp_path,
        searcher={"name": "single", "metric": "error", "max_length": {"epochs": 2}},
        records_per_epoch=16,
        min_validation_period={"epochs": 1},
        min_checkpoint_period={"batches": 0},
        perform_initial_validation=False,
        optimizations={"average_training_metrics": False},
    ) as bench:
        folder = train(bench, "gets worse", 4)
    assert shortened(diary(folder)).replace("C", "") == "BBBBVBBBBV"


# -- mistakes


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("model_def:Nope", ["AttributeError: ", "'model_def'", "'Nope'"]),
        ("syntax:Variants", ["SyntaxError: ", "syntax.py"]),
    ],
)
def test_a_module_with_an_error_of_its_own(tmp_path: Path, spec: str, words: list[str]) -> None:
    entry = f"python3 -m determined.launch.deepspeed --trial {spec}"
    with bench_with(tmp_path, entrypoint=entry) as bench:
        outcome = bench.run(bench.trial())
    assert outcome.kind is OutcomeKind.ERROR
    assert outcome.message.startswith("rank 0: ") and all(w in outcome.message for w in words)
    if spec.startswith("syntax"):
        assert BROKEN.strip() in outcome.detail
