"""Trials without processes: what they report is made up, and when one ends is no matter of time.

One of the running trials ends whenever the search has heard all news and asks for more. So a whole
search takes as long as its requests, and the same search meets the same events in the same order.
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
        searcher_metric: it reports as the value of its operation; None: it reports nothing.
        metrics: it reports for validation.
        log: the lines that it prints, the rank's prefix included.
        status: of its container, if it reports nothing.
        rejects: it raised InvalidHP.
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
        behave: returns what a trial with such hyperparameters does; None: it goes on.
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
        allocation.ready = True  # it can be asked to stop from its first moment
        self._running.append(_Running(trial, allocation))
        self.most = max(self.most, len(self._running))

    def leave(self) -> None:
        """End the containers of trials that were asked to stop, or killed."""
        for each in list(self._running):
            if each.allocation.killed:
                self._exit(each, _KILLED)
            elif each.allocation.preempt:
                each.allocation.acknowledged = True
                self._exit(each, 0)

    def let_one_end(self, cluster: Cluster) -> bool:
        """Let a trial come to its end; return whether there is one that runs and may."""
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
        else:  # it stays until it is closed
            each.reported = True
            experiment.complete_operation(trial, trial.searcher.length, end.searcher_metric)

    def _exit(self, each: _Running, status: int) -> None:
        self._running.remove(each)
        each.allocation.container_exited(status)


def _order(each: _Running) -> str:
    """Return a key by which trials end in another order than they began."""
    return hashlib.sha256(each.trial.request_id.encode()).hexdigest()
