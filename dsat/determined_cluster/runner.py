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
import logging
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import determined
from determined import core, searcher
from determined.common.api import errors

from dsat.determined_cluster import ending, master
from dsat.determined_cluster import job as jobs
from dsat.determined_cluster.job import SAID, Job
from dsat.determined_cluster.method import Method
from dsat.determined_cluster.retry import retry_while_unreachable
from dsat.determined_cluster.search import EVENT_FULL_RUN
from dsat.determined_cluster.waiting import IDLE_STATES, LongPoll, StateWatch

_LOOK_EVERY_S = 0.5
_BETWEEN_POLLS_S = 0.1  # a trial that has reported waits for the answer
_WHILE_PAUSED_S = 1.0
_BY_USER = ("USER_CANCELED", "USER_REQUESTED_STOP")


class Preempted(Exception):
    """The runner's own experiment is paused or canceled."""


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
        self._watch = StateWatch(lambda: master.experiment_state(self.experiment_id), say)
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
        session = client._determined._session
        self.run_experiment(self.experiment_id, session, None, sleep_time=_BETWEEN_POLLS_S)

    # -- the loop's parts

    def get_events(self, session: Any, experiment_id: int) -> Any:
        self._report()
        ask = super().get_events
        events = retry_while_unreachable(
            lambda: self._without_waiting(lambda: ask(session, experiment_id)), self._say
        )
        inactive = bool(events) and any(event.experimentInactive for event in events)
        if self._paused and not inactive:
            self._say(f"experiment {experiment_id} goes on")
            self._paused = False
        return events

    def _without_waiting(self, ask: Callable[[], Any]) -> Any:
        """The answer to a long poll, which a pause or a cancel does not wait for.

        Raises:
            Preempted: this runner is to leave.
        """
        poll = LongPoll(ask)
        while True:
            if self.context.preempt.should_preempt():
                raise Preempted
            if poll.wait(_LOOK_EVERY_S):
                return poll.result()
            if self._watch.is_idle():  # of which only the next request is told at once
                return ask()

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
        time.sleep(_WHILE_PAUSED_S)

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

    def pause(self) -> None:
        """Keeps that the search rests from now on."""
        self._method.search.pause()
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
            end = _End(job, runner, method, runner_id, submitted, folder)
            try:
                runner.search(job, config, runner_id, folder)
            except Preempted:
                end.leave()
                return
            end.conclude()
            context.train.report_validation_metrics(
                steps_completed=len(method.run.outcomes),
                metrics=ending.metrics(method.run, over=method.search.over),
            )
            value = method.run.best_value
            operation.report_completed(value if value is not None else 0.0)


@dataclass(frozen=True)
class _End:
    """The end of a runner: by its own, or because somebody pauses or cancels it.

    Attributes:
        submitted: the configuration of the runner's own experiment.
        folder: of its context.
    """

    job: Job
    runner: Runner
    method: Method
    runner_id: int
    submitted: Mapping[str, Any]
    folder: Path

    def leave(self) -> None:
        """The runner's own experiment is paused, canceled or killed, or it has to move."""
        state = retry_while_unreachable(lambda: master.experiment_state(self.runner_id), say)
        if state == "PAUSED":
            say("paused; trials that run go on, and no others are started until this is resumed")
            self.runner.pause()
            return
        if not state.startswith("STOPPING_") and state not in IDLE_STATES:
            say("the cluster wants its place; trials that run go on, and it starts again")
            return
        number = self.runner.experiment_id
        say(f"canceled, and with it experiment {number}")
        retry_while_unreachable(lambda: master.cancel_experiment(number), say)
        self._tell(canceled=True)

    def conclude(self) -> None:
        """The trials' experiment is over."""
        found = self.method.run
        if self.method.search.over:
            say(f"ended: {found.stop_reason}")
        else:
            number = self.runner.experiment_id
            state = retry_while_unreachable(lambda: master.experiment_state(number), say)
            say(f"experiment {number} was ended from outside ({jobs.state_in_words(state)})")
        self._tell()

    def _tell(self, *, canceled: bool = False) -> None:
        """Says what was found, or the best so far, wherever people look."""
        run, over = self.method.run, self.method.search.over
        for line in ending.lines(run):
            say(line)
        full_run = self._train() if self.job.run_full_experiment and over and run.best else None
        experiments = {"search_experiment_id": self.runner.experiment_id}
        if full_run is not None:
            experiments["full_run_experiment_id"] = full_run
        for line in ending.result_lines(run, experiments, over=over):
            print(line, flush=True)
        own = self.submitted.get("description") or ""
        text = ending.description(own, run, over=over, canceled=canceled)
        retry_while_unreachable(lambda: master.describe(self.runner_id, text), say)

    def _train(self) -> int:
        """The number of the full-length run, which is submitted once."""
        for event in self.method.search.journal.events:
            if event["event"] == EVENT_FULL_RUN:
                return int(event["experiment_id"])
        best = self.method.run.best
        assert best is not None
        number = master.find_or_create(
            jobs.full_run_tag(self.runner_id),
            jobs.full_run_config(self.job, self.runner_id, self.submitted, best.overrides),
            self.folder / jobs.MODEL_FOLDER,
            [self.folder / jobs.PACKAGE_FOLDER],
            say,
        )
        self.runner.note({"event": EVENT_FULL_RUN, "experiment_id": number})
        say(f"training with {best.name} in experiment {number}")
        return number


def main(argv: Sequence[str] | None = None) -> None:
    """The container's command."""
    parser = argparse.ArgumentParser(prog="dsat.determined_cluster.runner")
    parser.add_argument("job", type=Path)
    path: Path = parser.parse_args(argv).job
    logging.basicConfig(level=logging.INFO, format=determined.LOG_FORMAT)
    # What they say of each event and each attempt is said here, in fewer words.
    for name in ("determined.core", "determined.searcher", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)  # of determined about custom searchers
    run(Job.read(path), path.resolve().parent)


if __name__ == "__main__":
    main(sys.argv[1:])
