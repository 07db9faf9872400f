"""The finals: alternating re-runs of the search's best configuration and the user's own.

The best of many noisy measurements is usually lucky (the winner's curse), so the gain is measured
anew. The configuration with the best expected value is the pick. The pick and the user's own
configuration run in pairs, and the reported gain is the mean of the pairs alone. The order within
pairs alternates, so that a machine that slows down steadily favours neither.

The gain is judged only after certain numbers of pairs. The finals end early if a 99 % interval
excludes "no gain" (Haybittle 1971, Peto 1976) or any worthwhile gain. Since the number of pairs
thus depends on their results, the reported 95 % interval is as wide as one of 97.5 % for a fixed
number of pairs. `benchmarks/winners_curse.py` measures how often it contains the true gain.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsat.run.comparison import Comparison, Gain, margin_of_single_runs

# Seven pairs detect a gain of 3 % nearly always at 1 % of run-to-run noise, and in half of the
# runs at 2 %. Beyond `_UNCLEAR` trials, finals take at most 30 % of the search's time.
MOST_TRIALS, LEAST_TRIALS = 15, 5
_UNCLEAR = 7  # allowed regardless of time: three pairs, and a run with the user's global batch
SHARE, MOST_COST = 0.25, 0.30
# Runs of fewer than `SHORT_RUN` trials have one pair of finals; of fewer than `LEAST_RUN`, none.
SHORT_RUN, LEAST_RUN = 12, 4
PAIR = 2
MOST_FAILURES = 2  # failed re-runs after which a configuration leaves the finals

# Numbers of pairs after which the gain is judged. One pair suffices only for a clear gain or loss
# of 1.3x (`_LARGE`) or more. With a limit of 1.5x, gains of 1.4x to 1.5x on a noisy machine took
# two or three pairs (`benchmarks/native.py`). With 1.3x, if runs vary by 5 %, a gain of 1.4x is
# reported 2 to 3 percentage points too high.
FIRST_LOOK, _LARGE = 1, math.log(1.3)
_LOOKS = (FIRST_LOOK, 2, 3, 5, 8, 13, 21, 34, 55)
_LEAST_ERROR = 0.003  # smallest difference that a run can resolve, as a logarithm
_MEMORY_STEP = math.log(1.05)  # memory that differs by a smaller factor counts as equal


def reserved(max_trials: int, asked: int | None = None) -> int:
    """Return the number of trials that a search reserves for the finals; 0 for no finals.

    `asked` is the user's limit on the finals; None reserves a share of all trials.
    """
    if asked is not None:  # keep trials for the baseline, perhaps a profile, and a candidate
        count = min(asked, max(reserved(max_trials), max_trials - 3))
        return count if count >= PAIR else 0
    if max_trials < SHORT_RUN:
        return PAIR if max_trials >= LEAST_RUN else 0
    return min(MOST_TRIALS, max(LEAST_TRIALS, int(SHARE * max_trials)))


def budget(max_trials: int, searched: int, asked: int | None = None, *, cost: float) -> int:
    """Return the number of trials that the finals after a search may use; 0 if less than a pair.

    Args:
        searched: number of trials before the finals.
        asked: as in `reserved`.
        cost: expected duration of one trial of the finals, as a fraction of the search's time.
    """
    most, remaining = reserved(max_trials, asked), max_trials - searched
    if asked is None and most:
        most = min(MOST_TRIALS, max(_UNCLEAR, int(MOST_COST / cost)))
    room = min(most, remaining)
    return room if room >= PAIR else 0


@dataclass(frozen=True)
class Contestant:
    """A configuration as the search measured it.

    Attributes:
        trial_id: the trial of the search, whose configuration the finals would run again.
        log_value: logarithm of the measured value; larger is better.
        standard_error: standard error of `log_value` in a single run.
        memory_bytes: peak memory of a device; None if unknown.
        changes: number of settings that differ from the user's own configuration.
        ran_alone: whether no other trial ran at the same time.
        predicted: the search's prediction of `log_value`. If the search has no model of speed, all
            configurations have the same one; without a prediction, it equals `log_value`.
    """

    trial_id: int
    log_value: float
    standard_error: float
    train_batch_size: int
    memory_bytes: int | None = None
    changes: int = 0
    ran_alone: bool = True
    predicted: float = 0.0

    @property
    def size(self) -> tuple[int, int, int]:
        """Sort key among equally fast configurations; smaller is better."""
        memory = round(math.log(self.memory_bytes) / _MEMORY_STEP) if self.memory_bytes else 0
        return self.train_batch_size, memory, self.changes


def rank_by_expectation(
    tried: Collection[Contestant], *, indifference: float = 0.0
) -> list[Contestant]:
    """Rank configurations for the comparison with the user's own.

    Configurations count as nearly best if the best expected value exceeds theirs by at most the
    fraction `indifference`. Of these, the one with the smallest `size` comes first. All others
    follow by expected value.
    """
    expected = dict(zip(tried, _expect_again(list(tried)), strict=True))
    level = max(expected.values()) - math.log1p(indifference)
    first = min(
        (c for c in tried if expected[c] >= level), key=lambda c: (c.size, -expected[c], c.trial_id)
    )
    by_value = sorted(tried, key=lambda c: (-expected[c], c.trial_id))
    return list(dict.fromkeys([first, *by_value]))


def _expect_again(contestants: Sequence[Contestant]) -> list[float]:
    """Return the expected log value of each configuration in a re-run.

    A noisy measurement above its prediction is mostly luck. So each measurement is shrunk towards
    its prediction plus the mean error of all predictions. It is shrunk the more, the better noise
    alone explains the variation of these errors (DerSimonian and Laird, Controlled Clinical Trials
    7 (1986)).
    """
    predicted = np.array([c.predicted for c in contestants])
    values = np.array([c.log_value for c in contestants]) - predicted
    variances = np.array([max(c.standard_error, _LEAST_ERROR) for c in contestants]) ** 2
    weights = 1 / variances
    spread_squares = weights @ (values - np.average(values, weights=weights)) ** 2
    scale = weights.sum() - weights @ weights / weights.sum()
    spread = max(0.0, spread_squares - (len(values) - 1)) / scale if len(values) > 1 else 0.0
    mean = np.average(values, weights=1 / (variances + spread))
    expected = predicted + mean + (values - mean) * spread / (spread + variances)
    return [float(value) for value in expected]


class Role(str, enum.Enum):
    """Configuration that a turn of the finals runs."""

    OWN = "own"
    LEADER = "leader"
    SAME_BATCH = "same batch"  # the best configuration with the user's global batch


@dataclass(frozen=True)
class Rules:
    """Limits of the finals.

    Attributes:
        trials: number of runs allowed.
        indifference: gain, as a fraction, below which a larger global batch is not worth it.
        least_gain: the finals end early if the gain is surely below this fraction; None for never.
        first_look: number of pairs after which the gain is judged for the first time.
        most_failures: number of failed re-runs after which the next candidate replaces the pick.
    """

    trials: int
    indifference: float = 0.0
    least_gain: float | None = None
    first_look: int = FIRST_LOOK
    most_failures: int = MOST_FAILURES

    @classmethod
    def of_event(cls, event: Mapping[str, Any]) -> Rules:
        """Return the rules in a finals event; missing ones get the values of earlier versions."""
        return cls(
            trials=event["trials"],
            indifference=event["indifference"],
            least_gain=event.get("least_gain"),
            first_look=event.get("first_look", 2),
            most_failures=event.get("most_failures", 1),
        )


class Finals:
    """The state of the finals: which configuration runs next, and in the end which one won.

    Args:
        candidates: best first; if one fails or trains differently, the next replaces it.
        same_batch: trial ids of candidates with another global batch than the user's, for which a
            configuration with the user's global batch runs too.

    Attributes:
        pick: candidate that is compared with the user's own configuration; None if none is left.
        turn: next run; None when the finals are over.
        used: number of runs so far.
        pairs: logarithms of the values of the user's own configuration and the pick.
    """

    def __init__(
        self,
        own: Contestant,
        candidates: Sequence[Contestant],
        rules: Rules,
        *,
        same_batch: Collection[int] = (),
    ) -> None:
        self.own = own
        self.pick: Contestant | None = None
        self.turn: Role | None = None
        self.used = 0
        self.pairs: list[tuple[float, float]] = []
        self.with_same_batch = frozenset(same_batch)
        self._rules = rules
        self._candidates = list(candidates)
        self._own_failures = self._pick_failures = 0
        self._pair: dict[Role, float] = {}  # runs of an incomplete pair
        self._same_batch: float | None = None  # log gain over the baseline's run just before
        self._same_batch_due = False
        self._continue()

    @property
    def over(self) -> bool:
        return self.turn is None

    @property
    def repeated_id(self) -> int | None:
        """Id of the trial that the turn runs again; None for `Role.SAME_BATCH`."""
        contestant = self.own if self.turn is Role.OWN else self.pick
        return None if contestant is None or self.turn is Role.SAME_BATCH else contestant.trial_id

    @property
    def own_failed(self) -> bool:
        """Return whether two re-runs of the user's own configuration failed."""
        return self._own_failures >= MOST_FAILURES

    def mean_log_value(self, trial_id: int) -> float | None:
        """Return the mean log value of a trial in the pairs; None if it is in no pair.

        The difference of two such means is the logarithm of the gain.
        """
        for role, contestant in enumerate((self.own, self.pick)):
            if self.pairs and contestant is not None and contestant.trial_id == trial_id:
                return statistics.fmean(pair[role] for pair in self.pairs)
        return None

    @property
    def comparison(self) -> Comparison | None:
        """Comparison of the pick with the user's own configuration; None without a pair."""
        if not self.pairs or self.pick is None:
            return None
        searched = (self.own.log_value, self.pick.log_value if self.pick.ran_alone else None)
        return Comparison.of_pairs(self.pairs, searched)

    @property
    def is_better(self) -> bool:
        """Return whether the pick is better with 95 % confidence."""
        comparison = self.comparison
        return comparison is not None and comparison.is_better

    @property
    def is_worth_it(self) -> bool:
        """Return whether the pick is better, and by enough if its global batch is larger."""
        comparison = self.comparison
        if comparison is None or self.pick is None or not self.is_better:
            return False
        larger = self.pick.train_batch_size > self.own.train_batch_size
        return not larger or comparison.gain.ratio > 1 + self._rules.indifference

    @property
    def same_batch_gain(self) -> Gain | None:
        """Gain of the configuration with the user's global batch; None until it and a pair ran."""
        comparison = self.comparison
        if self._same_batch is None or comparison is None:
            return None
        # A single run shows no variation, so it gets the margin of a single pair.
        margin = comparison.margin * math.sqrt(len(self.pairs))
        return Gain.of_log(self._same_batch, margin)

    def record(self, log_value: float | None, *, may_repeat: bool = True) -> None:
        """Record the result of the turn.

        Args:
            log_value: None for a failure.
            may_repeat: whether a pick that failed may stay in the finals.
        """
        turn, self.used = self.turn, self.used + 1
        if turn is Role.SAME_BATCH:
            self._same_batch = None if log_value is None else log_value - self.pairs[-1][0]
        elif turn is not None and log_value is not None:
            self._pair[turn] = log_value
        elif turn is Role.OWN:
            self._own_failures += 1
        else:
            self._handle_failure(may_repeat)
        self._continue()

    def disqualify(self) -> None:
        """Exclude the pick from winning because it trains differently."""
        self._drop_pick()
        self._continue()

    def forget_same_batch(self) -> None:
        """Exclude the configuration at the user's global batch because it trains differently."""
        self._same_batch = None

    def _continue(self) -> None:
        """Choose the next turn, and the next candidate if there is no pick."""
        self.turn = None
        if self.pick is None and self._candidates and self._room >= PAIR:
            self.pick, self._pick_failures = self._candidates.pop(0), 0
            self._same_batch_due = self.pick.trial_id in self.with_same_batch
        if self.pick is None:
            return
        if len(self._pair) == PAIR:
            self.pairs.append((self._pair[Role.OWN], self._pair[Role.LEADER]))
            self._pair = {}
        decided = self._is_decided()
        # The second pair ends with a run of the baseline, to which this gain refers.
        is_due = self._same_batch_due and (decided or (len(self.pairs) == 2 and not self._pair))
        if is_due and not self.own_failed and self._room:
            self.turn, self._same_batch_due = Role.SAME_BATCH, False
        elif not decided and self._room >= PAIR - len(self._pair):
            order = (Role.LEADER, Role.OWN) if len(self.pairs) % 2 else (Role.OWN, Role.LEADER)
            self.turn = next(role for role in order if role not in self._pair)

    @property
    def _room(self) -> int:
        return self._rules.trials - self.used

    def _handle_failure(self, may_repeat: bool) -> None:
        """Drop a pick that failed, unless it may run again and has a pair or room for one."""
        self._pick_failures += 1
        may_repeat &= self._pick_failures < self._rules.most_failures
        if may_repeat and (self.pairs or self._room >= PAIR - len(self._pair)):
            return
        self._drop_pick()
        if self._room < PAIR:
            self.pick = self._surely_better()

    def _surely_better(self) -> Contestant | None:
        """Return the next candidate whose single run surely beats the baseline's, or None."""

        def least(candidate: Contestant) -> float:
            errors = candidate.standard_error, self.own.standard_error
            margin = margin_of_single_runs(errors, 1 + len(self._candidates))
            return candidate.log_value - self.own.log_value - margin

        return next((c for c in self._candidates if least(c) > 0), None)

    def _drop_pick(self) -> None:
        self.pick, self.pairs, self._pair, self._same_batch = None, [], {}, None

    def _is_decided(self) -> bool:
        """Return whether the finals end: `own_failed`, or a clear result at one of `_LOOKS`."""
        if self.own_failed:
            return True
        comparison, count = self.comparison, len(self.pairs)
        if comparison is None or count not in _LOOKS or count < self._rules.first_look:
            return False
        if count == 1 and abs(comparison.mean) < _LARGE:
            return False
        least = self._rules.least_gain
        return comparison.is_clear(None if least is None else math.log1p(least))
