"""The configurations of a problem, in the form that the models of speed and failures use."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dsat.search.base import Memory, Problem, largest_micro_batch
from dsat.search.feasibility import Values
from dsat.search.normal import Array
from dsat.search.speed import Points, Prior
from dsat.search.step_time import COLUMNS, Job, acts_on_whole_step, work
from dsat.space.overrides import GAS

Key = tuple[int, int]
"""Key of settings: the number of a branch, and the index of the settings in it."""

GROUPS = COLUMNS.index("data_parallel")
TILE = 8  # micro batches that are multiples of this fill matrix units at any sequence length
# Prior standard deviations of effects on the log step time that the physical model misses: of a
# strategy, a setting, a script's switch, and whole tiles. Only their ratios count, because their
# scale is learned. Without whole tiles, replays (see `choice`) end 0.1 points lower.
_STRATEGY_SD, _SETTING_SD, _SWITCH_SD, _TILES_SD = 0.04, 0.02, 0.2, 0.02
_ALONE_SD = 0.1  # the same for the effect of other trials on the machine
_STRATEGY = "strategy"  # name of a trait


@dataclass(frozen=True)
class Row:
    """Settings in the form that the models of speed and failures use.

    Attributes:
        work: see `step_time.work`.
        traits: 1 for each value that the settings or the strategy have, else 0.
        values: names of settings and their values, as JSON text.
        gas: accumulation steps, unless a global batch size decides them.
    """

    work: Array
    traits: Array
    values: Values
    gas: int


class Configurations:
    """The configurations of a problem.

    Attributes:
        prior: the model of speed before any measurement. The traits of a point are `Row.traits`,
            whether the micro batch fills whole tiles, and whether the trial runs alone.
        sample_part: fraction of a device's memory that the activations of one sample take.
    """

    def __init__(self, problem: Problem) -> None:
        space, profile = problem.space, problem.profile
        self.problem = problem
        self.sample_part = max(1, profile.activation_bytes_per_sample) / profile.slot_memory_bytes
        hosts = space.freedom.slots_per_host
        self._job = Job.of_profile(profile, slots=space.slots, slots_per_host=hosts)
        effects = {(_STRATEGY, strategy.name): _STRATEGY_SD for strategy in space.strategies}
        self._first: dict[str, str] = {}
        for branch in space.branches:
            for key, values in branch.searched:
                texts = [_text(value) for value in values]
                self._first.setdefault(key, texts[0])
                sd = _SWITCH_SD if acts_on_whole_step(key) else _SETTING_SD
                effects |= {(key, text): sd for text in texts if key != GAS}
        self._traits = {trait: position for position, trait in enumerate(effects)}
        # `Prior.covariance` halves variances, as a new value changes two traits. These change one.
        of_trials = [math.sqrt(2) * sd for sd in (_TILES_SD, _ALONE_SD)]
        self.prior = Prior(self._job.hardware, np.array([*effects.values(), *of_trials]))
        self.row = functools.cache(self._make_row)
        self.set_memory(None)

    def set_memory(self, memory: Memory | None) -> None:
        """Set the predictions of memory, which change between decisions."""
        self.memory = memory
        self.edge = functools.cache(self._find_edge)

    def _make_row(self, key: Key) -> Row:
        branch = self.problem.space.branches[key[0]]
        strategy, settings = branch.strategy, branch.settings(key[1])
        values = tuple((name, _text(value)) for name, value in settings.items())
        searched = {name: _text(value) for name, value in branch.values_in(settings).items()}
        having = {**self._first, **dict(values), **searched, _STRATEGY: strategy.name}
        traits = np.zeros(len(self._traits))
        traits[[self._traits[trait] for trait in having.items() if trait in self._traits]] = 1.0
        gas = int(settings.get(GAS, self.problem.space.gas))
        return Row(work(self._job, strategy, settings), traits, values, gas)

    def settings_of(self, key: Key) -> Mapping[str, Any]:
        branch, index = key
        return self.problem.space.branches[branch].settings(index)

    def _find_edge(self, key: Key) -> float:
        """Return the limit of the micro batch: the largest that should fit, plus 0.5."""
        largest = largest_micro_batch(self.problem, self.memory, self.settings_of(key))
        return math.floor(largest) + 0.5

    def points(
        self,
        keys: Sequence[Key],
        micro_batch: Array,
        gas: Array | None = None,
        is_alone: Any = True,
    ) -> Points:
        """Return n configurations as `Points`.

        Args:
            keys, micro_batch: settings and micro batch of each configuration, (n,).
            gas: accumulation steps, (n,); by default from `Space.accumulation`.
            is_alone: whether no other trials ran at the same time, (n,) or one for all.
        """
        rows = [self.row(key) for key in keys]
        edges = np.array([*map(self.edge, keys)])
        size = np.asarray(micro_batch, float)
        work = np.array([row.work for row in rows]).reshape(-1, len(COLUMNS))
        traits = np.array([row.traits for row in rows]).reshape(-1, len(self._traits))
        is_alone = np.broadcast_to(is_alone, size.shape)
        if gas is None:
            own = np.array([row.gas for row in rows])
            gas = self.problem.space.accumulation(size, work[:, GROUPS], own)
        return Points(
            work=work,
            micro_batch=size,
            gas=np.asarray(gas, float),
            room=(edges - size) * self.sample_part,
            traits=np.column_stack([traits, size % TILE == 0, is_alone]),
        )

    def log_work(self, points: Points) -> Array:
        """Return log samples per step, (n,); minus log seconds, they give the log rate.

        If a smaller metric is better, as for times, return 0 instead.
        """
        work: Array = np.log(points.micro_batch * points.gas * points.work[:, GROUPS])
        return np.zeros(len(work)) if self.problem.objective.smaller_is_better else work

    def octaves(self, keys: Sequence[Key], micro_batch: Any) -> Array:
        """Return log2 of the ratio of the micro batches to their limits (`edge`), (n,)."""
        edges = np.maximum(0.5, np.array([*map(self.edge, keys)]))
        octaves: Array = np.log2(micro_batch / edges)
        return octaves

    def changes(self, branch: int, best: Mapping[str, Any]) -> list[Key]:
        """Return the keys of the best settings, and of all settings that differ in one value.

        Args:
            best: best settings so far; a value that the branch lacks is replaced by its first one.
        """
        whole = self.problem.space.branches[branch]
        at_best, others, own = 0, [], whole.values_in(best)
        for (name, values), stride in zip(whole.searched, whole.strides, strict=True):
            digit = values.index(own[name]) if own[name] in values else 0
            at_best += stride * digit
            others += [stride * (other - digit) for other in range(len(values)) if other != digit]
        return [(branch, at_best + change) for change in (0, *others)]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
