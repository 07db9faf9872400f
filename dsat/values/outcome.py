"""Outcome of a trial: how it ended, its measurements, and facts about the model."""

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
        """Return whether the memory of the device or of the host ran out."""
        return self in (OutcomeKind.OOM, OutcomeKind.HOST_OOM)

    @property
    def is_unsafe(self) -> bool:
        """Return whether the training may fail with a configuration whose trial ended like this."""
        return self.is_out_of_memory or self is OutcomeKind.DIVERGED


_DESCRIPTIONS = {
    OutcomeKind.OK: "ran",
    OutcomeKind.OOM: "ran out of memory",
    OutcomeKind.HOST_OOM: "ran out of host memory",
    OutcomeKind.ERROR: "failed",
    OutcomeKind.TIMEOUT: "timed out",
    OutcomeKind.INVALID: "could not be measured",
    OutcomeKind.DIVERGED: "diverged",
    OutcomeKind.CANCELED: "was canceled",
}

_MAX_WARNINGS = 50


@dataclass(frozen=True)
class Metrics(Recorded):
    """Measurements of a trial. Times are per optimizer step, on the slowest rank.

    Attributes:
        throughput: samples/s over all devices.
        latency, forward, backward, step: ms per optimizer step, summed over its micro steps.
        FLOPS_per_gpu: model FLOP/s per device without recomputation; None if not counted.
        ci95: half-width of the 95 % confidence interval of `latency`, as a fraction of it.
        accidents: number of outliers, steps that other work on the host slowed down. The figures
            above exclude them.
        lost_to_accidents: excess time of the outliers, as a fraction of the other steps' time.
        tokens_per_second: over all devices, without masked padding; None if the model's inputs are
            not sequences of tokens.
        data: ms per optimizer step in which the rank only waited for a PyTorch data loader.
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
        """Return these metrics with an interval at least as wide as `standard_error` implies."""
        min_ci95 = standard_error * student.half_width(0.95, max(1, self.num_steps - 1))
        return self if self.ci95 >= min_ci95 else replace(self, ci95=min_ci95)

    def value(self, metric: str) -> float | None:
        number: float | None = getattr(self, metric)
        return number


@dataclass(frozen=True)
class MemoryUse:
    """Peaks over all ranks, in bytes.

    Attributes:
        allocated_bytes, reserved_bytes: device memory that torch's allocator allocated and
            reserved, by phase (`init`, `forward`, `backward`, `step`); empty on a CPU.
        host_rss_bytes: largest resident set of a rank, by phase.
        context_bytes: device memory outside the allocator, for CUDA's context and libraries (0 on
            other accelerators); on a CPU, the resident set before the model was built.
        data_bytes: on a CPU with a memory limit, the peak that counted against the limit since the
            model was built; otherwise 0.
    """

    allocated_bytes: Mapping[str, int] = field(default_factory=dict)
    reserved_bytes: Mapping[str, int] = field(default_factory=dict)
    host_rss_bytes: Mapping[str, int] = field(default_factory=dict)
    context_bytes: int = 0
    data_bytes: int = 0

    @property
    def is_exact(self) -> bool:
        """Return whether the peak is exact; a resident set lacks pages that were never written."""
        return bool(self.allocated_bytes or self.data_bytes)

    @property
    def by_phase(self) -> dict[str, int]:
        """Bytes of a rank's tensors, by phase; on a CPU, estimated from its resident set."""
        if self.allocated_bytes:
            return dict(self.allocated_bytes)
        return {p: max(0, v - self.context_bytes) for p, v in self.host_rss_bytes.items()}

    @property
    def peak(self) -> int:
        """`data_bytes` or, if that is 0, the largest phase; 0 if nothing was measured."""
        return self.data_bytes or max(self.by_phase.values(), default=0)


