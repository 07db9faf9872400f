"""A rank of a trial, from inside the user's process.

The hook (`dsat.in_trial.hook`) calls `begin` in processes that import DeepSpeed or transformers. If
the supervisor starts the ranks, it marks them by an environment variable. If the user's command
starts them, a process becomes a rank when it calls `deepspeed.initialize`.

A rank ends by `os._exit` once its outcome is known, because an orderly end takes a second. A rank
of the user's command waits until the supervisor ends the command, so that nothing runs after it.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from dsat.command.ds_config import BATCH_KEYS
from dsat.command.script_args import mappings_for
from dsat.errors import InvalidTrial
from dsat.in_trial import config_injection, exits, failures, loopback, meter, start_record
from dsat.in_trial.adapters import install, trackers
from dsat.in_trial.adapters.hf_trainer import TrainerSettings
from dsat.in_trial.adapters.trial import TRIAL, Phase
from dsat.in_trial.agreement import rank_and_size
from dsat.in_trial.memory_limit import limit_memory, limit_to_host
from dsat.in_trial.meter import Meter
from dsat.in_trial.rank_files import (
    CONFIG_FILE,
    DONE_FILE,
    MODULES_FILE,
    SPEC_FILE,
    Progress,
    RankSpec,
    has_begun,
    mark_begun,
    write_outcome,
)
from dsat.in_trial.script_flags import find_accumulation_flag, find_batch_flag
from dsat.in_trial.script_switches import ScriptSwitches
from dsat.simulation import server
from dsat.values import host_limits
from dsat.values.files import write_atomically
from dsat.values.outcome import Outcome, OutcomeKind

FAILED = 1
_IS_ENDED_WITHIN_S = 30.0
# Prefixes of variables that torch, DeepSpeed and the libraries that they load set by themselves.
_SET_BY_LIBRARIES = tuple(
    "ACCELERATE_ CROSS_ CUDA_ DS_ KMP_ NCCL_ PYTORCH_ TOKENIZERS_PARALLELISM TORCH TRITON_".split()
)


def begin(folder: Path, start: Mapping[str, Any], *, is_rank: bool) -> None:
    """Prepare this process to be a rank of the trial in a folder; later calls do nothing.

    If the folder has no `SPEC_FILE`, only record how ranks start.

    Args:
        start: see `start_record.install`.
        is_rank: whether the supervisor started this process as a rank.
    """
    if TRIAL.rank is not None:
        return
    if (folder / SPEC_FILE).exists():
        TRIAL.rank = rank = Rank(folder, is_rank=is_rank)
        if not is_rank:  # the hook does this for a rank
            TRIAL.on_uncaught = rank.fail
            atexit.register(rank.finish)
        rank.prepare(start)
    else:
        start_record.install(folder, start, waits=True)
        TRIAL.on_uncaught = functools.partial(exits.report_unmeasured, folder)
        atexit.register(exits.report_exit, folder)


def get_rank(folder: Path, *, is_forked: bool = False) -> Rank:
    """Return the rank of this process; make one if it has not imported DeepSpeed yet."""
    rank: Rank = TRIAL.rank or Rank(folder, is_rank=True, is_forked=is_forked)
    TRIAL.rank = rank
    return rank


class Rank:
    """A process that is or may become a rank.

    Args:
        is_rank: if False, the process becomes a rank when it calls `deepspeed.initialize`.
        is_forked: whether it is a fork of the supervisor, which has imported torch and DeepSpeed.
    """

    def __init__(self, folder: Path, *, is_rank: bool, is_forked: bool = False) -> None:
        self._folder = folder
        self._spec = RankSpec.read(folder)
        self._is_forked = is_forked
        TRIAL.progress = Progress(folder if rank_and_size()[0] == 0 else None)
        self._meter: Meter | None = None
        # A process forked from a rank is not a rank.
        self._pid = os.getpid() if is_rank else None
        self._has_engine = False
        self._is_complete = False
        self._known_modules, self._env = set(sys.modules), dict(os.environ)
        self._server: server.SimulationServer | None = None
        if self._spec.simulation_folder is not None:
            self._server = server.SimulationServer(Path(self._spec.simulation_folder))

    def prepare(self, start: Mapping[str, Any] | None = None) -> None:
        """Adapt DeepSpeed and the other libraries of the script, and limit memory.

        `start` is recorded in the run's first trial.
        """
        if "deepspeed" not in sys.modules:  # the script may import transformers first
            TRIAL.progress.set_activity("importing torch and DeepSpeed")
            importlib.import_module("deepspeed")
        spec = self._spec = _adapt_to_machine(self._spec)
        # As in an activated environment: DeepSpeed compiles with the ninja that is found first, and
        # another version of ninja would compile everything anew.
        programs, path = os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)
        if programs not in path.split(os.pathsep):
            os.environ["PATH"] = os.pathsep.join([programs, path])
        if self._server is not None:
            self._server.install()
        TRIAL.calls.before_engine.append(self._begin_engine)
        self._adapt_libraries()
        if start is not None:
            start_record.install(self._folder, start, waits=False)
        if not spec.is_full_run:  # after the record of the script's own configuration
            TRIAL.calls.before_engine.append(trackers.disable_reports)
        # Imports do not count against the limit; a forked rank already has them.
        if spec.cpu_memory_bytes is not None and self._is_forked:
            limit_memory(spec.cpu_memory_bytes)
        elif spec.cpu_memory_bytes is not None:
            TRIAL.calls.before_model = functools.partial(_limit, spec.cpu_memory_bytes)
            install.adapt_models()
        elif spec.meter is not None and spec.threads is not None and not spec.own:
            limit_to_host()
        program = "your command" if spec.is_command else "your script"
        activity = f"{program} runs, up to its first optimizer step"
        if spec.program.module.startswith("dsat."):  # with --model
            activity = "building the model on fake tensors, to count parameters and activations"
        TRIAL.progress.set_activity(activity)
        self._known_modules, self._env = set(sys.modules), dict(os.environ)

    def _adapt_libraries(self) -> None:
        """Install the meter, and apply the trial's settings to the script's libraries."""
        import torch

        spec, trial, on_cpu = self._spec, self._spec.trial, not self._spec.task.devices
        if spec.defaults_local_rank:
            TRIAL.local_rank = os.environ["LOCAL_RANK"]
        if spec.threads:
            torch.set_num_threads(spec.threads)
        loopback.choose_interface()
        TRIAL.task, TRIAL.is_simulated = spec.task, self._server is not None
        if spec.meter is not None:
            self._meter = meter.install(spec.meter, self._complete)
        path = None if spec.own else self._folder / CONFIG_FILE
        if path is not None:
            TRIAL.config = json.loads(path.read_text())
            config_injection.install(TRIAL.config, trial.overrides, path)
        switches = ScriptSwitches(trial.script_args, trial.overrides, on_cpu=on_cpu)
        if not TRIAL.is_simulated:
            TRIAL.calls.before_engine.append(switches.before_engine)
            TRIAL.calls.after_engine.append(switches.after_engine)
        TRIAL.trainer = TrainerSettings(
            trial,
            path,
            switches,
            max_steps=None if spec.meter is None else spec.meter.longest,
            batch_in_file=spec.program.launch.batch_in_file,
            on_cpu=on_cpu,
        )

    def fail(self, error: BaseException) -> None:
        """Report the error that ends this process."""
        self._leave_if_complete()
        if isinstance(error, SystemExit) and error.code in (None, 0):
            self.finish()
            return
        outcome = self._outcome_of(error)
        if outcome.kind is OutcomeKind.ERROR:
            outcome = replace(outcome, batch_flag=self._find_unchanged_flag())
        if self._server is not None:
            outcome = replace(outcome, message=self._server.failed(error) or outcome.message)
        if self.is_rank:
            self._end(replace(outcome, before_engine=not self._has_begun()))
        elif self._pid is None and not self._may_be_helper() and not _is_of_signal(error):
            self._end(replace(outcome, before_engine=True))

    def finish(self) -> None:
        """Report the measurement or the failure of a rank whose script ended by itself."""
        self._leave_if_complete()
        if self._pid is None:
            exits.report_exit(self._folder)
        if not self.is_rank or self._spec.is_full_run:
            return
        uncaught = getattr(sys, "last_value", None)  # handled by an excepthook of the script
        if TRIAL.exit is not None and TRIAL.exit.has_failed:
            self.fail(TRIAL.exit.error)
        elif uncaught is not None:
            self.fail(uncaught)
        if self._server is not None:
            self._server.failed(None)
        measured = None if self._meter is None else self._meter.finish()
        self._end(measured or failures.outcome(InvalidTrial(meter.NO_ENGINE)))

    def _outcome_of(self, error: BaseException) -> Outcome:
        """Return the outcome of a process that ends with an error.

        multiprocessing, Hydra and others catch an error and call `sys.exit`; the caught error then
        counts.
        """
        describe = failures.outcome if self._meter is None else self._meter.describe
        if not isinstance(error, SystemExit):
            return describe(error)
        if error.__context__ is not None:
            return describe(error.__context__)
        outcome = None if self._meter is None else self._meter.outcome
        if outcome is not None and not outcome.ok:
            return outcome
        return exits.outcome_of_exit(error)

    def _find_unchanged_flag(self) -> str:
        """Return a flag that still has the user's micro batch, not the trial's; empty if none."""
        spec = self._spec.meter
        own_micro_batch = None if spec is None else spec.options.own_micro_batch
        if spec is None or own_micro_batch in (None, spec.micro_batch):
            return ""
        return find_batch_flag(sys.argv[1:], own_micro_batch, TRIAL.script_options)

    def _find_accumulation_flag(self, outcome: Outcome) -> str:
        """Return the flag that trials must set to change accumulation; empty if there is none.

        No flag is needed if the script has a Trainer, whose arguments trials set, or a flag with
        the Trainer's name. No flag helps if the script ignores `gradient_accumulation_steps`.
        """
        spec, switches, args = self._spec, TRIAL.trainer.switches.found, sys.argv[1:]
        facts = None if outcome.training is None else outcome.training.facts
        if facts is None or facts.micro_steps != facts.gas or spec.meter is None:
            return ""
        own_gas = facts.gas if spec.own else spec.meter.options.own_gas
        has_arguments = any(switch.in_arguments for switch in switches.values())
        if own_gas is None or has_arguments or BATCH_KEYS[2] in mappings_for(args, {}):
            return ""
        return find_accumulation_flag(args, own_gas, TRIAL.script_options)

    @property
    def is_rank(self) -> bool:
        return self._pid == os.getpid()

    def _has_begun(self) -> bool:
        """Return whether the configuration may have caused the present error.

        If the script runs unchanged, DeepSpeed may fail early for another reason, such as a
        missing mpi4py.
        """
        import torch.distributed as dist

        may_train = self._meter is not None and self._meter.has_trainable_engine
        return self._has_engine and (not self._spec.own or may_train or dist.is_initialized())

    def _may_be_helper(self) -> bool:
        """Return whether this may be a launcher or a helper: its rank began in another process."""
        number, size = rank_and_size()
        return has_begun(self._folder, number if size > 1 else "*")

    def _begin_engine(self, _: Any) -> None:
        spec = self._spec
        if self._pid is None:  # the user's command started this process
            self._pid = os.getpid()
        self._has_engine = True
        number, size = rank_and_size()
        cores = host_limits.usable_cores()
        is_bound = len(cores) == len(os.sched_getaffinity(0))  # cores, not a quota, are the limit
        if spec.own and spec.threads and is_bound:  # use as many cores as later trials
            os.sched_setaffinity(0, cores[:size])
        if spec.is_command and size == 1 and not spec.own:  # so that libraries choose no port
            alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
            for name, value in alone.items():
                self._env[name] = os.environ.setdefault(name, value)
        mark_begun(self._folder, number)

    def _complete(self, outcome: Outcome) -> None:
        """Report the measurement; if the user's command started this rank, end it here.

        The meter ends other ranks. If their script does not end, the supervisor ends them.
        """
        if self._spec.is_command:
            self._end(outcome)
        else:
            self._report(outcome)
            self._is_complete = True
            (self._folder / DONE_FILE).touch()

    def _leave_if_complete(self) -> None:
        if self._is_complete and self.is_rank:
            leave(0)

    def _report(self, outcome: Outcome) -> None:
        if outcome.profile is not None:
            outcome = replace(outcome, accumulation_flag=self._find_accumulation_flag(outcome))
        flag = TRIAL.script_flags.get(outcome.batch_flag or outcome.accumulation_flag)
        outcome = replace(outcome, flag_leads=flag is not None and flag.leads)
        number, _ = rank_and_size()
        write_outcome(self._folder, number, outcome)
        if outcome.ok and number == 0:
            names = _find_libraries(self._known_modules, self._env)
            write_atomically(self._folder / MODULES_FILE, json.dumps(names))

    def _end(self, outcome: Outcome) -> None:
        """Report an outcome; end the process if it is a rank.

        A full-length run continues, unless the process is forked.
        """
        self._report(outcome)
        number, _ = rank_and_size()
        if self._is_forked and not outcome.ok:
            sys.stderr.write((outcome.detail or outcome.message) + "\n")
        if not self.is_rank or (self._spec.is_full_run and not self._is_forked):
            return  # the process continues
        if self._spec.is_command:
            if number == 0 or not outcome.ok:
                (self._folder / DONE_FILE).touch()
            _flush()
            time.sleep(_IS_ENDED_WITHIN_S)  # the supervisor ends the command
        leave(0 if outcome.ok else FAILED)


def _is_of_signal(error: BaseException) -> bool:
    """Return whether an error, perhaps a launcher's, reports that a signal killed a child."""
    status = error.returncode if isinstance(error, subprocess.CalledProcessError) else 0
    return status < 0


