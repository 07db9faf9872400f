"""Log lines of a running search."""

from __future__ import annotations

import enum
from collections.abc import Callable

from dsat.memory.forecast import Forecast
from dsat.run.loop import Observer
from dsat.run.run import Run
from dsat.show.memory import used_bytes
from dsat.space.plan import NO_MEMORY_MODEL
from dsat.values import format as fmt
from dsat.values.outcome import ModelProfile, Outcome
from dsat.values.trial import Trial, TrialKind

_DISABLED = "Memory predictions are disabled: they said nothing fits, yet the baseline ran"


class Kind(enum.Enum):
    """The kinds of log lines."""

    RUN = "of the run"
    TRIAL = "of a trial, which a table may show instead"
    WARNING = "shown once"


class Narrator(Observer):
    """Writer of log lines about the events of a run."""

    def __init__(self, say: Callable[[Kind, str], None]) -> None:
        self._say = say
        self._warned: set[str] = set()
        self._told_flags: dict[str, str] = {}

    def started(self, run: Run, trial: Trial) -> None:
        """Log that a trial profiles the model, which may take minutes."""
        if trial.profiles:
            text = f"trial {trial.name}: counting parameters, FLOPs and activations"
            self._say(Kind.TRIAL, text)

    def ended(self, run: Run, trial: Trial, outcome: Outcome) -> None:
        """Log new warnings, facts about a profiled model, the result, and changed flags."""
        new = [text for text in dict.fromkeys(outcome.warnings) if text not in self._warned]
        self._warned.update(new)
        for text in new:
            self._say(Kind.WARNING, f"{trial.name}: {text}")
        kind = Kind.TRIAL if outcome.profile is None else Kind.RUN
        for text in () if outcome.profile is None else _describe_profile(outcome.profile):
            self._say(kind, text)
        if outcome.profile is None or trial.kind is not TrialKind.PROFILE:
            self._say(kind, _describe_trial(run, trial, outcome))
        flags = run.batch_flag.names
        for flag in flags.keys() - self._told_flags.keys():
            self._say(Kind.RUN, f"note: from now on, trials set {flag} to their {flags[flag]}")
        for flag in self._told_flags.keys() - flags.keys():
            what = self._told_flags[flag]
            self._say(Kind.RUN, f"note: trials no longer set {flag} to their {what}")
        self._told_flags = flags

    def began(self, run: Run, forecast: Forecast | None) -> None:
        """Log the memory that each strategy needs, or that predictions are disabled."""
        if forecast is not None:
            for text in forecast.describe():
                self._say(Kind.RUN, text)
        elif run.plan.memory_model != NO_MEMORY_MODEL:
            self._say(Kind.RUN, _DISABLED)


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
    # During finals, the best may change with each pair, so it is not shown.
    best = ""
    if run.best is not None and trial.kind is not TrialKind.FINAL:
        best = f"; recommended so far: {run.best.name}"
    count = f"[{len(run.outcomes)}/{run.plan.max_trials}]"
    return f"{count} {trial.name}: {', '.join(parts)}{best}"
