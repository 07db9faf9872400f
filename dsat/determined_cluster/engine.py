"""The engine over a stream of searcher events: events go in, operations come out.

It talks with nobody: whoever has the events hands them in (`validated`, `exited`, `closed`) and
takes the operations to where they belong. Only a trial's log and its early end are asked for.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from dsat.determined_cluster import trial_result
from dsat.errors import EngineError
from dsat.in_trial import cluster_rank
from dsat.in_trial.meter_spec import MeterSpec
from dsat.inputs import ds_config
from dsat.inputs.experiment import length_in_units, trial_hparams
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial, TrialOptions

CREATE, VALIDATE, CLOSE, SHUTDOWN = "create", "validate", "close", "shutdown"


class Cluster(Protocol):
    """What the engine asks of the master besides the events."""

    def log(self, trial_id: int) -> Sequence[str]:
        """The messages of a trial's log, oldest first."""
        ...

    def on_slots_s(self, trial_id: int) -> float:
        """For how long a trial had its slots, pauses left out; 0 if that is not known."""
        ...

    def kill(self, trial_id: int) -> None:
        """Ends a trial; does nothing if there is none."""
        ...


@dataclass(frozen=True)
class Operation:
    """What the master is told to do.

    Attributes:
        kind: CREATE, VALIDATE, CLOSE (a trial) or SHUTDOWN.
        trial_id: of the trial, as dsat counts.
        failure: of a SHUTDOWN, whether the search failed.
    """

    kind: str
    trial_id: int | None = None
    failure: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ClusterOptions:
    """How trials are run and measured.

    Attributes:
        hparams: the user's hyperparameters.
        config: their experiment configuration, for the unit of a trial's length.
        trial: what holds for the trials of any engine.
        runner_id: of the search runner's experiment.
    """

    hparams: Mapping[str, Any]
    trial: TrialOptions
    config: Mapping[str, Any] = field(default_factory=dict)
    runner_id: int = 0


class ClusterEngine:
    """Runs trials by operations of a custom searcher.

    Args:
        options: how trials are run and measured.
        run_key: tells the search from others on the same cluster; request ids derive from it.
        cluster: the master.
        num_slots: slots that trials may use at once.
        slots_per_trial: of every trial.
        clock: seconds, for the time that trials take.
    """

    def __init__(
        self,
        options: ClusterOptions,
        run_key: str,
        cluster: Cluster,
        *,
        num_slots: int,
        slots_per_trial: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._run_key = run_key
        self._cluster = cluster
        self._num_slots = num_slots
        self._slots_per_trial = slots_per_trial
        self._clock = clock
        self._known: set[int] = set()
        self._running: dict[int, float] = {}  # when it was launched
        self._trial_by_request: dict[str, int] = {}
        self._told: list[tuple[int, Outcome]] = []
        self._operations: list[Operation] = []
        self._closed = False

    # -- as every engine

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def free_slots(self) -> int:
        return self._num_slots - len(self._running) * self._slots_per_trial

    def launch(self, trial: Trial) -> None:
        if trial.id in self._known:
            return
        if self.free_slots < self._slots_per_trial:
            raise EngineError(f"no free slots for trial {trial.id}")
        self.adopt(trial)
        self._operations += [Operation(CREATE, trial.id), Operation(VALIDATE, trial.id)]

    def poll(self, timeout_s: float) -> list[tuple[int, Outcome]]:
        """Trials of which an event told the end; does not wait, since events come by themselves."""
        told, self._told = self._told, []
        return [] if self._closed else told

    def cancel(self, trial_id: int) -> None:
        if trial_id not in self._running:
            return
        posted = [o for o in self._operations if o.trial_id != trial_id]
        if len(posted) < len(self._operations):  # the master does not know it yet
            self._operations = posted
            self._end(trial_id, trial_result.canceled())
        else:
            self._cluster.kill(trial_id)

    def close(self, *, failure: bool = False) -> None:
        if not self._closed:
            self._closed = True
            self._operations.append(Operation(SHUTDOWN, failure=failure))

    # -- towards the master

    def take_operations(self) -> list[Operation]:
        """What is to be posted, in this order; each operation once."""
        operations, self._operations = self._operations, []
        return operations

    def request_id(self, trial_id: int) -> str:
        """The same for the same trial of the same search, also in another process."""
        return str(uuid.uuid5(uuid.NAMESPACE_URL, f"dsat:{self._run_key}:{trial_id}"))

    def hparams(self, trial: Trial) -> dict[str, Any]:
        """All hyperparameters of a trial."""
        return {
            **trial_hparams(self._options.hparams, trial.overrides),
            ds_config.DSAT_MODE_KEY: True,
            ds_config.DSAT_TRIAL_KEY: cluster_rank.spec_for_hparams(
                self._meter(trial), trial.id, self._options.runner_id
            ),
        }

    def length(self, trial: Trial) -> int:
        """Of a trial's one operation: more than it needs, since it leaves by itself."""
        return length_in_units(self._meter(trial).longest, self._options.config, trial.batch)

    def _meter(self, trial: Trial) -> MeterSpec:
        return MeterSpec.of_trial(trial, self._options.trial, slots=self._slots_per_trial)

    # -- events

    def adopt(self, trial: Trial, *, ended: bool = False) -> None:
        """Takes a trial for launched, be it by an earlier process."""
        self._known.add(trial.id)
        self._trial_by_request[self.request_id(trial.id)] = trial.id
        if not ended:
            self._running[trial.id] = self._clock()

    def trial_of(self, request_id: str) -> int | None:
        """Which trial a request is about; None if it is none of this search."""
        return self._trial_by_request.get(request_id)

    def validated(self, request_id: str, metric: Any) -> None:
        """A trial completed its operation, and goes on unless it is closed."""
        trial_id = self.trial_of(request_id)
        if trial_id in self._running:
            self._end(trial_id, trial_result.of_metric(metric))
            self._operations.append(Operation(CLOSE, trial_id))

    def exited(self, request_id: str, *, canceled: bool) -> None:
        """A trial failed for good, or was canceled. It is closed by itself."""
        trial_id = self.trial_of(request_id)
        if trial_id in self._running:
            if canceled:
                self._end(trial_id, trial_result.canceled())
            else:
                self._end(trial_id, trial_result.of_log(self._cluster.log(trial_id), failed=True))

    def closed(self, request_id: str) -> None:
        """A trial is over; if nothing was told of it before, it came to an end by itself."""
        trial_id = self.trial_of(request_id)
        if trial_id in self._running:
            self._end(trial_id, trial_result.of_log(self._cluster.log(trial_id), failed=False))

    def _end(self, trial_id: int, outcome: Outcome) -> None:
        since_s = max(self._clock() - self._running.pop(trial_id), 0.001)
        if not outcome.duration_s:  # else the trial itself knew
            took_s = self._cluster.on_slots_s(trial_id) or since_s
            outcome = replace(outcome, duration_s=round(took_s, 3))
        self._told.append((trial_id, outcome))
