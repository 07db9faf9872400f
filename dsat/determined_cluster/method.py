"""The search as determined's search runner calls it: events in, its operations out."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from determined import searcher

from dsat.determined_cluster import hyperparameters
from dsat.determined_cluster.engine import (
    CLOSE,
    CREATE,
    VALIDATE,
    Cluster,
    ClusterEngine,
    Operation,
)
from dsat.determined_cluster.job import Job
from dsat.determined_cluster.search import ClusterSearch
from dsat.report import summary
from dsat.tuning.journal import FILE_NAME, read_events
from dsat.tuning.run import Run
from dsat.values.files import write_atomically


class Method(searcher.SearchMethod):  # type: ignore[misc]
    """The search as determined's runner calls it; its state is the journal.

    Args:
        job: what to tune.
        runner_id: of the runner's experiment.
        cluster: where trials' logs are.
        say: prints a line.

    Attributes:
        event_id: of the event that is handled; set by whoever hands it in.
    """

    def __init__(
        self,
        job: Job,
        runner_id: int,
        cluster: Cluster,
        say: Callable[[str], None],
    ) -> None:
        super().__init__()
        self.event_id = 0
        self._job = job
        self._runner_id = runner_id
        self._cluster = cluster
        self._say = say
        self.search = self._search([])

    def _search(self, events: Sequence[dict[str, Any]]) -> ClusterSearch:
        engine = ClusterEngine(
            replace(self._job.options, runner_id=self._runner_id),
            f"{self._runner_id}:{self._job.plan.seed}",
            self._cluster,
            num_slots=self._job.num_slots,
            slots_per_trial=self._job.plan.slots_per_trial,
        )
        return ClusterSearch(
            self._job.plan, engine, info=self._job.info, events=events, say=self._say
        )

    @property
    def run(self) -> Run:
        return self.search.run

    # -- events

    def initial_operations(self, state: Any) -> list[Any]:
        return self._translated(self.search.begin(self.event_id))

    def on_trial_created(self, state: Any, request_id: uuid.UUID) -> list[Any]:
        return []  # its first operation went with the one that made it

    def on_validation_completed(
        self, state: Any, request_id: uuid.UUID, metric: Any, train_length: int
    ) -> list[Any]:
        return self._translated(self.search.validated(self.event_id, str(request_id), metric))

    def on_trial_exited_early(
        self, state: Any, request_id: uuid.UUID, exited_reason: Any
    ) -> list[Any]:
        canceled = exited_reason == searcher.ExitedReason.USER_CANCELED
        return self.exited(request_id, canceled=canceled)

    def exited(self, request_id: uuid.UUID, *, canceled: bool) -> list[Any]:
        return self._translated(
            self.search.exited(self.event_id, str(request_id), canceled=canceled)
        )

    def on_trial_closed(self, state: Any, request_id: uuid.UUID) -> list[Any]:
        return self._translated(self.search.closed(self.event_id, str(request_id)))

    def progress(self, state: Any) -> float:
        return self.search.progress

    def _translated(self, operations: Sequence[Operation]) -> list[Any]:
        engine, found = self.search.engine, []
        for operation in operations:
            if operation.trial_id is None:
                found.append(searcher.Shutdown(failure=operation.failure))
                continue
            trial = self.run.trials[operation.trial_id]
            request_id = uuid.UUID(engine.request_id(trial.id))
            if operation.kind == CREATE:
                hparams = {
                    **engine.hparams(trial),
                    hyperparameters.KEY: hyperparameters.of_trial(self._job.plan, trial),
                }
                found.append(searcher.Create(request_id, hparams, checkpoint=None))
            elif operation.kind == VALIDATE:
                found.append(searcher.ValidateAfter(request_id, engine.length(trial)))
            else:
                assert operation.kind == CLOSE
                found.append(searcher.Close(request_id))
        return found

    # -- state

    def save_method_state(self, path: Path) -> None:
        lines = [json.dumps(event, separators=(",", ":")) for event in self.search.journal.events]
        write_atomically(path / FILE_NAME, "".join(f"{line}\n" for line in lines))
        summary.write_files(self.run, path, "see best_ds_config.json")

    def load_method_state(self, path: Path) -> None:
        self.search = self._search(read_events(path / FILE_NAME))
