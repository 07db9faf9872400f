"""Specification of a measurement."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from dsat.values.codec import Recorded
from dsat.values.parallelism import DATA_ONLY, Parallelism
from dsat.values.trial import KnownBefore, Trial, TrialKind, TrialOptions

MAX_SKIPPED_STEPS = 60  # fp16: overflows halve the loss scale: 16 times from 2**16, 32 from 2**32
MAX_EXTRA_STEPS = 500  # limit on extra warm-up steps, and on steps beyond `max_steps`


@dataclass(frozen=True)
class MeterSpec(KnownBefore, Recorded):
    """Specification of a measurement, and facts that are known before it.

    Attributes:
        micro_batch, gas, stage, slots, parallelism: what the engine must use. If slots is 0, the
            engine's own values replace them (`complete_from`).
        host_slots: slots that share the host's memory.
        profile: whether the first step counts parameters, FLOPs and activations.
        measures: whether the measured speed is used; False if only the profile is needed.
    """

    options: TrialOptions
    micro_batch: int
    gas: int
    stage: int
    slots: int
    parallelism: Parallelism = DATA_ONLY
    host_slots: int = 1
    profile: bool = False
    measures: bool = True

    @classmethod
    def build(
        cls, trial: Trial, options: TrialOptions, *, slots: int, host_slots: int = 1
    ) -> MeterSpec:
        """Return the specification for a trial; a profile trial measures a single step."""
        measures = trial.kind is not TrialKind.PROFILE
        if not measures:
            # One measured step is enough. Memory peaks need a second step before it, since the
            # optimizer makes its moments in the first.
            options = replace(options, start_step=3, end_step=3, max_steps=1)
        return cls(
            options,
            micro_batch=trial.batch.micro_batch,
            gas=trial.batch.gas,
            stage=trial.stage,
            slots=slots,
            parallelism=trial.batch.parallelism,
            host_slots=host_slots,
            profile=trial.profiles,
            measures=measures,
            **{field.name: getattr(trial, field.name) for field in fields(KnownBefore)},
        )

    def complete_from(self, engine: Any) -> MeterSpec:
        """Return the specification, with the engine's own values if `slots` is 0."""
        if self.slots:
            return self
        micro_batch = engine.train_micro_batch_size_per_gpu()
        return replace(
            self,
            options=replace(self.options, own_micro_batch=micro_batch),
            micro_batch=micro_batch,
            gas=engine.gradient_accumulation_steps(),
            stage=engine.zero_optimization_stage(),
            slots=int(engine.world_size),
            parallelism=parallelism_of(engine),
        )

    @property
    def longest(self) -> int:
        """Number of optimizer steps that the training loop must allow."""
        first, max_steps = self.options.start_step, self.options.max_steps
        return first - 1 + max_steps + MAX_SKIPPED_STEPS + 2 * MAX_EXTRA_STEPS


def parallelism_of(engine: Any) -> Parallelism:
    """Return an engine's parallelism (DeepSpeed 0.19.8, `_configure_distributed_model`)."""
    sizes = (getattr(engine, name, 1) for name in ("mp_world_size", "sequence_parallel_size"))
    return Parallelism(*(size if isinstance(size, int) else 1 for size in sizes))
