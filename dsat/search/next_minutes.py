"""Expected gain of the next minutes of a search, for early stopping."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsat.search import step_time
from dsat.search.normal import Array, expected_largest_gain, expected_largest_gain_of

# Configurations that are asked what they may gain together; of a branch.
_HOPES, _HOPES_OF_EACH = 128, 24


@dataclass(frozen=True)
class Looked:
    """Candidates of a branch with one number of accumulation steps.

    There are m micro batches and s settings.

    Attributes:
        branch: of the space.
        sizes, gas: (m,).
        knobs: features of the settings, (s, number of features).
        gain: on the best so far, as predicted; a logarithm, (m, s).
        sd: of that.
        chance: that it runs, (m, s); 0 if it is not to be tried.
        trials: for how many like it there is time, (m, s).
    """

    branch: int
    sizes: Array
    gas: Array
    knobs: Array
    gain: Array
    sd: Array
    chance: Array
    trials: Array

    def hopes(self, fit: step_time.Fit) -> Hopes:
        """The most promising one of each micro batch and of each of the settings."""
        learnable = fit.learnable(self.sd)
        best_of = expected_largest_gain(self.gain, learnable, self.trials) * self.chance
        rows, columns = (np.arange(length) for length in best_of.shape)
        of_rows = rows * len(columns) + best_of.argmax(axis=1)
        of_columns = best_of.argmax(axis=0) * len(columns) + columns
        row, column = np.divmod(np.unique(np.concatenate((of_rows, of_columns))), len(columns))
        at = np.full(len(row), self.branch)
        return Hopes(
            step_time.Points(at, self.sizes[row], self.gas[row], self.knobs[column]),
            self.gain[row, column],
            self.chance[row, column],
            best_of[row, column],
        ).most(_HOPES_OF_EACH)


@dataclass(frozen=True)
class Hopes:
    """Configurations that the next minutes may gain most with, n of them.

    Attributes:
        points: themselves.
        gain: on the best so far, as predicted; a logarithm, (n,).
        chance: that it runs, (n,).
        best_of: the gain of the best of as many like it as there is time for, if none of them tells
            of another, (n,).
    """

    points: step_time.Points
    gain: Array
    chance: Array
    best_of: Array

    def most(self, count: int) -> Hopes:
        """So many of them, the most promising first."""
        kept = np.argsort(-self.best_of, kind="stable")[:count]
        return Hopes(self.points.only(kept), self.gain[kept], self.chance[kept], self.best_of[kept])


def worth(looked: Sequence[Looked], fit: step_time.Fit, reference: step_time.Points) -> float:
    """The most that the next minutes may gain, as a logarithm.

    The smaller of two bounds: of so many trials as there is time for, if all promise as much as the
    most promising one and none tells of another; and of any number of the most promising trials,
    each of which tells of the others what it does.

    Args:
        looked: what may be tried.
        fit: the model of time.
        reference: the best configuration so far.
    """
    each = [found.hopes(fit) for found in looked]
    hopes = Hopes(
        step_time.Points.of([hopes.points for hopes in each]),
        np.concatenate([hopes.gain for hopes in each]),
        np.concatenate([hopes.chance for hopes in each]),
        np.concatenate([hopes.best_of for hopes in each]),
    ).most(_HOPES)
    moved = fit.learnable_together(hopes.points, reference)
    both_run = np.outer(hopes.chance, hopes.chance)
    together = expected_largest_gain_of(hopes.gain * hopes.chance, moved * both_run)
    return min(float(hopes.best_of[0]), together)
