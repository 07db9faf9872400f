"""Files in a trial's folder by which its ranks and dsat's engine exchange messages."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.command.entrypoint import Entrypoint
from dsat.in_trial.loopback import ADDRESS
from dsat.in_trial.meter_spec import MeterSpec
from dsat.values.codec import Recorded
from dsat.values.files import write_atomically
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial

SPEC_FILE = "trial.json"
CONFIG_FILE = "ds_config.json"
METRICS_FILE = "metrics.json"
MODULES_FILE = "modules.json"
ACTIVITY_FILE = "doing.txt"  # the present activity of a trial, for users
STEPS_FILE = "steps"  # number of optimizer steps of rank 0
DONE_FILE = "done"  # exists once the trial's processes are not needed any more
PORTS_FILE = "ports"  # MASTER_PORT of each rank that called `initialize`, one a line
# Only in a trial that runs the user's command:
RECORDS_FOLDER = "records"  # records of how ranks start, in the first run
SEVERAL_NODES_FILE = "nodes.json"  # in RECORDS_FOLDER, if the launcher would use several nodes


@dataclass(frozen=True, eq=False)
class LocalTask:
    """Information that a Determined script gets about its task in a local trial.

    Attributes:
        hparams: hyperparameters, `deepspeed_config` and `overwrite_deepspeed_args` among them.
        length: length of the only searcher operation, in the script's unit.
        seed: `info.trial.trial_seed`.
        ports: two free ports for the chief's broadcasts.
        devices: identifiers of the slots' devices; empty on a CPU.
        hosts: addresses of the trial's hosts, each with the same number of slots.
    """

    trial_id: int
    slots: int
    hparams: Mapping[str, Any]
    experiment_config: Mapping[str, Any]
    length: int
    seed: int
    ports: Sequence[int]
    devices: Sequence[str] = ()
    hosts: Sequence[str] = (ADDRESS,)

    @property
    def slots_per_host(self) -> int:
        return self.slots // len(self.hosts)


@dataclass(frozen=True)
class RankSpec(Recorded):
    """Specification of a trial's ranks; in `trial.json`.

    Attributes:
        program: entrypoint with the trial's configuration, without environment variables.
        meter: what to measure; None in a full-length run or a simulation.
        cpu_memory_bytes: memory that a rank may allocate beyond its imports; None for no limit.
        threads: threads of each rank if slots are CPU cores; else None.
        simulation_folder: folder of messages if the script runs only for simulations; else None.
        own: whether the script runs unchanged, with its own batch sizes and devices.
        is_command: whether the user's whole command runs, and starts the ranks.
        defaults_local_rank: whether dsat sets the default of `--local_rank`, because no launcher
            passes it to the ranks.
    """

    trial: Trial
    program: Entrypoint
    task: LocalTask
    meter: MeterSpec | None
    cpu_memory_bytes: int | None = None
    threads: int | None = None
    simulation_folder: str | None = None
    own: bool = False
    is_command: bool = False
    defaults_local_rank: bool = False

    @classmethod
    def read(cls, folder: Path) -> RankSpec:
        return cls.from_json(json.loads((folder / SPEC_FILE).read_text(encoding="utf-8")))

    @property
    def is_full_run(self) -> bool:
        """Return whether the script trains in full length, without measurement or simulation."""
        return self.meter is None and self.simulation_folder is None


def result_file(rank: int | str) -> str:
    """Return the name of the file in which a rank reports a failure; "*" gives a glob pattern."""
    return f"rank{rank}.json"


def mark_begun(folder: Path, rank: int) -> None:
    """Record that a rank calls `deepspeed.initialize`, and its port."""
    with open(folder / PORTS_FILE, "a", encoding="ascii") as file:
        file.write(os.environ.get("MASTER_PORT", "") + "\n")
    (folder / f"begun{rank}").touch()


def has_begun(folder: Path, rank: int | str) -> bool:
    """Return whether a rank ("*": any) called `deepspeed.initialize`, or any rank failed."""
    has_failed = any(folder.glob(result_file("*")))
    return has_failed or any(folder.glob(f"begun{rank}"))


def write_outcome(folder: Path, rank: int, outcome: Outcome) -> None:
    """Write a failure, or a measurement on rank 0 only, since all ranks have the same."""
    if outcome.ok and rank != 0:
        return
    path = folder / (METRICS_FILE if outcome.ok else result_file(rank))
    write_atomically(path, json.dumps(outcome.to_json(), indent=1) + "\n")


def read_steps(folder: Path) -> int | None:
    """Read the number of optimizer steps of a trial; None before the first."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / STEPS_FILE).read_text(encoding="ascii"))
    return None


class Progress:
    """Progress files of a trial; errors in writing them are ignored.

    `folder` is None if another rank writes them.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._steps: int | None = None  # descriptor of the file
        self.activity = ""

    def set_activity(self, text: str) -> None:
        """Set the present activity; empty for none."""
        self.activity = text
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            if text:
                (self._folder / ACTIVITY_FILE).write_text(text)
            else:
                (self._folder / ACTIVITY_FILE).unlink(missing_ok=True)

    @contextlib.contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Set another activity for the duration of a context."""
        previous = self.activity
        self.set_activity(text)
        try:
            yield
        finally:
            self.set_activity(previous)

    def count(self, steps: int) -> None:
        """Write the number of optimizer steps, in a few microseconds; clear the activity first."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            if self._steps is None:
                self.set_activity("")
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                self._steps = os.open(self._folder / STEPS_FILE, flags, 0o600)
            os.pwrite(self._steps, b"%8d\n" % steps, 0)
