"""Log lines of a run that goes on."""

from __future__ import annotations

from dsat.inputs.settings import NO_MEMORY_MODEL
from dsat.memory.forecast import Forecast
from dsat.report import format as fmt
from dsat.tuning.run import Run
from dsat.values.outcome import ModelProfile, Outcome
from dsat.values.trial import Trial, TrialKind


class Narrator:
    """Log lines of what happens in a run; every warning once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def started(self, trial: Trial) -> list[str]:
        """As a trial begins; the first ones take their time."""
        if not trial.profiles:
            return []
        return [f"trial {trial.name}: counting parameters, FLOPs and activations"]

    def ended(self, run: Run, trial: Trial, outcome: Outcome) -> list[str]:
        """Return the result of a trial, below its warnings."""
        warnings = [f"warning: {text}" for text in self.new_warnings(trial, outcome)]
        return [*warnings, *self.result(run, trial, outcome)]

    def new_warnings(self, trial: Trial, outcome: Outcome) -> list[str]:
        """The outcome's warnings that no earlier outcome had."""
        new = [text for text in dict.fromkeys(outcome.warnings) if text not in self._warned]
        self._warned.update(new)
        return [f"{trial.name}: {text}" for text in new]

    def result(self, run: Run, trial: Trial, outcome: Outcome) -> list[str]:
        """Return the result of a trial; of a profile trial, the model's facts."""
        found = [] if outcome.profile is None else _of_profile(outcome.profile)
        return (
            found
            if trial.kind is TrialKind.PROFILE and found
            else [
                *found,
                _of_trial(run, trial, outcome),
            ]
        )

    def search_began(self, run: Run, forecast: Forecast | None) -> list[str]:
        """Return the memory that each strategy needs."""
        assert run.plan is not None
        if forecast is not None:
            return forecast.describe()
        if run.plan.memory_model == NO_MEMORY_MODEL:
            return []
        return ["memory is not predicted: nothing was predicted to fit, but the profile trial ran"]


def _of_profile(profile: ModelProfile) -> list[str]:
    return [
        f"parameters {profile.num_params:,} (trainable {profile.trainable_params:,}), "
        f"{profile.param_bytes} bytes each in the forward pass",
        f"memory per slot {fmt.memory(profile.slot_memory_bytes)}, "
        f"activations {fmt.memory(profile.activation_bytes_per_sample)} per sample, "
        f"{profile.flops_per_sample / 1e9:.3f} GFLOP per sample (forward and backward)",
    ]


def _of_trial(run: Run, trial: Trial, outcome: Outcome) -> str:
    assert run.plan is not None
    count = f"[{len(run.outcomes)}/{run.plan.max_trials}]"
    line = fmt.outcome(outcome, run.plan.metric)
    took = fmt.duration(outcome.duration_s)
    best = "" if run.best is None else f"; best {run.best.name}"
    return f"{count} {trial.name}: {line}{_memory(run, trial, outcome)}, took {took}{best}"


def _memory(run: Run, trial: Trial, outcome: Outcome) -> str:
    """Predicted against measured."""
    if trial.predicted_bytes is None:
        return ""
    predicted = fmt.memory(trial.predicted_bytes)
    used = run.used_bytes(outcome)
    if used is None:
        return f", {predicted} predicted"
    return f", {fmt.memory(used)} used of {predicted} predicted"
