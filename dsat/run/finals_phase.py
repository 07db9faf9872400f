"""The finals of a run: which configurations take part, and the trial of each turn."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

from dsat.run import finals
from dsat.run.events import EVENT_FINALS
from dsat.run.run import Run, searched
from dsat.run.trial_factory import count_finals, make_trial
from dsat.values.trial import BatchTriple, Trial, TrialKind

_RESERVES = 3  # candidates that can replace a pick that fails or trains differently


def begin(
    run: Run, reason: str, predicted: Callable[[Trial], float | None]
) -> dict[str, Any] | None:
    """Return the event that begins the finals; None if no pair is worthwhile or possible.

    Args:
        reason: why the search ended.
        predicted: `SearchPhase.predicted`.
    """
    plan, baseline = run.plan, run.baseline
    spent = len(run.trials) - count_finals(run)
    most = plan.max_trials - count_finals(run)
    if run.leader is None or baseline is None or run.value(baseline) is None:
        return None
    count = finals.budget(most, spent, plan.finals, cost=_cost(run, baseline, run.leader))
    contestants = [run.contestant(trial, predicted(trial)) for trial in contenders(run)]
    if not count or not contestants:
        return None
    expected = finals.rank_by_expectation(contestants, indifference=plan.indifference)
    candidates = _one_of_each_strategy(run, [c.trial_id for c in expected])
    return {
        "event": EVENT_FINALS,
        "reason": reason,
        "trials": count,
        "indifference": plan.indifference,
        "leaders": candidates[:1],
        "reserves": candidates[1:],
        "least_gain": plan.indifference,
        "first_look": finals.FIRST_LOOK,
        "most_failures": finals.MOST_FAILURES,
        "same_batch": [
            trial_id
            for trial_id in candidates
            if _match_own_batch(run, run.trials[trial_id]) is not None
        ],
    }


def _one_of_each_strategy(run: Run, ranked: list[int]) -> list[int]:
    """Return the leader and the reserves: first the best of each strategy, in case one fails."""
    first: dict[str, int] = {}
    for trial_id in ranked:
        first.setdefault(run.trials[trial_id].strategy, trial_id)
    return list(dict.fromkeys([*first.values(), *ranked]))[: 1 + _RESERVES]


def _cost(run: Run, baseline: Trial, leader: Trial) -> float:
    """Return the expected duration of a final, divided by the total duration of all trials."""
    outcomes = run.outcomes
    took_s = sum(outcome.duration_s for outcome in outcomes.values())
    both_s = outcomes[baseline.id].duration_s + outcomes[leader.id].duration_s
    return both_s / 2 / took_s if took_s else 1 / len(outcomes)


def next_trial(run: Run) -> Trial | None:
    """Return the final to start next, alone on the machine; None to wait for an outcome."""
    begun = run.finals
    assert begun is not None and begun.pick is not None
    if begun.over or run.running:
        return None
    if begun.repeated_id is None:
        configuration = _match_own_batch(run, run.trials[begun.pick.trial_id])
        assert configuration is not None
        return make_trial(run, TrialKind.FINAL, *configuration)
    trial = run.trials[begun.repeated_id]
    return make_trial(
        run,
        TrialKind.FINAL,
        trial.overrides,
        trial.batch,
        trial.script_args,
        predicted_bytes=trial.predicted_bytes,
    )


def _match_own_batch(
    run: Run, pick: Trial
) -> tuple[dict[str, Any], BatchTriple, dict[str, Any]] | None:
    """Return overrides, batch sizes and switches to compare at the user's global batch size.

    These are the best that the search measured at that size, or else the pick's settings with
    gradient accumulation if necessary. Return None if the pick itself has that size, if the result
    would be the user's own configuration, or if no allowed micro batch divides the size.
    """
    plan, user_batch = run.plan, run.plan.own_batch
    if pick.batch.train_batch_size == user_batch.train_batch_size:
        return None
    size = user_batch.train_batch_size
    measured = [trial for trial in searched(run) if trial.batch.train_batch_size == size]
    if measured:
        best = max(measured, key=lambda trial: run.contestant(trial).log_value)
        return dict(best.overrides), best.batch, dict(best.script_args)
    slots, shared = plan.slots_per_trial, pick.batch.parallelism
    per_group, rest = divmod(user_batch.train_batch_size, shared.data(slots))
    sizes, most = plan.allowed_micro_batches, min(per_group, pick.batch.micro_batch)
    smaller = sizes[: bisect.bisect_right(sizes, most)]
    micro_batch = max((size for size in smaller if per_group % size == 0), default=None)
    if micro_batch is None or rest:
        return None
    gas = per_group // micro_batch
    batch = BatchTriple.on(slots, shared, micro_batch=micro_batch, gas=gas)
    overrides = {**pick.overrides, **batch.config()}
    script_args = dict(pick.script_args)
    assert run.baseline is not None
    yours = plan.fingerprint(run.baseline.overrides, run.baseline.script_args)
    is_own = plan.fingerprint(overrides, script_args) == yours
    return None if is_own else (overrides, batch, script_args)


def contenders(run: Run) -> list[Trial]:
    """Return the trials of the search that the finals may compare with the baseline.

    If the baseline is the best, only two kinds of trials remain: those whose interval includes a
    worthwhile gain, and those that ran beside other trials although the baseline ran alone.
    """
    trials = [trial for trial in searched(run) if run.plan.admits(trial.batch)]
    if run.leader is not run.baseline:
        return trials
    return [trial for trial in trials if _may_gain(run, trial)]


def _may_gain(run: Run, trial: Trial) -> bool:
    assert run.baseline is not None
    baseline, contestant = run.contestant(run.baseline), run.contestant(trial)
    if baseline.ran_alone and not contestant.ran_alone:
        return True
    ran = sum(outcome.ok for outcome in run.outcomes.values())
    margin = NormalDist().inv_cdf(1 - 0.025 / ran)
    margin *= math.hypot(baseline.standard_error, contestant.standard_error)
    return contestant.log_value - baseline.log_value + margin > math.log1p(run.plan.indifference)
