"""Common parts of benchmarks: options, tables, targets ("bars"), commands, and real trials."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dsat.command import entrypoint, experiment
from dsat.engines.engine import LocalEngine
from dsat.engines.machines.hosts import Host
from dsat.engines.machines.machine import Machine
from dsat.engines.start import LocalOptions
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial, TrialOptions

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
MIB, GIB = 2**20, 2**30
BARS_HEAD = "| bar | measured | |\n|---|---|---|"
_PACKAGES = ("torch", "deepspeed", "transformers", "torchvision")


@dataclass(frozen=True)
class Bar:
    """A requirement, the measured value, and whether the value meets it."""

    text: str
    measured: str
    met: bool


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return an argument parser that describes the program with an unwrapped module docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def choose(names: Sequence[str], known: Sequence[str], options: argparse.ArgumentParser) -> None:
    """Exit with an error if a name is unknown."""
    if unknown := set(names) - set(known):
        options.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")


def print_explanation(doc: str | None) -> None:
    """Print a module docstring without its title and usage, its first two paragraphs."""
    print((doc or "").split("\n\n", 2)[2].strip(), end="\n\n")


def print_head(*headings: str, numbers: Sequence[str] = ()) -> None:
    """Print the first two lines of a table; the columns in `numbers` are right-aligned."""
    rules = ["---:" if heading in numbers else "---" for heading in headings]
    print(f"| {' | '.join(headings)} |\n|{'|'.join(rules)}|")


def print_row(*cells: object) -> None:
    """Print a row of a table, flushed at once because the next row may take minutes."""
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def print_bars(bars: Sequence[Bar]) -> None:
    """Print a table of bars: each target, the measured value, and whether it is met."""
    print(f"\n{BARS_HEAD}")
    for bar in bars:
        print_row(bar.text, bar.measured, "met" if bar.met else "**missed**")


def environment(**more: str) -> dict[str, str]:
    """Return variables with which a child process finds this dsat and this environment's
    programs."""
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
    python = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PATH": path, "PYTHONPATH": python, **more}


def run(
    command: Sequence[str | Path],
    folder: Path,
    env: Mapping[str, str] | None = None,
    *,
    timeout_s: float = 3600.0,
) -> tuple[int, str, float]:
    """Run a command.

    Returns:
        Its exit status (-1 at a time-out), its output, and its duration in seconds.
    """
    began_s = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment() if env is None else env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        status, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        status, said = -1, f"not done after {timeout_s:g} s"
    return status, said, time.perf_counter() - began_s


def run_well(command: Sequence[str | Path], folder: Path, env: Mapping[str, str]) -> float:
    """Run a command that must succeed; return its duration in seconds.

    Raises:
        SystemExit: it failed.
    """
    status, said, took_s = run(command, folder, env)
    if status:
        words = " ".join(map(str, command))
        raise SystemExit(f"{words} ended with status {status}:\n{said[-4000:]}")
    return took_s


def engine_of(
    command: Sequence[str],
    config: Mapping[str, Any],
    folder: Path,
    hosts: Sequence[Host],
    options: TrialOptions,
    *,
    slots: int = 1,
    cold: bool = False,
) -> LocalEngine:
    """Make an engine whose trials run a command.

    Args:
        command: must name `ds_config.json` as its DeepSpeed configuration.
        config: the content of that file.
        folder: for the file and the trials' files; created if it is missing.
        options: how trials are measured.
        slots: slots of each trial.
        cold: run trials in fresh processes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ds_config.json").write_text(json.dumps(config))
    user = experiment.make_experiment(command, folder.name, folder, config)
    program = entrypoint.parse(command, folder)
    ways = LocalOptions(options, cold=cold)
    return LocalEngine(user, program, hosts, folder, ways, slots_per_trial=slots)


def run_trial(engine: LocalEngine, trial: Trial) -> Outcome:
    """Launch a trial, wait for its end and return its outcome; no other trial may run."""
    engine.launch(trial)
    ended: list[tuple[int, Outcome]] = []
    while not ended:
        ended = engine.poll(60.0)
    [(_, outcome)] = ended
    return outcome


def about_machine(machine: Machine) -> dict[str, str]:
    """Return facts of a measurement for people: machine, date, and versions."""
    return {
        "machine": machine.describe(),
        "host": f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / GIB:.0f} GiB",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }
