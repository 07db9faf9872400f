"""How the end of a trial appears to the user's script."""

from __future__ import annotations

import pytest

import dsat
from dsat.in_trial.meter import TrialComplete
from testing.metered import Clock, CoreContext, attached, measure, metrics_of


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
    core = CoreContext(rank)
    with pytest.raises(SystemExit) as left, dsat.dsat_reporting_context(core, core, steps):
        raise complete
    assert left.value is complete and complete.code == 0
    metrics = metrics_of(complete.outcome).to_json()
    assert core.calls == ([] if rank else [("metrics", metrics), ("completed", metrics)])
    assert core.steps_completed == (-1 if rank else reported)


@pytest.mark.parametrize("error", [None, ValueError("mine"), SystemExit(3)])
def test_outside_a_dsat_run_the_context_does_nothing(error: BaseException | None) -> None:
    core = CoreContext()
    if error is None:
        with dsat.dsat_reporting_context(core, core), dsat.dsat_reporting_context(core, None):
            pass
    else:
        with pytest.raises(type(error)) as left, dsat.dsat_reporting_context(core, core):
            raise error
        assert left.value is error
    assert core.calls == []
