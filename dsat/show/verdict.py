"""Verdict of a run: the gain and what to do, what changed, how certain it is, and warnings.

Confirmed gains come from the finals. The search overestimates its best trial, because it selects
the best measurement; without finals, the verdict says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dsat.run.comparison import Gain
from dsat.run.finals import LEAST_RUN, PAIR
from dsat.run.finals_phase import contenders
from dsat.run.journal import ENGINE
from dsat.run.run import Run, check_of, final_value, own_switches, searched
from dsat.run.same_training import Agreement
from dsat.show import advice, caveats, step_parts
from dsat.show.differences import TRAIN_BATCH, differences
from dsat.show.memory import memory_warning
from dsat.values import format as fmt
from dsat.values.outcome import Outcome, OutcomeKind
from dsat.values.trial import Trial, TrialKind

_MOST_CHANGES = 5
_MANY = 0.4  # fraction of the search's trials whose failures are worth a warning
_NONE_CONFIRMED = "none of the leading configurations was confirmed on a re-run"


class GainView:
    """Gain of the best configuration over the user's own.

    Attributes:
        ratio: gain in the finals, else `search_gain` (may be None); 1 if the best is the user's.
        text: the ratio with its interval or with `unconfirmed`; `-` without a ratio.
        own_value: value of the objective for the user's configuration; see `run.final_value`.
        finals: comparison by the finals as JSON values; None if there is none (yet).
    """

    def __init__(self, run: Run) -> None:
        measured, self.ratio, self.finals = gain(run), search_gain(run), _finals_json(run)
        self.own_value = None if run.baseline is None else final_value(run, run.baseline)
        self.text = "-" if self.ratio is None else f"{self.ratio:.2f}x, unconfirmed"
        if run.best is not None and run.best is run.baseline:
            self.ratio, self.text = 1.0, "1.00x, your own"
        elif measured is not None:
            self.ratio, self.text = measured.ratio, say_gain(measured)


@dataclass(frozen=True)
class Verdict:
    """Verdict of a run; all fields but the headline may be empty.

    Attributes:
        changed: the most important settings that change, with both values.
        advice: sentences on batch, learning rate, script, saving, and where time goes.
    """

    headline: str
    changed: str = ""
    confidence: str = ""
    advice: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """All lines, with labels."""
        labelled = {"Changed": self.changed, "Confidence": self.confidence}
        return (
            self.headline,
            *(f"{label}: {text}" for label, text in labelled.items() if text),
            *self.advice,
            *(f"Warning: {text}" for text in self.warnings),
        )


def verdict(run: Run) -> Verdict:
    """Return the verdict, which compares the recommended configuration with the user's own."""
    best, outcome = run.best, run.best_outcome
    if best is None or outcome is None:
        return _explain_no_best(run)
    return Verdict(
        _headline(run, best),
        _changed(run, best),
        " ".join(_confidence(run, best)),
        (
            *_batch_advice(run, best),
            *advice.advise_batch(run),
            *advice.advise_learning_rate(run),
            *advice.advise_script(run, best),
            *advice.advise_saving(run, best),
            *step_parts.advice(run),
        ),
        (
            *_describe_failures(run),
            *caveats.find_caveats(run, best, outcome, gain(run)),
            *memory_warning(run),
        ),
    )


def search_gain(run: Run) -> float | None:
    """Return the gain of `run.best_value` over the user's own value; None unless both exist."""
    user_value = None if run.baseline is None else final_value(run, run.baseline)
    if user_value is None or run.best_value is None:
        return None
    return run.plan.objective.gain(run.best_value, user_value)


def gain(run: Run) -> Gain | None:
    """Return the gain that the finals measured; None if they are not over or compared no pair."""
    if run.finals is None or not run.finals.over or run.finals.comparison is None:
        return None
    return run.finals.comparison.gain


def say_gain(result: Gain) -> str:
    """Write a gain as `1.42x (1.38 to 1.46)`, with three decimals for narrow intervals."""
    if result.is_unknown:
        return f"{result.ratio:.2f}x (too noisy to tell)"
    digits = 2 if result.high - result.low >= 0.02 else 3
    low, ratio, high = (f"{value:.{digits}f}" for value in (result.low, result.ratio, result.high))
    return f"{ratio}x ({low} to {high})"


def _finals_json(run: Run) -> dict[str, Any] | None:
    finals = run.finals
    if finals is None or finals.comparison is None or finals.pick is None:
        return None
    same_batch = finals.same_batch_gain
    return {
        "compared": run.trials[finals.pick.trial_id].name,
        "gain": asdict(finals.comparison.gain),
        "pairs": len(finals.pairs),
        "significant": finals.is_better,
        "recommended": finals.is_worth_it,
        "noise": finals.comparison.variation.sd,
        "gain_at_own_global_batch": None if same_batch is None else asdict(same_batch),
    }


