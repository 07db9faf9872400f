"""Location of a configuration in a space: the inverse of `Branch.settings`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsat.command import ds_config
from dsat.command.ds_config import BATCH_KEYS
from dsat.space.deepspeed_settings import SETTINGS, defaults
from dsat.space.overrides import GAS, overrides_for
from dsat.space.space import Space
from dsat.values import parallelism
from dsat.values.parallelism import SEQUENCE_SIZE
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import of_config

_ELEMENTS = [setting.path.partition(".")[2] for setting in SETTINGS if setting.elements]
_OTHER = object()  # differs from every value


@dataclass(frozen=True, order=True)
class Point:
    """A configuration of a space.

    Attributes:
        branch: position of the strategy in `Space.branches`.
        index: index of the settings in the branch; see `Branch.settings`.
        micro_batch: samples of a micro step; usually one of `Space.micro_batches`.
    """

    branch: int
    index: int
    micro_batch: int


class Locator:
    """Mapping from configurations to the points of a space."""

    def __init__(self, space: Space) -> None:
        self._space = space

    def locate(
        self, overrides: Mapping[str, Any], script_args: Mapping[str, Any], batch: BatchTriple
    ) -> tuple[Point | None, bool]:
        """Return the point of a trial's configuration, or the nearest one of its strategy.

        Args:
            overrides: DeepSpeed settings that replace the user's.
            script_args: values of the script's switches; missing ones have the script's own values.

        Returns:
            The point, or None if the space does not have the strategy; and whether the trial has
            exactly the settings and batch sizes of the point.
        """
        config = ds_config.prepare_for_training(self._space.freedom.base_config, overrides)
        strategies = list(self._space.strategies)
        strategy = of_config(config)
        if strategy not in strategies:
            return None, False
        number = strategies.index(strategy)
        branch = self._space.branches[number]
        actual = self._flat(config, {**self._own_switches, **script_args}, batch.gas)
        index = 0
        for stride, each in zip(branch.strides, self._flat_values(number), strict=True):
            distances = [_distance(actual, flat) for flat in each]
            index += stride * distances.index(min(distances))
        point = Point(number, index, batch.micro_batch)
        settings = branch.settings(index)
        is_exact = (
            batch.micro_batch in self._space.micro_batches
            and batch == self._space.batch(batch.micro_batch, settings)
            and actual == self._flat_of(settings)
        )
        return point, is_exact

    @functools.cached_property
    def _own_switches(self) -> dict[str, Any]:
        own = {name: values[0] for name, values in self._space.searched_switches.items()}
        return {**self._space.freedom.switches, **own}

    @functools.cache  # noqa: B019  (a locator lives as long as its run)
    def _flat_values(self, number: int) -> list[list[dict[str, Any]]]:
        """Return a flat configuration for each value of each searched setting of a branch."""
        branch = self._space.branches[number]
        return [
            [self._flat_of(branch.settings(stride * digit)) for digit in range(len(values))]
            for stride, (_, values) in zip(branch.strides, branch.searched, strict=True)
        ]

    def _flat_of(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        batch = self._space.batch(self._space.micro_batches[0], settings)
        config = ds_config.prepare_for_training(
            self._space.freedom.base_config, overrides_for(settings, batch)
        )
        script_args = {**self._own_switches, **self._space.script_args(settings)}
        return self._flat(config, script_args, settings.get(GAS, _OTHER))

    def _flat(
        self, config: Mapping[str, Any], script_args: Mapping[str, Any], gas: Any
    ) -> dict[str, Any]:
        """Return a configuration's values by path; accumulation steps only if they are searched."""
        canonical = canonical_config(config, num_params=self._space.num_params)
        settings = {key: value for key, value in canonical.items() if key not in BATCH_KEYS}
        flat = ds_config.flat({**settings, **script_args})
        return {**flat, GAS: gas} if self._searches_gas else flat

    @functools.cached_property
    def _searches_gas(self) -> bool:
        return any(key == GAS for branch in self._space.branches for key, _ in branch.searched)


def _distance(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Return the number of paths whose values differ."""
    return sum(one.get(path, _OTHER) != other.get(path, _OTHER) for path in {*one, *other})


def canonical_config(config: Mapping[str, Any], *, num_params: int | None = None) -> dict[str, Any]:
    """Return a DeepSpeed configuration in a canonical form, equal for equivalent configurations.

    It contains ZeRO's defaults, except for `Setting.is_later`, and no parallelism of size 1.

    Args:
        num_params: if given, larger sizes in elements, such as buckets, are replaced by it.
    """
    found = dict(config)
    shared = parallelism.of_config(config)
    for key, size in (("tensor_parallel", shared.tensor), (SEQUENCE_SIZE, shared.sequence)):
        if size == 1:
            found.pop(key, None)
    zero = found.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    later = defaults(stage, later=True)
    zero = {key: value for key, value in zero.items() if value != later.get(key, _OTHER)}
    zero = {"stage": stage, **defaults(stage), **zero}
    if num_params is not None:
        sizes = {key: zero.get(key) for key in _ELEMENTS}
        zero |= {k: min(n, num_params) for k, n in sizes.items() if isinstance(n, (int, float))}
    found["zero_optimization"] = zero
    return found
