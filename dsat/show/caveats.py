"""Warnings of the verdict: reasons to doubt the gain."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator

from dsat.in_trial import batches
from dsat.in_trial.adapters.deepspeed_calls import ZERO_INIT
from dsat.in_trial.config_injection import SEVERAL_ENGINES
from dsat.in_trial.steps import RAREST
from dsat.run.comparison import Gain
from dsat.run.run import Run, typical_outcome
from dsat.run.training_check import OWN_IS_WRONG, training_of
from dsat.values import format as fmt
from dsat.values import hazards
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial
from dsat.values.zero_strategy import read_strategy

_NOISY = 0.2  # half-width of the 95 % interval of one measurement
_DRIFTED = 1.2  # ratio of the user's own speeds; run-to-run variation is at most half as large
_UNSURE = 2.0  # ratio of the ends of the gain's interval
_LONGER, _ERRORS = 1.2, 3.0  # lengths differ beyond this factor and this many standard errors
_QUIETER = "End other programs on the machine, or measure longer (--max-measured-steps)."


def find_caveats(run: Run, best: Trial, outcome: Outcome, found: Gain | None) -> Iterator[str]:
    """Yield warnings about the run and the gain of `best`, the recommended trial.

    Args:
        outcome: median outcome of `best`.
        found: the gain that the finals measured; None before they end.
    """
    version, training = run.deepspeed_version, training_of(run.plan, best)
    for fault in hazards.find(version, training, hazards.GRADIENTS, hazards.SLOW):
        yield f"{fault.describe(version or '')}."
    for trial_id, why in run.disqualified.items():
        yield f"{run.trials[trial_id].name} is excluded: {why}."
    yield from _warn_of_noise(run, found)
    yield from _warn_of_drift(run)
    yield from _warn_of_steps(run)
    own = None if run.baseline is None else run.outcomes.get(run.baseline.id)
    for text in dict.fromkeys([*outcome.warnings, *(() if own is None else own.warnings)]):
        if batches.is_about(text):
            yield f"{text}."
    yield from _warn_of_lengths(run, best)
    yield from _warn_of_optimizer(run, best)
    if any(SEVERAL_ENGINES in each.warnings for each in run.outcomes.values()):
        yield f"{SEVERAL_ENGINES}."
    if ZERO_INIT in outcome.warnings:
        yield f"{ZERO_INIT}."


def trains_wrongly(run: Run, own: Trial) -> bool:
    """Return whether `own`, the user's configuration, likely computes wrong gradients."""
    if any(OWN_IS_WRONG in why for why in run.disqualified.values()):
        return True
    training = training_of(run.plan, own)
    found = hazards.find(run.deepspeed_version, training, hazards.GRADIENTS)
    return any(not fault.unseen for fault in found)


def _warn_of_noise(run: Run, found: Gain | None) -> Iterator[str]:
    """Warn if measurements are too uncertain to compare."""
    compared = [each for each in (run.baseline, run.leader) if each]
    noise = max(
        0.0,
        *_intervals(run, compared),
        statistics.median(_intervals(run, run.trials.values()) or [0.0]),
    )
    if found is None and noise > _NOISY:
        yield (
            f"measurements are uncertain by ±{fmt.percent(noise)}, so smaller gains go unnoticed. "
            f"Other programs may have used the machine. {_QUIETER}"
        )
    elif found is not None and found.high > _UNSURE * found.low:
        interval = f"may be anything from {found.low:.2f}x to {found.high:.2f}x"
        yield (
            f"the gain {'is unknown' if found.is_unknown else interval}, because runs of the same "
            f"configuration differ a lot. {_QUIETER} In a new run, more pairs also help (a higher "
            "--finals, with enough --max-trials)."
        )


def _intervals(run: Run, trials: Iterable[Trial]) -> list[float]:
    """Return the half-widths of 95 % intervals of the measured trials."""
    outcomes = (run.outcomes.get(trial.id) for trial in trials)
    return [outcome.metrics.ci95 for outcome in outcomes if outcome and outcome.metrics]


