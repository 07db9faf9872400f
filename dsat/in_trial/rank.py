"""One rank of a trial: prepares the process, runs the user's program, writes what came of it.

Runs in a process forked from the warm supervisor, or as `python3 -m dsat.in_trial.rank DIR`.
Everything it needs is in the folder's `trial.json` and in the environment. It leaves by `os._exit`,
because an orderly end of the interpreter costs a second that nobody needs.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import functools
import json
import os
import random
import runpy
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from dsat.errors import InvalidTrial
from dsat.in_trial import (
    available_memory,
    config_injection,
    determined_shim,
    failures,
    hf_trainer,
    loopback,
    side_effects,
)
from dsat.in_trial.clocks import ProcessMemory
from dsat.in_trial.meter import Meter, TrialComplete, install
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.simulation import server
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.script_args import CHECKPOINTING
from dsat.values.files import write_atomically
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial

SPEC_FILE = "trial.json"
CONFIG_FILE = "ds_config.json"
METRICS_FILE = "metrics.json"
MODULES_FILE = "modules.json"
DOING_FILE = "doing.txt"  # what takes its time in a trial, for people
STEPS_FILE = "steps"  # how many optimizer steps rank 0 has made
FAILED = 1
_DATA_LIMIT_SLACK = 16 * 2**20
# malloc.h of glibc.
_M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -3, -4, -8
_MAPPED_FROM_BYTES = 2**18
# The same by mallopt's variables (glibc), for a program that is started by hand.
MALLOC_VARIABLES = {
    "MALLOC_MMAP_THRESHOLD_": _MAPPED_FROM_BYTES,
    "MALLOC_MMAP_MAX_": 2**30,
    "MALLOC_ARENA_MAX": 1,
}
# Variables that torch, DeepSpeed and what they load set by themselves.
_SET_BY_LIBRARIES = tuple(
    "ACCELERATE_ CROSS_ CUDA_ DS_ KMP_ NCCL_ PYTORCH_ TOKENIZERS_PARALLELISM TORCH TRITON_".split()
)


@dataclass(frozen=True)
class RankSpec:
    """Specification of a trial's ranks; in `trial.json`.

    Attributes:
        trial: the trial as in the journal, for people.
        program: the entrypoint, its configuration path already the trial's own.
        task: the fields of `determined_shim.LocalTask`, its folder left out.
        meter: what to measure; None in a full-length run, which is not measured.
        cpu_memory_bytes: if given, what the rank may allocate on top of what it has imported.
        threads: of each rank, if the machine's slots are processor cores.
        simulation_socket: the run is only for simulations of its model; the path of the socket
            where whoever wants them listens.
        own: the script runs as the user has it; batch sizes and devices are those that it takes.
    """

    trial: Mapping[str, Any]
    program: Mapping[str, Any]
    task: Mapping[str, Any]
    meter: Mapping[str, Any] | None
    cpu_memory_bytes: int | None = None
    threads: int | None = None
    simulation_socket: str | None = None
    own: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankSpec:
        return cls(**{f.name: data[f.name] for f in fields(cls)})


def result_file(rank: int | str) -> str:
    """Return the file in which a rank reports its failure; of all ranks with "*"."""
    return f"rank{rank}.json"


def run(folder: Path) -> NoReturn:
    """Runs the rank that the environment says this process is; never returns."""
    spec = RankSpec.from_json(json.loads((folder / SPEC_FILE).read_text()))
    rank = int(os.environ["RANK"])
    meter: list[Meter] = []
    engines: list[Any] = []  # what tells the script's own errors from a configuration's
    socket = spec.simulation_socket
    simulations = None if socket is None else server.SimulationServer(Path(socket), folder)
    doing = Doing(folder / DOING_FILE if rank == 0 else None)
    try:
        if "deepspeed" not in sys.modules:
            doing.say("importing torch and DeepSpeed in a fresh process")
        _prepare(spec, folder, rank, meter, simulations, doing)
        doing.say("your script runs, up to its first optimizer step")
        config_injection.on_initialize(engines.append)
        _run_program(Entrypoint.from_json(spec.program))
    except (TrialComplete, server.ScriptSimulated):
        _leave(0)
    except SystemExit as stop:
        if simulations is not None:
            simulations.failed(stop)
        if stop.code not in (None, 0):
            said = f"the script ended with sys.exit({stop.code!r})"
            _write_failure(folder, rank, stop, said, before_engine=not engines)
            _leave(FAILED)
    except BaseException as error:
        told = "" if simulations is None else simulations.failed(error)
        _write_failure(folder, rank, error, told, before_engine=not engines)
        _leave(FAILED)
    if simulations is not None:
        simulations.failed(None)
    _end_of_script(spec, folder, rank, meter)


def _prepare(
    spec: RankSpec,
    folder: Path,
    rank: int,
    meters: list[Meter],
    simulations: server.SimulationServer | None,
    doing: Doing,
) -> None:
    import deepspeed  # noqa: F401  (after a cold start; the memory limit must come after it)
    import numpy
    import torch

    tell_of_compiling(doing)
    # A forked process has its parent's state, a fresh one would have a random one.
    random.seed()
    numpy.random.seed()
    # torch has read OMP_NUM_THREADS when the parent of this process imported it.
    given = os.environ.get("OMP_NUM_THREADS", "")
    threads = spec.threads or (int(given) if given.isdigit() else None)
    if threads:
        torch.set_num_threads(threads)
    loopback.install()
    task = {**spec.task, "folder": folder}
    determined_shim.install(determined_shim.LocalTask(**task))
    if spec.program["trial_class"]:
        determined_shim.adapt_trial_classes(on_cpu=not spec.task["devices"])
    if simulations is not None:
        simulations.install()

    def complete(outcome: Outcome) -> None:
        write_outcome(folder, rank, outcome)
        if rank == 0:
            write_atomically(folder / MODULES_FILE, json.dumps(libraries(known, before)))

    on_step = step_counter(folder, doing) if rank == 0 and spec.meter is not None else None
    meters.extend(lay_over(spec, folder, complete, on_step))
    known, before = set(sys.modules), dict(os.environ)


def lay_over(
    spec: RankSpec,
    folder: Path,
    complete: Callable[[Outcome], None],
    on_step: Callable[[int], None] | None,
) -> list[Meter]:
    """Gives whatever the script does in this process the trial's configuration and its limits.

    Args:
        complete: takes what was measured.
        on_step: takes the number of optimizer steps, after each.

    Returns:
        What measures the script; nothing if it is not measured.
    """
    path = folder / CONFIG_FILE
    if spec.meter is not None or spec.simulation_socket is not None:
        side_effects.install(folder, _say)
    if not spec.own:
        config_injection.install(json.loads(path.read_text()), spec.trial["overrides"], path)
    meters = []
    if spec.meter is not None:
        meters.append(install(MeterSpec.from_json(spec.meter), complete, on_step))
    elif spec.simulation_socket is None:
        available_memory.adapt(None, _say)
    _adapt_trainer(spec, folder, meters)
    if spec.cpu_memory_bytes is not None:
        limit_memory(spec.cpu_memory_bytes)
    return meters


def step_counter(folder: Path, doing: Doing) -> Callable[[int], None]:
    """Writes how many steps were made, for people to see; microseconds, nothing is synced."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    descriptor = os.open(folder / STEPS_FILE, flags, 0o600)

    def count(steps: int) -> None:
        if steps == 1:
            doing.say("")
        with contextlib.suppress(OSError):  # a full disk is no reason to fail a trial
            os.pwrite(descriptor, b"%8d\n" % steps, 0)

    return count


