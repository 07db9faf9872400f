"""What is said of a run while it goes on, line by line."""

from __future__ import annotations

from dsat.inputs.settings import NO_MEMORY_MODEL
from dsat.memory.forecast import Forecast
from dsat.report import format as fmt
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
    profile = run.profile
    assert profile is not None
    return [
        f"parameters {profile.num_params:,} (trainable {profile.trainable_params:,}), "
        f"{profile.param_bytes} bytes each in the forward pass",
        f"memory per slot {fmt.memory(profile.slot_memory_bytes)}, "
        f"activations {fmt.memory(profile.activation_bytes_per_sample)} per sample, "
        f"{profile.flops_per_sample / 1e9:.3f} GFLOP per sample (forward and backward)",
    ]


def of_search(run: Run, forecast: Forecast | None) -> list[str]:
    """What each strategy needs, as the search begins."""
    assert run.plan is not None
    if forecast is not None:
        return forecast.describe()
    if run.plan.memory_model == NO_MEMORY_MODEL:
        return []
    return ["memory is not predicted: nothing was predicted to fit, but the profile trial ran"]


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
