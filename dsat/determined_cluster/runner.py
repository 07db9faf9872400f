"""Search runner: the program of the `single` experiment on the cluster, which uses no slot.

    python3 -m dsat.determined_cluster.runner dsat_job.json

It creates the `custom` experiment and answers its events until the search ends. Decisions are
saved as a checkpoint before they are posted; the module `search` explains why nothing is lost or
done twice if this process dies.

determined's `RemoteSearchRunner` is not used. It pickles the last operations, and after a restart
posts them as the answer to another event; it ends at the first failed request; and it does not
notice that a user canceled a trial.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import determined
from determined import core
from determined.common.api import bindings, errors

from dsat.determined_cluster import job as jobs
from dsat.determined_cluster import result
from dsat.determined_cluster.engine import CLOSE, ClusterEngine, Operation
from dsat.determined_cluster.job import SAID, Job
from dsat.determined_cluster.master import (
    Master,
    describe_error,
    describe_request,
    is_ending,
    is_unreachable,
    read_trial_log,
)
from dsat.determined_cluster.search import EVENT_FULL_RUN, ClusterSearch
from dsat.determined_cluster.waiting import StateWatch, TimeLimit, long_poll
from dsat.run.journal import FILE_NAME, read_events, to_text
from dsat.run.run import Run
from dsat.show import summary
from dsat.show.view import RunView
from dsat.values.files import write_atomically
from dsat.values.trial import Trial

_EXPERIMENT_FILE = "experiment.json"
_BETWEEN_POLLS_S = 0.1  # short, because a trial that has reported waits for operations
_WHILE_PAUSED_S = 1.0
_WITHOUT_PROGRESS = ("initialOperations", "trialCreated")


class Preempted(Exception):
    """The runner's experiment is paused or canceled, or has to move."""


class Runner:
    """Runner of one search, driven by the master's events.

    Args:
        runner_id: id of the runner's own experiment.
        folder: folder with the files of that experiment.
        context: determined's `core.Context`.
        operation: searcher operation of that experiment, which shows progress.
    """

    def __init__(self, job: Job, runner_id: int, folder: Path, context: Any, operation: Any):
        self._job = job
        self._runner_id = runner_id
        self._folder = folder
        self._context = context
        self._operation = operation
        self._master = Master.from_task(say)
        self._experiment_id: int | None = None  # of the trials
        self._search = self._search_from([])
        self._submitted = self._master.submitted_config(runner_id)
        self._watch = StateWatch(lambda: self._master.state_now(self.experiment_id), say)
        self._limit = TimeLimit(
            lambda: self._master.running_trials(self.experiment_id), job.trial.timeout_s
        )
        self._saved_events = -1
        self._num_reported = 0

    @property
    def experiment_id(self) -> int:
        assert self._experiment_id is not None
        return self._experiment_id

    @property
    def _run(self) -> Run:
        return self._search.run

    def run(self, checkpoint: str | None) -> None:
        """Run the search to its end; continue from a checkpoint, if given."""
        if checkpoint is not None:
            self._load(checkpoint)
            say(f"continuing with experiment {self.experiment_id}")
        else:
            self._experiment_id = self._find_or_create(
                jobs.search_tag(self._runner_id),
                jobs.custom_config(self._job, self._runner_id, self._submitted),
            )
            say(f"trials are those of experiment {self.experiment_id}")
            self._save()
        paused = False
        while True:
            time.sleep(_BETWEEN_POLLS_S)
            self._report_progress()
            events = self._master.ask(self._next_events)
            inactive = any(event.experimentInactive for event in events)
            if paused and not inactive:
                say(f"experiment {self.experiment_id} continues")
                paused = False
            for event in events:
                if not event.experimentInactive:
                    self._handle(event)
                elif event.experimentInactive.experimentState.name != "PAUSED":
                    return
                else:
                    if not paused:
                        say(f"experiment {self.experiment_id} is paused; waiting")
                    paused = True
                    time.sleep(_WHILE_PAUSED_S)
                    break

    # -- events

    def _events(self) -> Sequence[Any]:
        answer = bindings.get_GetSearcherEvents(
            self._master.session, experimentId=self.experiment_id
        )
        return answer.searcherEvents or []

    def _next_events(self) -> Sequence[Any]:
        """Wait for events and return them; meanwhile, kill trials that are over the time limit.

        Raises Preempted at once if the runner is paused or canceled.
        """

        def check() -> None:
            if self._context.preempt.should_preempt():
                raise Preempted
            for number, trial_id in self._limit.overdue().items():
                if self._search.engine.time_out(number):
                    self._master.kill_trial(trial_id)

        return long_poll(self._events, check, self._watch.is_idle)

    def _handle(self, event: Any) -> None:
        data = {key: value for key, value in event.to_json().items() if value is not None}
        operations = list(self._search.answer(data))
        if not data.keys() & set(_WITHOUT_PROGRESS):
            operations.append({"setSearcherProgress": {"progress": self._search.progress}})
        self._save()
        self._master.ask(lambda: self._post(event, operations))

    def _post(self, event: Any, operations: Sequence[Operation]) -> None:
        body = bindings.v1PostSearcherOperationsRequest(
            experimentId=self.experiment_id,
            searcherOperations=list(map(bindings.v1SearcherOperation.from_json, operations)),
            triggeredByEvent=event,
        )
        try:
            bindings.post_PostSearcherOperations(
                self._master.session, body=body, experimentId=self.experiment_id
            )
        except errors.BadRequestException as error:
            closes = any(CLOSE in operation for operation in operations)
            if closes and "could not be found" in str(error):
                return  # the trial ended by itself before it could be closed
            # If the master no longer sends the event, this or an earlier attempt has answered it.
            if any(e.id == event.id for e in self._events()):
                raise

    # -- state

    def _search_from(self, events: Sequence[dict[str, Any]]) -> ClusterSearch:
        engine = ClusterEngine(
            self._job,
            self._runner_id,
            lambda trial_id: read_trial_log(self._master, self.experiment_id, trial_id),
        )
        return ClusterSearch(self._job, engine, events=events, say=say)

    def _save(self) -> None:
        events = self._search.journal.events
        if len(events) != self._saved_events:
            self._master.ask(lambda: self._store(events))
            self._saved_events = len(events)

    def _store(self, events: Sequence[Mapping[str, Any]]) -> None:
        metadata = {"steps_completed": len(events)}
        with self._context.checkpoint.store_path(metadata) as (path, _):
            text = json.dumps({"experiment_id": self.experiment_id})
            (path / _EXPERIMENT_FILE).write_text(text, encoding="utf-8")
            write_atomically(path / FILE_NAME, to_text(events))
            summary.write_files(RunView(self._run), path, "")

    def _load(self, storage_id: str) -> None:
        with self._context.checkpoint.restore_path(storage_id) as path:
            state = json.loads((path / _EXPERIMENT_FILE).read_text(encoding="utf-8"))
            self._experiment_id = state["experiment_id"]
            events = read_events(path / FILE_NAME)
        self._search = self._search_from(events)
        self._saved_events = len(events)

    def _find_or_create(self, tag: str, config: Mapping[str, Any]) -> int:
        packages = [self._folder / jobs.PACKAGE_FOLDER]
        return self._master.find_or_create(tag, config, self._folder / jobs.MODEL_FOLDER, packages)

    # -- the runner's progress in the web UI

    def _report_progress(self) -> None:
        run = self._run
        ended = len(run.outcomes)
        if ended == self._num_reported:
            return
        self._num_reported = ended
        progress = self._search.progress * jobs.RUNNER_LENGTH
        self._master.ask(lambda: self._operation.report_progress(progress))
        if run.best_value is not None:
            values = {f"best {run.plan.metric}": run.best_value}
            self._master.ask(
                lambda: self._context.train.report_training_metrics(
                    steps_completed=ended, metrics=values
                )
            )

    # -- the end

    def leave(self) -> None:
        """End the runner: its experiment is paused, canceled or killed, or has to move."""
        state = self._master.state(self._runner_id)
        if state == "PAUSED":
            say("paused: running trials continue, but no others start before you resume")
            self._search.tuner.pause()
            self._save()
        elif not is_ending(state):
            say("preempted: running trials continue, and the search runner is restarted")
        else:
            say(f"canceled, together with experiment {self.experiment_id}")
            self._master.kill(self.experiment_id)
            self._print_result(canceled=True)

    def conclude(self) -> None:
        """Print why the search ended, and report its result."""
        if self._search.over:
            say(f"ended: {self._run.stop_reason}")
        else:
            state = jobs.describe_state(self._master.state(self.experiment_id))
            say(f"experiment {self.experiment_id} was ended from outside ({state})")
        self._complete()

    def give_up(self, error: errors.APIException) -> None:
        """End the runner, and kill the trials' experiment, because the master refuses a request."""
        refusal = describe_request(error)
        say(refusal)
        if self._experiment_id is not None:
            try:
                self._master.kill(self.experiment_id)
            except errors.APIException as refused:
                say(
                    f"experiment {self.experiment_id} could not be ended: {describe_error(refused)}"
                )
        self._complete(refusal)

    def _complete(self, refusal: str | None = None) -> None:
        """Print and report the result; `refusal` says why a request was refused, if one was.

        A failed search cancels the runner's experiment. Otherwise the web UI would show it as
        completed, or the master would restart a runner that exits with an error.
        """
        run, value = self._run, self._run.best_value
        failed = run.best is None and (self._search.over or refusal is not None)
        self._print_result(refusal=refusal)
        metrics: dict[str, float] = {result.FAILED_METRIC: int(failed)}
        if value is not None:
            metrics[run.plan.metric] = value
        self._context.train.report_validation_metrics(
            steps_completed=len(run.outcomes), metrics=metrics
        )
        if failed:
            self._master.cancel(self._runner_id)
        else:
            self._operation.report_completed(value if value is not None else 0.0)

    def _print_result(self, *, canceled: bool = False, refusal: str | None = None) -> None:
        """Print the result so far, start the full-length run if requested, set the description."""
        view, is_over = RunView(self._run), self._search.over
        reason = view.stop_reason or refusal
        for line in result.text_lines(view):
            say(line)
        values = {**result.to_json(view, over=is_over), "stop_reason": reason}
        values["search_experiment_id"] = self._experiment_id
        values["events"] = result.events_to_json(self._search.journal.events)
        if self._job.run_full_experiment and is_over and view.best:
            try:
                values["full_run_experiment_id"] = self._train(view.best.trial)
            except errors.BadRequestException as error:
                say(f"the full-length training did not start: {describe_request(error)}")
        for line in result.to_lines(values):
            print(line, flush=True)
        user_text = self._submitted.get("description") or ""
        text = result.description(user_text, view, reason, canceled=canceled)
        self._master.describe(self._runner_id, text)

    def _train(self, best: Trial) -> int:
        """Submit the full-length run unless this was done; return its experiment's id."""
        for event in self._search.journal.events:
            if event["event"] == EVENT_FULL_RUN:
                return int(event["experiment_id"])
        number = self._find_or_create(
            jobs.full_run_tag(self._runner_id),
            jobs.full_run_config(self._job, self._runner_id, self._submitted, best),
        )
        self._search.journal.append({"event": EVENT_FULL_RUN, "experiment_id": number})
        self._save()
        say(f"training with {best.name} in experiment {number}")
        return number


