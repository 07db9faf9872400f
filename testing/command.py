"""Run the real command line in child processes, and read the folders of its runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml

from dsat.run.journal import FILE_NAME, read_events
from dsat.run.run import Run
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import Trial, TrialKind
from testing import warm_command
from testing.local import PATIENCE_S, PROGRAMS, is_alive, wait_until
from testing.started import Told

# Short trials: steps 2 and 3 are measured, with batches that fit a slot of 150 MiB.
FAST = "--start-profile-step 2 --end-profile-step 3 --max-profile-steps 2".split()
FAST += ["--memory-model", "formula", "--slot-memory", "150MiB"]


def command_of(
    method: str,
    program: str,
    run_dir: Path,
    *options: object,
    config: Path | None = None,
    imported: bool = False,
) -> list[str]:
    """Return the dsat command for a program of `testing/programs`.

    Args:
        imported: let a warm host fork the supervisors; see `testing.warm_command`.
    """
    config = config or PROGRAMS / program / "deepspeed.yaml"
    words = [method, config, PROGRAMS / program, "--run-dir", run_dir, *options]
    start = warm_command.words() if imported else [sys.executable, "-m", "dsat"]
    return [*start, *map(str, words)]


def dsat(method: str, program: str, run_dir: Path, *options: object, **more: Any) -> Told:
    """Run the command of `command_of` to its end; by default with `imported`."""
    return run_to_end(command_of(method, program, run_dir, *options, **{"imported": True, **more}))


def typed(folder: Path, *words: object, **variables: str) -> Told:
    """Run `dsat WORDS` in a folder; a warm host forks the supervisors (`testing.warm_command`)."""
    return run_to_end([*warm_command.words(), *map(str, words)], cwd=folder, **variables)


def run_to_end(command: Sequence[str], cwd: Path | None = None, **variables: str) -> Told:
    """Run a command to its end, with this environment's programs on the `PATH`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return Told(process.returncode, process.stdout, process.stderr)


def experiment_of(folder: Path, program: str, **changes: Any) -> Path:
    """Write a program's experiment configuration, with changed values, into another folder."""
    data = yaml.safe_load((PROGRAMS / program / "deepspeed.yaml").read_text())
    path = folder / "deepspeed.yaml"
    path.write_text(yaml.safe_dump({**data, **changes}))
    return path


def inline(**ds_config: Any) -> Mapping[str, Any]:
    """Return hyperparameters that contain a DeepSpeed configuration."""
    return {"deepspeed_config": {"optimizer": ADAM, **ds_config}}


ADAM = {"type": "Adam", "params": {"lr": 0.001, "torch_adam": True}}


def events_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the journal's events; the run may still be writing it."""
    path = run_dir / FILE_NAME
    return read_events(path) if path.exists() else []


def run_of(run_dir: Path) -> Run:
    return Run(events_of(run_dir))


def kinds_of(run: Run) -> list[OutcomeKind]:
    """Return the outcome kinds of all trials except the profile trial."""
    return [outcome.kind for trial_id, outcome in run.outcomes.items() if trial_id]


def searched(run: Run) -> list[Trial]:
    """Return the trials that the search chose: no profile, no baseline, no finals."""
    return [trial for trial in run.trials.values() if trial.kind is TrialKind.SEARCH]


class Background:
    """A command that runs in the background; it can be killed with all its child processes."""

    def __init__(self, command: list[str]) -> None:
        # A new session, as in a terminal, so that a test can interrupt the whole process group.
        self.process = psutil.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def until_events(self, run_dir: Path, count: int) -> None:
        """Wait until the journal has at least `count` events."""
        wait_until(
            lambda: len(events_of(run_dir)) >= count or self.process.poll() is not None,
            f"{count} events",
        )
        assert self.process.poll() is None, self.process.communicate()

    def below(self) -> list[int]:
        return [child.pid for child in self.process.children(recursive=True)]

    def kill(self) -> None:
        """Kill the command with SIGKILL; return when its child processes have ended too."""
        self.process.suspend()  # or it could start a child after the children are listed
        wait_until(lambda: self.process.status() == psutil.STATUS_STOPPED, "that it stands")
        below = self.below()
        self.process.kill()
        self.process.communicate()
        wait_until(lambda: not any(map(is_alive, below)), "the end of all its processes")

    def end(self, timeout_s: float = PATIENCE_S) -> Told:
        out, err = self.process.communicate(timeout=timeout_s)
        return Told(self.process.returncode, out, err)
