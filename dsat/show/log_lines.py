"""Log lines of a running search."""

from __future__ import annotations

from dsat.memory.forecast import Forecast
from dsat.run.run import Run
from dsat.show.memory import used_bytes
from dsat.space.plan import NO_MEMORY_MODEL
from dsat.values import format as fmt
from dsat.values.outcome import ModelProfile, Outcome
from dsat.values.trial import Trial, TrialKind

_DISABLED = "Memory predictions are disabled: they said nothing fits, yet the baseline ran"


class Narrator:
    """Log lines of the events of a run; each warning once."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def started(self, trial: Trial) -> list[str]:
        """Announce the profile, which may take minutes."""
        if not trial.profiles:
            return []
        return [f"trial {trial.name}: counting parameters, FLOPs and activations"]

    def ended(self, run: Run, trial: Trial, outcome: Outcome) -> list[str]:
        """Return the result of a trial, below its warnings."""
        warnings = [f"warning: {text}" for text in self.new_warnings(trial, outcome)]
        return [*warnings, *self.result(run, trial, outcome)]

    def new_warnings(self, trial: Trial, outcome: Outcome) -> list[str]:
        """Return an outcome's warnings that were not shown before."""
        new = [text for text in dict.fromkeys(outcome.warnings) if text not in self._warned]
        self._warned.update(new)
        return [f"{trial.name}: {text}" for text in new]

    def result(self, run: Run, trial: Trial, outcome: Outcome) -> list[str]:
        """Return the result of a trial; of a profile trial, the model's facts."""
        facts = [] if outcome.profile is None else _describe_profile(outcome.profile)
        if facts and trial.kind is TrialKind.PROFILE:
            return facts
        lines = [*facts, _describe_trial(run, trial, outcome)]
        flag = run.batch_flag.name
        if flag and flag not in self._warned:
            self._warned.add(flag)
            lines.append(f"note: {flag} follows the micro batch from now on")
        return lines

    def search_began(self, run: Run, forecast: Forecast | None) -> list[str]:
        """Return the memory that each strategy needs."""
        if forecast is not None:
            return forecast.describe()
        if run.plan.memory_model == NO_MEMORY_MODEL:
            return []
        return [_DISABLED]


def _describe_profile(profile: ModelProfile) -> list[str]:
    return [
        f"parameters {profile.num_params:,} (trainable {profile.trainable_params:,}), "
        f"{profile.param_bytes} bytes each in the forward pass",
        f"memory per device {fmt.memory(profile.slot_memory_bytes)} available, "
        f"activations {fmt.memory(profile.activation_bytes_per_sample)} per sample, "
        f"{profile.flops_per_sample / 1e9:.3f} GFLOP per sample (forward and backward)",
    ]


def _describe_trial(run: Run, trial: Trial, outcome: Outcome) -> str:
    parts = [fmt.outcome(outcome, run.plan.metric)]
    if trial.predicted_bytes is not None:
        predicted, used = f"{fmt.memory(trial.predicted_bytes)} predicted", used_bytes(run, outcome)
        parts.append(predicted if used is None else f"{fmt.memory(used)} used of {predicted}")
    parts.append(f"took {fmt.duration(outcome.duration_s)}")
    # While the finals run, the best is what the pairs so far say, back and forth.
    best = ""
    if run.best is not None and trial.kind is not TrialKind.FINAL:
        best = f"; best {run.best.name}"
    count = f"[{len(run.outcomes)}/{run.most_trials}]"
    return f"{count} {trial.name}: {', '.join(parts)}{best}"
