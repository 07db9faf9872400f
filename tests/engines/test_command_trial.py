"""Trials that run the user's whole command again; ranks use the real DeepSpeed."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsat.command.placement import Launch
from dsat.engines.retries import COMMAND_AGAIN
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import TrialKind
from testing.local import (
    PROGRAMS,
    Bench,
    buffers_of,
    engine_of_command,
    processes_of,
    shared_memory,
    wait_until,
    warnings_of,
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the programs that start their ranks themselves into a user's folder."""
    shutil.copytree(PROGRAMS / "own_ranks", tmp_path / "work")
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    monkeypatch.setenv("PATH", path)
    return tmp_path / "work"


@contextlib.contextmanager
def bench_of(place: Path, *command: str, slots: int = 1, **seen: Any) -> Iterator[Bench]:
    """Make an engine for a command with a recorded program; check that no process remains."""
    folder = place.parent / "run"
    folder.mkdir()
    engine = engine_of_command(place, folder, command, slots=slots, **seen)
    try:
        yield Bench(engine, folder, slots)
    finally:
        engine.close()
    assert not processes_of(folder)


ALONE: dict[str, Any] = {"needs_command": "the program is not in a file"}


@pytest.mark.parametrize(
    ("seen", "own", "found"),
    [({}, None, "1"), ({"A_SWITCH": "0"}, "0", "1"), ({"A_SWITCH": "0"}, "2", "2")],
)
def test_a_switch_in_the_environment_is_the_trials(
    seen: Mapping[str, str], own: str | None, found: str, place: Path
) -> None:
    """Only processes that had the recorded value get the trial's; others are not ranks."""
    sets = [] if own is None else [f"A_SWITCH={own}"]
    prints = "import os; print('A_SWITCH is', os.environ['A_SWITCH'])"
    with bench_of(place, "env", *sets, "python", "-c", prints, env=seen, **ALONE) as bench:
        trial = replace(bench.trial(), script_args={"ENV:A_SWITCH": "1"})
        bench.run(trial)
        assert f"A_SWITCH is {found}\n" in bench.log(trial)


def test_arguments_that_differ_by_rank_stay_different(place: Path) -> None:
    """As with `srun bash -c "python train.py --local_rank $SLURM_LOCALID"`."""
    config = "--deepspeed_config ds_config.json"
    (place / "says.py").write_text("import sys; print('runs with', *sys.argv[1:])")
    line = f"for rank in 0 1 2; do python says.py --local_rank $rank {config}; done"
    args, other = (("--local_rank", rank, *config.split()) for rank in "01")
    seen: dict[str, Any] = {
        "script": "says.py",
        "args": args,
        "launch": Launch(other_args=(other,)),
    }
    with bench_of(place, "bash", "-c", line, **seen, **ALONE) as bench:
        trial = bench.trial()
        bench.run(trial)
        own = f"--deepspeed_config {bench.folder.resolve()}/trials/{trial.name}/ds_config.json"
        for rank, used in ((0, own), (1, own), (2, config)):  # the last is no rank
            assert f"runs with --local_rank {rank} {used}\n" in bench.log(trial)


@pytest.mark.slow
@pytest.mark.nightly
def test_ranks_that_a_script_spawns_are_measured_and_ended(place: Path) -> None:
    """A wrapper restarts the script forever, so the script never ends by itself."""
    args = ("--deepspeed_config", "ds_config.json")
    seen: dict[str, Any] = {"script": "train.py", "args": args, "needs_command": "it spawns them"}
    again = f"until python train.py {' '.join(args)}; do sleep 0.1; done; touch went_on"
    before = shared_memory()
    with bench_of(place, "bash", "-c", again, slots=2, **seen) as bench:
        assert bench.engine.num_slots == 2
        trial = bench.trial(micro_batch=4)
        outcome = bench.run(trial)
        assert outcome.kind is OutcomeKind.OK, bench.log(trial)
        assert outcome.metrics is not None and outcome.metrics.throughput > 0
        failing = bench.trial("fails", micro_batch=4)
        outcome = bench.run(failing)
        assert outcome.kind is OutcomeKind.OOM, bench.log(failing)
        assert outcome.message.startswith("rank 1: OutOfMemoryError") and not outcome.before_engine
    assert not (place / "went_on").exists()
    assert shared_memory() <= before or not buffers_of(bench.folder)


WRAPPER = """
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT
echo 3 > "$scratch/seed"
SCRATCH=$scratch python alone.py
"""


@pytest.mark.nightly
def test_what_fails_by_itself_where_the_command_did_not_is_left_to_the_command(
    place: Path,
) -> None:
    """The rank alone fails, because a wrapper deletes the folder that the rank needs."""
    (place / "run.sh").write_text(WRAPPER)
    gone = {"SCRATCH": str(place / "gone")}
    with bench_of(place, "bash", "run.sh", script="alone.py", env=gone) as bench:
        assert not bench.engine.needs_command
        profile = bench.trial(micro_batch=1, kind=TrialKind.PROFILE)
        outcome = bench.run(profile)
        assert outcome.kind is OutcomeKind.OK, bench.log(profile)
        assert warnings_of(outcome) == (COMMAND_AGAIN,)
        assert "FileNotFoundError" in bench.engine.needs_command
        assert "bash run.sh" in bench.read(profile, "cmd.txt")


def test_all_that_a_command_starts_ends_with_the_engine(place: Path) -> None:
    starts = "setsid sleep 1000 & setsid bash -c 'sleep 1000; true' & wait"
    with bench_of(place, "bash", "-c", starts, **ALONE) as bench:
        bench.engine.launch(bench.trial())
        wait_until(lambda: len(processes_of(bench.folder)) >= 4, "all of them run")


def test_a_command_that_ends_too_soon_is_quoted(place: Path) -> None:
    with bench_of(place, "bash", "-c", "echo no such cluster >&2; exit 3", **ALONE) as bench:
        outcome = bench.run(bench.trial())
    assert outcome.kind is OutcomeKind.ERROR and outcome.before_engine
    said = "your command ended with exit status 3 before it called deepspeed.initialize"
    assert outcome.message == f"{said}: no such cluster"
    assert outcome.detail == "no such cluster"
