"""A trial on a Determined cluster, from inside the user's processes.

When the script asks dsat for its configuration, or opens `dsat_reporting_context`, its process
becomes a rank of the trial that the hyperparameters name. The context reports successes to the
master, and failures that another attempt would repeat. Any other outcome is logged as a line in the
trial's log.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from dsat.command import switches
from dsat.command.ds_config import DSAT_MODE_KEY, DSAT_SWITCHES_KEY, DSAT_TRIAL_KEY, OVERWRITE_KEY
from dsat.errors import InvalidTrial
from dsat.in_trial import failures, runner_watch
from dsat.in_trial.adapters import install as adapters
from dsat.in_trial.adapters.hf_trainer import TrainerSettings
from dsat.in_trial.adapters.trial import TRIAL, Phase
from dsat.in_trial.agreement import local_size, rank_and_size
from dsat.in_trial.meter import Meter, install
from dsat.in_trial.meter_spec import MeterSpec
from dsat.in_trial.runner_watch import RunnerWatch
from dsat.values.outcome import Outcome, OutcomeKind

OUTCOME_KEY = "dsat_outcome"  # in the searcher metric, which is a dict
LOG_MARK = "[dsat-outcome] "
ATTACHED_MARK = "[dsat-attached] "  # the script has called dsat
_LONGEST_LINE_BYTES = 4000  # below PIPE_BUF: lines of ranks that share a pipe do not mix
_WOULD_REPEAT = (OutcomeKind.OOM, OutcomeKind.HOST_OOM, OutcomeKind.INVALID, OutcomeKind.DIVERGED)

_log = logging.getLogger(__name__)
_task: Task | None = None
_has_switches = False


def spec_for_hparams(
    meter: MeterSpec, trial_id: int, runner_id: int, flags: Mapping[str, int]
) -> dict[str, Any]:
    """Return the value of a trial's hyperparameter `DSAT_TRIAL_KEY`.

    `flags` are the batch-size flags that the script of a Trainer must have.
    """
    # As text, because a master reads a null or a nested value as another hyperparameter.
    spec = json.dumps(meter.to_json(), separators=(",", ":"))
    return {"id": trial_id, "spec": spec, "runner": runner_id, "flags": json.dumps(flags)}


def attach(hparams: Mapping[str, Any]) -> Task | None:
    """Make this process a rank of the trial that the hyperparameters name; return its task.

    Return None if they name no trial, as without a cluster or in a full-length training. With or
    without a trial, set the script's switches. Later calls only return the task.

    Raises:
        InvalidTrial: a switch can no longer be set.
    """
    global _task, _has_switches
    if _task is None and hparams.get(DSAT_MODE_KEY) and DSAT_TRIAL_KEY in hparams:
        data = json.loads(hparams[DSAT_TRIAL_KEY]["spec"])
        spec = replace(MeterSpec.from_json(data), host_slots=local_size())
        _task = Task(install(spec, lambda outcome: None))
        _task.watch()
        if rank_and_size()[0] == 0:
            _task.runner = runner_watch.start(hparams[DSAT_TRIAL_KEY]["runner"])
        os.write(2, f"{ATTACHED_MARK}{_allocation()}\n".encode())
    if not _has_switches and (_task is not None or DSAT_SWITCHES_KEY in hparams):
        _has_switches = True
        _use_switches(hparams)
    return _task


def _use_switches(hparams: Mapping[str, Any]) -> None:
    """Apply the trial's values of the script's switches.

    Raises:
        InvalidTrial: a switch is a CUDA variable, and the script has already used CUDA.
    """
    import torch
    from deepspeed.accelerator import get_accelerator

    from dsat.in_trial.script_switches import ScriptSwitches

    adapters.install()
    if TRIAL.phase is Phase.INERT:
        TRIAL.phase = Phase.TRAINING
    targets = hparams.get(DSAT_SWITCHES_KEY) or {}
    variables = switches.variables(targets)
    late = [name for name in variables if name.startswith("CUDA_")]
    if late and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise InvalidTrial(
            f"{late[0]} has no effect: the script used CUDA before it called dsat. Call "
            "dsat.get_ds_config_from_hparams (or dsat.get_hf_args_with_overwrites) first"
        )
    os.environ.update(variables)
    on_cpu = get_accelerator().device_name() == "cpu"
    scripts = ScriptSwitches(targets, hparams.get(OVERWRITE_KEY) or {}, on_cpu=on_cpu)
    TRIAL.calls.before_engine.append(scripts.before_engine)
    TRIAL.calls.after_engine.append(scripts.after_engine)
    TRIAL.trainer = TrainerSettings(None, None, scripts)


class Task:
    """One rank of a trial; the chief also watches the search runner."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._began_s = time.monotonic()
        self._has_reported = False
        self.runner: RunnerWatch | None = None
        self._core_context: Any = None
        self._steps_completed = 0
        self._report_completed: Callable[[Any], None] | None = None  # of the chief's operation

    def watch(self) -> None:
        """Log the outcome if this process fails or exits; end the process at the time limit."""
        TRIAL.on_uncaught = lambda error: self._log(self.measured() or self.failed(error))
        atexit.register(self._report_at_exit)
        timer = threading.Timer(self.meter.spec.options.timeout_s, self._give_up)
        timer.daemon = True
        timer.start()

    # -- outcomes

    def measured(self) -> Outcome | None:
        outcome = self.meter.outcome
        return None if outcome is None else self._add_facts(outcome)

    def failed(self, error: BaseException) -> Outcome:
        outcome = self._add_facts(failures.outcome(error))
        return replace(outcome, message=f"rank {rank_and_size()[0]}: {outcome.message}")

    def ended(self) -> Outcome:
        """Return the measurement of a script that ended, or the reason why there is none."""
        return self.measured() or self._add_facts(failures.outcome(self.meter.shortfall))

    def _add_facts(self, outcome: Outcome) -> Outcome:
        device = self.meter.device_name
        return replace(
            outcome,
            duration_s=self._duration_s(),
            before_engine=device is None,
            device_name=device or "",
        )

    def _duration_s(self) -> float:
        return round(time.monotonic() - self._began_s, 3)

    # -- reports

    def follow(self, core_context: Any, op: Any, steps_completed: int) -> None:
        """Report outcomes to a core context, also in place of the script's own final report.

        `steps_completed`: number of steps under which the master records the metrics.
        """
        self._core_context, self._steps_completed = core_context, steps_completed
        if core_context.distributed.rank == 0 and self._report_completed is None:
            self._report_completed = op.report_completed
            _report_progress(op)
            op.report_completed = lambda searcher_metric: self.report(self.ended())

    def report(self, outcome: Outcome) -> None:
        """Report the chief's first outcome: metrics for the web UI, and the searcher metric."""
        if self._report_completed is None or self._has_reported:
            return
        metrics = numbers(outcome, measures=self.meter.spec.measures)
        if metrics:
            self._core_context.train.report_validation_metrics(
                steps_completed=self._steps_completed, metrics=metrics
            )
        self._report_completed({**metrics, OUTCOME_KEY: outcome.to_json()})
        self._has_reported = True

    def stay_until_closed(self) -> None:
        """After a report, wait as in `RunnerWatch.stay_until_closed`."""
        if self._has_reported and self.runner is not None:
            self.runner.stay_until_closed()

    def report_failure(self, error: BaseException) -> None:
        """Report a failure if another attempt would repeat it."""
        outcome = self.failed(error)
        if outcome.kind in _WOULD_REPEAT:
            self.report(outcome)
            self.stay_until_closed()

    def _log(self, outcome: Outcome, *, ended: bool = False) -> None:
        """Write an unreported outcome to the trial's log.

        `ended`: whether the script ended by itself.
        """
        if self._has_reported:
            return
        self._has_reported = True
        os.write(2, log_line(outcome, run=_allocation(), ended=ended))

    def _report_at_exit(self) -> None:
        outcome = self.ended()
        if not outcome.ok or rank_and_size()[0] == 0:
            self._log(outcome, ended=True)

    def _give_up(self) -> None:
        timeout_s = self.meter.spec.options.timeout_s
        message = f"no result after {timeout_s:g} s; raise --trial-timeout?"
        self._log(Outcome(OutcomeKind.TIMEOUT, message=message, duration_s=self._duration_s()))
        os._exit(1)