def _explain_no_best(run: Run) -> Verdict:
    if not run.outcomes:
        return Verdict("No trial has ended.")
    first = next((i for i, outcome in run.outcomes.items() if not outcome.ok), None)
    if first is None:
        return Verdict("No configuration ran.")
    how = fmt.outcome(run.outcomes[first], run.plan.metric).rstrip(".")
    return Verdict("No configuration ran.", warnings=(f"{run.trials[first].name} failed: {how}.",))


def _headline(run: Run, best: Trial) -> str:
    gained, metric = GainView(run), run.plan.metric
    value = fmt.metric(metric, run.best_value, digits=3)
    if best is run.baseline:
        if run.stop_reason is None and not run.paused and not _searched(run):
            return f"Baseline: {value}. Searching..."
        if caveats.trains_wrongly(run, best):
            return (
                f"Your configuration likely computes wrong gradients ({value}): see the warnings. "
                "Compare it with training without DeepSpeed before you keep it."
            )
        return f"Keep your configuration ({value}): {_why_keep(run)}."
    if gained.ratio is None or gained.own_value is None:
        return f"Use {best.name} ({value}): {_why_no_gain(run)}."
    change = fmt.change(metric, gained.own_value, run.best_value)
    size, yours = best.batch.train_batch_size, run.plan.own_batch.train_batch_size
    batch = "" if size == yours else f" with a global batch of {size} instead of {yours}"
    if gained.ratio < 1:
        least = "the best within the batch sizes that you asked for"
        return f"Slower than yours, {gained.text}: {change}{batch}. {best.name} is {least}."
    return f"Gain {gained.text}: {change}{batch}. Use {best.name}."


def _why_keep(run: Run) -> str:
    finals, trial = run.finals, _rival(run)
    gains = run.gain_of(trial)
    if finals is not None and finals.over:
        if finals.pick is None:
            return _NONE_CONFIRMED
        trial, gains = run.trials[finals.pick.trial_id], gain(run)
    if trial is None or gains is None:
        searched = _searched(run)
        if not searched:
            return "nothing else was measured"
        some_ran = any(outcome.ok for outcome in searched)
        return "nothing faster was found" if some_ran else "nothing else ran"
    if gains.ratio < 1:
        return f"{trial.name} measured slower: {say_gain(gains)}"
    if gains.low <= 1:
        return f"{trial.name} is not significantly faster: {say_gain(gains)}"
    old, new = run.plan.own_batch.train_batch_size, trial.batch.train_batch_size
    return f"a gain of {say_gain(gains)} does not justify a global batch of {new} instead of {old}"


def _rival(run: Run) -> Trial | None:
    """Return the fastest other trial that may beat the user's own; None without one."""
    if run.leader is None or run.leader is not run.baseline:
        return run.leader
    return max(contenders(run), key=lambda trial: run.contestant(trial).log_value, default=None)


def _searched(run: Run) -> list[Outcome]:
    return [o for i, o in run.outcomes.items() if run.trials[i].kind is TrialKind.SEARCH]


def _describe_failures(run: Run) -> list[str]:
    """Return a warning with the most frequent failure, if all or many trials of the search failed.

    For `many`, a lack of memory or of samples does not count.
    """
    searched = _searched(run)
    ran = any(outcome.ok for outcome in searched)
    unsound = [o for o in searched if o.is_unsound and o.kind is not OutcomeKind.CANCELED]
    failed = unsound if ran else searched
    if len(failed) <= _MANY * len(searched):
        return []
    endings = Counter(fmt.outcome(outcome, run.plan.metric) for outcome in failed)
    [(most, count)] = endings.most_common(1)
    trials = (trial for trial in run.trials.values() if trial.kind is TrialKind.SEARCH)
    flag = run.batch_flag.name
    if flag and all(run.batch_flag.supersedes(trial) for trial in trials):
        most += f". Further trials would set {flag}: allow more trials (--max-trials)"
    if len(searched) == 1:
        return [f"the only other configuration did not run: {most}"]
    if ran:
        return [
            f"{len(failed)} of {len(searched)} other configurations failed, {count} with {most}"
        ]
    return [f"none of the {len(searched)} other configurations ran. {count} failed with {most}"]


def _why_no_gain(run: Run) -> str:
    """Explain why there is no ratio to the user's own configuration."""
    baseline, first = run.baseline, next(iter(run.trials.values()))
    ended = run.outcomes.get(first.id)
    if baseline in (None, first) and ended is not None and ended.kind.is_out_of_memory:
        how = f"stage {first.stage}, micro batch {first.batch.micro_batch}"
        how += advice.blame_bucket(run, first)
        return f"your configuration runs out of memory ({how})"
    if baseline is None or baseline.id not in run.outcomes:
        return "your configuration was not measured"
    ended = run.outcomes[baseline.id]
    how = "could not be measured" if ended.kind is OutcomeKind.INVALID else "did not run"
    return f"your configuration {how} ({fmt.outcome(ended, run.plan.metric)})"


