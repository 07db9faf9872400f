"""Trials: what a search proposes, and what is run of it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsat.values.codec import Recorded
from dsat.values.outcome import StepFacts
from dsat.values.parallelism import DATA_ONLY, Parallelism

# Factor by which the fewest steps may exceed a trial's time limit for measuring: one or two steps
# give no confidence interval.
FEWEST_MAY_TAKE = 3.0


class TrialKind(str, enum.Enum):
    """Purpose of a trial."""

    PROFILE = "profile"
    BASELINE = "baseline"
    SEARCH = "search"
    FINAL = "final"
    REPEAT = "repeat"  # of the baseline, to measure how much runs vary


@dataclass(frozen=True)
class BatchTriple:
    """Batch sizes of a trial.

    Attributes:
        train_batch_size: samples of an optimizer step: micro batch x gas x data-parallel size.
        micro_batch: samples per data-parallel group of slots and micro step.
        gas: gradient accumulation steps.
        parallelism: how the trial's slots share samples.
    """

    train_batch_size: int
    micro_batch: int
    gas: int
    parallelism: Parallelism = DATA_ONLY

    def __post_init__(self) -> None:
        if min(self.train_batch_size, self.micro_batch, self.gas) < 1:
            raise ValueError("a batch size is less than 1")

    @classmethod
    def on(
        cls, slots: int, parallelism: Parallelism, *, micro_batch: int, gas: int = 1
    ) -> BatchTriple:
        """Return the batch sizes of a micro batch on a number of slots."""
        return cls(micro_batch * gas * parallelism.data(slots), micro_batch, gas, parallelism)

    def config(self) -> dict[str, int | None]:
        """The batch sizes under DeepSpeed's keys.

        The global one is left out where slots share samples: there DeepSpeed (0.19.8) checks it by
        other sizes in its engine and in stage 3, and the Trainer by one more.
        """
        is_plain = self.parallelism == DATA_ONLY
        return {
            "train_batch_size": self.train_batch_size if is_plain else None,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.gas,
        }


@dataclass(frozen=True, kw_only=True)
class TrialOptions(Recorded):
    """Measurement options and limits of the trials of a run.

    Attributes:
        timeout_s: a trial that takes longer, from its start on the slots, is ended.
        start_step, end_step: optimizer steps, counted from 1, both measured.
        max_steps: the most steps to measure while the confidence interval is too wide, and the best
            so far is in it or beyond its worse end.
        slot_memory_bytes: what a slot may use, if less than it has.
        own_micro_batch: that of the user's own configuration, by which a script that ignores its
            trial's configuration is recognised.
        warm_up_s, measured_s: on an accelerator, whose clocks rise and fall with the load: so long
            at least, however many steps.
    """

    timeout_s: float
    start_step: int = 3
    end_step: int = 7
    max_steps: int = 20
    slot_memory_bytes: int | None = None
    own_micro_batch: int | None = None
    warm_up_s: float = 1.0
    measured_s: float = 2.0


@dataclass(frozen=True, kw_only=True)
class KnownOfModel:
    """Facts of the profile that a measurement needs.

    Attributes:
        flops_per_sample: model FLOPs of one sample, forward and backward; None until counted.
        batch_dimensions, fed_instead: see `ModelProfile`.
    """

    flops_per_sample: float | None = None
    batch_dimensions: Mapping[str, int] = field(default_factory=dict)
    fed_instead: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial(KnownOfModel, Recorded):
    """One run of the user's script under one configuration.

    Attributes:
        id: sequential from 0; the first one profiles the model.
        name: descriptive (`z2_gas1_tmbspg4`) and unique in the run.
        overrides: DeepSpeed keys laid over the user's configuration.
        strategy: the name of its `Strategy` (`z2_offload`); by default the stage alone.
        predicted_bytes: the peak that was predicted for a slot; None if nothing was.
        to_beat: the metric and its best value so far; empty if there is none, or if the intervals
            of the metric are not known. A trial that is surely worse is measured less closely.
        longest_s: maximum duration of its measurement in seconds; None for no limit.
        own_steps: of the user's own configuration; None until it was measured.
        script_args: switches of the script that are no DeepSpeed keys (`gradient_checkpointing`).
    """

    id: int
    kind: TrialKind
    name: str
    stage: int
    batch: BatchTriple
    overrides: Mapping[str, Any]
    strategy: str = ""
    script_args: Mapping[str, Any] = field(default_factory=dict)
    lineage: int | None = None
    note: Mapping[str, int] = field(default_factory=dict)
    predicted_bytes: int | None = None
    to_beat: Mapping[str, float] = field(default_factory=dict)
    longest_s: float | None = None
    own_steps: StepFacts | None = None

    @property
    def profiles(self) -> bool:
        """Return whether it counts parameters, FLOPs and activations in its first step.

        It is the first of its run, or follows one that failed.
        """
        own_first = self.kind is TrialKind.BASELINE and self.id == 0
        return own_first or self.kind is TrialKind.PROFILE

    def __post_init__(self) -> None:
        if not self.strategy:
            object.__setattr__(self, "strategy", f"z{self.stage}")