def say(line: str) -> None:
    """Print a line that `client.follow` shows to the user."""
    print(f"{SAID}{line}", flush=True)


def run_job(job: Job, folder: Path) -> None:
    """Run the search of a job in the runner's experiment; print its result when it ends."""
    info = determined.get_cluster_info()
    if info is None or info.task_type != "TRIAL":
        raise SystemExit("dsat: error: the search runner runs as a Determined experiment only.")
    with core.init(tensorboard_mode=core.TensorboardMode.MANUAL) as context:
        for operation in context.searcher.operations():
            runner = Runner(job, info.trial.experiment_id, folder, context, operation)
            try:
                runner.run(info.latest_checkpoint)
                runner.conclude()
            except Preempted:
                runner.leave()
            except errors.BadRequestException as error:
                if is_unreachable(error) or not isinstance(error, errors.APIException):
                    say(f"the search runner failed, and may be restarted: {describe_error(error)}")
                    raise  # a restarted runner gets a new token, and may reach the master
                runner.give_up(error)
            return


def main(path: Path) -> None:
    """Run the job in a file; the container's entry point."""
    logging.basicConfig(level=logging.INFO, format=determined.LOG_FORMAT)
    # These loggers log every event and every attempt.
    for name in ("determined.core", "determined.searcher", "urllib3"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)  # determined's, about custom searchers
    run_job(Job.read(path), path.resolve().parent)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
