"""The user's own command, run unchanged: it records how ranks start, and is the first trial."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import wrapt

import dsat
from dsat.engines.local import machine, trial_result
from dsat.engines.local.accelerators import has_nvml
from dsat.engines.local.command_trial import with_hook
from dsat.engines.local.hosts import Host, Share
from dsat.engines.local.launch import COMMAND_FILE, log_files
from dsat.engines.local.leftovers import CompilerLocks
from dsat.engines.local.machine import machine_of_cores
from dsat.engines.local.ports import free_ports
from dsat.engines.local.rank_settings import ALLOCATOR_SETTINGS, allocator_is_set
from dsat.engines.local.running import Running, Start, Way, slow_activities
from dsat.engines.local.supervisors import LOST, Supervisors
from dsat.errors import DsatError, EngineError, ScriptFailed, UserInputError
from dsat.in_trial import command_hook, start_record
from dsat.in_trial.adapters import trackers
from dsat.in_trial.loopback import ADDRESS, INTERFACES
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.rank_files import DONE_FILE, RECORDS_FOLDER, SPEC_FILE, RankSpec
from dsat.inputs.ds_config import DSAT_MODE_KEY
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.recorded_start import ONE_NODE, RankStart, check_one_training
from dsat.values import host_cores
from dsat.values.files import remove, write_atomically
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.text import words_without_secrets
from dsat.values.trial import BatchTriple, Trial, TrialKind, TrialOptions

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_HERE = 0
_OWN = Trial(0, TrialKind.BASELINE, "own", 0, BatchTriple(1, 1, 1), {})


class FirstRun:
    """One run of the user's command, begun when this is made.

    Args:
        command: the program with its arguments, as a person types it.
        cwd: its working folder.
        timeout_s: limit until its ranks are there, and of the whole run.
        options: of the measurement; None ends the ranks as soon as they are recorded.
        ranks: so many processes of the command, with the variables of a launcher; None for a
            command that starts its ranks itself.

    Attributes:
        env: environment of the command, without the hook.
        folder: logs, records and results.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        *,
        timeout_s: float,
        options: TrialOptions | None = None,
        ranks: int | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dsat-"))
        self._command = command
        self._cwd = cwd.resolve()
        self._timeout_s = timeout_s
        self._recorded: list[RankStart] = []
        self._records = self.folder / RECORDS_FOLDER
        self._records.mkdir()
        self._closed = False
        self._logged: set[str] = set()  # activities
        self.env = _environment(self.folder)
        slots: tuple[str, ...] = ()
        if options is not None and machine.has_no_accelerator():
            here = machine_of_cores()
            slots = () if here.has_quota else here.devices
            self.env["OMP_NUM_THREADS"] = "1"  # as in all trials
        if options is not None:
            self._write_spec(options, ranks or 0)
        hooked = self._hooked_env()
        self._locks = CompilerLocks(self.env)
        self._locks.remove()
        # The command starts before the devices are looked at: its own errors are shown at once.
        host = Host()
        shares = (Share(_HERE, host, ()),)
        self._running = Running(Start(_OWN, self.folder, None), shares, Way.COMMAND)
        self._supervisors = Supervisors([host], self.folder, env={})
        request: dict[str, Any] = {
            "op": "launch",
            "trial": _OWN.id,
            "folder": str(self.folder),
            "cwd": str(self._cwd),
            "port": 0,
            "command": [shutil.which(command[0]), *command[1:]],
            "ranks": [
                {
                    "env": {**hooked, **variables},
                    "cores": [int(slots[rank % len(slots)])] if slots and ranks else [],
                }
                for rank, variables in enumerate(_variables(ranks))
            ],
            "logs": log_files(0),
            "linger_s": None,
            "done": DONE_FILE,
        }
        self._supervisors.send(_HERE, request)

    def ranks(self) -> list[RankStart]:
        """Wait for the command's ranks.

        Returns:
            How each of them was started, with the configuration that it passed.

        Raises:
            UserInputError: it is not one training on one machine, or none that can be tuned.
            ScriptFailed: it ended, or took too long, without a call of `deepspeed.initialize`.
        """
        began_s = time.monotonic()
        while not self._recorded:
            self._receive(_POLL_S)
            self._log_activities()
            self._check_nodes()
            is_over = self._has_ended or time.monotonic() - began_s > self._timeout_s
            found = self._read()
            numbers = [rank.rank for rank in found]
            if len(set(numbers)) < len(numbers):
                check_one_training(found)
            if found and len(found) >= found[0].on_this_node:
                self._recorded = found
            elif is_over:
                raise self._failure(found)
        for path in self._record_files():  # they hold variables
            path.unlink(missing_ok=True)
        return self._recorded

    def is_of(self, trial: Trial) -> bool:
        """Return whether the command trains with the batch sizes of a trial."""
        config = self._recorded[0].config or {} if self._recorded else {}
        return trial.kind is TrialKind.BASELINE and all(
            config[key] == value
            for key, value in trial.batch.config().items()
            if isinstance(config.get(key), int)
        )

    def poll(self, timeout_s: float) -> Outcome | None:
        """Return the run's outcome; None while it goes on."""
        self._receive(timeout_s)
        if self._has_ended:
            return trial_result.of(self._running, timeout_s=self._timeout_s)
        self._log_activities()
        if time.monotonic() - self._running.began_s > self._timeout_s:
            self._running.timed_out = True
            self._kill()
        return None

    def _log_activities(self) -> None:
        for _, activity in slow_activities([self._running], ()):
            if activity not in self._logged:
                self._logged.add(activity)
                _log.info("%s", activity)

    def cancel(self) -> None:
        """End the run; its outcome follows."""
        self._running.canceled = True
        self._kill()

    def move_to(self, folder: Path) -> None:
        """Give the files of a run that has ended to its trial, whose folder this is."""
        for name in ("hook", "packages", RECORDS_FOLDER):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        words = shlex.join(words_without_secrets(self._command))
        text = f"cd {shlex.quote(str(self._cwd))}\n{words}\n"
        write_atomically(self.folder / COMMAND_FILE, text)
        remove(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(self.folder, folder)

    def close(self, *, keep_files: bool = False) -> None:
        """End all processes, and remove the folder."""
        failed = not self._has_ended or trial_result.status_of(self._running) != 0
        self._supervisors.close()
        self._locks.remove(own=failed and not self._closed)
        self._closed = True
        if not keep_files:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _write_spec(self, options: TrialOptions, ranks: int) -> None:
        """Have the ranks go on to train and be measured."""
        if has_nvml() and not allocator_is_set(self.env):
            self.env.update(ALLOCATOR_SETTINGS)
        meter = MeterSpec(
            options,
            micro_batch=0,
            gas=0,
            stage=0,
            slots=0,
            host_slots=len(host_cores.usable()),
            profile=True,
        )
        spec = RankSpec(
            trial=_OWN.to_json(),
            program={**asdict(Entrypoint()), "slots": ranks},
            task={
                "trial_id": _OWN.id,
                "slots": ranks,
                "hosts": [ADDRESS],
                "hparams": {DSAT_MODE_KEY: True},
                "experiment_config": {"searcher": {"name": "custom"}},
                "length": meter.longest,
                "seed": 42,
                "ports": free_ports(2),
                "devices": [],
            },
            meter=meter.to_json(),
            cpu_memory_bytes=options.slot_memory_bytes,
            own=True,
        )
        write_atomically(self.folder / SPEC_FILE, json.dumps(spec.to_json(), indent=1) + "\n")

    def _hooked_env(self) -> dict[str, str]:
        """Return the environment of the command, in which its processes can import dsat."""
        packages = self.folder / "packages"
        hooked = with_hook(self.env, self.folder, packages=[packages])
        spare = self.folder / "hook" / "spare"
        for folder, module in ((packages, dsat), (spare, wrapt)):
            folder.mkdir()
            (folder / module.__name__).symlink_to(Path(str(module.__file__)).parent)
        return hooked

    @property
    def _has_ended(self) -> bool:
        return not self._running.hosts_going_on

    def _receive(self, timeout_s: float) -> None:
        if self._has_ended:
            return
        for _, message in self._supervisors.receive(timeout_s):
            if message["event"] == LOST:
                raise EngineError(message["reason"])
            self._running.ended[_HERE] = message

    def _kill(self) -> None:
        self._supervisors.send(_HERE, {"op": "kill", "trial": _OWN.id, "grace_s": 0})

    def _failure(self, ranks: Sequence[RankStart]) -> DsatError:
        """Return the error of a command of which only some ranks, or none, reached the training."""
        log = trial_result.log_tail(self.folder)
        # The command may have written its log to a file.
        report = next(iter(trial_result.reported(self.folder, 0.0)), None)
        if report is not None and report.kind is OutcomeKind.INVALID:
            return UserInputError(report.message, where="command")
        if not self._has_ended:
            problem = (
                f"did not call deepspeed.initialize within {self._timeout_s:g} s (--trial-timeout)"
            )
            if ranks:
                problem += f" in all of its ranks, but in {len(ranks)} of {ranks[0].size}"
                problem += f". Are the others on another node? {ONE_NODE.rstrip('.')}"
        elif status := trial_result.status_of(self._running):
            said = next(filter(trial_result.ERROR.match, reversed(log.splitlines())), "")
            if not said and report is not None:
                said, log = report.message, report.detail
            problem = f"ended with exit status {status} before it called deepspeed.initialize"
            problem += " in all of its ranks" if ranks else ""
            problem += f": {said.rstrip('.')}" if said else ""
        else:
            problem = (
                "ended without a call of deepspeed.initialize. Name a DeepSpeed configuration in "
                "its arguments or its file; do not start the training in the background (&), nor "
                "clear PYTHONPATH, by which dsat sees its Python processes"
            )
        kept = Path(tempfile.mkdtemp(prefix="dsat-"))
        for name in log_files(0):
            if (self.folder / name).exists():
                shutil.copy(self.folder / name, kept / name)
        printed = self.folder / "stdout.log"
        if not log and printed.exists():  # programs like make say there what went wrong
            log = printed.read_text(errors="replace")[-4096:]
        return ScriptFailed(f"your command {problem}. Its log is {kept / log_files(0)[1]}", log)

    def _check_nodes(self) -> None:
        path = self._records / start_record.SEVERAL_NODES_FILE
        if path.exists():
            nodes = json.loads(path.read_text())["nodes"]
            raise UserInputError(
                f"starts a training on {nodes} nodes, and trials run on this machine",
                where="command",
                hint=ONE_NODE,
            )

    def _read(self) -> list[RankStart]:
        return [RankStart.from_json(json.loads(path.read_text())) for path in self._record_files()]

    def _record_files(self) -> list[Path]:
        return sorted(self._records.glob(f"{start_record.RECORD_PREFIX}*.json"))


def _environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "DSAT_TRIAL_DIR": str(folder),
        # Here too: what a launcher's process adds would be recorded as the user's own.
        **trackers.variables_off(folder),
        **INTERFACES,
    }


def _variables(size: int | None) -> list[dict[str, str]]:
    """Return the variables that a launcher gives each rank.

    None where the command has a launcher, or fails without one as it does without dsat.
    """
    if size is None:
        return [{}]
    [port] = free_ports(1)
    of_all = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(port)}
    of_all |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), str(size))
    if size == 1:
        of_all[command_hook.ALONE_VARIABLE] = "1"
    return [of_all | dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(size)]