def _changed(run: Run, best: Trial) -> str:
    changes = [d for d in differences(run.plan, best, own_switches(run)) if d.key != TRAIN_BATCH]
    if best is run.baseline or not changes:
        return ""
    rest = f" and {len(changes) - _MOST_CHANGES} more" if len(changes) > _MOST_CHANGES else ""
    return f"{', '.join(map(str, changes[:_MOST_CHANGES]))}{rest}."


def _confidence(run: Run, best: Trial) -> Iterator[str]:
    """Yield sentences on how well the recommendation is supported."""
    finals = run.finals
    if finals is None or not finals.over:
        if search_gain(run) is not None and any(outcome.ok for outcome in _searched(run)):
            yield _how_often(run, best)
            yield _no_finals(run)
        return
    if finals.comparison is None:
        if best is run.baseline:
            return
        why = "faster configurations failed when run again, and this one was measured once"
        if finals.own_failed:
            why = "your configuration failed when it was run again"
        yield f"low, because {_NONE_CONFIRMED if finals.pick is None else why}."
        return
    pairs = fmt.count(len(finals.pairs), "pair")
    noise = fmt.percent(finals.comparison.variation.sd)
    yield f"95 % confidence interval from {pairs} of runs; run-to-run variation {noise}."
    if best is run.baseline:
        return
    if not finals.is_better:
        how = "faster" if finals.comparison.gain.high < 1 else "as fast"
        yield f"Your configuration is {how}, but its batch sizes are not those that you asked for."
    finding = check_of(run).compare(best)
    if finding.agreement is Agreement.SAME:
        yield "On the same data the losses agree with yours."
    else:
        yield f"Losses were not compared: {finding.reason}."


def _how_often(run: Run, best: Trial) -> str:
    pairs = 0 if run.finals is None else len(run.finals.pairs)
    if pairs:
        return f"low, because the finals have completed only {fmt.count(pairs, 'pair')}."
    if best is run.baseline:
        return "low, because each configuration was measured once."
    return "low, because each configuration was measured once, which overstates gains."


def _no_finals(run: Run) -> str:
    """Explain why no finals confirm the search, and what to do."""
    if run.finals is not None:
        return "The finals have not finished."
    if run.plan.finals is not None and run.plan.finals < PAIR:
        return f"Finals would confirm the result (--finals {PAIR} or more)."
    if run.plan.max_trials < LEAST_RUN:
        return f"Finals would confirm the result (--max-trials {LEAST_RUN} or more)."
    resume = "" if ENGINE in run.info else "; if the run was ended, continue it with --resume"
    if any(trial.kind is TrialKind.FINAL for trial in run.trials.values()):
        return f"The search resumed after its finals, so the result needs new finals{resume}."
    if run.best is run.baseline and run.stop_reason is not None:
        return "There were no finals: no other configuration is likely to be faster by enough."
    return f"The finals have not begun{resume}."


def _batch_advice(run: Run, best: Trial) -> list[str]:
    """Return a sentence on the gain at the user's global batch, if the best has another."""
    baseline, size = run.baseline, run.plan.own_batch.train_batch_size
    if baseline is None or best.batch.train_batch_size == size:
        return []
    steps, gained = _steps_per_epoch(run, baseline, best), _describe_own_batch(run, baseline, best)
    keep = "To keep this batch, use --train-batch-size own."
    return [f"Batch: at your global batch of {size}, {gained}. {keep}{steps}"]


def _steps_per_epoch(run: Run, baseline: Trial, best: Trial) -> str:
    """Return ` Steps per epoch: 100 -> 2.`, or nothing if the data's size is unknown."""
    counts = []
    for trial in (baseline, best):
        outcome = run.outcomes.get(trial.id)
        if outcome is None or outcome.most_samples is None:
            return ""
        counts.append(outcome.most_samples // trial.batch.micro_batch)
    before, after = counts
    return f" Steps per epoch: {before} -> {after}."


def _describe_own_batch(run: Run, baseline: Trial, best: Trial) -> str:
    finals, size = run.finals, run.plan.own_batch.train_batch_size
    if finals is not None and finals.over:
        same_batch, trial = finals.same_batch_gain, run.same_batch_final
        if trial is not None and trial.id in run.disqualified:
            return f"{trial.name} is excluded"
        if same_batch is not None and trial is not None:
            return f"{trial.name} gains {say_gain(same_batch)}"
        if best.id not in finals.with_same_batch:
            other = "larger" if best.batch.train_batch_size > size else "smaller"
            return f"nothing faster was found: the whole gain comes from the {other} batch"
    user_value = run.value(baseline)
    measured = {
        run.value(trial) or 0.0: trial
        for trial in searched(run)
        if trial.batch.train_batch_size == size
    }
    if not measured or user_value is None:
        return "nothing else was measured"
    value = min(measured, key=run.plan.objective.loss)
    ratio = run.plan.objective.gain(value, user_value)
    return f"{measured[value].name} gains {ratio:.2f}x, unconfirmed"
