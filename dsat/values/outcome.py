"""Outcome of a trial: its end, its measurements, and facts about the model."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dsat.values import student
from dsat.values.codec import Recorded
from dsat.values.objective import Objective
from dsat.values.parallelism import DATA_ONLY, Parallelism
from dsat.values.text import MOST_OF_A_LOG, printable


class OutcomeKind(str, enum.Enum):
    """Kind of a trial's end."""

    OK = "OK"
    OOM = "OOM"
    HOST_OOM = "HOST_OOM"
    ERROR = "ERROR"
    TIMEOUT = "TIMEOUT"
    INVALID = "INVALID"
    DIVERGED = "DIVERGED"
    CANCELED = "CANCELED"

    @property
    def is_out_of_memory(self) -> bool:
        """Tell whether memory ran out, the device's or the host's."""
        return self in (OutcomeKind.OOM, OutcomeKind.HOST_OOM)


_SAID = {
    OutcomeKind.OK: "ran",
    OutcomeKind.OOM: "ran out of memory",
    OutcomeKind.HOST_OOM: "ran out of host memory",
    OutcomeKind.ERROR: "failed",
    OutcomeKind.TIMEOUT: "timed out",
    OutcomeKind.INVALID: "could not be measured",
    OutcomeKind.DIVERGED: "diverged",
    OutcomeKind.CANCELED: "was canceled",
}

_MOST_WARNINGS = 50


@dataclass(frozen=True)
class Metrics(Recorded):
    """Measurements of a trial. Times are per optimizer step, of the slowest rank.

    Attributes:
        throughput: samples/s over all slots.
        latency, forward, backward, step: ms per optimizer step, all its micro steps included.
        FLOPS_per_gpu: model FLOP/s per slot without recomputation; None if not counted.
        num_steps: optimizer steps measured.
        ci95: half-width of the 95 % confidence interval of `latency`, as a fraction of it.
        accidents: outliers, left out above: steps that the host made far longer, it seems.
        lost_to_accidents: their excess time, as a fraction of the time of all others.
        tokens_per_second: over all slots, without masked padding; None if the script's inputs have
            no sequences of tokens.
        data: ms per optimizer step in which the rank waited for a PyTorch data loader, and nothing
            else went on.
    """

    throughput: float
    latency: float
    forward: float
    backward: float
    step: float
    FLOPS_per_gpu: float | None
    num_steps: int
    ci95: float
    accidents: int = 0
    lost_to_accidents: float = 0.0
    tokens_per_second: float | None = None
    data: float = 0.0

    @property
    def standard_error(self) -> float:
        """Standard error of `latency`, as a fraction of it."""
        return self.ci95 / student.half_width(0.95, max(1, self.num_steps - 1))

    def at_least_as_uncertain(self, standard_error: float) -> Metrics:
        """Return this with an interval that has at least this standard error."""
        least = standard_error * student.half_width(0.95, max(1, self.num_steps - 1))
        return self if self.ci95 >= least else replace(self, ci95=least)

    def value(self, metric: str) -> float | None:
        """The value of one of `METRIC_NAMES`."""
        number: float | None = getattr(self, metric)
        return number


@dataclass(frozen=True)
class MemoryUse:
    """Peaks over all ranks, in bytes.

    Attributes:
        allocated_bytes, reserved_bytes: of the device's allocator, by phase (`init`, `forward`,
            `backward`, `step`); empty on a CPU.
        host_rss_bytes: the largest resident set of one rank, by phase.
        context_bytes: of a rank besides its tensors: on a device the context and its libraries, on
            a CPU the resident set before the model was built.
        data_bytes: on a CPU with a limited slot, the peak that counted against the limit since the
            model was built; 0 elsewhere.
    """

    allocated_bytes: Mapping[str, int] = field(default_factory=dict)
    reserved_bytes: Mapping[str, int] = field(default_factory=dict)
    host_rss_bytes: Mapping[str, int] = field(default_factory=dict)
    context_bytes: int = 0
    data_bytes: int = 0

    @property
    def is_exact(self) -> bool:
        """Tell whether the limited quantity was counted; a resident set misses untouched pages."""
        return bool(self.allocated_bytes or self.data_bytes)

    @property
    def by_phase(self) -> dict[str, int]:
        """Bytes of a rank's tensors, by phase; on a CPU by its resident set."""
        if self.allocated_bytes:
            return dict(self.allocated_bytes)
        return {p: max(0, v - self.context_bytes) for p, v in self.host_rss_bytes.items()}

    @property
    def peak(self) -> int:
        """The largest of the phases; 0 if nothing was measured."""
        return self.data_bytes or max(self.by_phase.values(), default=0)


