"""A rank of a trial that runs the user's whole command again, from inside of the user's processes.

`dsat.in_trial.command_hook` begins it in each process that imports DeepSpeed; which of them is a
rank is not known before one calls `deepspeed.initialize`. After its report a rank waits until the
engine ends the command, which therefore never goes on behind its training.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.in_trial import config_injection, failures, preparation, start_record
from dsat.in_trial.adapters.trial import TRIAL
from dsat.in_trial.agreement import rank_and_size
from dsat.in_trial.memory_limit import limit_memory
from dsat.in_trial.meter import Meter
from dsat.in_trial.rank import outcome_of_ended
from dsat.in_trial.rank_files import (
    DONE_FILE,
    MODULES_FILE,
    PORTS_FILE,
    SPEC_FILE,
    Progress,
    RankSpec,
    result_file,
    write_outcome,
)
from dsat.values import host_cores
from dsat.values.files import write_atomically
from dsat.values.outcome import Outcome

_IS_ENDED_WITHIN_S = 30.0
begun: CommandRank | None = None  # in this process


def begin(folder: str, start: Mapping[str, Any]) -> None:
    """Prepare this process to be a rank of the trial in the folder; does nothing twice.

    Args:
        start: see `start_record.install`.
    """
    global begun
    if begun is not None:
        return
    if (Path(folder) / SPEC_FILE).exists():
        begun = CommandRank(Path(folder))
        begun.prepare(start)
    else:
        start_record.install(Path(folder), start, waits=True)
        failures.report_uncaught(functools.partial(_report_first, Path(folder)))


def _report_first(folder: Path, error: BaseException) -> None:
    """Report an error before `deepspeed.initialize`, which the command may write to a file."""
    if not any(folder.glob(result_file("*"))):
        write_outcome(folder, rank_and_size()[0], failures.outcome(error))


class CommandRank:
    """A process that may be a rank."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spec = RankSpec.of_folder(folder)
        self._progress = Progress(folder)
        self._meter: Meter | None = None
        self._engine_in: int | None = None  # a process that is forked from a rank is none
        self._known, self._env = set(sys.modules), dict(os.environ)

    def prepare(self, start: Mapping[str, Any]) -> None:
        """Adapt DeepSpeed and what else the script uses, as in any rank."""
        import deepspeed  # noqa: F401  (it may be transformers that was imported first)

        if self._spec.own:
            self._spec = _with_own_devices(self._spec)
        # As in an activated environment: another version of ninja would compile everything anew.
        programs, path = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
        if programs not in path.split(os.pathsep):
            os.environ["PATH"] = os.pathsep.join([programs, path])
        config_injection.on_initialize(self._begin_engine)
        self._meter = preparation.prepare(
            self._spec,
            self._folder,
            self._progress,
            on_complete=self._report,
            on_step=self._count_step,
        )
        start_record.install(self._folder, start, waits=False)
        preparation.prevent_side_effects(self._spec)
        self._progress.set_activity("your command runs, up to its first optimizer step")
        # What the script imports from here on does not count, as in a forked rank.
        if self._spec.cpu_memory_bytes is not None:
            _before_first_module(functools.partial(_limit, self._spec.cpu_memory_bytes))
        failures.report_uncaught(self.failed)
        atexit.register(self.ended)
        self._env = dict(os.environ)

    def failed(self, error: BaseException) -> None:
        """Report the error with which this process ends."""
        if isinstance(error, SystemExit) and error.code in (None, 0):
            self.ended()
            return
        import torch.distributed as dist

        # multiprocessing's own ends the process that way behind an error of the script's.
        hidden = error.__context__ if isinstance(error, SystemExit) else None
        found = failures.outcome(hidden or error)
        if self._has_engine:
            # Whatever the configuration is: without a launcher DeepSpeed looks for MPI's package.
            has_begun = (self._meter is not None and self._meter.watches) or dist.is_initialized()
            self._report(replace(found, before_engine=self._spec.own and not has_begun))
        elif self._engine_in is None and not any(self._folder.glob(result_file("*"))):
            # The launcher of ranks that failed fails as well, after them.
            self._report(replace(found, before_engine=True))

    def ended(self) -> None:
        """Report that a rank's script has come to its own end before enough was measured."""
        if self._meter is None or not self._has_engine:
            return
        uncaught = getattr(sys, "last_value", None)  # another hook than this one has seen it
        if uncaught is not None:
            self.failed(uncaught)
        else:
            self._report(outcome_of_ended(self._meter))

    @property
    def _has_engine(self) -> bool:
        return self._engine_in == os.getpid()

    def _begin_engine(self, _: Any) -> None:
        self._engine_in = os.getpid()
        _, size = rank_and_size()
        cores = host_cores.usable()
        is_bound = len(cores) == len(os.sched_getaffinity(0))  # by no quota, as in `Machine`
        if self._spec.own and self._spec.threads and is_bound:  # to cores that a trial has
            os.sched_setaffinity(0, cores[:size])
        if size == 1 and not self._spec.own:  # not the port that each of them would choose
            alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            for name, value in alone.items():
                self._env[name] = os.environ.setdefault(name, value)
        with open(self._folder / PORTS_FILE, "a", encoding="ascii") as file:
            file.write(os.environ.get("MASTER_PORT", "") + "\n")

    def _count_step(self, steps: int) -> None:
        if rank_and_size()[0] == 0:
            self._progress.count(steps)

    def _report(self, outcome: Outcome) -> None:
        rank, _ = rank_and_size()
        write_outcome(self._folder, rank, outcome)
        if outcome.ok and rank == 0 and self._spec.own:
            names = preparation.libraries(self._known, self._env)
            write_atomically(self._folder / MODULES_FILE, json.dumps(names))
        if self._meter is None or not self._has_engine:
            return  # the command goes on as it would
        if rank == 0 or not outcome.ok:
            (self._folder / DONE_FILE).touch()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the script may have closed it
                stream.flush()
        time.sleep(_IS_ENDED_WITHIN_S)  # the engine ends the command
        os._exit(0)


def _with_own_devices(spec: RankSpec) -> RankSpec:
    """The specification of the user's own run, with the devices that its processes have."""
    from deepspeed.accelerator import get_accelerator

    on_cpu = get_accelerator().is_synchronized_device()
    if spec.task["slots"] > 1:  # dsat started them, with no launcher that passes --local_rank
        TRIAL.local_rank = os.environ["LOCAL_RANK"]
    slots = rank_and_size()[1]
    devices = [] if on_cpu else list(map(str, range(slots)))
    return replace(
        spec,
        task={**spec.task, "slots": slots, "devices": devices},
        threads=1 if on_cpu else None,
        cpu_memory_bytes=spec.cpu_memory_bytes if on_cpu else None,
    )


def _limit(budget_bytes: int) -> None:
    """Limit this process's memory once DeepSpeed's own late imports are done (deepspeed 0.19.8)."""
    importlib.import_module("torch._inductor.compile_fx")
    limit_memory(budget_bytes)


def _before_first_module(act: Callable[[], None]) -> None:
    """Call `act` once, when the script begins to build its first model."""
    import torch

    original = torch.nn.Module.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.Module.__init__ = original  # type: ignore[method-assign]
        act()
        original(self, *args, **kwargs)

    torch.nn.Module.__init__ = init  # type: ignore[method-assign]
