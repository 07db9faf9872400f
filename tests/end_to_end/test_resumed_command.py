"""An interrupted search of a command is resumed."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from dsat.cli import EXIT_INTERRUPTED
from dsat.values.outcome import OutcomeKind
from testing import warm_command
from testing.command import Background, run_of, typed
from testing.local import PROGRAMS, processes_of, wait_until

pytestmark = pytest.mark.slow

OPTIONS = "--finals 0 --memory-model formula -m throughput --zero-stages 1 --max-micro-batch 4"
OPTIONS += " --start-profile-step 2 --end-profile-step 3 --run-dir run"
_PAUSE = "LOAD_S"  # variable: how long a row of the script's data takes to load


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "work"
    shutil.copytree(PROGRAMS / "hf_trainer", folder)
    return folder


def words(command: str, *options: str) -> list[str]:
    return ["random", *OPTIONS.split(), *options, "--", *command.split()]


@pytest.mark.nightly
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL])
def test_ended_in_its_first_trial(
    place: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = "python in_code.py"
    monkeypatch.setenv(_PAUSE, "2000")
    monkeypatch.chdir(place)
    background = Background([*warm_command.words(), *words(command, "--max-trials", "2")])
    trials = place / "run" / "trials"
    wait_until(lambda: trials.is_dir() and any(trials.iterdir()), "the first trial")
    os.killpg(background.process.pid, number)
    told = background.end()
    assert told.status == (-number if number == signal.SIGKILL else EXIT_INTERRUPTED)
    wait_until(lambda: not processes_of(place / "run"), "the end of all processes")
    if number != signal.SIGKILL:
        assert "interrupted" in (place / "run" / "summary.md").read_text()
        assert not any(trials.iterdir())
    monkeypatch.delenv(_PAUSE)
    again = typed(place, *words(command, "--resume", "--max-trials", "2"))
    assert again.status == 0, again
    run = run_of(place / "run")
    assert [outcome.kind for outcome in run.outcomes.values()] == [OutcomeKind.OK] * 2


def test_interrupted_before_its_training(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "loading.py").write_text("import time; open('here', 'w').close(); time.sleep(2000)")
    monkeypatch.chdir(place)
    background = Background([*warm_command.words(), *words("python loading.py")])
    wait_until((place / "here").exists, "the script")
    os.killpg(background.process.pid, signal.SIGINT)
    told = background.end()
    assert told.status == EXIT_INTERRUPTED and told.out == ""
    last = "interrupted before the first trial was measured: start the search again"
    assert told.err.splitlines()[-1] == last
    assert not (place / "run").exists()


@pytest.mark.nightly
def test_a_trainer_that_fills_in_its_batch_size(place: Path) -> None:
    command = "torchrun --standalone --nproc_per_node 1 train.py --deepspeed ds_config.json"
    command += " --output_dir out --per_device_train_batch_size 2"
    told = typed(place, *words(command, "--max-trials", "2"))
    assert told.status == 0, told
    run = run_of(place / "run")
    assert run.ended_s[0] >= run.outcomes[0].duration_s, "the wall time holds the first run"
    again = typed(place, *words(command, "--resume", "--max-trials", "3"))
    assert again.status == 0, again
    run = run_of(place / "run")
    assert [outcome.kind for outcome in run.outcomes.values()] == [OutcomeKind.OK] * 3
    assert run.baseline is not None and run.baseline.batch.micro_batch == 2
