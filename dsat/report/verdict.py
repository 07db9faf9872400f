"""Verdict of a run in sentences: the recommended configuration, its gain, how certain it is.

Confirmed gains come from the finals. The search's measurement of its best is biased upward by
selection; where no finals ran, the verdict says so.
"""

from __future__ import annotations

from dsat.in_trial import samples
from dsat.report import format as fmt
from dsat.report.longest_sequence import memory_warning
from dsat.tuning.comparison import Gain
from dsat.tuning.finals import LEAST_RUN, Finals
from dsat.tuning.run import Run
from dsat.tuning.same_training import Agreement
from dsat.values.outcome import Outcome
from dsat.values.trial import Trial, TrialKind

_KEEP = "keep your own configuration"


def verdict(run: Run) -> list[str]:
    """Return sentences that compare the recommended configuration with the user's own."""
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


def headline(run: Run) -> str:
    """Return one line: the confirmed gain, or what the run leads to without one."""
    found = gain(run)
    if found is not None:
        if run.best is run.baseline:
            return "Keep your own configuration"
        return f"{say_gain(found)} your own configuration"
    if run.best is None:
        return "No configuration ran" if run.outcomes else "No trial has ended"
    if run.best is run.baseline:
        return "Your own configuration is the best so far"
    measured = search_gain(run)
    if measured is None:
        return f"Best so far: {run.best.name}"
    return f"{measured:.2f}x your own, unconfirmed"


def search_gain(run: Run) -> float | None:
    """Return the gain over the user's own, unconfirmed, as both were measured once."""
    assert run.plan is not None
    own = None if run.baseline is None else run.value(run.baseline)
    if own is None or run.best_value is None:
        return None
    return run.plan.objective.gain(run.best_value, own)


def _of_samples(run: Run, best: Outcome) -> list[str]:
    """Return warnings about the counting of samples, of the best and of the user's own."""
    own = None if run.baseline is None else run.outcomes.get(run.baseline.id)
    told = dict.fromkeys([*best.warnings, *(() if own is None else own.warnings)])
    return [f"{text[0].upper()}{text[1:]}." for text in told if samples.is_about(text)]


def _tokens(run: Run) -> str:
    """Return the best's tokens per second, or nothing where they are the metric or missing."""
    assert run.plan is not None
    outcome, name = run.best_outcome, "tokens_per_second"
    if run.plan.metric == name or outcome is None or outcome.metrics is None:
        return ""
    value = outcome.metrics.value(name)
    return "" if value is None else f", {fmt.metric(name, value)}"


def gain(run: Run) -> Gain | None:
    """Return the confirmed gain of the finals' pick over the user's own; None without finals."""
    if run.finals is None or not run.finals.over or run.finals.comparison is None:
        return None
    return run.finals.comparison.gain


def gains(run: Run) -> list[tuple[str, str]]:
    """Return labels and texts of the gain and of the gain at the user's own global batch size.

    Empty without finals.
    """
    found = gain(run)
    if found is None or run.finals is None or run.finals.pick is None or run.plan is None:
        return []
    pick, own = run.trials[run.finals.pick.trial_id], run.plan.own_batch.train_batch_size
    same = run.finals.same_batch_gain
    rows = [(f"with a global batch size of {pick.batch.train_batch_size}", say_gain(found))]
    if pick.batch.train_batch_size != own:
        said = "not measured" if same is None else say_gain(same)
        rows.append((f"at your global batch size of {own}", said))
    return rows


def say_gain(found: Gain) -> str:
    """`1.42x (1.38 to 1.46)`, with as many digits as tell the ends of the interval apart."""
    digits = 2 if found.high - found.low >= 0.02 else 3
    low, ratio, high = (f"{value:.{digits}f}" for value in (found.low, found.ratio, found.high))
    return f"{ratio}x ({low} to {high})"


def _of_finals(run: Run, finals: Finals) -> list[str]:
    assert run.plan is not None
    wrong = [
        f"{run.trials[trial_id].name} trains differently from your own configuration on the "
        f"same data and is excluded: {why}."
        for trial_id, why in run.disqualified.items()
    ]
    return wrong + _of_the_pick(run, finals)


