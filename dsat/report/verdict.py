"""Verdict of a run in sentences: the gain, the recommended configuration, how certain they are.

Confirmed gains come from the finals. The search's measurement of its best is biased upward by
selection; where no finals ran, the verdict says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dsat.in_trial import batches
from dsat.report import format as fmt
from dsat.report.longest_sequence import memory_warning
from dsat.tuning.comparison import Gain
from dsat.tuning.finals import LEAST_RUN, Finals
from dsat.tuning.run import Run
from dsat.tuning.same_training import Agreement
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial, TrialKind

_KEEP = "keep your own configuration"


@dataclass(frozen=True)
class GainView:
    """Gain of the best configuration over the user's own.

    Attributes:
        ratio: confirmed by the finals, or else as the search measured both once. None where one of
            them was not measured.
        text: the same with its interval, or with `unconfirmed`.
        headline: one line that also says what a run without a gain leads to.
        by_batch: label and text of the gain at each global batch size, by the finals.
        finals: comparison of the finals for programs; None without one.
    """

    ratio: float | None
    text: str
    headline: str
    by_batch: tuple[tuple[str, str], ...] = ()
    finals: dict[str, Any] | None = None

    @classmethod
    def of(cls, run: Run) -> GainView:
        """Return the gain of a run as it is now."""
        found, measured = gain(run), search_gain(run)
        if run.best is None:
            return cls(None, "-", "No configuration ran" if run.outcomes else "No trial has ended")
        if found is not None:
            keeps, text = run.best is run.baseline, say_gain(found)
            headline = (
                "Keep your own configuration" if keeps else f"{text} over your own configuration"
            )
            ratio, text = (1.0, "1.00x, your own") if keeps else (found.ratio, text)
            return cls(ratio, text, headline, tuple(_by_batch(run, found)), _finals_json(run))
        if run.best is run.baseline:
            return cls(1.0, "1.00x, your own", "Your own configuration is the best so far")
        if measured is None:
            return cls(None, "-", f"Best so far: {run.best.name}")
        text = f"{measured:.2f}x"
        return cls(measured, f"{text}, unconfirmed", f"{text} your own, unconfirmed")


def verdict(run: Run) -> list[str]:
    """Return sentences that compare the recommended configuration with the user's own."""
    best, outcome = run.best, run.best_outcome
    if best is None or outcome is None:
        return ["No configuration ran." if run.outcomes else "No trial has ended."]
    over = run.finals is not None and run.finals.over
    gained, *rest = _of_finals(run) if over else _of_search(run, best)
    return [
        gained,
        _best_sentence(run),
        *rest,
        *_of_script_args(run, best),
        *_of_samples(run, outcome),
        *memory_warning(run),
        *learning_rate_advice(run),
    ]


def _best_sentence(run: Run) -> str:
    """Return the best trial and its measurement."""
    best, outcome = run.best, run.best_outcome
    if run.plan is None or best is None or outcome is None:
        return "No configuration ran."
    tokens = None if outcome.metrics is None else outcome.metrics.tokens_per_second
    beside = ""
    if tokens is not None and run.plan.metric != "tokens_per_second":
        beside = f", {fmt.metric('tokens_per_second', tokens)}"
    return f"Best: {best.name}, {fmt.outcome(outcome, run.plan.metric)}{beside}."


def search_gain(run: Run) -> float | None:
    """Return the gain over the user's own, unconfirmed, as both were measured once."""
    own = None if run.baseline is None else run.value(run.baseline)
    if run.plan is None or own is None or run.best_value is None:
        return None
    return run.plan.objective.gain(run.best_value, own)


def gain(run: Run) -> Gain | None:
    """Return the confirmed gain of the finals' pick over the user's own; None without finals."""
    if run.finals is None or not run.finals.over or run.finals.comparison is None:
        return None
    return run.finals.comparison.gain


def say_gain(found: Gain) -> str:
    """`1.42x (1.38 to 1.46)`, with as many digits as tell the ends of the interval apart."""
    digits = 2 if found.high - found.low >= 0.02 else 3
    low, ratio, high = (f"{value:.{digits}f}" for value in (found.low, found.ratio, found.high))
    return f"{ratio}x ({low} to {high})"


