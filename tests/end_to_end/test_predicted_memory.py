"""Memory predictions: `dsat estimate`, and a search that begins with simulations."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dsat.run.run import searched
from dsat.values.outcome import OutcomeKind
from testing.command import FAST, dsat, experiment_of, inline, run_of, typed
from testing.local import processes_of
from testing.started import Told
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

GIB = 2**30
HF_ARGS = "--deepspeed ds_config.json --output_dir out --per_device_train_batch_size 4"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a cache that keeps DeepSpeed's answers; each script is estimated only once."""
    return tmp_path_factory.mktemp("cache")


def estimate(*words: object, cwd: Path, cache: Path) -> Told:
    operators = cache / "operators"
    variables = {"XDG_CACHE_HOME": str(cache), "TORCH_EXTENSIONS_DIR": str(operators)}
    done = typed(cwd, "estimate", *words, **variables)
    assert not operators.exists()  # they would take minutes to compile
    return done


@pytest.mark.parametrize(
    ("example", "words", "parameters"),
    [
        pytest.param(
            *("deepspeed_trial", ["deepspeed.yaml", "."], 11_689_512), marks=pytest.mark.nightly
        ),
        ("hf_trainer", ["--", "train.py", *HF_ARGS.split()], 5_273_088),
    ],
)
def test_every_kind_of_script_is_estimated(
    tmp_path: Path, cache: Path, example: str, words: list[str], parameters: int
) -> None:
    folder = tmp_path / example
    shutil.copytree(ROOT / "examples" / example, folder)
    if example == "hf_trainer":  # its own arguments ask for fp32
        own = folder / "ds_config.json"
        own.write_text(json.dumps({**json.loads(own.read_text()), "bf16": {"enabled": "auto"}}))
    options = ["--slots", 1, 8, "--slot-memory", "1GiB", "16GiB", "--json", "--formula"]
    done = estimate(*options, *words, cwd=folder, cache=cache)
    assert done.status == 0, done
    told = json.loads(done.out)
    assert told["model"]["num_params"] == parameters
    assert told["model"]["param_bytes"] == 4
    assert [line["slots"] for line in told["lines"]] == [1] * 7 + [8] * 7
    assert [line["strategy"] for line in told["lines"][:7]] == [
        *("z0", "z1", "z2", "z2_offload", "z3", "z3_offload", "z3_offload_param")
    ]
    for line in told["lines"]:
        by_size = line["largest_micro_batch"]
        assert 0 <= by_size[str(GIB)] < by_size[str(16 * GIB)]
        assert line["peak_bytes"] > parameters
    assert not processes_of(folder)


def test_a_script_that_cannot_be_simulated_says_why(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "train.py").write_text("raise KeyError('no data here')\n")
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 1}))
    done = estimate("--ds-config", "ds.json", "--", "train.py", cwd=tmp_path, cache=cache)
    assert done.status == 1
    assert "the model cannot be simulated" in done.err and "no data here" in done.err
    assert "`dsat tune` works without simulation" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("wrong", ["--seq-length 65", "--lora r=8,target=q_proj"])
def test_a_wrong_option_that_only_the_model_shows_is_one_of_usage(
    tmp_path: Path, cache: Path, wrong: str
) -> None:
    model = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps({**model, "n_embd": 24, "n_layer": 1}))
    done = estimate("--model", tmp_path, *wrong.split(), cwd=tmp_path, cache=cache)
    assert done.status == 2 and f"dsat: error: {wrong.split()[0]}: " in done.err, done


def test_a_search_simulates_before_it_launches(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    zero = {"reduce_bucket_size": 10**6, "allgather_bucket_size": 10**6}
    own = inline(train_micro_batch_size_per_gpu=4, zero_optimization=zero)
    config = experiment_of(tmp_path, "tiny", hyperparameters=own)
    options: list[Any] = [*FAST[: FAST.index("--memory-model")], "--slot-memory", "150MiB"]
    options += ["-mt", 7, "-z", 0, 1, 2, 3]
    options += ["-m", "throughput", "--slots", 1, "-mct", 1]
    told = dsat("model", "tiny", run_dir, *options, config=config)
    assert told.status == 0, told
    run = run_of(run_dir)
    assert run.memory_basis is not None and run.memory_basis.note == ""
    assert {a.estimate.source for v in run.memory_basis.variants for a in v.anchors} == {
        "simulated"
    }
    for stage in range(4):
        assert re.search(
            rf"stage {stage}: .* fits up to micro batch [\d,]+ \(by simulation\)", told.err
        )
    assert [o.kind for o in run.outcomes.values()].count(OutcomeKind.OOM) <= 1
    others = searched(run)
    assert others and all(trial.predicted_bytes for trial in others)
    assert re.search(r" used of [\d.]+ [MG]iB predicted", told.err)
    text = (run_dir / "summary.md").read_text()
    assert "memory predicted" in text
    # With a memory limit, trials know how much counts against it.
    said = re.search(r"memory: predicted by simulation, median error [\d.]+ %", text)
    assert said is not None, text