def _warn_of_drift(run: Run) -> Iterator[str]:
    """Warn if the speed of the user's own configuration changed during the run."""
    own = run.baseline
    if own is None:
        return
    repeats = (run.trials[i] for i, repeated in run.repeated.items() if repeated == own.id)
    first, again = run.value(own), [v for v in map(run.value, repeats) if v is not None]
    if first is None or not again:
        return
    later = statistics.median(again)
    if max(first, later) > _DRIFTED * min(first, later):
        metric = run.plan.metric
        yield (
            f"your own configuration measured {fmt.metric(metric, first)} first and "
            f"{fmt.metric(metric, later)} later. The machine's speed changed (heat, or other "
            "programs), so the search compared trials under different conditions. The finals are "
            "not affected, because they alternate both configurations."
        )


def _warn_of_steps(run: Run) -> Iterator[str]:
    """Warn if long steps of the training were excluded, or if shares of evaluation steps differ."""
    other = run.leader if run.best is run.baseline else run.best
    ended = (run.outcomes.get(each.id) if each else None for each in (run.baseline, other))
    curves = (None if outcome is None else outcome.training for outcome in ended)
    own, its = (None if curve is None else curve.facts for curve in curves)
    if other in (None, run.baseline) or own is None or its is None:
        return
    late = sorted({*own.late} & {*its.late})
    if len(late) >= 2:
        yield (
            f"optimizer steps {', '.join(map(str, late))} took far longer both in your "
            f"configuration and in {other.name}, so they belong to the training (for example, an "
            "optimizer with extra work in every n-th step). But dsat excluded them as delays by "
            "the host, so the gain covers only the other steps."
        )
    if abs(own.evaluated - its.evaluated) * RAREST >= 1:
        yield (
            "the gain is unreliable: the model also ran outside training (evaluation or "
            f"generation, perhaps), in {fmt.percent(own.evaluated)} of the measured steps of your "
            f"configuration but {fmt.percent(its.evaluated)} of those of {other.name}. Measure "
            "more steps (--end-profile-step)."
        )


def _warn_of_lengths(run: Run, best: Trial) -> Iterator[str]:
    """Warn if the compared configurations got samples of different lengths."""
    finals, own, compared = run.finals, run.baseline, best
    if best is own and finals is not None and finals.pick is not None:
        compared = run.trials[finals.pick.trial_id]
    if own is None:
        return
    (its, its_error), (yours, own_error) = (
        _tokens_per_sample(typical_outcome(run, each)) for each in (compared, own)
    )
    apart, error = abs(its - yours), math.hypot(its * its_error, yours * own_error)
    if apart > max((_LONGER - 1) * min(its, yours), _ERRORS * error):
        means = "The gain is unreliable"
        if run.plan.metric != "tokens_per_second":
            means = "Padding is a real cost; different data make the gain meaningless"
        yield (
            f"the samples of {compared.name} had {its:,.0f} tokens on average, and yours "
            f"{yours:,.0f}. Either the data differ (sorted, or a curriculum), or padding grew with "
            f"the micro batch. {means}. Shuffle the data for the search, or pad all samples to one "
            "length."
        )


def _tokens_per_sample(outcome: Outcome | None) -> tuple[float, float]:
    """Return the mean number of tokens per sample, and its relative standard error.

    If these are unknown, the error is infinite.
    """
    metrics = None if outcome is None else outcome.metrics
    facts = None if outcome is None or outcome.training is None else outcome.training.facts
    if metrics is None or facts is None or facts.tokens_error is None:
        return 1.0, math.inf
    return (metrics.tokens_per_second or 0.0) / metrics.throughput, facts.tokens_error


def _warn_of_optimizer(run: Run, best: Trial) -> Iterator[str]:
    """Warn if the optimizer may compute different updates than in the user's stage."""
    own = read_strategy(run.plan.base_config).stage
    if run.profile is None or run.profile.optimizer.by_element or bool(own) == bool(best.stage):
        return
    yield (
        f"{run.profile.optimizer.kind} may compute other updates in stages 1 to 3 than in stage 0, "
        "so losses may differ from yours. Compare losses over a longer training, or search with "
        f"--zero-stages {'1 2 3' if own else '0'}."
    )