def _adapt_trainer(spec: RankSpec, folder: Path, meters: Sequence[Meter]) -> None:
    trial = Trial.from_json(spec.trial)
    settings = hf_trainer.TrainerSettings(
        config_path=None if spec.own else folder / CONFIG_FILE,
        micro_batch=trial.batch.micro_batch,
        gas=trial.batch.gas,
        gradient_checkpointing=trial.script_args.get(CHECKPOINTING),
        max_steps=meters[0].spec.longest if meters else None,
    )
    hf_trainer.install(
        settings, meters[0].warn if meters else _say, on_cpu=not spec.task["devices"]
    )


def _say(text: str) -> None:
    print(f"dsat: {text}", file=sys.stderr)


def _run_program(program: Entrypoint) -> None:
    args = list(program.args)
    if program.passes_local_rank:
        args.insert(0, f"--local_rank={os.environ['LOCAL_RANK']}")
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        default_local_rank(os.environ["LOCAL_RANK"])
    if program.trial_class:
        from determined.exec import harness

        sys.path.insert(0, os.getcwd())
        sys.argv = ["harness.py", program.trial_class]
        harness.main(program.trial_class)
    elif program.module:
        sys.path.insert(0, os.getcwd())
        sys.argv = [program.module, *args]
        runpy.run_module(program.module, run_name="__main__", alter_sys=True)
    else:
        # `__file__` is absolute, as Python has it: a script may change its folder, or spawn itself.
        script = os.path.abspath(program.script)
        sys.path.insert(0, os.path.dirname(script))
        sys.argv = [program.script, *args]
        runpy.run_path(script, run_name="__main__")


def default_local_rank(local_rank: str) -> None:
    """A script that is started without a launcher may yet have the flag that DeepSpeed's sets.

    Its default is mostly 0 or -1, and DeepSpeed refuses to run if it is not the rank's own.
    """
    add_argument = argparse._ActionsContainer.add_argument

    @functools.wraps(add_argument)
    def with_default(self: Any, *flags: Any, **options: Any) -> Any:
        if "--local_rank" in flags and "action" not in options:
            options = {**options, "default": int(local_rank), "required": False}
        return add_argument(self, *flags, **options)

    argparse._ActionsContainer.add_argument = with_default  # type: ignore[method-assign]


