"""Trials without processes: their reports are made up, and their ends do not depend on time.

When the search has received all events and polls for more, one of the running trials ends. So a
whole search takes only as long as its requests, and repeating it gives the same events.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from testing.master.allocation import Allocation
from testing.master.cluster import Cluster
from testing.master.trial import INVALID_HP, Trial

Json = dict[str, Any]
_KILLED = 137


@dataclass(frozen=True)
class Ending:
    """What a made-up trial does at its end.

    Attributes:
        searcher_metric: the metric that completes its operation; None to complete nothing.
        metrics: the validation metrics that it reports.
        log: the lines that it prints, including the rank's prefix.
        status: the exit status of its container if it completes nothing.
        rejects: it raises InvalidHP.
    """

    searcher_metric: Any = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    status: int = 0
    rejects: bool = False


@dataclass(eq=False)
class _Running:
    trial: Trial
    allocation: Allocation
    reported: bool = False


class MadeUpTrials:
    """The running trials of a cluster.

    Args:
        behave: takes a trial's hyperparameters and returns how the trial ends; None: it runs on.
        limit: number of trials that may end; None for all.

    Attributes:
        most: the largest number of trials that ran at the same time.
    """

    def __init__(self, behave: Callable[[Json], Ending | None], limit: int | None = None) -> None:
        self.limit = limit
        self.ended = 0
        self.most = 0
        self._behave = behave
        self._running: list[_Running] = []

    def start(self, trial: Trial, allocation: Allocation) -> None:
        allocation.ready = True  # it can be preempted from its first moment
        self._running.append(_Running(trial, allocation))
        self.most = max(self.most, len(self._running))

    def leave(self) -> None:
        """End the containers of trials that were preempted or killed."""
        for each in list(self._running):
            if each.allocation.killed:
                self._exit(each, _KILLED)
            elif each.allocation.preempt:
                each.allocation.acknowledged = True
                self._exit(each, 0)

    def let_one_end(self, cluster: Cluster) -> bool:
        """End one running trial; return False if none may end."""
        if self.limit is not None and self.ended >= self.limit:
            return False
        for each in sorted(self._running, key=_order):
            end = None if each.reported else self._behave(dict(each.trial.hparams))
            if end is not None:
                self.ended += 1
                self._end(each, end, cluster)
                return True
        return False

    def _end(self, each: _Running, end: Ending, cluster: Cluster) -> None:
        trial = each.trial
        experiment = cluster.experiments[trial.experiment_id]
        experiment.report_progress(trial, 0.0)  # as `dsat_reporting_context` does
        for line in end.log:
            cluster.print(each.allocation, line)
        if end.metrics:
            report = {"metrics": {"avgMetrics": dict(end.metrics)}, "stepsCompleted": 1}
            cluster.report_metrics(trial, "validation", report)
        if end.rejects:
            cluster.early_exit(trial.id, INVALID_HP)
        if end.searcher_metric is None:
            self._exit(each, end.status)
        else:  # it runs until the search closes it
            each.reported = True
            experiment.complete_operation(trial, trial.searcher.length, end.searcher_metric)

    def _exit(self, each: _Running, status: int) -> None:
        self._running.remove(each)
        each.allocation.container_exited(status)


def _order(each: _Running) -> str:
    """Return a sort key that makes trials end in another order than they began."""
    return hashlib.sha256(each.trial.request_id.encode()).hexdigest()
