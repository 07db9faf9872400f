"""What may be tried: the knobs of each ZeRO stage, their conditions, and the micro batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsat.trial import BatchTriple

STAGES = (0, 1, 2, 3)
DEFAULT_STAGES = (1, 2, 3)
LARGEST_MICRO_BATCH = 2**20


@dataclass(frozen=True)
class Knob:
    """One setting of `zero_optimization` that a search may choose.

    Attributes:
        stages: the ZeRO stages in which it has an effect.
        needs_data_parallel: without effect when there is a single data-parallel slot.
        reason: why it is worth trying, in one line.
    """

    key: str
    values: tuple[int | bool, ...]
    stages: tuple[int, ...]
    needs_data_parallel: bool
    reason: str


_BUCKETS = tuple(n * 10**m for m in range(6, 10) for n in (1, 5))

# The values are those of Determined's DeepSpeed Autotune 0.37 (its DEFAULT_ZERO_SEARCH_SPACE). That
# a knob does nothing on one slot was read in deepspeed 0.19.8: runtime/utils.py:1012 (allgather),
# runtime/zero/stage_1_and_2.py (reductions are skipped when the process group has one member).
KNOBS = (
    Knob(
        "reduce_bucket_size",
        _BUCKETS,
        (1, 2, 3),
        False,
        "small buckets save memory, large ones need fewer reductions",
    ),
    Knob(
        "allgather_bucket_size",
        _BUCKETS,
        (1, 2, 3),
        True,
        "small buckets save memory, large ones need fewer gathers",
    ),
    Knob("overlap_comm", (True, False), (2, 3), True, "hides reductions behind the backward pass"),
    Knob(
        "reduce_scatter", (True, False), (2, 3), True, "reduce-scatter moves less than all-reduce"
    ),
    Knob(
        "contiguous_gradients",
        (True, False),
        (2, 3),
        False,
        "avoids fragmentation at the price of a copy",
    ),
    Knob(
        "allgather_partitions", (True, False), (3,), True, "one gather against several broadcasts"
    ),
)


def allowed_micro_batches(
    *, train_batch_size: int | None, divisible_by: int, slots: int
) -> Sequence[int]:
    """All micro batches that may be tried, ascending.

    Args:
        train_batch_size: if given, micro batch x gas x slots must be exactly this.
        divisible_by: micro batches must be multiples of this.
        slots: data-parallel slots of a trial.

    Returns:
        An ascending sequence, empty when the two constraints cannot be met together.
    """
    if train_batch_size is None:
        return range(divisible_by, LARGEST_MICRO_BATCH + 1, divisible_by)
    if train_batch_size % slots:
        return ()
    per_slot = train_batch_size // slots
    small = [d for d in range(1, int(per_slot**0.5) + 1) if per_slot % d == 0]
    divisors = sorted({*small, *(per_slot // d for d in small)})
    return tuple(d for d in divisors if d % divisible_by == 0)


class Space:
    """Every configuration that may be tried: stage x knob values x micro batch.

    Args:
        stages: the ZeRO stages to search.
        micro_batches: allowed micro batches, ascending.
        slots: data-parallel slots of a trial.
        gas: gradient accumulation steps, unless `train_batch_size` decides them.
        train_batch_size: if given, gas makes every batch exactly this.
        fixed: settings of `zero_optimization` that the user chose by hand: not searched.
        num_params: buckets that could never be filled by this many parameters are left out.
    """

    def __init__(
        self,
        *,
        stages: Sequence[int],
        micro_batches: Sequence[int],
        slots: int,
        gas: int,
        train_batch_size: int | None = None,
        fixed: Sequence[str] = (),
        num_params: int | None = None,
    ) -> None:
        self.stages = tuple(stages)
        self.micro_batches = micro_batches
        self.slots = slots
        self._gas = gas
        self._train_batch_size = train_batch_size
        self._knobs = {
            stage: [
                (knob.key, _useful_values(knob, num_params))
                for knob in KNOBS
                if stage in knob.stages
                and knob.key not in fixed
                and (slots > 1 or not knob.needs_data_parallel)
            ]
            for stage in self.stages
        }

    def num_zero_configs(self, stage: int) -> int:
        """How many ZeRO sections the stage has."""
        count = 1
        for _, values in self._knobs[stage]:
            count *= len(values)
        return count

    def zero_config(self, stage: int, index: int) -> dict[str, Any]:
        """The ZeRO section number `index` (from 0) of a stage."""
        section: dict[str, Any] = {"stage": stage}
        for key, values in self._knobs[stage]:
            index, digit = divmod(index, len(values))
            section[key] = values[digit]
        return section

    def batch(self, micro_batch: int) -> BatchTriple:
        """The batch sizes that go with a micro batch."""
        gas = self._gas
        if self._train_batch_size is not None:
            gas = self._train_batch_size // (micro_batch * self.slots)
        return BatchTriple(micro_batch * gas * self.slots, micro_batch, gas)

    def describe(self) -> list[str]:
        """One line per stage: what is searched in it."""
        return [
            f"stage {stage}: "
            + (", ".join(f"{key} {_short(values)}" for key, values in knobs) or "no knobs")
            for stage, knobs in self._knobs.items()
        ]


def smallest_buckets(*, fixed: Sequence[str]) -> dict[str, int]:
    """The bucket sizes that need the least memory, but for those the user chose."""
    return {k.key: k.values[0] for k in KNOBS if k.values is _BUCKETS and k.key not in fixed}


def overrides_for(zero: Mapping[str, Any], batch: BatchTriple) -> dict[str, Any]:
    """The DeepSpeed settings of one trial, to be laid over the user's configuration."""
    return {"zero_optimization": dict(zero), **batch.config()}


def _useful_values(knob: Knob, num_params: int | None) -> tuple[int | bool, ...]:
    """A bucket larger than the model is allocated but never filled: one such is enough."""
    if knob.values is not _BUCKETS or num_params is None:
        return knob.values
    enough = [value for value in _BUCKETS if value >= num_params][:1]
    return tuple(value for value in _BUCKETS if value < num_params) + tuple(enough)


def _short(values: Sequence[int | bool]) -> str:
    return "|".join(str(v).lower() if isinstance(v, bool) else f"{v:.0e}" for v in values)
