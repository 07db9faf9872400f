"""What the user's script sees of the end of a trial."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import dsat
from dsat.in_trial.meter import TrialComplete
from testing.metered import Clock, attached, measure, metrics_of


class FakeCore:
    """A Core API context that remembers what was reported."""

    def __init__(self, rank: int = 0) -> None:
        self.distributed = SimpleNamespace(rank=rank)
        self.train = self
        self.reports: list[tuple[int, dict[str, Any]]] = []

    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self.reports.append((steps_completed, metrics))


class FakeOperation:
    length = 77

    def __init__(self) -> None:
        self.completed: list[Any] = []

    def report_completed(self, metric: Any) -> None:
        self.completed.append(metric)


@pytest.fixture
def complete(clock: Clock) -> TrialComplete:
    engine = attached(clock)
    measured = measure(engine)
    return TrialComplete(measured)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("steps", "reported"), [(None, 77), (0, 0)])
def test_the_chief_reports_what_was_measured_and_the_script_ends_well(
    complete: TrialComplete, rank: int, steps: int | None, reported: int
) -> None:
    core, operation = FakeCore(rank), FakeOperation()
    with pytest.raises(SystemExit) as left, dsat.dsat_reporting_context(core, operation, steps):
        raise complete
    assert left.value is complete and complete.code == 0
    metrics = metrics_of(complete.outcome).to_json()
    assert core.reports == ([] if rank else [(reported, metrics)])
    assert operation.completed == ([] if rank else [metrics])


@pytest.mark.parametrize("error", [None, ValueError("mine"), SystemExit(3)])
def test_outside_a_dsat_run_the_context_does_nothing(error: BaseException | None) -> None:
    core, operation = FakeCore(), FakeOperation()
    if error is None:
        with dsat.dsat_reporting_context(core, operation), dsat.dsat_reporting_context(core, None):
            pass
    else:
        with pytest.raises(type(error)) as left, dsat.dsat_reporting_context(core, operation):
            raise error
        assert left.value is error
    assert core.reports == [] == operation.completed
