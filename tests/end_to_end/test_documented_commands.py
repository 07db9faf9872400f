"""Every kind of script, started with the documented commands, in real processes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from dsat.run.run import Run
from dsat.values.outcome import OutcomeKind
from testing.command import FAST, kinds_of, run_of, typed
from testing.local import buffers_of, processes_of, read_json
from testing.started import Told
from testing.tuned_scripts import documented_commands

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
STEPS = FAST[: FAST.index("--memory-model")]
SMALL = [*STEPS, *"--max-trials 3 --slot-memory 600MiB -m throughput".split()]
SMALL_MODEL = "--width 64 --layers 1 --length 8 --steps 12".split()


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
        "Coming from DeepSpeed's autotuner",
        # Every run of the tests searches these kinds of scripts elsewhere.
        *(
            pytest.param(section, marks=pytest.mark.nightly)
            for section in (
                "How do I tune a plain DeepSpeed script?",
                "How do I tune a Hugging Face Trainer?",
                "Determined",
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
