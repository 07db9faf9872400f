"""What came of a run, in sentences: what to train with, what that gains, and how sure it is.

Gains come from the finals alone. What the search measured of its best is flattered by the search's
having chosen it; where no finals ran, that is said.
"""

from __future__ import annotations

from dsat.in_trial import samples
from dsat.report import format as fmt
from dsat.report.longest_sequence import memory_warning
from dsat.tuning.finals import Finals, Gain
from dsat.tuning.run import Run
from dsat.tuning.same_training import Agreement
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial, TrialKind

_KEEP = "keep your own configuration"


def verdict(run: Run) -> list[str]:
    """The sentences on the recommended configuration, against the user's own."""
    assert run.plan is not None
    best, outcome = run.best, run.best_outcome
    if best is None or outcome is None:
        return ["No configuration ran."]
    lines = [f"Best: {best.name}, {fmt.outcome(outcome, run.plan.metric)}{_tokens(run)}."]
    if run.finals is not None and run.finals.over:
        lines += _of_finals(run, run.finals)
    else:
        lines += _of_search(run, best)
    changed = {k: v for k, v in best.script_args.items() if run.plan.switches.get(k) != v}
    if changed:
        said = ", ".join(f"{key}={value}" for key, value in changed.items())
        lines.append(f"The best needs other arguments of the script than yours: {said}.")
    lines += _of_samples(run, outcome)
    return lines + memory_warning(run) + learning_rate_advice(run)


def _of_samples(run: Run, best: Outcome) -> list[str]:
    """Where samples could not be counted, or are not the configuration's: of the best, and of the
    user's own, with which it is compared."""
    own = None if run.baseline is None else run.outcomes.get(run.baseline.id)
    told = dict.fromkeys([*best.warnings, *(() if own is None else own.warnings)])
    return [f"{text[0].upper()}{text[1:]}." for text in told if samples.is_about(text)]


def _tokens(run: Run) -> str:
    """The tokens per second of the best, unless they are the metric or there are none."""
    assert run.plan is not None
    outcome, name = run.best_outcome, "tokens_per_second"
    if run.plan.metric == name or outcome is None or outcome.metrics is None:
        return ""
    value = outcome.metrics.value(name)
    return "" if value is None else f", {fmt.metric(name, value)}"


def gain(run: Run) -> Gain | None:
    """How many times better the best is than the user's own, as the finals have it; None without
    them. If they recommend the user's own, it is of what they compared with it."""
    if run.finals is None or not run.finals.over or run.finals.comparison is None:
        return None
    return run.finals.comparison.gain


def gains(run: Run) -> list[tuple[str, str]]:
    """The gain over all, and beside it the gain at the user's own global batch: what of, and how
    much with its interval. Empty without finals."""
    found = gain(run)
    if found is None or run.finals is None or run.finals.pick is None or run.plan is None:
        return []
    pick, own = run.trials[run.finals.pick.trial_id], run.plan.own_batch.train_batch_size
    same = run.finals.same_batch_gain
    rows = [(f"with a global batch of {pick.batch.train_batch_size}", say_gain(found))]
    if pick.batch.train_batch_size != own:
        said = "not measured" if same is None else say_gain(same)
        rows.append((f"at your own global batch of {own}", said))
    return rows


def say_gain(found: Gain) -> str:
    """`1.42x (1.38 to 1.46)`, with as many digits as tell the ends of the interval apart."""
    digits = 2 if found.high - found.low >= 0.02 else 3
    low, ratio, high = (f"{value:.{digits}f}" for value in (found.low, found.ratio, found.high))
    return f"{ratio}x ({low} to {high})"


def _of_finals(run: Run, finals: Finals) -> list[str]:
    assert run.plan is not None
    wrong = [
        f"{run.trials[trial_id].name} trains otherwise than your own configuration on the same "
        f"data, so it cannot win: {why}."
        for trial_id, why in run.disqualified.items()
    ]
    return wrong + _of_the_pick(run, finals)


def _of_the_pick(run: Run, finals: Finals) -> list[str]:
    assert run.plan is not None
    if finals.pick is None:
        return [
            f"None of the leaders of the search stood its ground when it was run again: {_KEEP}.",
        ]
    pick, comparison = run.trials[finals.pick.trial_id], finals.comparison
    if comparison is None:
        return [
            "It could not be compared with your own configuration, which failed when it was run "
            "again."
        ]
    said = say_gain(comparison.gain)
    evidence = f"95 % interval of {len(finals.pairs)} pairs of runs in turns"
    if finals.is_worth_it:
        lines = [f"It is {said} your own configuration; {evidence}."]
    elif finals.is_better:
        lines = [
            f"{pick.name} is {said} your own configuration ({evidence}), which a global batch of "
            f"{pick.batch.train_batch_size} instead of {run.plan.own_batch.train_batch_size} is "
            f"not worth (--indifference {run.plan.indifference:.3g}): {_KEEP}."
        ]
    else:
        lines = [
            f"No significant difference: {_KEEP}. The best of the search, {pick.name}, is {said} "
            f"it; {evidence}."
        ]
    if run.best is pick and not finals.is_worth_it:
        lines = [
            f"No significant difference to your own configuration, which does not keep to the "
            f"batch sizes that you demanded: {said} it; {evidence}."
        ]
    lines.append(
        f"Run again, a configuration differed from itself by {fmt.percent(comparison.noise)} "
        "(standard deviation)."
    )
    if run.best is pick:
        finding = run.compare_training(pick)
        lines.append(
            "It trains like your own configuration: on the same data the losses agree."
            if finding.agreement is Agreement.SAME
            else f"Whether it trains like your own could not be compared: {finding.reason}."
        )
    return lines + _at_the_same_batch(run, pick)


