"""What is said of a run while it goes on, line by line."""

from __future__ import annotations

from dsat import memory
from dsat.memory.forecast import Forecast
from dsat.report import format as fmt
from dsat.tuning import strategies as ladder
from dsat.tuning.run import Run
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial


def of_start(trial: Trial) -> str:
    """At the beginning of the profile trial."""
    return f"trial {trial.name}: counting parameters, FLOPs and activations"


def warnings(trial: Trial, outcome: Outcome, said: set[str]) -> list[str]:
    """The outcome's warnings that are not among those `said` already, and now are."""
    new = [text for text in outcome.warnings if text not in said]
    said.update(new)
    return [f"warning: {trial.name}: {text}" for text in new]


def of_profile(run: Run) -> list[str]:
    """What the profile trial found."""
    assert run.profile is not None
    return memory.describe(run.profile)


def of_search(run: Run, forecast: Forecast | None) -> list[str]:
    """What each strategy needs, as the search begins."""
    assert run.plan is not None and run.profile is not None
    if forecast is not None:
        return forecast.describe()
    profiled = next(
        run.trials[i].strategy for i, o in run.outcomes.items() if o.profile is run.profile
    )
    strategies = ladder.searched_after(run.plan, profiled)
    return memory.describe_floors(run.profile, strategies, run.plan.slots_per_trial)


def of_trial(run: Run, trial: Trial, outcome: Outcome) -> str:
    """What came of a trial, and which is the best so far."""
    assert run.plan is not None
    count = f"[{len(run.outcomes)}/{run.plan.max_trials}]"
    line = fmt.outcome(outcome, run.plan.metric)
    took = fmt.duration(outcome.duration_s)
    best = "" if run.best is None else f"; best {run.best.name}"
    return f"{count} {trial.name}: {line}{_memory(trial, outcome)}, took {took}{best}"


def _memory(trial: Trial, outcome: Outcome) -> str:
    """Predicted against measured."""
    if trial.predicted_bytes is None:
        return ""
    predicted = fmt.memory(trial.predicted_bytes)
    if outcome.memory is None or not outcome.memory.peak:
        return f", {predicted} predicted"
    return f", {fmt.memory(outcome.memory.peak)} used of {predicted} predicted"