def numbers(outcome: Outcome, *, measures: bool = True) -> dict[str, float]:
    """Return the numbers in an outcome's metrics or, if not `measures`, in its profile.

    If a trial that only profiles reported the searched metric, the master would rank it.
    """
    part = outcome.metrics if measures else outcome.profile
    fields: dict[str, Any] = {} if part is None else part.to_json()
    return {name: value for name, value in fields.items() if isinstance(value, int | float)}


def log_line(outcome: Outcome, *, run: str, ended: bool) -> bytes:
    """Format an outcome as one line of a log, without step times and with a shortened detail."""
    detail = outcome.detail[-_LONGEST_LINE_BYTES:]
    while True:
        excerpt = replace(outcome, detail=detail, step_ms=())
        data = {**excerpt.to_json(), "run": run, "ended": ended}
        line = f"{LOG_MARK}{json.dumps(data, separators=(',', ':'))}\n".encode()
        if len(line) <= _LONGEST_LINE_BYTES or not detail:
            return line
        # JSON writes a character as at most 12 bytes.
        detail = detail[max(1, (len(line) - _LONGEST_LINE_BYTES) // 12) :]


def _report_progress(op: Any) -> None:
    """Make the master show the search's progress.

    The master records progress only when a trial reports (0.37, `master/internal/experiment.go`).
    """
    from determined.common.api import errors

    try:
        op.report_progress(0.0)
    except (errors.APIException, errors.BadRequestException, OSError) as error:
        _log.info("the search's progress is not shown: %s", error)


def _allocation() -> str:
    """Return the ID of this attempt at the trial; empty outside of a cluster."""
    return os.environ.get("DET_ALLOCATION_ID", "")
