"""The engine that places trials on the hosts of a run, starts them and reports their ends."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.command.entrypoint import Entrypoint
from dsat.command.experiment import Experiment
from dsat.engines import results as trial_result
from dsat.engines.agent.supervisor import GRACE_AFTER_FAILURE_S, LINGER_S
from dsat.engines.machines.hosts import Host, disable_segments
from dsat.engines.own_command import OwnCommand
from dsat.engines.retries import Retries, RetryReason
from dsat.engines.running import Running, find_overdue, log_activities
from dsat.engines.slots import Slots
from dsat.engines.start import FULL_RUN_ID, SIMULATION_ID, LocalOptions, Start, StartMethod
from dsat.engines.starts import StartBuilder
from dsat.engines.supervisors import LOST, PING_EVERY_S, Supervisors
from dsat.engines.trial_folder import CreatedFolders, working_folder
from dsat.errors import EngineError
from dsat.in_trial.rank_files import MODULES_FILE, result_file
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial
from dsat.values.zero_strategy import read_strategy

_log = logging.getLogger(__name__)
_SIMULATION_POLL_S = 0.05
_AGAIN = "-again"  # suffix of the folder of a trial that runs again after losing a host
# What ended a host or a rank, such as the end of an allocation, may soon end the other hosts and
# this process. Without this pause, the second attempt would fail as well, and that is final.
_RETRY_AFTER_S = 1.0


class LocalEngine:
    """Engine that runs trials as processes on one or several hosts.

    Args:
        hosts: hosts with equal numbers of devices; simulations run on the first. Several hosts must
            share the run's folder and the model's.
        own: the user's command, already running, which becomes the first trial.
    """

    def __init__(
        self,
        experiment: Experiment,
        program: Entrypoint,
        hosts: Sequence[Host],
        folder: Path,
        options: LocalOptions,
        *,
        slots_per_trial: int,
        own: OwnCommand | None = None,
    ) -> None:
        self._hosts = list(hosts)
        cwd = working_folder(experiment, folder).resolve()
        self._slots = Slots(self._hosts, slots_per_trial)
        host_slots = self._hosts[0].machine.num_slots
        self._builder = StartBuilder(
            experiment, program, folder, cwd, options, slots_per_trial, host_slots
        )
        self._retries = Retries(_methods(program, options, self._hosts))
        self._own_command = own
        self._has_begun = False  # True once dsat starts trials itself
        self._queue: list[Start] = []
        self._running: dict[int, Running] = {}
        self._ended: list[tuple[int, Outcome]] = []  # for `poll`
        self._modules: list[str] = []  # imported by the script
        self._created_folders = CreatedFolders()
        self._is_closed = False
        if own is None:
            self._activities: dict[str, float] = {}  # for `log_activities`
            self._begin_trials()
        else:
            self._activities, self._supervisors = own.activities, own.supervisors

    @property
    def num_slots(self) -> int:
        """Number of usable devices; at most one trial's, if trials must run one at a time."""
        usable, alone = self._slots.usable, self.needs_command or self._retries.one_at_a_time
        return min(usable, self._slots.needed) if alone else usable

    @property
    def needs_command(self) -> str:
        """Reason for running the user's whole command in each trial; empty if there is none."""
        if self._retries.method is not StartMethod.COMMAND:
            return ""
        reason = self._builder.program.needs_command
        return reason or f"when dsat started them, they failed with {self._retries.failure}"

    def launch(self, trial: Trial) -> None:
        if self._own_command is not None and self._own_command.is_of(trial):
            start = self._builder.start_of(trial)
            running = self._own_command.become(start, self._builder.config_of(start))
            self._running[trial.id] = running
            if not running.running_hosts:
                self._handle_end_of_trial(running)
            return
        self._begin_trials()
        self._queue.append(self._builder.start_of(trial))
        self._start_waiting()

    def train(self, trial: Trial) -> Path:
        """Start a full-length, unmeasured run with a trial's configuration; return its folder.

        `poll` returns its outcome with the id `FULL_RUN_ID`.
        """
        run = self._builder.run
        folder, number = run / "full", 2
        while folder.exists():  # an earlier run, with its checkpoints
            folder, number = run / f"full-{number}", number + 1
        self._begin_trials()
        self._queue.append(Start(replace(trial, id=FULL_RUN_ID), folder, None))
        self._start_waiting()
        return folder

    def start_simulation_server(self, messages: Path, script_args: Mapping[str, Any]) -> Path:
        """Start the script without a device, to simulate its model, unless the first host is lost.

        Questions and answers are files in the folder `messages`.

        Returns:
            The path at which a JSON file appears if the script fails; its `message` says why.
        """
        start = self._builder.simulation(messages, script_args)
        self._begin_trials()
        if 0 not in self._slots.lost:  # only this host has the folder `messages`
            self._queue.append(start)
            self._start_waiting()
        return start.folder / result_file(0)

    def has_simulation_server(self) -> bool:
        """Return whether the simulation server runs or waits to start."""
        if not self._is_closed:
            self._wait(0.0)
        is_queued = any(start.trial.id == SIMULATION_ID for start in self._queue)
        return is_queued or SIMULATION_ID in self._running

    def stop_simulation_server(self) -> None:
        """End the simulation server, and wait until all its processes have ended.

        The script may hold device memory, and the next server uses the same folder.
        """
        self.cancel(SIMULATION_ID)
        while SIMULATION_ID in self._running and not self._is_closed:
            self._wait(_SIMULATION_POLL_S)

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        if self._is_closed:
            return []
        if not self._ended:
            self._wait(timeout_s)
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, trial_id: int) -> None:
        """End a trial that runs (CANCELED unless it has a result), or drop one that still waits."""
        self._queue = [start for start in self._queue if start.trial.id != trial_id]
        if trial_id in self._running:
            self._running[trial_id].canceled = True
            self._end(self._running[trial_id], grace_s=0)

    def close(self) -> None:
        if not self._is_closed:
            self._supervisors.close()  # after a Ctrl-C here, a second call closes the rest
            if self._own_command is not None:
                self._own_command.close()
            self._running.clear()
            self._is_closed = True

    # -- trials

    def _begin_trials(self) -> None:
        """Start the supervisors of all hosts, unless they run already.

        End the user's command first, because a supervisor's imports would disturb its measurement.
        """
        if self._has_begun:
            return
        if self._own_command is not None:
            self._own_command.close()
        builder, program = self._builder, self._builder.program
        env = {**builder.experiment.env, **program.env}
        self._supervisors = Supervisors(self._hosts, builder.run, env=env)
        self._has_begun = True
        try:
            if any(host.reach for host in self._hosts):
                names = filter(None, (program.script, program.config_path))
                self._supervisors.check_files(builder.cwd, [builder.cwd / name for name in names])
            if self._retries.method is StartMethod.FORKED:
                self._retries.note_warm_up(self._supervisors.warm_up(self._modules))
        except BaseException:
            self._supervisors.kill()
            raise

    def _start_waiting(self) -> None:
        while self._queue and not self._retries.device_failure:
            start = self._queue[0]
            # An optimizer that is offloaded to the host needs all of the host's cores and memory.
            uses_host = read_strategy(self._builder.config_of(start)).offloads
            alone = start.alone or (uses_host and not self._hosts[0].machine.is_cpu)
            shares = self._slots.find_room(start, self._running.values(), alone=alone)
            if shares is None:
                self._slots.check_enough()
                return
            del self._queue[0]
            method = self._retries.method
            requests = self._builder.build(start, shares, method)
            running = Running(start, shares, method, alone=alone and bool(shares[0].slots))
            if start.simulation_folder is None:
                for other in self._running.values():
                    other.beside = running.beside = True
            self._running[start.trial.id] = running
            for host, request in requests.items():
                self._supervisors.send(host, request)

    def _wait(self, timeout_s: float) -> None:
        deadline, count = time.monotonic() + timeout_s, len(self._ended)
        while len(self._ended) == count:
            if not self._running and (failure := self._retries.device_failure):
                raise EngineError(f"{failure}. Check the devices, then continue with --resume.")
            if not (self._running or self._queue):
                self._slots.check_enough()
            self._start_waiting()
            # A trial that has ended by now did not time out, however long this process was busy.
            messages = self._supervisors.receive(0.0)
            if not messages:
                now = time.monotonic()
                overdue, left_s = find_overdue(
                    self._running.values(), self._builder.options.trial.timeout_s
                )
                for running in overdue:
                    self._end(running, grace_s=0)
                ends = [deadline, now + PING_EVERY_S, now + left_s]
                log_activities(self._running.values(), self._activities)
                messages = self._supervisors.receive(max(0.0, min(ends) - now))
            for host, message in messages:
                if message["event"] == LOST:
                    self._lose(host, message["reason"])
                else:
                    self._handle_end_of_ranks(host, message)
            if time.monotonic() >= deadline:
                break

    def _end(self, running: Running, *, grace_s: float) -> None:
        request = {"op": "kill", "trial": running.trial.id, "grace_s": grace_s}
        for host in running.running_hosts:
            self._supervisors.send(host, request)

    def _handle_end_of_ranks(self, host: int, message: Mapping[str, Any]) -> None:
        running = self._running[message["trial"]]
        running.ended[host] = message
        if not running.running_hosts:
            self._handle_end_of_trial(running)
        elif any(message["statuses"]):
            # As on a single host: the other ranks soon fail, and their reports may explain more.
            self._end(running, grace_s=GRACE_AFTER_FAILURE_S)
        elif running.trial.id != FULL_RUN_ID:
            self._end(running, grace_s=LINGER_S)

    def _lose(self, host: int, reason: str) -> None:
        """Give up a host, and end its trials, also on other hosts."""
        line = self._slots.lose(host, reason)
        _log.warning("%s", line)
        for running in list(self._running.values()):
            if host not in running.running_hosts:
                continue
            running.lost = line
            [share] = [share for share in running.shares if share.index == host]
            statuses = [-signal.SIGKILL] * share.ranks
            running.ended[host] = {"statuses": statuses, "killed": [True] * share.ranks}
            if running.running_hosts:
                self._end(running, grace_s=0)
            else:
                self._handle_end_of_trial(running)

    def _handle_end_of_trial(self, running: Running) -> None:
        """Queue a trial's outcome for `poll`, unless it runs again or was a simulation."""
        del self._running[running.trial.id]
        self._created_folders.add(running.folder)
        if not self._running:  # another trial may be about to use them
            self._created_folders.remove_empty()
        if running.trial.id == SIMULATION_ID:
            return
        outcome = trial_result.read_outcome(
            running, timeout_s=self._builder.options.trial.timeout_s
        )
        if not running.start.is_own:
            self._slots.give_back(running.shares)
        # The compilers of trials on other hosts are invisible here.
        if not outcome.ok and (len(self._hosts) == 1 or not self._running):
            self._supervisors.locks.remove()
        reason = self._retries.decide(running, outcome)
        if reason is not None:
            self._run_again(running, outcome, reason)
            return
        if running.start.is_own and self._own_command is not None:
            self._own_command.move_files()
            self._own_command.close()
        modules = running.folder / MODULES_FILE
        is_forked = self._retries.method is StartMethod.FORKED
        if running.trial.profiles and outcome.ok and is_forked and modules.exists():
            self._modules += json.loads(modules.read_text())
            if self._has_begun:
                self._retries.note_warm_up(self._supervisors.warm_up(self._modules))
        _rename_to_trial(running.folder)
        outcome = self._retries.final(running, outcome)
        warnings = (*outcome.warnings, *self._slots.pop_losses())
        self._ended.append((running.trial.id, replace(outcome, warnings=warnings)))

    def _run_again(self, running: Running, outcome: Outcome, reason: RetryReason) -> None:
        if running.start.is_own:
            self._begin_trials()
        if reason is RetryReason.SEGMENTS:
            self._hosts[:] = disable_segments(self._hosts)
        if reason is RetryReason.LOST:
            time.sleep(_RETRY_AFTER_S)
        _log.info("%s failed (%s); %s", running.trial.name, outcome.message, reason.value)
        folder = running.folder
        if running.lost:  # a host that is merely cut off may still write there
            folder = folder.with_name(folder.name + _AGAIN)
        alone = running.start.alone or reason is not RetryReason.LOST
        self._queue.append(replace(running.start, folder=folder, alone=alone, own_ranks=None))


def _methods(
    program: Entrypoint, options: LocalOptions, hosts: Sequence[Host]
) -> list[StartMethod]:
    """Return the possible methods to start ranks, in order of preference."""
    if program.needs_command:
        return [StartMethod.COMMAND]
    command = [StartMethod.COMMAND] if program.started_in and len(hosts) == 1 else []
    # Only a fresh process can have another interpreter or other options of the interpreter.
    if options.cold or program.python_options or program.interpreter:
        return [StartMethod.FRESH, *command]
    return [StartMethod.FORKED, StartMethod.FRESH, *command]


def _rename_to_trial(folder: Path) -> None:
    """Give a trial's folder its usual name, if the trial ran again after the loss of a host."""
    home = folder.with_name(folder.name.removesuffix(_AGAIN))
    if home != folder:
        remains = home.rename(home.with_name(f"{home.name}-lost"))
        folder.rename(home)
        shutil.rmtree(remains, ignore_errors=True)  # a lost host may hold files open