def _adapt_to_machine(spec: RankSpec) -> RankSpec:
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not spec.own:
        is_given = not spec.threads and threads.isdigit()  # torch may have read it in the parent
        return replace(spec, threads=int(threads)) if is_given else spec
    from deepspeed.accelerator import get_accelerator

    on_cpu = get_accelerator().is_synchronized_device()
    slots = rank_and_size()[1]
    devices = [] if on_cpu else list(map(str, range(slots)))
    return replace(
        spec,
        task=replace(spec.task, slots=slots, devices=devices),
        threads=1 if on_cpu else None,
        cpu_memory_bytes=spec.cpu_memory_bytes if on_cpu else None,
    )


def _limit(budget_bytes: int) -> None:
    """Import what DeepSpeed 0.19.8 would import later, then limit this process's memory."""
    importlib.import_module("torch._inductor.compile_fx")
    limit_memory(budget_bytes)


def _find_libraries(known_modules: set[str], env: Mapping[str, str]) -> list[str]:
    """Return the names of modules that the script imported from installed packages, in order.

    Later trials import them early. Names of packages would not be enough: some import most of their
    modules only when used. Return an empty list if the script set environment variables,
    since these may have to be set before the imports.
    """
    changes = {key for key, value in os.environ.items() if env.get(key) != value}
    if any(not key.startswith(_SET_BY_LIBRARIES) for key in changes):
        return []
    libraries = []
    for name, module in list(sys.modules.items()):
        if name in known_modules or name == "__main__":
            continue
        if "site-packages" in str(getattr(module, "__file__", "") or ""):
            libraries.append(name)
    return libraries


def _flush() -> bool:
    """Flush the output of the script; return whether all of it was written."""
    is_written = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the script may have closed it
            is_written = False
    return is_written


def leave(status: int) -> NoReturn:
    """Flush the output and end this process at once; if flushing fails, status 0 becomes 1."""
    TRIAL.phase = Phase.INERT  # `os._exit` is adapted
    os._exit(status if _flush() else status or FAILED)
