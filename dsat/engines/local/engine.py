"""The local engine: gives trials slots and folders, has them started, tells what came of them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsat.engines.local import leftovers, trial_result
from dsat.engines.local.command_trial import CommandLaunch
from dsat.engines.local.hosts import Host, Share, without_segments
from dsat.engines.local.launch import COMMAND_FILE, Launch, offloads, working_folder
from dsat.engines.local.ports import free_ports
from dsat.engines.local.retries import Again, Retries
from dsat.engines.local.running import (
    FULL_RUN_ID,
    SIMULATION_ID,
    Running,
    Start,
)
from dsat.engines.local.slots import Slots
from dsat.engines.local.supervisor import GRACE_AFTER_FAILURE_S
from dsat.engines.local.supervisors import LOST, Supervisors
from dsat.engines.local.views import VIEW, WorkingFolder
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.rank import (
    CONFIG_FILE,
    DOING_FILE,
    MODULES_FILE,
    SPEC_FILE,
    result_file,
)
from dsat.in_trial.simulation.server import CAPTURED_MICRO_BATCH
from dsat.inputs import ds_config
from dsat.inputs.entrypoint import Entrypoint
from dsat.inputs.experiment import Experiment
from dsat.values import slow
from dsat.values.files import PRIVATE_FOLDER, write_atomically
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import BatchTriple, Trial, TrialKind, TrialOptions

_log = logging.getLogger(__name__)
_SIMULATION_POLL_S = 0.05
_AGAIN = {
    Again.FRESH: "%s failed in a forked process (%s); trying it once in a fresh one",
    Again.ALONE: "%s failed beside other trials (%s); it is run again alone",
    Again.BY_COMMAND: "%s failed where your command did not (%s): it is run again in each trial",
    Again.NO_SEGMENTS: "%s failed (%s); it is run again, without expandable segments",
    Again.ELSEWHERE: "%s could not go on (%s); it is run again on other slots",
}
_LINGER_S = 20.0
# Of the folder of a trial that runs again because it has lost a host.
_ANEW = "-again"
# What ends a host or a rank from outside, such as the end of an allocation, may be about to end
# other hosts and this process as well: a trial is not to be blamed for that.
_SETTLE_S = 1.0


@dataclass(frozen=True)
class LocalOptions:
    """Options of running and measuring trials.

    Attributes:
        trial: what holds for the trials of any engine.
        cold: start each rank as a fresh Python process.
        seed: `trial_seed` of Determined scripts.
        at_once: so many trials may run side by side.
        imported: modules that forked ranks find imported; if none are given, what trials need.
    """

    trial: TrialOptions
    cold: bool = False
    seed: int = 42
    at_once: int = 1
    imported: Sequence[str] = ()


class LocalEngine:
    """Runs trials as processes of this machine or of several, more than one at a time.

    Args:
        experiment: what to run.
        program: its entrypoint, taken apart.
        hosts: where, with equally many slots each; simulations run on the first. Several must share
            the run's folder and the model's.
        folder: of the run.
        trials: where trials get their folders; by default `folder / "trials"`.
        options: how trials are run and measured.

    Raises:
        EngineError: the processes that start trials cannot be started, or hosts lack a folder.
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
        self._experiment = experiment
        self._program = program
        self._hosts = list(hosts)
        self._machine = hosts[0].machine
        self._folder = folder
        self._trials = trials or folder / "trials"
        self._options = options
        self._slots_per_trial = slots_per_trial
        self._slots = Slots(self._hosts, slots_per_trial)
        self._waiting: list[Start] = []
        self._known: set[int] = set()
        self._running: dict[int, Running] = {}
        self._closed = False
        self._untold: list[tuple[int, Outcome]] = []
        self._lost: list[str] = []  # slots that people have not been told of yet
        # Options of the interpreter need an interpreter of their own.
        self._retries = Retries(
            cold=options.cold
            or bool(program.python_options or program.interpreter or program.needs_command),
            has_command=bool(program.started_in) and len(hosts) == 1,
        )
        self._working = WorkingFolder(working_folder(experiment, folder), folder)
        self._failed_in_view: set[int] = set()
        self._told: set[str] = set()  # of what takes long
        self._supervisors = Supervisors(hosts, folder, env={**experiment.env, **program.env})
        if len(hosts) > 1:
            self._check_folders()
        self._compiling_env = {**os.environ, **experiment.env, **program.env}
        leftovers.remove_compiler_locks(self._compiling_env)
        self._began_s = time.time()
        if not self._retries.cold:
            try:
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
        return self._program.needs_command

    def launch(self, trial: Trial) -> None:
        if trial.id in self._known:
            return
        self._slots.check_free(waiting=len(self._waiting))
        spec = MeterSpec.of_trial(
            trial,
            self._options.trial,
            slots=self._slots_per_trial,
            host_slots=self._machine.num_slots,
        )
        self._start(trial, self._trials / trial.name, spec)

    def train(self, trial: Trial) -> Path:
        """Starts a full-length, unmeasured run with a trial's configuration.

        Its outcome comes from `poll` under the id `FULL_RUN_ID`.

        Returns:
            The run's folder.
        """
        folder, number = self._folder / "full", 2
        while folder.exists():  # an earlier one, with its checkpoints
            folder, number = self._folder / f"full-{number}", number + 1
        full = replace(trial, id=FULL_RUN_ID)
        self._start(full, folder, None)
        return folder

    def start_simulation_server(self, address: Path, script_args: Mapping[str, Any]) -> Path:
        """Starts the script so that its model can be simulated; takes no slot.

        Args:
            address: path of the socket where whoever wants simulations listens.
            script_args: switches of the script, as a trial has them.

        Returns:
            A file that tells, once it exists, why there will be no simulations (`message` in it).
        """
        folder, size = self._folder / "simulation", CAPTURED_MICRO_BATCH
        batch = BatchTriple(size, size, 1)
        overrides = {**batch.config(), "zero_optimization": {"stage": 0}}
        trial = Trial(
            SIMULATION_ID,
            TrialKind.SEARCH,
            "simulation",
            0,
            batch,
            overrides,
            script_args=script_args,
        )
        self._start(trial, folder, None, address)
        return folder / result_file(0)

    def has_simulation_server(self) -> bool:
        """Return whether the simulation server runs, or is yet to begin."""
        if not self._closed:
            self._wait(0.0)
        waiting = any(start.trial.id == SIMULATION_ID for start in self._waiting)
        return waiting or SIMULATION_ID in self._running

    def stop_simulation_server(self) -> None:
        """Ends what `start_simulation_server` started, and waits until nothing of it is left.

        It may hold memory of the device, and another one has the same folder.
        """
        self.cancel(SIMULATION_ID)
        while SIMULATION_ID in self._running and not self._closed:
            self._wait(_SIMULATION_POLL_S)

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        if self._closed:
            return []
        if not self._untold:
            self._wait(timeout_s)
        told, self._untold = self._untold, []
        return told

    def _wait(self, timeout_s: float) -> None:
        """Wait until a trial has ended or for so long; what has ended is kept for `poll`.

        Raises:
            EngineError: too few slots are left; not before `poll` has told of what has ended.
        """
        deadline, told = time.monotonic() + timeout_s, len(self._untold)
        while len(self._untold) == told:
            if not (self._running or self._waiting):
                self._slots.check_enough()
            self._start_waiting()
            # What has ended by now did so in time, however long this process was busy.
            messages = self._supervisors.receive(0.0)
            if not messages:
                now = time.monotonic()
                self._end_overdue(now)
                self._tell_what_takes_long()
                wait_s = min([deadline - now, *self._times_left(now)])
                messages = self._supervisors.receive(max(0.0, wait_s))
            for host, message in messages:
                self._hear(host, message)
            if time.monotonic() >= deadline:
                break

    def cancel(self, trial_id: int) -> None:
        for waiting in [w for w in self._waiting if w.trial.id == trial_id]:
            self._waiting.remove(waiting)
            self._untold.append((trial_id, Outcome(OutcomeKind.CANCELED, message="canceled")))
        if trial_id in self._running:
            self._running[trial_id].canceled = True
            self._end(self._running[trial_id], grace_s=0)

    def close(self) -> None:
        if not self._closed:
            self._running.clear()
            self._supervisors.close()  # a Ctrl-C meanwhile leaves this to be done again
            self._closed = True

    # -- starting

    def _start(
        self,
        trial: Trial,
        folder: Path,
        meter: MeterSpec | None,
        simulation_socket: Path | None = None,
    ) -> None:
        self._known.add(trial.id)
        self._waiting.append(Start(trial, folder, meter, simulation_socket))
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Starts what has been asked for, in that order, as far as there is room."""
        while self._waiting:
            start = self._waiting[0]
            config = ds_config.for_use(self._experiment.base_config, start.trial.overrides)
            # Its optimizer needs the host's cores and memory for itself.
            alone = start.alone or (offloads(config) and not self._machine.is_cpu)
            shares = self._find_room(start, alone=alone)
            if shares is None:
                self._slots.check_enough()
                return
            del self._waiting[0]
            self._start_on(start, shares, config, alone=alone and bool(shares[0].slots))

    def _find_room(self, start: Start, *, alone: bool) -> tuple[Share, ...] | None:
        """Slots for a trial; None as long as there are none."""
        if start.simulation_socket is not None:
            return (Share(0, self._hosts[0], ()),)
        trials = [r for r in self._running.values() if r.trial.id != SIMULATION_ID]
        if any(r.again_alone for r in trials) or (start.alone and trials):
            return None
        taken = {host for r in trials if alone or r.alone for host in r.hosts}
        return self._slots.take(without=taken)

    def _start_on(
        self, start: Start, shares: tuple[Share, ...], config: dict[str, Any], *, alone: bool
    ) -> None:
        trial, folder, meter = start.trial, start.folder, start.meter
        if folder.exists():  # left when dsat was killed
            shutil.rmtree(folder)
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True)
        config, swap = leftovers.with_own_swap_folder(config, f"{self._folder.name}-{trial.name}")
        leftovers.make(swap)
        program = self._program
        config_path = folder / CONFIG_FILE
        write_atomically(config_path, json.dumps(config, indent=2) + "\n")
        program = program.for_config(
            str(config_path.resolve()), config, trial.script_args, self._experiment.arg_mappings
        )
        launch = Launch(
            experiment=self._experiment,
            program=program,
            shares=shares,
            trial=trial,
            config=config,
            folder=folder,
            meter=meter,
            ports=tuple(free_ports(3)),
            seed=self._options.seed,
            cold=self._retries.cold,
            cpu_memory_bytes=self._options.trial.slot_memory_bytes,
            simulation_socket=start.simulation_socket,
            linger_s=None if trial.id == FULL_RUN_ID else _LINGER_S,
        )
        if program.needs_command:
            launch = CommandLaunch.of(launch, self._program)
        write_atomically(folder / SPEC_FILE, json.dumps(launch.spec().to_json(), indent=1) + "\n")
        if trial.profiles and meter is not None:
            self._working.watch()
        in_view = self._needs_view(start, alone=alone)
        cwd = self._working.view_for(folder) if in_view else self._working.real
        write_atomically(folder / COMMAND_FILE, launch.command_text(cwd))
        running = Running(
            trial,
            folder,
            meter,
            shares,
            time.monotonic(),
            self._retries.cold,
            alone,
            start.alone,
            swap=swap,
            in_view=in_view,
            by_command=bool(program.needs_command),
        )
        if start.simulation_socket is None:
            for other in self._running.values():
                other.beside = running.beside = True
        self._running[trial.id] = running
        for host, request in launch.requests(cwd).items():
            self._supervisors.send(host, request)

    def _needs_view(self, start: Start, *, alone: bool) -> bool:
        """Return whether a trial needs its own view of the working folder."""
        is_one_of_many = start.trial.kind is TrialKind.SEARCH and start.meter is not None
        beside = is_one_of_many and self._options.at_once > 1 and not alone
        return beside and self._working.is_written_to

    # -- ending

    def _hear(self, host: int, message: Mapping[str, Any]) -> None:
        """Take in what a host's supervisor says."""
        if message["event"] == LOST:
            self._lose(host, message["reason"])
            return
        running = self._running[message["trial"]]
        running.ended[host] = message
        if not running.hosts_going_on:
            self._conclude(running)
        elif any(message["statuses"]):
            # As among the ranks of one host: they see it fail, and their own report may say more.
            self._end(running, grace_s=GRACE_AFTER_FAILURE_S)
        elif running.trial.id != FULL_RUN_ID:
            self._end(running, grace_s=_LINGER_S)

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
                self._end(running, grace_s=0)
            else:
                self._conclude(running)

    def _end(self, running: Running, *, grace_s: float) -> None:
        """Has the ranks of a trial killed that do not end by themselves in time."""
        for host in running.hosts_going_on:
            request = {"op": "kill", "trial": running.trial.id, "grace_s": grace_s}
            self._supervisors.send(host, request)

    def _conclude(self, running: Running) -> None:
        """Take in that a trial has ended; there is no outcome if it is run again, or was none."""
        del self._running[running.trial.id]
        leftovers.remove(running.swap)
        if running.trial.id == SIMULATION_ID:
            return
        outcome = trial_result.of(running, timeout_s=self._options.trial.timeout_s)
        lost = self._slots.check(running.shares, outcome, stuck=running.stuck)
        self._lost += lost
        self._slots.give_back(running.shares)
        if not outcome.ok:
            # Those of trials that go on are seen if they run here.
            all_seen = len(self._hosts) == 1 or not self._running
            since_s = self._began_s if all_seen else math.inf
            leftovers.remove_compiler_locks(self._compiling_env, since_s=since_s)
        self._settle_folder(running, outcome)
        broken = bool(lost) and not outcome.ok  # a rank may get stuck after all was measured
        again = self._retries.decide(running, outcome, broken=broken)
        if again is Again.ELSEWHERE and running.trial.id == FULL_RUN_ID:
            again = None  # its checkpoints would be lost
        if again is Again.ELSEWHERE:
            time.sleep(_SETTLE_S)
        if again is not None:
            self._run_again(running, outcome, again)
            return
        if running.trial.profiles and outcome.ok:
            self.import_modules_of(running.folder)
            outcome = self._with_smallest_device(outcome)
        _bring_home(running.folder)
        outcome = self._retries.settle(running, outcome)
        if self._lost:
            outcome = replace(outcome, warnings=(*outcome.warnings, *self._lost))
            self._lost = []
        self._untold.append((running.trial.id, outcome))

    def _with_smallest_device(self, outcome: Outcome) -> Outcome:
        """A profile's outcome with the memory of the slot that has least.

        Its trial knows its own devices, and others may run on smaller ones.
        """
        sizes = [host.machine.memory_bytes for host in self._hosts if not host.machine.is_cpu]
        profile = outcome.profile
        if profile is None or not sizes or profile.slot_memory_bytes <= min(sizes):
            return outcome
        return replace(outcome, profile=replace(profile, slot_memory_bytes=min(sizes)))

    def _settle_folder(self, running: Running, outcome: Outcome) -> None:
        """Learns of the working folder from a trial that ended, and clears its view of it."""
        if running.trial.profiles and running.meter is not None:
            self._working.look()
        elif running.in_view and outcome.ok:
            shutil.rmtree(running.folder / VIEW)
        elif running.in_view:
            self._failed_in_view.add(running.trial.id)
        elif running.again_alone and outcome.ok and running.trial.id in self._failed_in_view:
            self._working.give_up_views()

    def _times_left(self, now: float) -> list[float]:
        limit = self._options.trial.timeout_s
        return [r.began_s + limit - now for r in self._measured() if not r.timed_out]

    def _measured(self) -> list[Running]:
        return [r for r in self._running.values() if r.trial.id not in (FULL_RUN_ID, SIMULATION_ID)]

    def _tell_what_takes_long(self) -> None:
        """Logs, once for each thing, what a trial has been doing for more than a moment."""
        for running in self._running.values():
            path = running.folder / DOING_FILE
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > slow.LONG_S:
                    self._tell_once(running.trial.name, path.read_text())
        for start in self._waiting:
            if time.monotonic() - start.asked_s > slow.LONG_S:
                those = ", ".join(running.trial.name for running in self._running.values())
                self._tell_once(start.trial.name, f"waits for {those} to end")

    def _tell_once(self, name: str, doing: str) -> None:
        if doing and doing not in self._told:
            self._told.add(doing)
            _log.info("%s: %s", name, doing)

    def _end_overdue(self, now: float) -> None:
        for running in self._measured():
            if now - running.began_s >= self._options.trial.timeout_s and not running.timed_out:
                running.timed_out = True
                self._end(running, grace_s=0)

    def _run_again(self, running: Running, outcome: Outcome, again: Again) -> None:
        if again is Again.NO_SEGMENTS:
            self._hosts[:] = without_segments(self._hosts)
        if again is Again.BY_COMMAND:
            why = f"started by dsat, they failed with {outcome.message}"
            self._program = replace(self._program, needs_command=why)
        if again is not Again.AS_BEFORE:
            _log.info(_AGAIN[again], running.trial.name, outcome.message)
        alone = again is Again.ALONE or running.again_alone
        folder = running.folder
        if running.lost:  # where its ranks may still write, on a host that is only cut off
            folder = folder.with_name(folder.name + _ANEW)
        self._waiting.append(Start(running.trial, folder, running.meter, None, alone))

    def _check_folders(self) -> None:
        try:
            self._supervisors.check_folders([self._working.real])
        except BaseException:
            self._supervisors.close()
            raise

    def _warm_up(self, modules: Sequence[str] = ()) -> None:
        which = f"{len(modules)} modules of your script" if modules else "torch and DeepSpeed"
        with slow.logged(_log, f"importing {which}, once for all trials"):
            imported = modules or self._options.imported
            broken = self._slots.broken
            cannot_fork = self._supervisors.warm_up(imported, broken=broken)
            self._retries.hear_of_warm_up(cannot_fork)

    def import_modules_of(self, folder: Path) -> None:
        """Import in advance what the user's script imported in a trial, whose folder this is."""
        if self._retries.cold:
            return
        try:
            modules = json.loads((folder / MODULES_FILE).read_text())
        except (OSError, ValueError):  # where also scripts may write
            return
        if isinstance(modules, list) and all(isinstance(name, str) for name in modules):
            self._warm_up(modules)


def _bring_home(folder: Path) -> None:
    """Gives the folder of a trial that ran elsewhere the name that trials' folders have."""
    home = folder.with_name(folder.name.removesuffix(_ANEW))
    if home != folder:
        left = home.with_name(f"{home.name}-lost")
        home.rename(left)
        folder.rename(home)
        shutil.rmtree(left, ignore_errors=True)  # of which one that is cut off may hold files open
