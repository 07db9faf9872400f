"""The plug for DeepSpeed's own launcher."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dsat.cli import autotuner
from testing.local import PATIENCE_S, read_json

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def parsed(words: str) -> argparse.Namespace:
    from deepspeed.launcher import runner

    found: argparse.Namespace = runner.parse_args(words.split())
    return found


def test_options_of_the_launcher_are_those_of_dsat() -> None:
    options = "--num_gpus 2 --master_port 29501 --bind_cores_to_rank"
    args = parsed(f"--autotuning run {options} train.py --deepspeed_config ds.json --lr 0.1")
    words = autotuner.words_of(args)
    assert words[0] == "run"
    assert words[-5:] == ["train.py", "--deepspeed_config", "ds.json", "--lr", "0.1"]
    assert set(options.split()) == set(words[1:-5])


def test_deepspeeds_launcher_can_find_it() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [line] = [x for x in text.splitlines() if x.startswith("dsat = ") and "autotuner" in x]
    value = line.partition(" = ")[2].strip('"')
    entry = EntryPoint("dsat", value, "deepspeed.autotuner")
    assert entry.load() is autotuner.run_autotuning


@pytest.mark.nightly
def test_deepspeeds_launcher_tunes_with_dsat(tmp_path: Path) -> None:
    place = tmp_path / "plain"
    shutil.copytree(ROOT / "examples" / "plain", place)
    words = "--autotuning tune --num_gpus 1 train.py --deepspeed --deepspeed_config".split()
    told = subprocess.run(
        [sys.executable, "-m", "dsat.cli.autotuner", *words, "ds_config_autotuning.json"],
        cwd=place,
        env={**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert told.returncode == 0, told.stderr + told.stdout
    assert read_json(place / "autotuning_results" / "ds_config_optimal.json")