@dataclass(frozen=True)
class ScriptSwitch:
    """A switch that a script turned out to have (`dsat.command.switches`).

    Attributes:
        values: that can be set in its processes, its own first.
        in_arguments: it is set in the Trainer's TrainingArguments.
    """

    values: tuple[Any, ...]
    in_arguments: bool = False


@dataclass(frozen=True)
class OwnOptimizer:
    """An optimizer of a script.

    Attributes:
        kind: name of its class; empty if it is not known.
        by_element: it is known to compute each element by itself, whatever a parameter's shape,
            which stage 0 keeps and ZeRO flattens.
        moves_to_host: accelerate, which makes the engine, replaces it by DeepSpeed's equivalent for
            the host where it is offloaded.
    """

    kind: str = ""
    by_element: bool = True
    moves_to_host: bool = False


@dataclass(frozen=True)
class ModelProfile(Recorded):
    """Facts about the model and its slots, from the first trial.

    Attributes:
        num_params, trainable_params: of the whole model, whatever the partitioning.
        param_bytes: bytes of one parameter in the forward pass (2 for bf16 and fp16).
        activation_bytes_per_sample: kept on a slot for the backward pass by each sample of a micro
            batch.
        flops_per_sample: forward and backward, without recomputation.
        slot_memory_bytes: what a slot may use.
        largest_activation_bytes_per_sample: of the largest one of those; 0 if that is not known.
        host_memory_bytes: of the host for each rank of a trial that runs there alone; 0 if a slot's
            memory is the host's, or it is not known.
        batch_dimensions: the dimension of the samples in the model's inputs, by the place of the
            tensor among them (`1.input_ids`), where that is certain.
        device_name: of the slot, as its driver names it; empty if it has no name.
        fed_instead: `micro_batch` of this trial and `rows` that all of the model's inputs had
            instead; empty if they had as many as expected, or differed.
        switches: of the script, by name.
        parallelism: with which it was measured.
        attention_heads: None if the model's configuration does not say.
        optimizer: the one that the engine got.
        compares_samples: the loss is one over pairs of samples, so it depends on the micro batch.
    """

    num_params: int
    trainable_params: int
    param_bytes: int
    activation_bytes_per_sample: int
    flops_per_sample: float
    slot_memory_bytes: int
    host_memory_bytes: int = 0
    batch_dimensions: Mapping[str, int] = field(default_factory=dict)
    fed_instead: Mapping[str, int] = field(default_factory=dict)
    device_name: str = ""
    switches: Mapping[str, ScriptSwitch] = field(default_factory=dict)
    largest_activation_bytes_per_sample: int = 0
    parallelism: Parallelism = DATA_ONLY
    attention_heads: int | None = None
    optimizer: OwnOptimizer = OwnOptimizer()
    compares_samples: bool = False


PRECISIONS = ("fp32", "fp16", "bf16")  # the finest first


@dataclass(frozen=True)
class StepFacts:
    """Facts about a trial's optimizer steps.

    Attributes:
        gas: gradient accumulation steps by the configuration.
        micro_steps: micro batches that most steps took; 0 if that could not be seen.
        late: numbers of the steps, counted from 1, that are `Metrics.accidents`.
        evaluated: share of the measured ones in which the model ran outside of training too.
        tokens_error: standard error of the tokens per sample, as a fraction; None if unknown.
    """

    gas: int
    micro_steps: int = 0
    late: tuple[int, ...] = ()
    evaluated: float = 0.0
    tokens_error: float | None = None