def _by_batch(run: Run, found: Gain) -> Iterator[tuple[str, str]]:
    if run.finals is None or run.finals.pick is None or run.plan is None:
        return
    size = run.trials[run.finals.pick.trial_id].batch.train_batch_size
    own, same = run.plan.own_batch.train_batch_size, run.finals.same_batch_gain
    yield f"with a global batch size of {size}", say_gain(found)
    if size != own:
        said = "not measured" if same is None else say_gain(same)
        yield f"at your global batch size of {own}", said


def _finals_json(run: Run) -> dict[str, Any] | None:
    finals = run.finals
    if finals is None or finals.comparison is None or finals.pick is None:
        return None
    same = finals.same_batch_gain
    return {
        "compared": run.trials[finals.pick.trial_id].name,
        "gain": asdict(finals.comparison.gain),
        "pairs": len(finals.pairs),
        "significant": finals.is_better,
        "recommended": finals.is_worth_it,
        "noise": finals.comparison.noise,
        "gain_at_own_global_batch": None if same is None else asdict(same),
    }


def _of_script_args(run: Run, best: Trial) -> list[str]:
    assert run.plan is not None
    changed = {k: v for k, v in best.script_args.items() if run.plan.switches.get(k) != v}
    if not changed:
        return []
    said = ", ".join(f"{key}={value}" for key, value in changed.items())
    return [f"The best needs other arguments of the script than yours: {said}."]


def _of_samples(run: Run, best: Outcome) -> list[str]:
    """Return warnings about the counting of samples, of the best and of the user's own."""
    own = None if run.baseline is None else run.outcomes.get(run.baseline.id)
    found = dict.fromkeys([*best.warnings, *(() if own is None else own.warnings)])
    return [f"{text[0].upper()}{text[1:]}." for text in found if batches.is_about(text)]


def _of_finals(run: Run) -> list[str]:
    """Return the sentences of a run whose finals are over, the gain first."""
    finals = run.finals
    assert finals is not None
    wrong = [
        f"{run.trials[trial_id].name} trains differently from your own configuration on the "
        f"same data and is excluded: {why}."
        for trial_id, why in run.disqualified.items()
    ]
    if finals.pick is None:
        return [f"None of the leading configurations was confirmed on a re-run: {_KEEP}.", *wrong]
    if finals.comparison is None:
        failed = "The gain was not confirmed: your own configuration failed when it was run again."
        return [failed, *wrong]
    pick = run.trials[finals.pick.trial_id]
    return [
        _of_pick(run, finals, pick, finals.comparison.gain),
        *wrong,
        f"Run-to-run variation: {fmt.percent(finals.comparison.noise)} (standard deviation).",
        *([_of_training(run, pick)] if run.best is pick else []),
        *_at_the_same_batch(run, pick),
    ]


def _of_pick(run: Run, finals: Finals, pick: Trial, found: Gain) -> str:
    evidence = f"95 % interval of {len(finals.pairs)} pairs of runs in turns"
    if finals.is_worth_it:
        return f"Gain: {say_gain(found)} over your own configuration; {evidence}."
    if run.best is pick:
        return (
            f"No significant difference: {say_gain(found)} over your own configuration; "
            f"{evidence}. Your own is outside the batch sizes that you asked for."
        )
    return _keep_own(run, pick, found, evidence, is_better=finals.is_better)


def _keep_own(run: Run, trial: Trial, found: Gain, evidence: str, *, is_better: bool) -> str:
    """Say why a trial is not recommended although it was the best of the search."""
    assert run.plan is not None
    why = "No significant difference"
    if is_better:
        own, its = run.plan.own_batch.train_batch_size, trial.batch.train_batch_size
        why = f"The gain does not justify a global batch of {its} instead of {own}"
    best = f"The best of the search, {trial.name}, is {say_gain(found)} it"
    return f"{why}: {_KEEP}. {best}; {evidence}."


def _of_training(run: Run, pick: Trial) -> str:
    assert run.plan is not None and run.baseline is not None
    finding = run.training.compare(run.plan, run.baseline, pick)
    if finding.agreement is Agreement.SAME:
        return "It trains like your own configuration: on the same data the losses agree."
    return f"Training equivalence was not checked: {finding.reason}."


