"""Predicted memory of the settings and trials of a search."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from typing import Any

from dsat.memory.estimate import METHODS
from dsat.memory.predictor import Basis, MemoryModel, Shape
from dsat.space.overrides import overrides_for
from dsat.space.plan import Plan
from dsat.space.space import Space
from dsat.values import format as fmt
from dsat.values.outcome import ModelProfile, Outcome
from dsat.values.trial import BatchTriple

_MICRO_BATCH = "train_micro_batch_size_per_gpu"
# Without simulations, predictions are trusted up to this multiple of the largest micro batch that
# ran: the formulas do not know what a script computes outside of its model.
FARTHEST = 16


class Forecast:
    """Predicted memory of all configurations that a run may try, corrected by its trials."""

    def __init__(self, basis: Basis, plan: Plan, profile: ModelProfile, space: Space) -> None:
        self._plan = plan
        self._space = space
        self._shapes: dict[str, tuple[Shape, Shape | None]] = {}
        self._ran: dict[str, int] = {}  # the largest micro batch that ran, by strategy
        self.model = MemoryModel(
            basis,
            slots=plan.slots_per_trial,
            limit_bytes=profile.slot_memory_bytes,
            counts_context=plan.slot_memory_bytes is None,
            host_limit_bytes=profile.host_memory_bytes,
            on_device=profile.host_memory_bytes > 0,
        )

    def largest(self, settings: Mapping[str, Any]) -> float:
        """Return the largest micro batch that fits with some settings; 0 if none fits.

        With a fixed global batch, the largest micro batches may need no accumulation, and so no
        memory for accumulated gradients. Without simulations, `FARTHEST` limits the result.
        """
        max_gas_shape, min_gas_shape = self._shapes_of(settings)
        largest = self.model.largest(max_gas_shape)
        if min_gas_shape is not None:
            sizes, alone = self._space.micro_batches, self.model.largest(min_gas_shape)
            nearest = sizes[max(0, bisect.bisect_right(sizes, alone) - 1)]
            min_gas = self._space.batch(sizes[-1], settings).gas
            if self._space.batch(nearest, settings).gas == min_gas:
                largest = max(largest, alone)
        if self._ran and not self.model.basis.simulated:
            return min(largest, FARTHEST * max(self._ran.values()))
        return largest

    def fits(self, settings: Mapping[str, Any], micro_batch: int) -> bool:
        """Return whether a trial is predicted to fit, so that it may be launched.

        With --search-range-factor F above 1, it is enough if 1/F of the micro batch fits.
        """
        factor = max(1.0, self._plan.search_options.get("search_range_factor") or 1.0)
        shape = self._shape_of(settings, self._space.batch(micro_batch, settings).gas)
        return self.model.fits(shape, max(1, math.floor(micro_batch / factor)))

    def describe(self) -> list[str]:
        """Return a line about each strategy's memory; if nothing was simulated, add the reason.

        A line describes a strategy with the first value of every searched setting.
        """
        lines = []
        for branch in self._space.branches:
            settings = branch.settings(0)
            largest = int(self.largest(settings))
            smallest = self._space.micro_batches[0]
            shape, _ = self._shapes_of(settings)
            num_bytes = self.model.predicted_bytes(shape, smallest)
            ending = f"fits up to micro batch {largest}" if largest else "does not fit"
            ran = self._ran.get(shape.strategy)
            if ran and not largest:
                ending = f"predicted not to fit, although micro batch {ran} ran"
            if not self.model.fits_host(shape):
                ending = (
                    f"needs {fmt.memory(round(shape.host_bytes))} of host memory per rank, but "
                    f"only {fmt.memory(self.model.host_limit_bytes)} are available"
                )
            lines.append(
                f"{branch.strategy.label}: {fmt.memory(num_bytes)} per device at micro batch "
                f"{smallest}, {ending} (by {METHODS[shape.source]})"
            )
        note = self.model.basis.note
        return [*lines, f"memory is predicted by formula: {note}"] if note else lines

    # -- trials, described by their overrides of the user's configuration and their switches

    def predicted_bytes(self, overrides: Mapping[str, Any], script_args: Mapping[str, Any]) -> int:
        """Return the predicted peak memory of one slot, in bytes."""
        return self.model.predicted_bytes(
            self._shape(overrides, script_args), overrides[_MICRO_BATCH]
        )

    def learn(
        self, overrides: Mapping[str, Any], script_args: Mapping[str, Any], outcome: Outcome
    ) -> None:
        """Correct later predictions by a trial's outcome."""
        shape, micro_batch = self._shape(overrides, script_args), overrides[_MICRO_BATCH]
        self.model.learn(shape, micro_batch, outcome)
        if outcome.ok:
            self._ran[shape.strategy] = max(micro_batch, self._ran.get(shape.strategy, 0))

    def _shapes_of(self, settings: Mapping[str, Any]) -> tuple[Shape, Shape | None]:
        """Return the shape with the most accumulation steps, and that with the fewest.

        The second is None if all micro batches need the same number of steps.
        """
        key = repr(settings)  # cached, as each decision of a search needs thousands of shapes
        shapes = self._shapes.get(key)
        if shapes is None:
            sizes = self._space.micro_batches
            max_gas, min_gas = (
                self._space.batch(size, settings).gas for size in (sizes[0], sizes[-1])
            )
            max_gas_shape = self._shape_of(settings, max_gas)
            min_gas_shape = None if max_gas == min_gas else self._shape_of(settings, min_gas)
            shapes = self._shapes[key] = max_gas_shape, min_gas_shape
        return shapes

    def _shape_of(self, settings: Mapping[str, Any], gas: int) -> Shape:
        shared = self._plan.parallelism(settings)
        batch = BatchTriple.on(self._plan.slots_per_trial, shared, micro_batch=1, gas=gas)
        overrides = overrides_for(settings, batch)
        return self._shape(overrides, self._space.script_args(settings))

    def _shape(self, overrides: Mapping[str, Any], script_args: Mapping[str, Any]) -> Shape:
        return self.model.shape(self._plan.config(overrides), script_args)