@dataclass(frozen=True)
class ScriptSwitch:
    """A switch of the script, detected while it ran (`dsat.command.switches`).

    Attributes:
        values: the values that a trial can set, the script's own first.
        in_arguments: whether it is a field of the Trainer's TrainingArguments.
    """

    values: tuple[Any, ...]
    in_arguments: bool = False


@dataclass(frozen=True)
class OwnOptimizer:
    """The optimizer that a script passes to DeepSpeed.

    Attributes:
        kind: name of its class; empty if unknown.
        by_element: whether it updates each element independently of the parameter's shape. If not,
            stage 0 trains differently from the other stages, which flatten parameters. False for
            DeepSpeed's Muon with clipping, because ZeRO clips Muon's updates.
        moves_to_host: whether accelerate replaces it by DeepSpeed's CPU optimizer when offloading.
    """

    kind: str = ""
    by_element: bool = True
    moves_to_host: bool = False


@dataclass(frozen=True)
class ModelProfile(Recorded):
    """Facts about the model and the devices, from the first trial that succeeds.

    Attributes:
        num_params, trainable_params: counts for the whole model, before partitioning.
        param_bytes: bytes of one parameter in the forward pass (2 for bf16 and fp16).
        activation_bytes_per_sample: bytes that a device keeps for the backward pass, per sample of
            a micro batch.
        flops_per_sample: FLOPs of forward and backward pass, without recomputation.
        slot_memory_bytes: memory that a device may use.
        largest_activation_bytes_per_sample: size of the largest kept activation; 0 if unknown.
        host_memory_bytes: host memory per rank, if a trial has its host for itself; 0 if unknown,
            or if the device is the host.
        batch_dimensions: index of the batch dimension of each input of the model, by the input's
            path in the arguments (`1.input_ids`); only where it is certain.
        device_name: name of the device in its driver; empty if it has none.
        fed_instead: this trial's `micro_batch`, and the number of `rows` that all inputs had
            instead; empty if they had `micro_batch` rows, or different numbers of rows.
        parallelism: parallelism of the trial that measured these facts.
        attention_heads: number of heads; None if the model's configuration has no such field.
        hidden_size: hidden size, from which a Trainer computes "auto" settings; None if unknown.
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
    hidden_size: int | None = None
    optimizer: OwnOptimizer = OwnOptimizer()


PRECISIONS = ("fp32", "fp16", "bf16")  # from the finest to the coarsest


@dataclass(frozen=True)
class StepFacts:
    """Facts about a trial's optimizer steps.

    Attributes:
        gas: configured gradient accumulation steps.
        micro_steps: number of micro batches in most steps; 0 if unknown.
        late: numbers, from 1, of the steps that are outliers (`Metrics.accidents`).
        evaluated: fraction of the measured steps in which the model was also evaluated.
        tokens_error: standard error of the tokens per sample, as a fraction; None if unknown.
    """

    gas: int
    micro_steps: int = 0
    late: tuple[int, ...] = ()
    evaluated: float = 0.0
    tokens_error: float | None = None


@dataclass(frozen=True)
class TrainingCurve:
    """Losses of a trial's first and last optimizer steps, in order.

    Attributes:
        steps: optimizer steps, counted from 1.
        losses: mean over the micro steps and ranks of each step, as passed to the backward pass;
            None for a step without a loss.
        skipped: steps that fp16 skipped because of an overflow.
        precision: the coarsest number format in use, one of `PRECISIONS`; empty if unknown.
        facts: facts about these steps; None in older journals.
        gradient_norm: norm of all gradients of the first step, before clipping; None if unknown.
        compares_samples: whether the first loss compares pairs of samples, and thus depends on the
            micro batch.
        deepspeed_version: DeepSpeed's version in the trial; empty if unknown.
    """

    steps: tuple[int, ...] = ()
    losses: tuple[float | None, ...] = ()
    skipped: tuple[int, ...] = ()
    precision: str = ""
    facts: StepFacts | None = None
    gradient_norm: float | None = None
    compares_samples: bool = False
    deepspeed_version: str = ""


@dataclass(frozen=True)
class SequenceLengths:
    """Lengths of a trial's sequences over all ranks and steps, in tokens.

    Attributes:
        shortest, longest: lengths of the micro batches, including padding.
        model_takes: positions of the model; None if its configuration has none.
    """

    shortest: int
    longest: int
    model_takes: int | None = None


@dataclass(frozen=True)
class Outcome(Recorded):
    """End of a trial, with its measurements. All its texts are sanitized (`printable`).

    Attributes:
        kind: OK, OOM, HOST_OOM, ERROR, TIMEOUT, INVALID, DIVERGED or CANCELED.
        metrics: measurements; None if the trial failed.
        memory: peaks of memory; None if not measured.
        profile: facts about the model; required of the first successful trial.
        message: one line on what went wrong; empty for a successful trial.
        detail: the script's traceback, or the end of its log.
        duration_s: time from the launch to the outcome.
        smaller_may_run: whether a smaller micro batch may run: there were too few samples, or the
            script refuses larger ones.
        most_samples: the largest micro batch for which the samples suffice, with the trial's
            accumulation; None if unknown.
        fixed_batch: the number of samples that the script feeds regardless of the configured micro
            batch; None if it follows the configuration, or unknown.
        batch_flag: the script's flag that sets `fixed_batch`, such as `--batch-size`; empty if
            none. After an error: a flag that had the user's micro batch instead of the trial's.
        accumulation_flag: in the trial that profiles, the script's flag that repeats the user's
            accumulation steps, such as `--grad_accum`; empty if none.
        flag_leads: whether these flags must precede all other arguments, because the script has
            subcommands.
        step_ms: latency of each measured step on the slowest rank, in ms.
        training: None for a trial that measured nothing.
        sequences: None if the model's inputs are not sequences of tokens.
        before_engine: whether the script failed before it called `deepspeed.initialize`, so that
            other configurations would fail too.
        device_name: as in `ModelProfile`; set on a cluster, whose devices may differ.
        completed_steps: optimizer steps before the trial's error; 0 if unknown.
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
    accumulation_flag: str = ""
    flag_leads: bool = False
    step_ms: tuple[float, ...] = ()
    training: TrainingCurve | None = None
    sequences: SequenceLengths | None = None
    before_engine: bool = False
    device_name: str = ""
    completed_steps: int = 0

    def __post_init__(self) -> None:
        # Scripts and exceptions may contain control characters, secrets, or megabytes.
        object.__setattr__(self, "message", printable(self.message))
        object.__setattr__(self, "detail", printable(self.detail, MOST_OF_A_LOG))
        warnings = tuple(printable(text) for text in self.warnings[:_MAX_WARNINGS])
        object.__setattr__(self, "warnings", warnings)

    @property
    def ok(self) -> bool:
        return self.kind is OutcomeKind.OK

    @property
    def is_unsound(self) -> bool:
        """Return whether a setting other than the micro batch may have caused a failure."""
        return not (self.ok or self.kind.is_out_of_memory or self.smaller_may_run)

    def refuses(self, *flags: str) -> bool:
        """Return whether the trial failed because the script's parser does not know a flag."""
        unknown = self.message.partition("error: unrecognized arguments: ")[2].split()
        return self.kind is OutcomeKind.ERROR and not set(flags).isdisjoint(unknown)

    def describe(self, subject: str) -> str:
        """Return a sentence: `the profile trial timed out: no result after 10 s`."""
        sentence = f"{subject} {_DESCRIPTIONS[self.kind]}"
        return f"{sentence}: {self.message.rstrip('.')}" if self.message else sentence

    def value(self, objective: Objective) -> float | None:
        """Return the objective's value; None unless the trial ran and measured it."""
        if not self.ok or self.metrics is None:
            return None
        return self.metrics.value(objective.metric)