def _at_the_same_batch(run: Run, pick: Trial) -> list[str]:
    """Return the gain at the user's own global batch size."""
    assert run.plan is not None
    own, its = run.plan.own_batch.train_batch_size, pick.batch.train_batch_size
    if its == own:
        return []
    head, other = f"At your global batch size of {own}", f"{pick.name} has a global batch of {its}"
    finals = run.finals
    if finals is not None and finals.over:
        found, trial = finals.same_batch_gain, run.same_batch_final
        if found is not None and trial is not None:
            return [f"{head} the gain is {say_gain(found)}, with {trial.name} ({other})."]
        if pick.id not in finals.with_same_batch:
            size = "larger" if its > own else "smaller"
            whole = f"the whole gain comes from the {size} batch"
            return [f"{head} nothing faster was found: {whole}."]
    return [f"{head} {_searched_at_the_same_batch(run)} ({other})."]


def _searched_at_the_same_batch(run: Run) -> str:
    assert run.plan is not None and run.baseline is not None
    own_value = run.value(run.baseline)
    measured = {
        value: trial
        for trial in run.trials.values()
        if trial.kind is TrialKind.SEARCH
        and trial.batch.train_batch_size == run.plan.own_batch.train_batch_size
        and (value := run.value(trial)) is not None
    }
    if not measured or own_value is None:
        return "nothing else was measured"
    best = min(measured, key=run.plan.objective.loss)
    ratio = run.plan.objective.gain(best, own_value)
    return f"the search measured {ratio:.2f} times as much, with {measured[best].name}, unconfirmed"


def _of_search(run: Run, best: Trial) -> list[str]:
    """Return the sentences of a run without finished finals, the gain first."""
    assert run.plan is not None
    own, first = run.baseline, next(iter(run.trials.values()))
    if own in (None, first) and run.outcomes[first.id].kind.is_out_of_memory:
        return [
            f"Your own configuration does not fit: {first.strategy} ran out of memory at micro "
            f"batch {first.batch.micro_batch}."
        ]
    if own is None or own.id not in run.outcomes:
        return ["Your own configuration was not measured."]
    measured = fmt.outcome(run.outcomes[own.id], run.plan.metric)
    ratio, found, leader = search_gain(run), run.leaders_gain, run.leader
    if ratio is None:
        return [f"Your own configuration did not run: {measured}."]
    if own is best and (found is None or leader is None or leader is own):
        searched = any(run.trials[i].kind is TrialKind.SEARCH for i in run.outcomes)
        why = "nothing faster was found" if searched else "nothing else was measured yet"
        return [f"{_KEEP.capitalize()}: {why}."]
    if found is not None and own is best and leader is not None:
        once = f"measured once: {_no_finals(run)}"
        return [_keep_own(run, leader, found, once, is_better=found.low > 1)]
    said = f"{ratio:.2f}x" if found is None else say_gain(found)
    return [
        f"Gain: {said} over your own configuration ({measured}), unconfirmed: measured once by the "
        f"search, which overstates its best, and {_no_finals(run)}.",
        *_at_the_same_batch(run, best),
    ]


def _no_finals(run: Run) -> str:
    """Say why no finals confirm the search."""
    assert run.plan is not None
    if run.finals is not None:
        return "the finals are not over"
    if run.plan.finals is None and run.plan.max_trials < LEAST_RUN:
        return f"no finals were run, which need a budget of {LEAST_RUN} trials"
    return "no finals were run"


def learning_rate_advice(run: Run) -> list[str]:
    """Advise on the learning rate if the best global batch size differs from the user's.

    Square-root scaling for adaptive optimizers (Malladi et al., arXiv:2205.10287), linear scaling
    for SGD (Goyal et al., arXiv:1706.02677).
    """
    assert run.plan is not None
    if run.best is None:
        return []
    old, new = run.plan.own_batch.train_batch_size, run.best.batch.train_batch_size
    if old == new:
        return []
    optimizer = run.plan.base_config.get("optimizer") or {}
    ratio = new / old
    root = f"multiply it by sqrt({new}/{old}) = {ratio**0.5:.3g}"
    linear = f"multiply it by {new}/{old} = {ratio:.3g}"
    kind = str(optimizer.get("type", "")).lower()
    if "sgd" in kind:
        advice = linear
    elif kind:
        advice = root
    else:
        advice = f"with an Adam-like optimizer {root}, with SGD {linear}"
    return [
        f"The global batch size changed from {old} to {new}, so the learning rate should too: "
        f"{advice}. To keep the batch, use --train-batch-size own."
    ]
