"""Local engine: placement and life cycle of trials on the hosts of a run."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsat.engines.local import trial_result
from dsat.engines.local.heartbeats import PING_EVERY_S
from dsat.engines.local.hosts import Host, without_segments
from dsat.engines.local.launch import LINGER_S, LocalOptions, working_folder
from dsat.engines.local.leftovers import CompilerLocks, remove
from dsat.engines.local.preparation import Preparation
from dsat.engines.local.rank_settings import offloads
from dsat.engines.local.retries import Again, Retries
from dsat.engines.local.running import (
    FULL_RUN_ID,
    SIMULATION_ID,
    Running,
    Start,
    Way,
    slow_activities,
)
from dsat.engines.local.slots import Slots
from dsat.engines.local.supervisor import GRACE_AFTER_FAILURE_S
from dsat.engines.local.supervisors import LOST, Supervisors
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.rank_files import MODULES_FILE, result_file
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import Experiment
from dsat.simulation.server import CAPTURED_MICRO_BATCH
from dsat.space.overrides import overrides_for
from dsat.values import parallelism, slow
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.parallelism import DATA_ONLY
from dsat.values.trial import BatchTriple, Trial, TrialKind

_log = logging.getLogger(__name__)
_SIMULATION_POLL_S = 0.05
_AGAIN = "-again"  # of the folder of a trial that runs again because it has lost a host
# What ends a host or a rank from outside, such as the end of an allocation, may be about to end
# other hosts and this process as well: a trial is not to be blamed for that.
_RETRY_AFTER_S = 1.0


class LocalEngine:
    """Engine that runs trials as processes of this machine or of several.

    Args:
        experiment: what to run.
        program: its entrypoint, taken apart.
        hosts: where, with equally many slots each; simulations run on the first. Several must share
            the run's folder and the model's.
        folder: of the run.
        trials: where trials get their folders; by default `folder / "trials"`.
        options: how trials are run and measured.
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
        trials: Path | None = None,
    ) -> None:
        self._hosts = list(hosts)
        self._options = options
        self._slots_per_trial = slots_per_trial
        cwd = working_folder(experiment, folder).resolve()
        self._preparation = Preparation(
            experiment, program, folder, trials or folder / "trials", cwd, options
        )
        self._slots = Slots(self._hosts, slots_per_trial)
        self._retries = Retries(_ways(program, options, self._hosts))
        self._waiting: list[Start] = []
        self._running: dict[int, Running] = {}
        self._known: set[int] = set()
        self._ended: list[tuple[int, Outcome]] = []  # for `poll`
        self._lost: list[str] = []  # slots, for the warnings of the next outcome
        self._closed = False
        self._logged = set[str]()  # activities that take long
        env = {**experiment.env, **program.env}
        self._locks = CompilerLocks({**os.environ, **env})
        self._locks.remove()
        self._supervisors = Supervisors(hosts, folder, env=env)
        try:
            if any(host.prefix for host in hosts):
                named = filter(None, (program.script, program.config_path))
                self._supervisors.check_files(cwd, [cwd / name for name in named])
            if self._retries.way is Way.FORKED:
                self._warm_up()
        except BaseException:
            self._supervisors.kill()
            raise

    @property
    def num_slots(self) -> int:
        """Slots that work; of one trial if each runs the user's command, one after the other."""
        usable = self._slots.usable
        return min(usable, self._slots_per_trial) if self.needs_command else usable

    @property
    def needs_command(self) -> str:
        """Reason for which each trial runs the user's command again; empty if none does."""
        if self._retries.way is not Way.COMMAND:
            return ""
        reason = self._preparation.program.needs_command
        return reason or f"started by dsat, they failed with {self._retries.failure}"

    def launch(self, trial: Trial) -> None:
        if trial.id in self._known:
            return
        self._slots.check_free(waiting=len(self._waiting))
        spec = MeterSpec.of_trial(
            trial,
            self._options.trial,
            slots=self._slots_per_trial,
            host_slots=self._hosts[0].machine.num_slots,
        )
        self._known.add(trial.id)
        self._waiting.append(Start(trial, self._preparation.trials / trial.name, spec))
        self._start_waiting()

    def train(self, trial: Trial) -> Path:
        """Start a full-length, unmeasured run with a trial's configuration.

        Its outcome comes from `poll` under the id `FULL_RUN_ID`.

        Returns:
            The run's folder.
        """
        run = self._preparation.run
        folder, number = run / "full", 2
        while folder.exists():  # an earlier one, with its checkpoints
            folder, number = run / f"full-{number}", number + 1
        self._waiting.append(Start(replace(trial, id=FULL_RUN_ID), folder, None))
        self._start_waiting()
        return folder

    def start_simulation_server(self, address: Path, script_args: Mapping[str, Any]) -> Path:
        """Start the script so that its model can be simulated; takes no slot.

        Args:
            address: path of the socket on which the caller listens for simulations.
            script_args: switches of the script, as a trial has them.

        Returns:
            A file that says, once it exists, why there will be no simulations (`message` in it).
        """
        size = CAPTURED_MICRO_BATCH
        batch = BatchTriple(size, size, 1)
        own = parallelism.of_config(self._preparation.experiment.base_config)
        alone = {} if own == DATA_ONLY else DATA_ONLY.settings  # it is a single rank
        trial = Trial(
            SIMULATION_ID,
            TrialKind.SEARCH,
            "simulation",
            0,
            batch,
            overrides_for({**alone, "stage": 0}, batch),
            script_args=script_args,
        )
        folder = self._preparation.run / "simulation"
        if 0 not in self._slots.lost:  # the socket is on it
            self._waiting.append(Start(trial, folder, None, address))
            self._start_waiting()
        return folder / result_file(0)

    def has_simulation_server(self) -> bool:
        """Return whether the simulation server runs, or is yet to begin."""
        if not self._closed:
            self._wait(0.0)
        waiting = any(start.trial.id == SIMULATION_ID for start in self._waiting)
        return waiting or SIMULATION_ID in self._running

    def stop_simulation_server(self) -> None:
        """End the simulation server, and wait until nothing of it is left.

        It may hold memory of the device, and another one has the same folder.
        """
        self.cancel(SIMULATION_ID)
        while SIMULATION_ID in self._running and not self._closed:
            self._wait(_SIMULATION_POLL_S)

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        if self._closed:
            return []
        if not self._ended:
            self._wait(timeout_s)
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, trial_id: int) -> None:
        for waiting in [w for w in self._waiting if w.trial.id == trial_id]:
            self._waiting.remove(waiting)
            if trial_id != SIMULATION_ID:
                canceled = Outcome(OutcomeKind.CANCELED, message="canceled")
                self._ended.append((trial_id, canceled))
        if trial_id in self._running:
            self._running[trial_id].canceled = True
            _end(self._supervisors, self._running[trial_id], grace_s=0)

    def close(self) -> None:
        if not self._closed:
            self._supervisors.close()  # a Ctrl-C meanwhile leaves this to be done again
            self._locks.remove(own=bool(self._running) and len(self._hosts) == 1)
            self._running.clear()
            self._closed = True

    def import_modules_of(self, folder: Path) -> None:
        """Import in advance what the user's script imported in a trial, whose folder this is."""
        # On a device that no longer works, the check after the imports would not come back.
        if self._retries.way is not Way.FORKED or any(self._slots.broken):
            return
        try:
            modules = json.loads((folder / MODULES_FILE).read_text())
        except (OSError, ValueError):  # where also scripts may write
            return
        if isinstance(modules, list) and all(isinstance(name, str) for name in modules):
            self._warm_up(modules)

    def _warm_up(self, modules: Sequence[str] = ()) -> None:
        which = f"{len(modules)} modules of your script" if modules else "torch and DeepSpeed"
        with slow.logged(_log, f"importing {which} once"):
            imported = modules or self._options.imported
            self._retries.on_warm_up(self._supervisors.warm_up(imported))

    def _start_waiting(self) -> None:
        """Start what has been requested, in that order, as far as there is room."""
        while self._waiting:
            start = self._waiting[0]
            # An optimizer on the host needs its cores and memory for itself.
            on_host = offloads(self._preparation.config_of(start))
            alone = start.alone or (on_host and not self._hosts[0].machine.is_cpu)
            shares = self._slots.find_room(start, self._running.values(), alone=alone)
            if shares is None:
                self._slots.check_enough()
                return
            del self._waiting[0]
            way, why = self._retries.way, self.needs_command
            running, requests = self._preparation.prepare(start, shares, way, why=why)
            running.alone = alone and bool(shares[0].slots)
            if start.simulation_socket is None:
                for other in self._running.values():
                    other.beside = running.beside = True
            self._running[start.trial.id] = running
            for host, request in requests.items():
                self._supervisors.send(host, request)

    def _wait(self, timeout_s: float) -> None:
        """Wait until a trial has ended or for so long; what has ended is kept for `poll`."""
        deadline, before = time.monotonic() + timeout_s, len(self._ended)
        while len(self._ended) == before:
            if not (self._running or self._waiting):
                self._slots.check_enough()
            self._start_waiting()
            # What has ended by now did so in time, however long this process was busy.
            messages = self._supervisors.receive(0.0)
            if not messages:
                now = time.monotonic()
                ends = [deadline, now + PING_EVERY_S, *self._end_overdue(now)]
                for name, activity in slow_activities(self._running.values(), self._waiting):
                    if activity not in self._logged:
                        self._logged.add(activity)
                        _log.info("%s: %s", name, activity)
                messages = self._supervisors.receive(max(0.0, min(ends) - now))
            for host, message in messages:
                if message["event"] == LOST:
                    self._lose(host, message["reason"])
                else:
                    self._on_ranks_ended(host, message)
            if time.monotonic() >= deadline:
                break

    def _end_overdue(self, now: float) -> Iterator[float]:
        """End trials that take too long; yield when others will."""
        limit_s = self._options.trial.timeout_s
        for running in self._running.values():
            if running.timed_out or running.trial.id in (FULL_RUN_ID, SIMULATION_ID):
                continue
            left_s = limit_s - running.clock.now_s()
            if left_s <= 0:
                running.timed_out = True
                _end(self._supervisors, running, grace_s=0)
            else:
                yield now + left_s

    def _on_ranks_ended(self, host: int, message: Mapping[str, Any]) -> None:
        """Take in that a trial's ranks on a host have ended."""
        running = self._running[message["trial"]]
        running.ended[host] = message
        if not running.hosts_going_on:
            self._on_trial_ended(running)
        elif any(message["statuses"]):
            # As among the ranks of one host: they see it fail, and their own report may say more.
            _end(self._supervisors, running, grace_s=GRACE_AFTER_FAILURE_S)
        elif running.trial.id != FULL_RUN_ID:
            _end(self._supervisors, running, grace_s=LINGER_S)

    def _lose(self, host: int, reason: str) -> None:
        """Go on without a host. Trials that had ranks there are ended elsewhere too."""
        line = self._slots.lose(host, reason)
        _log.warning("%s", line)
        self._lost.append(line)
        for running in list(self._running.values()):
            if host not in running.hosts_going_on:
                continue
            running.lost = line
            [share] = [share for share in running.shares if share.index == host]
            statuses = [-signal.SIGKILL] * share.ranks
            running.ended[host] = {"statuses": statuses, "killed": [True] * share.ranks}
            if running.hosts_going_on:
                _end(self._supervisors, running, grace_s=0)
            else:
                self._on_trial_ended(running)

    def _on_trial_ended(self, running: Running) -> None:
        """Take in that a trial has ended; there is no outcome if it is run again."""
        del self._running[running.trial.id]
        remove(running.swap)
        if running.trial.id == SIMULATION_ID:
            return
        outcome = trial_result.of(running, timeout_s=self._options.trial.timeout_s)
        lost = self._slots.check(running.shares, outcome, stuck=running.stuck)
        self._lost += lost
        self._slots.give_back(running.shares)
        if not outcome.ok:
            # Compilers of trials that go on are seen if they run here.
            self._locks.remove(own=len(self._hosts) == 1 or not self._running)
        again = self._retries.decide(running, outcome, broken=bool(lost))
        if again is not None:
            self._run_again(running, outcome, again)
            return
        if running.trial.profiles and outcome.ok:
            self.import_modules_of(running.folder)
            outcome = trial_result.with_smallest_device(outcome, self._hosts)
        _rename_to_trial(running.folder)
        outcome = self._retries.final(running, outcome)
        warnings, self._lost = (*outcome.warnings, *self._lost), []
        self._ended.append((running.trial.id, replace(outcome, warnings=warnings)))

    def _run_again(self, running: Running, outcome: Outcome, again: Again) -> None:
        if again is Again.NO_SEGMENTS:
            self._hosts[:] = without_segments(self._hosts)
        if again is Again.ELSEWHERE:
            time.sleep(_RETRY_AFTER_S)
        _log.info("%s failed (%s); %s", running.trial.name, outcome.message, again.value)
        folder = running.folder
        if running.lost:  # a host that is only cut off may still write there
            folder = folder.with_name(folder.name + _AGAIN)
        alone = again is Again.ALONE or running.start.alone
        self._waiting.append(replace(running.start, folder=folder, alone=alone))


def _ways(program: Entrypoint, options: LocalOptions, hosts: Sequence[Host]) -> list[Way]:
    """Return the ways in which ranks may be started, the first one first."""
    command = [Way.COMMAND] if program.started_in and len(hosts) == 1 else []
    if program.needs_command:
        return [Way.COMMAND]
    # Options of the interpreter need an interpreter of their own.
    if options.cold or program.python_options or program.interpreter:
        return [Way.FRESH, *command]
    return [Way.FORKED, Way.FRESH, *command]


def _end(supervisors: Supervisors, running: Running, *, grace_s: float) -> None:
    """Have the ranks of a trial killed that do not end by themselves in time."""
    for host in running.hosts_going_on:
        request = {"op": "kill", "trial": running.trial.id, "grace_s": grace_s}
        supervisors.send(host, request)


def _rename_to_trial(folder: Path) -> None:
    """Give the folder of a trial that ran again the name that trials' folders have."""
    home = folder.with_name(folder.name.removesuffix(_AGAIN))
    if home != folder:
        left = home.rename(home.with_name(f"{home.name}-lost"))
        folder.rename(home)
        shutil.rmtree(left, ignore_errors=True)  # one that is cut off may hold files open
