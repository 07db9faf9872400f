"""A trial (one run of the user's script under one configuration), its batch sizes and options."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsat.values.codec import Recorded
from dsat.values.outcome import StepFacts
from dsat.values.parallelism import DATA_ONLY, Parallelism

# The minimum number of steps is measured even if this takes up to this multiple of the time limit,
# because one or two steps give no confidence interval.
FEWEST_MAY_TAKE = 3.0


class TrialKind(str, enum.Enum):
    """Purpose of a trial."""

    PROFILE = "profile"
    BASELINE = "baseline"
    SEARCH = "search"
    FINAL = "final"
    REPEAT = "repeat"  # the baseline again, to measure run-to-run variation


@dataclass(frozen=True)
class BatchTriple:
    """Batch sizes of a trial.

    Attributes:
        train_batch_size: samples of an optimizer step: micro batch x gas x data-parallel size.
        micro_batch: samples of a micro step in each group of devices that shares samples.
        gas: gradient accumulation steps.
    """

    train_batch_size: int
    micro_batch: int
    gas: int
    parallelism: Parallelism = DATA_ONLY

    def __post_init__(self) -> None:
        if min(self.train_batch_size, self.micro_batch, self.gas) < 1:
            raise ValueError(f"a batch size is less than 1: {self.config()}")

    @classmethod
    def on(
        cls, slots: int, parallelism: Parallelism, *, micro_batch: int, gas: int = 1
    ) -> BatchTriple:
        """Return the batch sizes for a micro batch on a number of slots."""
        return cls(micro_batch * gas * parallelism.data(slots), micro_batch, gas, parallelism)

    def config(self) -> dict[str, int | None]:
        """Return the batch sizes under DeepSpeed's keys.

        The global batch size is None if devices share samples, because the engine and stage 3 of
        DeepSpeed 0.19.8, and the Trainer, compute it with different numbers of groups.
        """
        is_plain = self.parallelism == DATA_ONLY
        return {
            "train_batch_size": self.train_batch_size if is_plain else None,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.gas,
        }


@dataclass(frozen=True, kw_only=True)
class TrialOptions(Recorded):
    """Measurement options and limits of a run's trials.

    Attributes:
        timeout_s: time limit of a trial, from its start on the devices.
        start_step, end_step: first and last optimizer step to measure, counted from 1.
        max_steps: most steps to measure, while the confidence interval is too wide to tell whether
            the trial beats the best so far.
        slot_memory_bytes: memory that a device may use, if less than it has.
        own_micro_batch: micro batch of the user's own configuration, by which a rank recognises a
            script that ignores its trial's configuration; None if unknown.
        own_gas: accumulation steps of the user's own configuration, by which a rank recognises the
            script's flag for them; None if unknown.
        warm_up_s, measured_s: minimum durations on an accelerator, whose clock rates change with
            the load.
    """

    timeout_s: float
    start_step: int = 3
    end_step: int = 7
    max_steps: int = 20
    slot_memory_bytes: int | None = None
    own_micro_batch: int | None = None
    own_gas: int | None = None
    warm_up_s: float = 1.0
    measured_s: float = 2.0


@dataclass(frozen=True, kw_only=True)
class KnownBefore:
    """Facts from earlier trials that a measurement uses.

    Attributes:
        flops_per_sample: model FLOPs of one sample, forward and backward; None until counted.
        batch_dimensions, fed_instead: see `ModelProfile`.
        to_beat: the metric and its best value so far; empty if there is no value yet, or if the
            metric has no interval. A trial that is clearly worse ends its measurement early.
        longest_s: time limit of the measurement in seconds; None for no limit.
        own_steps: facts about the steps of the user's own configuration; None until measured.
    """

    flops_per_sample: float | None = None
    batch_dimensions: Mapping[str, int] = field(default_factory=dict)
    fed_instead: Mapping[str, int] = field(default_factory=dict)
    to_beat: Mapping[str, float] = field(default_factory=dict)
    longest_s: float | None = None
    own_steps: StepFacts | None = None


@dataclass(frozen=True)
class Trial(KnownBefore, Recorded):
    """One run of the user's script under one configuration.

    Attributes:
        id: sequential from 0; the first one profiles the model.
        name: descriptive (`z2_gas1_tmbspg4`) and unique in the run; names the trial's folder.
        batch: `train_batch_size`, `micro_batch` and `gas`.
        overrides: DeepSpeed settings that replace the user's.
        strategy: name of its `Strategy` (`z2_offload`); by default the stage alone (`z2`).
        script_args: values of the script's switches (`gradient_checkpointing`).
        lineage, note: `arm` and `note` of the search's `Proposal`.
        predicted_bytes: predicted peak memory of a device; None without a prediction.
        batch_flag: flag of the script that must also get the micro batch; empty if none.
        accumulation_flag: flag that must also get the accumulation steps; empty if none.
        flag_leads: whether both flags must precede all other arguments.
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
    batch_flag: str = ""
    accumulation_flag: str = ""
    flag_leads: bool = False

    @property
    def flags(self) -> dict[str, str]:
        """The script's flags that must also get a batch size, by DeepSpeed's key."""
        flags = {
            "train_micro_batch_size_per_gpu": self.batch_flag,
            "gradient_accumulation_steps": self.accumulation_flag,
        }
        return {key: flag for key, flag in flags.items() if flag}

    @property
    def profiles(self) -> bool:
        """Return whether the trial's first step counts parameters, FLOPs and activations.

        This is so for the first trial of a run, and for PROFILE trials, which follow if it fails.
        """
        own_first = self.kind is TrialKind.BASELINE and self.id == 0
        return own_first or self.kind is TrialKind.PROFILE

    def __post_init__(self) -> None:
        if not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise ValueError(f"{self.name!r} cannot name a trial's folder")
        if not self.strategy:
            object.__setattr__(self, "strategy", f"z{self.stage}")
