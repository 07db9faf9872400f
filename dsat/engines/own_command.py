"""The first trial: the user's command, unchanged, while dsat records how its ranks start."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from dsat.command import experiment as experiments
from dsat.command.entrypoint import Entrypoint
from dsat.command.recorded_start import ONE_NODE, RankStart, check_one_training
from dsat.engines import results as trial_result
from dsat.engines.machines import machine
from dsat.engines.machines.accelerators import has_nvml
from dsat.engines.machines.hosts import UNSEEN, Host, Share
from dsat.engines.machines.machine import machine_of_cores
from dsat.engines.running import Running, log_activities
from dsat.engines.start import LocalOptions, Start, StartMethod
from dsat.engines.starts import StartBuilder
from dsat.engines.supervisors import LOST, Supervisors
from dsat.engines.trial_folder import check_space, log_files, read_end, remove_hook
from dsat.errors import DsatError, EngineError, ScriptFailed, UserInputError
from dsat.in_trial import start_record
from dsat.in_trial.hook import HOOK_FOLDER, RUN_VARIABLE, TRIAL_VARIABLE, UNMARKED_FILE
from dsat.in_trial.rank_files import CONFIG_FILE, RECORDS_FOLDER, SEVERAL_NODES_FILE
from dsat.values import host_limits
from dsat.values.files import remove, write_atomically
from dsat.values.outcome import OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind, TrialOptions

_POLL_S = 0.1
_CHECK_S = 0.5  # between checks of all processes; scripts import torch earlier than they train
_LAST_LINES = 50
_HERE = 0
_LOCAL_RANK = "LOCAL_RANK"
_TORCH = "/libtorch_python"  # in the maps of a process that imported torch
_OWN = Trial(0, TrialKind.BASELINE, "own", 0, BatchTriple(1, 1, 1), {})


class OwnCommand:
    """First run of the user's command, started by the constructor.

    An engine takes it over as its first trial.

    Args:
        command: the program with its arguments, as typed.
        options: measurement options; their time limit also applies to the method `ranks`.
        measures: if False, ranks do not train: once recorded, they pause until `close`.
        ranks: number of processes of the command to start, with a launcher's variables; None if the
            command starts its ranks itself.

    Attributes:
        env: environment variables of the command, without dsat's folders in `PYTHONPATH`.
    """

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        options: TrialOptions,
        *,
        measures: bool = True,
        ranks: int | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="dsat-")).resolve()
        self._timeout_s = options.timeout_s
        self.activities: dict[str, float] = {}  # for `log_activities`
        self._starts: list[RankStart] = []
        self._checks_hook_s = 0.0
        self._records = self.folder / RECORDS_FOLDER
        self._records.mkdir()
        cwd = cwd.resolve()
        builder = StartBuilder(
            experiments.make_experiment(command, "own", cwd, {}),
            Entrypoint(started_by=tuple(command), started_in=str(cwd)),
            self.folder,
            cwd,
            LocalOptions(options),
            host_slots=len(host_limits.usable_cores()),
        )
        # The command starts before the devices are inspected, so that its errors appear at once.
        here = replace(UNSEEN, expandable_segments=has_nvml())
        if machine.has_no_accelerator():
            here = machine_of_cores()
        slots = tuple(rank % (here.num_slots or rank + 1) for rank in range(ranks or 0))
        start = replace(builder.start_of(_OWN), folder=self.folder, own_ranks=ranks or 0)
        if not measures:
            start = replace(start, meter=None)
        shares = (Share(_HERE, Host(here), slots),)
        [request] = builder.build(start, shares, StartMethod.COMMAND).values()
        self.env = start_record.drop_hook(self.folder, request["ranks"][0]["env"], str(cwd))
        self.running = Running(start, shares, StartMethod.COMMAND)
        self.supervisors = Supervisors([Host()], self.folder, env={})
        self.supervisors.send(_HERE, request)

    def ranks(self) -> list[RankStart]:
        """Wait until all ranks of the command call `deepspeed.initialize`; return their starts.

        Raises:
            UserInputError: the command is not one training on one machine, or cannot be tuned.
            ScriptFailed: before all ranks called it, the command ended or the time limit passed.
            EngineError: the supervisor ended.
        """
        began_s = time.monotonic()
        while not self._starts:
            self._receive()
            log_activities([self.running], self.activities)
            self._check_nodes()
            self._check_hook()
            is_over = self._has_ended or time.monotonic() - began_s > self._timeout_s
            starts = [RankStart.from_json(json.loads(p.read_text())) for p in self._record_files()]
            numbers = [rank.rank for rank in starts]
            if len(set(numbers)) < len(numbers):
                check_one_training(starts)
            if starts and len(starts) >= starts[0].local_size_of_launcher:
                self._starts = starts
            elif is_over:
                raise self._failure(starts)
        for path in self._record_files():  # they hold environment variables, perhaps secrets
            path.unlink(missing_ok=True)
        return self._starts

    def is_of(self, trial: Trial) -> bool:
        """Return whether a trial is the first one, and has the command's batch sizes."""
        config = self._starts[0].config or {} if self._starts else {}
        is_first = trial.id == _OWN.id and trial.kind is TrialKind.BASELINE
        return is_first and all(
            config[key] == value
            for key, value in trial.batch.config().items()
            if isinstance(config.get(key), int)
        )

    def become(self, start: Start, config: Mapping[str, Any]) -> Running:
        """Register the running command as a trial, and write the trial's configuration.

        Until `move_files` or `close`, the trial's folder is a link to the command's folder.
        """
        self.running.start = replace(start, own_ranks=self.running.start.own_ranks)
        start.folder.parent.mkdir(parents=True, exist_ok=True)
        start.folder.symlink_to(self.folder)
        write_atomically(start.folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
        return self.running

    def move_files(self) -> None:
        """Move the files of the ended command to the trial's folder."""
        folder = self.running.folder
        remove_hook(self.folder)
        shutil.rmtree(self._records, ignore_errors=True)
        remove(folder)
        shutil.move(self.folder, folder)

    def close(self) -> None:
        if self.running.folder.is_symlink():  # the link that `become` made
            self.running.folder.unlink()
        self.supervisors.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _has_ended(self) -> bool:
        return not self.running.running_hosts

    def _receive(self) -> None:
        if self._has_ended:
            return
        for _, message in self.supervisors.receive(_POLL_S):
            if message["event"] == LOST:
                raise EngineError(message["reason"])
            self.running.ended[_HERE] = message

    def _failure(self, ranks: Sequence[RankStart]) -> DsatError:
        """Return the error of a command if some of its ranks did not begin to train."""
        check_space(self.folder)
        log = trial_result.log_tail(self.folder)
        # Read the report of a rank, too: the command may log to a file.
        report = next(iter(trial_result.read_reports(self.folder, 0.0)), None)
        if report is not None and report.kind is OutcomeKind.INVALID:
            return UserInputError(report.message, where="command")
        if not self._has_ended:
            problem = (
                f"your command did not call deepspeed.initialize within {self._timeout_s:g} s "
                "(--trial-timeout)"
            )
            if ranks:
                problem += (
                    f": only {len(ranks)} of {ranks[0].size} ranks did. If the others run on "
                )
                problem += f"another node: {ONE_NODE.rstrip('.')}"
        elif trial_result.status_of(self.running):
            message = next(filter(trial_result.ERROR.match, reversed(log.splitlines())), "")
            if not message and report is not None:
                message, log = report.message, report.detail or log
            end = trial_result.describe_end(self.running)
            problem = f"{end} before it called deepspeed.initialize"
            problem += " in all of its ranks" if ranks else ""
            problem += f": {message.rstrip('.')}" if message else ""
        else:
            problem = (
                "your command ended without a call of deepspeed.initialize. Set a DeepSpeed "
                "configuration in its arguments or its file. Do not start the training in the "
                "background (&), and do not submit it as a job"
            )
        log_folder = Path(tempfile.mkdtemp(prefix="dsat-"))
        for name in log_files(0):
            if (self.folder / name).exists():
                shutil.copy(self.folder / name, log_folder / name)
        if not log:  # programs like make print their errors on standard output
            log = "\n".join(read_end(self.folder / log_files(0)[0])[-_LAST_LINES:])
        return ScriptFailed(f"{problem}. Its log is {log_folder / log_files(0)[1]}", log)

    def _check_nodes(self) -> None:
        path = self._records / SEVERAL_NODES_FILE
        if path.exists():
            nodes = json.loads(path.read_text())["nodes"]
            raise UserInputError(
                f"starts a training on {nodes} nodes, but trials run on this machine",
                where="command",
                hint=ONE_NODE,
            )

    def _check_hook(self) -> None:
        """Raise UserInputError if a process of the command has torch and a socket, but no hook.

        Such a process would train unmeasured, and overwrite checkpoints. Processes without a
        socket, which may prepare data, and processes that a rank started do not count.
        """
        if time.monotonic() < self._checks_hook_s or (self.folder / UNMARKED_FILE).exists():
            return
        self._checks_hook_s = time.monotonic() + _CHECK_S
        hook = f"/{self.folder.name}/{HOOK_FOLDER}"
        for process in self._processes():
            with contextlib.suppress(psutil.Error, OSError):
                maps = _maps(process)
                # psutil 6 renamed the method.
                connections = getattr(process, "net_connections", None) or process.connections
                has_socket = _TORCH in maps and connections("inet")
                if has_socket and hook not in maps and not _is_below_rank(process, hook):
                    problem, hint = _explain_missing_hook(process.environ(), hook)
                    command = shlex.join(process.cmdline()[:3])
                    raise UserInputError(
                        f"{problem} `{command}`, so dsat can neither measure that training nor "
                        "protect your files",
                        where="command",
                        hint=hint,
                    )

    def _processes(self) -> Iterator[psutil.Process]:
        """Yield the processes below the supervisor: the command and all that it started."""
        for supervisor in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if supervisor.environ().get(RUN_VARIABLE) == str(self.folder):
                    yield from supervisor.children(recursive=True)

    def _record_files(self) -> list[Path]:
        return sorted(self._records.glob(f"{start_record.RECORD_PREFIX}*.json"))


def _maps(process: psutil.Process) -> str:
    """Return the text of a process's /proc/PID/maps, which names its mapped files."""
    return Path(f"/proc/{process.pid}/maps").read_text(errors="replace")


def _is_below_rank(process: psutil.Process, hook: str) -> bool:
    """Return whether a process descends from a rank with torch and the hook.

    A launcher may have both, but not the `LOCAL_RANK` of a rank.
    """
    ancestors = itertools.takewhile(lambda parent: parent.pid != os.getpid(), process.parents())
    own_rank = os.environ.get(_LOCAL_RANK)
    return any(
        ancestor.environ().get(_LOCAL_RANK) != own_rank
        and hook in (maps := _maps(ancestor))
        and _TORCH in maps
        for ancestor in ancestors
    )


def _explain_missing_hook(env: Mapping[str, str], hook: str) -> tuple[str, str]:
    """Return how a process with these variables came to lack the hook, and what to do."""
    if TRIAL_VARIABLE not in env:
        return (
            "clears the environment of",
            "Pass all variables on, for example without `env -i` and --cleanenv.",
        )
    if hook not in env.get("PYTHONPATH", ""):
        return (
            "replaces PYTHONPATH for",
            "Keep the old entries, as in export PYTHONPATH=src:$PYTHONPATH.",
        )
    hint = "Use Python 3.10 or newer without -E, -I and -S, where dsat's folder is visible."
    return "hides dsat from", hint