def _at_the_same_batch(run: Run, pick: Trial) -> list[str]:
    """What the gain is without a larger or smaller global batch."""
    assert run.plan is not None
    own = run.plan.own_batch.train_batch_size
    if pick.batch.train_batch_size == own:
        return []
    head = f"At your own global batch of {own}"
    other = f"{pick.name} has a global batch of {pick.batch.train_batch_size}"
    finals = run.finals
    if finals is not None and finals.over:
        found, trial = finals.same_batch_gain, run.same_batch_final
        if found is not None and trial is not None:
            return [f"{head} the gain is {say_gain(found)}, with {trial.name} ({other})."]
        if pick.id not in finals.with_same_batch:
            return [f"{head} it would be your own configuration: all the gain is the batch's."]
    return [f"{head} {_searched_at_the_same_batch(run)} ({other})."]


def _searched_at_the_same_batch(run: Run) -> str:
    assert run.plan is not None and run.baseline is not None
    objective, own_value = run.plan.objective, run.value(run.baseline)
    best: tuple[float, Trial] | None = None
    for trial in run.trials.values():
        value = run.value(trial)
        same = trial.batch.train_batch_size == run.plan.own_batch.train_batch_size
        if trial.kind is not TrialKind.SEARCH or not same or value is None:
            continue
        if best is None or objective.is_better(value, best[0]):
            best = value, trial
    if best is None or own_value is None:
        return "nothing else was measured"
    ratio = objective.gain(best[0], own_value)
    return f"the search measured {ratio:.2f} times as much, with {best[1].name}, unconfirmed"


def _of_search(run: Run, best: Trial) -> list[str]:
    """Without finals."""
    assert run.plan is not None
    baseline, first = run.baseline, next(iter(run.trials.values()))
    if baseline in (None, first) and run.outcomes[first.id].kind.is_out_of_memory:
        return [
            f"Your own configuration does not fit: {first.strategy} ran out of memory at micro "
            f"batch {first.batch.micro_batch}."
        ]
    if baseline is None or baseline.id not in run.outcomes:
        return ["Your own configuration was not measured."]
    own = fmt.outcome(run.outcomes[baseline.id], run.plan.metric)
    own_value, value = run.value(baseline), run.best_value
    if own_value is None or value is None:
        return [f"Your own configuration did not run: {own}."]
    if baseline is best and not any(t.kind is TrialKind.SEARCH for t in _ended(run)):
        return ["That is your own configuration: nothing else was measured yet."]
    if baseline is best:
        return ["That is your own configuration: nothing faster was found."]
    ratio = run.plan.objective.gain(value, own_value)
    why = "the finals are not over" if run.finals is not None else "no finals were run"
    return [
        f"Your own configuration: {baseline.name}, {own}. The best is {ratio:.2f} times as good by "
        f"what the search measured, which flatters its best; {why} to confirm it.",
        *_at_the_same_batch(run, best),
    ]


def _ended(run: Run) -> list[Trial]:
    return [run.trials[trial_id] for trial_id in run.outcomes]


def learning_rate_advice(run: Run) -> list[str]:
    """What to do about the learning rate if the best global batch is another than the user's.

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
        f"{advice}. To keep the batch, use --train-batch-size {old}."
    ]


def knee(run: Run) -> list[tuple[int, float, float]]:
    """The best value of each micro batch that ran: micro batch, value, and which part of the best
    of all that is. Where the last column stops rising is the knee."""
    assert run.plan is not None
    objective = run.plan.objective
    best: dict[int, float] = {}
    for trial in run.trials.values():
        value = run.value(trial)
        if trial.kind not in (TrialKind.BASELINE, TrialKind.SEARCH) or value is None:
            continue
        if objective.is_better(value, best.get(trial.batch.micro_batch)):
            best[trial.batch.micro_batch] = value
    if not best:
        return []
    top = min(best.values(), key=objective.loss)
    return [(size, best[size], 1 / objective.gain(top, best[size])) for size in sorted(best)]


def knee_row(rows: list[tuple[int, float, float]], indifference: float) -> int | None:
    """The smallest micro batch within the indifference of the best; None with fewer than three."""
    if len(rows) < 3:
        return None
    return next((size for size, _, part in rows if part * (1 + indifference) >= 1), None)