def _end_of_script(spec: RankSpec, folder: Path, rank: int, meters: list[Meter]) -> NoReturn:
    """The script came to its own end."""
    if spec.simulation_socket is not None:
        problem = "the script ended without calling deepspeed.initialize with an optimizer"
        _write_failure(folder, rank, InvalidTrial(problem))
        _leave(FAILED)
    if spec.meter is None:
        # A training run ends as a Python program does: threads joined, atexit functions called.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _leave(0)
    meter = meters[0]
    try:
        meter.finish()
    except InvalidTrial as error:
        _write_failure(folder, rank, error)
        _leave(FAILED)
    except RuntimeError as error:  # the script has already parted its ranks
        _say(f"nothing more can be measured: {error}")
    if meter.outcome is not None:
        write_outcome(folder, rank, meter.outcome)
        _leave(0)
    too_short = InvalidTrial(meter.shortfall, smaller_may_run=meter.watches)
    _write_failure(folder, rank, too_short)
    _leave(FAILED)


def limit_memory(budget_bytes: int) -> None:
    """Lets this process allocate only so much more than it has now.

    The limit is on the data segment (Linux: private writable mappings), which makes torch's CPU
    allocator fail as a device's would. What was imported before does not count. The C library is
    told to give tensors back to the system at once: otherwise it is the holes in its heap that
    exhaust the limit, and not tensors. One heap is enough, since each more reserves 128 MiB for a
    moment, which no peak could be told from.
    """
    import ctypes
    import resource

    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
        mallopt(_M_MMAP_MAX, 2**30)
        mallopt(_M_ARENA_MAX, 1)
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    limit = ProcessMemory.now().data_bytes + budget_bytes + _DATA_LIMIT_SLACK
    resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
    _lift_to_compile(resource.RLIMIT_DATA, (limit, most))


def _lift_to_compile(limited: int, limits: tuple[int, int]) -> None:
    """Lets the compilers that DeepSpeed starts for its operators have all the memory they need."""
    import resource

    from deepspeed.ops.op_builder.builder import OpBuilder

    load = OpBuilder.jit_load

    @functools.wraps(load)
    def unlimited(self: Any, *args: Any, **options: Any) -> Any:
        _, most = limits
        resource.setrlimit(limited, (most, most))
        try:
            return load(self, *args, **options)
        finally:
            resource.setrlimit(limited, limits)

    OpBuilder.jit_load = unlimited


class Doing:
    """Says in a file what takes its time in a trial, as long as it does.

    Args:
        path: of the file; None if another rank tells.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.said = ""

    def say(self, text: str) -> None:
        """Set the current activity; empty for none."""
        self.said = text
        if self._path is None:
            return
        with contextlib.suppress(OSError):  # a full disk is no reason to fail a trial
            if text:
                self._path.write_text(text)
            else:
                self._path.unlink(missing_ok=True)


def tell_of_compiling(doing: Doing) -> None:
    """Tells of it while an operator of DeepSpeed's is being compiled."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    load = OpBuilder.jit_load

    @functools.wraps(load)
    def told(self: Any, *args: Any, **options: Any) -> Any:
        before = doing.said
        doing.say(f"compiling DeepSpeed's operator {self.name}; the result is kept")
        try:
            return load(self, *args, **options)
        finally:
            doing.say(before)

    OpBuilder.jit_load = told


def libraries(known: set[str], before: Mapping[str, str]) -> list[str]:
    """Return the imported modules of installed packages, in order, if they may be imported early.

    Some packages import most of theirs only when they are used.

    Not if the program set environment variables, which may be for them, and not if one of them took
    `deepspeed.initialize` for itself, which the meter could then no longer replace.
    """
    import deepspeed

    changed = {key for key, value in os.environ.items() if before.get(key) != value}
    if any(not key.startswith(_SET_BY_LIBRARIES) for key in changed):
        return []
    found = []
    for name, module in list(sys.modules.items()):
        if name in known or name == "__main__":
            continue
        names = list(getattr(module, "__dict__", {}).values())
        if any(value is deepspeed.initialize for value in names):
            return []
        if "site-packages" in str(getattr(module, "__file__", "") or ""):
            found.append(name)
    return found


def _write_failure(
    folder: Path,
    rank: int,
    error: BaseException,
    message: str = "",
    *,
    before_engine: bool = False,
) -> None:
    found = failures.outcome(error)
    found = replace(found, message=message or found.message, before_engine=before_engine)
    sys.stderr.write(found.detail or found.message + "\n")
    write_outcome(folder, rank, found)


def write_outcome(folder: Path, rank: int, outcome: Outcome) -> None:
    """Tells the engine what came of this rank; what was measured is the same on all of them."""
    if not outcome.ok:
        path = folder / result_file(rank)
    elif rank == 0:
        path = folder / METRICS_FILE
    else:
        return
    write_atomically(path, json.dumps(outcome.to_json(), indent=1) + "\n")


def _leave(status: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            status = status or FAILED
    os._exit(status)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
