"""The search runner: what the `single` experiment runs on the cluster, on no slot.

    python3 -m dsat.determined_cluster.runner dsat_job.json

It makes the `custom` experiment and answers its events until the search is over, through
determined's `RemoteSearchRunner`, whose loop is used as it is. What `search` decides is saved as a
checkpoint before it is posted; `search` says why nothing is lost or done twice, whenever this
process dies. Three things of determined 0.37 are done otherwise:

- its state holds a pickle of the last operations, which it would post again for another event after
  a restart; here an event that comes again is answered by the journal;
- it leaves at the first request that fails; here a master that is away is waited for, and whether
  it heard a post is asked of it;
- it cannot read that a user canceled a trial.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import determined
from determined import core, searcher
from determined.common.api import errors

from dsat.determined_cluster import job as jobs
from dsat.determined_cluster import master
from dsat.determined_cluster.engine import (
    CLOSE,
    CREATE,
    VALIDATE,
    Cluster,
    ClusterEngine,
    Operation,
)
from dsat.determined_cluster.job import RESULT_MARK, SAID, Job
from dsat.determined_cluster.retry import retry_while_unreachable
from dsat.determined_cluster.search import EVENT_FULL_RUN, ClusterSearch
from dsat.report import summary
from dsat.report.verdict import verdict
from dsat.tuning.journal import FILE_NAME, read_events
from dsat.tuning.run import Run
from dsat.values.files import write_atomically

_BY_USER = ("USER_CANCELED", "USER_REQUESTED_STOP")


class Preempted(Exception):
    """The runner's own experiment is paused or canceled."""


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
        self._run_key = f"{runner_id}:{job.plan.seed}"
        self._cluster = cluster
        self._say = say
        self.search = self._search([])

    def _search(self, events: Sequence[dict[str, Any]]) -> ClusterSearch:
        engine = ClusterEngine(
            self._job.options,
            self._run_key,
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
                found.append(searcher.Create(request_id, engine.hparams(trial), checkpoint=None))
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


class Runner(searcher.RemoteSearchRunner):  # type: ignore[misc]
    """Determined's runner with the three differences.

    Args:
        method: the search.
        cluster: is told of the custom experiment as soon as there is one.
        context: of `core.init`.
        operation: the runner's own, by which its experiment shows progress.
    """

    def __init__(
        self,
        method: Method,
        cluster: master.RemoteCluster,
        context: Any,
        operation: Any,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(method, context)
        self._method = method
        self._cluster = cluster
        self._operation = operation
        self._say = say
        self._saved: tuple[Any, int] = (None, 0)
        self._paused = False
        self._reported = 0

    @property
    def experiment_id(self) -> int:
        found: int = self.state.experiment_id
        return found

    def search(self, job: Job, config: dict[str, Any], runner_id: int, folder: Path) -> None:
        """Runs the search to its end, from where the latest checkpoint has it."""
        if self.latest_checkpoint is not None:
            self.load_state(self.latest_checkpoint)
            self._say(f"continuing with experiment {self.experiment_id}")
        else:
            self.state.experiment_id = master.find_or_create(
                jobs.search_tag(runner_id),
                config,
                folder / jobs.MODEL_FOLDER,
                [folder / jobs.PACKAGE_FOLDER],
                self._say,
            )
            self.state.last_event_id = 0
            self._say(f"trials are those of experiment {self.experiment_id}")
            self.save_state(self.experiment_id, [])
        self._cluster.experiment_id = self.experiment_id
        from determined.experimental import client

        client._require_singleton(lambda: None)()
        self.run_experiment(self.experiment_id, client._determined._session, None)

    # -- the loop's parts

    def get_events(self, session: Any, experiment_id: int) -> Any:
        self._report()
        if self.context.preempt.should_preempt():
            raise Preempted
        ask = super().get_events
        events = retry_while_unreachable(lambda: ask(session, experiment_id), self._say)
        inactive = bool(events) and any(event.experimentInactive for event in events)
        if self._paused and not inactive:
            self._say(f"experiment {experiment_id} goes on")
            self._paused = False
        return events

    def _get_operations(self, event: Any) -> Any:
        self._method.event_id = event.id
        early = event.trialExitedEarly
        if early is not None and early.exitedReason.name in _BY_USER:
            operations = self._method.exited(uuid.UUID(early.requestId), canceled=True)
            return [*operations, searcher.Progress(self._method.progress(self.state))]
        return super()._get_operations(event)

    def post_operations(
        self, session: Any, experiment_id: int, event: Any, operations: Any
    ) -> None:
        post, ask = super().post_operations, super().get_events

        def pending() -> bool:
            events = ask(session, experiment_id) or []
            return any(each.id == event.id for each in events)

        def attempt() -> None:
            try:
                post(session, experiment_id, event, operations)
            except errors.BadRequestException:
                # The master may have heard it all the same, now or the first time that it came.
                if pending():
                    raise

        retry_while_unreachable(attempt, self._say)

    def save_state(self, experiment_id: int, operations: Any) -> None:
        state = (experiment_id, len(self._method.search.journal.events))
        if state != self._saved:
            retry_while_unreachable(lambda: self._store(experiment_id), self._say)
            self._saved = state

    def _store(self, experiment_id: int) -> None:
        metadata = {"steps_completed": len(self._method.search.journal.events)}
        with self.context.checkpoint.store_path(metadata) as (path, _):
            self.search_method.save(self.state, path, experiment_id=experiment_id)

    def load_state(self, storage_id: str) -> tuple[int, list[Any]]:
        with self.context.checkpoint.restore_path(storage_id) as path:
            self.state, experiment_id = self.search_method.load(path)
        self.state.experiment_id = experiment_id
        self._saved = (experiment_id, len(self._method.search.journal.events))
        return experiment_id, []

    def _show_experiment_paused_msg(self) -> None:
        if not self._paused:
            self._say(f"experiment {self.experiment_id} is paused; waiting")
            self._paused = True

    # -- what the web UI shows of the runner

    def _report(self) -> None:
        run = self._method.run
        ended = len(run.outcomes)
        if ended == self._reported:
            return
        self._reported = ended
        progress = self._method.progress(self.state) * jobs.RUNNER_LENGTH
        retry_while_unreachable(lambda: self._operation.report_progress(progress), self._say)
        if run.best_value is not None and run.plan is not None:
            values = {f"best {run.plan.metric}": run.best_value}
            retry_while_unreachable(
                lambda: self.context.train.report_training_metrics(
                    steps_completed=ended, metrics=values
                ),
                self._say,
            )

    def note(self, event: dict[str, Any]) -> None:
        """Keeps something in the journal, durably."""
        self._method.search.journal.append(event)
        self.save_state(self.experiment_id, [])


def say(line: str) -> None:
    print(f"{SAID}{line}", flush=True)


def run(job: Job, folder: Path) -> None:
    """Runs the search, then says what it found."""
    info = determined.get_cluster_info()
    if info is None or info.task_type != "TRIAL":
        raise SystemExit("dsat: error: the search runner runs as a Determined experiment only.")
    runner_id = info.trial.experiment_id
    submitted = retry_while_unreachable(lambda: master.submitted_config(runner_id), say)
    config = jobs.custom_config(job, runner_id, submitted)
    with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as context:
        for operation in context.searcher.operations():
            cluster = master.RemoteCluster(say)
            method = Method(job, runner_id, cluster, say)
            runner = Runner(method, cluster, context, operation, say)
            try:
                runner.search(job, config, runner_id, folder)
            except Preempted:
                _leave(runner, runner_id)
                return
            _conclude(runner, method)
            if job.run_full_experiment and method.search.over and method.run.best is not None:
                _train(job, runner, method, runner_id, submitted, folder)
            value = method.run.best_value
            if value is not None:
                context.train.report_validation_metrics(
                    steps_completed=len(method.run.outcomes), metrics={job.plan.metric: value}
                )
            operation.report_completed(value if value is not None else 0.0)


def _leave(runner: Runner, runner_id: int) -> None:
    """The runner's own experiment is paused, canceled or killed."""
    if retry_while_unreachable(lambda: master.experiment_state(runner_id), say) == "PAUSED":
        say("paused; trials that run go on, and no others are started until this is resumed")
        return
    say(f"canceled, and with it experiment {runner.experiment_id}")
    retry_while_unreachable(lambda: master.cancel_experiment(runner.experiment_id), say)


def _conclude(runner: Runner, method: Method) -> None:
    found, plan = method.run, method.run.plan
    assert plan is not None
    if not method.search.over:
        number = runner.experiment_id
        state = retry_while_unreachable(lambda: master.experiment_state(number), say)
        say(f"experiment {number} was ended from outside ({jobs.state_in_words(state)})")
    else:
        say(f"ended: {found.stop_reason}")
    for line in verdict(found):
        say(line)
    if method.search.tuner.failed and found.outcomes:
        detail = list(found.outcomes.values())[-1].detail
        print(detail, flush=True)
    best = summary.best_config(found)
    if best is not None:
        say(f"best_ds_config.json: {json.dumps(best)}")
    result = {"over": method.search.over, "best": None if best is None else found.best_value}
    print(f"{RESULT_MARK}{json.dumps(result)}", flush=True)


def _train(
    job: Job, runner: Runner, method: Method, runner_id: int, submitted: Any, folder: Path
) -> None:
    """Submits the full-length run, once."""
    if any(event["event"] == EVENT_FULL_RUN for event in method.search.journal.events):
        return
    best = method.run.best
    assert best is not None
    number = master.find_or_create(
        jobs.full_run_tag(runner_id),
        jobs.full_run_config(job, runner_id, submitted, best.overrides),
        folder / jobs.MODEL_FOLDER,
        [folder / jobs.PACKAGE_FOLDER],
        say,
    )
    runner.note({"event": EVENT_FULL_RUN, "experiment_id": number})
    say(f"training with {best.name} in experiment {number}")


def main(argv: Sequence[str] | None = None) -> None:
    """The container's command."""
    parser = argparse.ArgumentParser(prog="dsat.determined_cluster.runner")
    parser.add_argument("job", type=Path)
    path: Path = parser.parse_args(argv).job
    logging.basicConfig(level=logging.INFO, format=determined.LOG_FORMAT)
    warnings.simplefilter("ignore", FutureWarning)  # of determined about custom searchers
    run(Job.read(path), path.resolve().parent)


if __name__ == "__main__":
    main(sys.argv[1:])