@dataclass(frozen=True)
class TrainingCurve:
    """Training curve: the first and the last optimizer steps of a trial, in order.

    Attributes:
        steps: optimizer steps, counted from 1.
        losses: mean over the micro steps and ranks of each step, as given to the backward pass;
            None if there was none.
        skipped: steps that fp16 skipped because of an overflow.
        precision: the coarsest type that was computed in, one of `PRECISIONS`; empty if unknown.
        facts: about these steps; None in older journals.
        gradient_norm: of the first step, over all parameters, before clipping; None if unknown.
    """

    steps: tuple[int, ...] = ()
    losses: tuple[float | None, ...] = ()
    skipped: tuple[int, ...] = ()
    precision: str = ""
    facts: StepFacts | None = None
    gradient_norm: float | None = None


@dataclass(frozen=True)
class SequenceLengths:
    """Lengths of a trial's sequences over all ranks and steps, in tokens.

    Attributes:
        shortest, longest: of the micro batches' lengths, the padding included.
        model_takes: the model's `max_position_embeddings`; None if it has none.
    """

    shortest: int
    longest: int
    model_takes: int | None = None


@dataclass(frozen=True)
class Outcome(Recorded):
    """End of a trial, and its measurements.

    Attributes:
        message: one line for people; empty when all went well.
        detail: the user's traceback or the end of their log. All texts are made `printable`.
        duration_s: from the launch to the outcome, wall time.
        warnings: for people, although the trial ran.
        smaller_may_run: it ran out of data, of which a smaller micro batch needs less.
        most_samples: the largest micro batch, with the trial's accumulation, that there are data
            for, if known.
        fixed_batch: samples that the script feeds whatever the micro batch of the configuration
            is; None if it follows the configuration, or that is unknown.
        batch_flag: the script's flag for that number, such as `--batch-size`; empty if it has none.
        step_ms: latency of each measured step, in ms, of the slowest rank.
        training: None for a trial that measured nothing.
        sequences: None if the script's inputs have no sequences of tokens.
        before_engine: it failed before its script called `deepspeed.initialize`, whatever the
            configuration.
        device_name: as in `ModelProfile`, of a trial on a cluster, whose slots may differ.
    """

    kind: OutcomeKind
    metrics: Metrics | None = None
    memory: MemoryUse | None = None
    profile: ModelProfile | None = None
    message: str = ""
    detail: str = ""
    duration_s: float = 0.0
    warnings: tuple[str, ...] = ()
    smaller_may_run: bool = False
    most_samples: int | None = None
    fixed_batch: int | None = None
    batch_flag: str = ""
    step_ms: tuple[float, ...] = ()
    training: TrainingCurve | None = None
    sequences: SequenceLengths | None = None
    before_engine: bool = False
    device_name: str = ""

    def __post_init__(self) -> None:
        # What scripts and exceptions say goes no further as it is.
        object.__setattr__(self, "message", printable(self.message))
        object.__setattr__(self, "detail", printable(self.detail, MOST_OF_A_LOG))
        warnings = tuple(printable(text) for text in self.warnings[:_MOST_WARNINGS])
        object.__setattr__(self, "warnings", warnings)

    @property
    def ok(self) -> bool:
        return self.kind is OutcomeKind.OK

    def said_of(self, subject: str) -> str:
        """`the profile trial timed out: no result after 10 s`."""
        said = f"{subject} {_SAID[self.kind]}"
        return f"{said}: {self.message}" if self.message else said

    def value(self, objective: Objective) -> float | None:
        """The objective's value; None unless the trial ran and measured it."""
        if not self.ok or self.metrics is None:
            return None
        return self.metrics.value(objective.metric)