def _of_the_pick(run: Run, finals: Finals) -> list[str]:
    assert run.plan is not None
    if finals.pick is None:
        return [
            f"None of the leading configurations was confirmed on a re-run: {_KEEP}.",
        ]
    pick, comparison = run.trials[finals.pick.trial_id], finals.comparison
    if comparison is None:
        return ["The gain was not confirmed: your own configuration failed when it was run again."]
    said = say_gain(comparison.gain)
    evidence = f"95 % interval of {len(finals.pairs)} pairs of runs in turns"
    if finals.is_worth_it:
        lines = [f"Gain: {said} your own configuration; {evidence}."]
    elif finals.is_better:
        lines = [
            f"The gain of {said} ({pick.name}; {evidence}) does not justify a global batch of "
            f"{pick.batch.train_batch_size} instead of {run.plan.own_batch.train_batch_size}: "
            f"{_KEEP}."
        ]
    else:
        lines = [
            f"No significant difference: {_KEEP}. The best of the search, {pick.name}, is {said} "
            f"it; {evidence}."
        ]
    if run.best is pick and not finals.is_worth_it:
        lines = [
            f"No significant difference: {said} your own configuration; {evidence}. Your own is "
            "outside the batch sizes that you asked for."
        ]
    lines.append(f"Run-to-run variation: {fmt.percent(comparison.noise)} (standard deviation).")
    if run.best is pick:
        finding = run.compare_training(pick)
        lines.append(
            "It trains like your own configuration: on the same data the losses agree."
            if finding.agreement is Agreement.SAME
            else f"Training equivalence was not checked: {finding.reason}."
        )
    return lines + _at_the_same_batch(run, pick)


def _at_the_same_batch(run: Run, pick: Trial) -> list[str]:
    """Return the gain at the user's own global batch size."""
    assert run.plan is not None
    own = run.plan.own_batch.train_batch_size
    if pick.batch.train_batch_size == own:
        return []
    head = f"At your global batch size of {own}"
    other = f"{pick.name} has a global batch of {pick.batch.train_batch_size}"
    finals = run.finals
    if finals is not None and finals.over:
        found, trial = finals.same_batch_gain, run.same_batch_final
        if found is not None and trial is not None:
            return [f"{head} the gain is {say_gain(found)}, with {trial.name} ({other})."]
        if pick.id not in finals.with_same_batch:
            return [
                f"{head} nothing faster was found: the whole gain comes from the other batch size."
            ]
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
    """Return the sentences of a run without finished finals."""
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
    ratio = search_gain(run)
    if ratio is None:
        return [f"Your own configuration did not run: {own}."]
    if baseline is best and not any(t.kind is TrialKind.SEARCH for t in _ended(run)):
        return ["This is your own configuration: nothing else was measured yet."]
    if baseline is best and run.leader is baseline:
        return ["This is your own configuration: nothing faster was found."]
    found = run.leaders_gain
    why = "no finals were run"
    if run.finals is not None:
        why = "the finals are not over"
    elif run.plan.finals is None and run.plan.max_trials < LEAST_RUN:
        why += f", which need a budget of {LEAST_RUN} trials"
    if found is not None and baseline is best and run.leader is not None:
        return [
            f"{_not_enough(run, run.leader, found)}: {_KEEP}. The best of the search, "
            f"{run.leader.name}, is {say_gain(found)} it, measured once: {why}."
        ]
    said = f"{ratio:.2f}x" if found is None else say_gain(found)
    return [
        f"Gain: {said} your own configuration ({own}), unconfirmed: measured once by the "
        f"search, which overstates its best, and {why}.",
        *_at_the_same_batch(run, best),
    ]


def _not_enough(run: Run, leader: Trial, found: Gain) -> str:
    """Return why the best of the search is not recommended."""
    assert run.plan is not None
    if found.low <= 1:
        return "No significant difference"
    return (
        f"The gain does not justify a global batch of {leader.batch.train_batch_size} instead of "
        f"{run.plan.own_batch.train_batch_size}"
    )


def _ended(run: Run) -> list[Trial]:
    return [run.trials[trial_id] for trial_id in run.outcomes]


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


def knee(run: Run) -> list[tuple[int, float, float]]:
    """Return micro batch, best value, and its fraction of the overall best, for each that ran."""
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
    """Return the smallest micro batch within the indifference; None with fewer than three."""
    if len(rows) < 3:
        return None
    return next((size for size, _, part in rows if part * (1 + indifference) >= 1), None)
