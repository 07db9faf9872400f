"""A made-up world: what becomes of a trial of a transformer on GPUs that do not exist.

One world serves tests and benchmarks. It shares the list of DeepSpeed's collectives, which is held
against traced steps, with the predictions of dsat, and nothing else. Its figures come from
elsewhere:

- Matrix products by tiles of 128 x 256 over the multiprocessors, in whole waves, at 0.6 of the peak
  where tokens are a multiple of 8, and 0.45 elsewhere (NVIDIA, "Matrix Multiplication Background
  User's Guide": tile and wave quantization, tensor core requirements). Attention at half of that.
- Element-wise work reads and writes `_ELEMENTWISE` activations of a layer at 0.8 of the memory
  bandwidth; no layer takes less time than the launches of its kernels.
- Collectives as DeepSpeed 0.19.8 calls them, by rings with NCCL's latencies
  (`dsat.search.collectives`). What overlaps with the backward pass takes the longer time of the
  two; the last bucket and the first gather are never hidden. Stage 3's hooks take `_HOOKS_S` of the
  host for each layer, which shows where kernels are shorter.
- Memory: 2 + 2 + 12 bytes for each parameter, partitioned as the stage says (the same, section 3);
  34 bytes for each token and hidden unit of a layer (Korthikanti et al. (2022), section 4, flash
  attention); logits in 16 and 32 bits; buckets; 3 % of fragmentation. Offloaded states live on the
  host and cross its link once a step.
- Above 94 % of the memory the allocator begins to free and to allocate anew. How steeply that slows
  a step is assumed, as is how much runs vary (`run_sd`, `step_sd`).

GPUs are as NVIDIA's data sheets describe them, 16-bit without sparsity. Rings reach 0.38 of the
bidirectional link and 0.88 of the network, as on a DGX A100 (230 of 600 GB/s of NVLink, 22 of 25
GB/s of InfiniBand for each GPU).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dsat.inputs import ds_config
from dsat.inputs.cards import Card
from dsat.search import collectives
from dsat.search.collectives import Network
from dsat.space import knobs
from dsat.values.outcome import (
    MemoryUse,
    Metrics,
    ModelProfile,
    Outcome,
    OutcomeKind,
    OwnOptimizer,
    ScriptSwitch,
    SequenceLengths,
    StepFacts,
    TrainingCurve,
)
from dsat.values.step_trace import ALL_GATHER, BACKWARD, FORWARD, STEP, Collectives
from dsat.values.student import half_width
from dsat.values.trial import Trial

GIB = 2**30
STEPS = 10
SETUP_S = 30.0
SLOTS_PER_HOST = 8
_TILE = (128, 256)
_EFFICIENCY, _UNALIGNED, _OF_ATTENTION = 0.6, 0.45, 0.5
_ELEMENTWISE = 24  # activations of a layer that are read or written in its forward pass
_KERNELS, _LAUNCH_S = 16, 5e-6  # of a layer, in its forward pass
_HOOKS_S = 8e-4  # of a layer, in its forward pass
_SUB_GROUP_S = 2e-4  # each sub-group of stage 3's optimizer step
_ADAM_BYTES = 30  # read and written for each element
_OF_LINK, _OF_NETWORK = 230 / 600, 22 / 25  # that a ring reaches
_HOST_LINK, _HOST_ADAM = 25e9, 20e9  # bytes/s to the host, and of its optimizer, for each GPU
_CONTEXT_BYTES = int(1.2e9)
_FRAGMENTED = 1.03
_EDGE, _SLOWER = 0.94, 0.5


@dataclass(frozen=True)
class Model:
    """A transformer; `vocabulary` is the width of its output, `tokens` are those of a sample."""

    layers: int
    hidden: int
    tokens: int
    vocabulary: int
    experts: int = 1  # feed-forward layers in the place of one
    active: int = 1  # of them, for each token

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        return (4 + 8 * self.experts) * self.hidden**2

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.vocabulary * self.hidden

    @property
    def flops_per_sample(self) -> float:
        idle = self.layers * 8 * (self.experts - self.active) * self.hidden**2
        attention = 12 * self.layers * self.tokens * self.hidden
        return self.tokens * (6.0 * (self.parameters - idle) + attention)


@dataclass(frozen=True)
class Gpu:
    """A GPU: FLOP/s, bytes, bytes/s of its memory, of its links both ways and of its network."""

    memory_bytes: int
    bandwidth: float
    peak: float = 312e12
    multiprocessors: int = 108
    link: float = 600e9
    network: float = 25e9


A100 = Gpu(40 * GIB, 1555e9)
GPT_300M = Model(layers=24, hidden=1024, tokens=1024, vocabulary=50304)


@dataclass(frozen=True)
class Failure:
    """A failure of some trials.

    Attributes:
        kind: of the outcome.
        where: facts of the trials that fail (`World.facts`), each a value or a list of values.
        message, detail: as an engine words them.
        before_engine: it failed before `deepspeed.initialize`, whatever the configuration.
    """

    kind: str
    where: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""
    detail: str = ""
    before_engine: bool = False


@dataclass(frozen=True)
class Finding:
    """Something that the meter reports of some trials besides their time.

    Attributes:
        where: facts of the trials, as of a failure.
        warnings: of the outcome.
        waiting: part of each step that waits for data.
        late: steps that took far longer, and were left out.
        evaluated: part of the steps with a forward pass outside of training.
        longer: tokens of a sample by those of the model.
        step_sd: in place of the world's.
    """

    where: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    waiting: float = 0.0
    late: tuple[int, ...] = ()
    evaluated: float = 0.0
    longer: float = 1.0
    step_sd: float | None = None


@dataclass(frozen=True)
class Time:
    """Seconds of an optimizer step, by part."""

    forward: float
    backward: float
    step: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.step

    def scaled(self, factor: float) -> Time:
        return Time(factor * self.forward, factor * self.backward, factor * self.step)


@dataclass(frozen=True)
class World:
    """A model on GPUs, and all that can go wrong there. Its outcomes depend on the trial alone.

    Attributes:
        slots: of every trial.
        at_once: trials that there are devices for.
        seed: of the noise.
        run_sd, step_sd: standard deviations of a run's and of a step's time, relative.
        drift: each further trial is slower by this fraction, as on a machine that heats up.
        lucky: factors of the measured speed by kind of trial, which no other run repeats.
        effects: factors of the step time by setting (`overlap_comm=False`), switch of the script,
            or strategy (`z2`).
        failures: the first one that matches a trial decides its outcome.
        samples: that a device has; a larger micro batch cannot be measured.
        tells_samples: also a trial that runs tells how many there are.
        host_memory_bytes: of the host for each rank.
        seeded: losses repeat from run to run, so that they can be compared.
        trains_otherwise: strategies (`z2`) whose losses fall more slowly.
        switches: of the script, by name, with the values that can be set.
        device_name: of every GPU.
        seen_activations: that the first trial finds, as a part of what there are.
        tells_memory: whether trials tell what they used.
        counts_flops: whether the FLOPs of the model can be counted.
        counts_tokens: whether the model's inputs are sequences of tokens.
        findings: the first one that matches a trial holds for it.
        sequences: shortest and longest sequence of the data, and positions of the model, in
            tokens; None where nobody counts them.
        by_element: the optimizer computes each element of a parameter by itself.
    """

    model: Model = GPT_300M
    gpu: Gpu = A100
    slots: int = 1
    at_once: int = 1
    seed: int = 0
    run_sd: float = 0.01
    step_sd: float = 0.005
    drift: float = 0.0
    setup_s: float = SETUP_S
    lucky: Mapping[str, float] = field(default_factory=dict)
    effects: Mapping[str, float] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    samples: int | None = None
    tells_samples: bool = False
    host_memory_bytes: int = 2**40 // 8
    seeded: bool = True
    trains_otherwise: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    switches: Mapping[str, ScriptSwitch] = field(default_factory=dict)
    device_name: str = "NVIDIA A100-SXM4-40GB"
    seen_activations: float = 1.0
    tells_memory: bool = True
    counts_flops: bool = True
    counts_tokens: bool = True
    findings: tuple[Finding, ...] = ()
    sequences: tuple[int, int, int] | None = None
    by_element: bool = True

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> World:
        """Build a world from `to_json`."""
        switches = {
            name: ScriptSwitch(tuple(found["values"]), found["in_arguments"])
            for name, found in data["switches"].items()
        }
        nested = {
            "model": Model(**data["model"]),
            "gpu": Gpu(**data["gpu"]),
            "failures": tuple(Failure(**failure) for failure in data["failures"]),
            "findings": tuple(Finding(**finding) for finding in data["findings"]),
            "sequences": data["sequences"] and tuple(data["sequences"]),
            "trains_otherwise": tuple(data["trains_otherwise"]),
            "warnings": tuple(data["warnings"]),
            "switches": switches,
        }
        return cls(**{**data, **nested})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    # -- outcomes

    def outcome(self, trial: Trial, config: Mapping[str, Any]) -> Outcome:
        """Return what becomes of a trial of a DeepSpeed configuration, with noise."""
        facts = self.facts(trial)
        for failure in self.failures:
            if _matches(failure.where, facts):
                return Outcome(
                    OutcomeKind(failure.kind),
                    message=failure.message,
                    detail=failure.detail,
                    before_engine=failure.before_engine,
                    duration_s=self.setup_s,
                )
        true = self.answer(config, trial.script_args)
        if self.samples is not None and trial.batch.micro_batch > self.samples:
            return Outcome(
                OutcomeKind.INVALID,
                message=f"the data end after {self.samples} samples",
                smaller_may_run=True,
                most_samples=self.samples,
                duration_s=self.setup_s,
            )
        if not true.ok:
            return true
        found = next((each for each in self.findings if _matches(each.where, facts)), Finding())
        return replace(
            self._with_noise(_with_finding(true, found), trial, found),
            profile=self.profile if trial.profiles else None,
            most_samples=self.samples if self.tells_samples else None,
            memory=true.memory if self.tells_memory else None,
            training=self._training(trial, found),
            warnings=(*self.warnings, *found.warnings),
            sequences=self.sequences and SequenceLengths(*self.sequences),
        )

    def facts(self, trial: Trial) -> dict[str, Any]:
        """Return the facts of a trial that a failure may name."""
        return {
            **trial.script_args,
            "trial": trial.id,
            "kind": trial.kind.value,
            "stage": trial.stage,
            "strategy": trial.strategy,
            "micro_batch": trial.batch.micro_batch,
            "gas": trial.batch.gas,
        }

    def answer(self, config: Mapping[str, Any], switches: Mapping[str, Any] = {}) -> Outcome:
        """Return the outcome of a whole DeepSpeed configuration without noise or failures."""
        batch = ds_config.resolve_batch(config, self.slots, where="the configuration")
        zero = with_defaults(config.get("zero_optimization") or {})
        memory = self.memory_bytes(zero, batch.micro_batch)
        if memory + _CONTEXT_BYTES > self.gpu.memory_bytes:
            return Outcome(OutcomeKind.OOM, message="out of memory", duration_s=self.setup_s)
        if self._host_bytes(zero) > self.host_memory_bytes:
            return Outcome(OutcomeKind.HOST_OOM, message="killed", duration_s=self.setup_s)
        slow = math.prod(self.effects.get(f"{name}={v}", 1.0) for name, v in switches.items())
        time = self.time(zero, batch.micro_batch, batch.gas).scaled(slow)
        latency, throughput = 1e3 * time.total, batch.train_batch_size / time.total
        metrics = Metrics(
            throughput=throughput,
            latency=latency,
            forward=1e3 * time.forward,
            backward=1e3 * time.backward,
            step=1e3 * time.step,
            FLOPS_per_gpu=throughput * self._flops_per_sample / self.slots,
            num_steps=STEPS,
            ci95=2.26 * self.step_sd / math.sqrt(STEPS),
            tokens_per_second=throughput * self.model.tokens if self.counts_tokens else None,
        )
        allocated = round(memory / _FRAGMENTED)
        use = MemoryUse({"backward": allocated}, {"backward": round(memory)}, {}, _CONTEXT_BYTES)
        duration_s = self.setup_s + (2 + STEPS) * time.total
        return Outcome(OutcomeKind.OK, metrics=metrics, memory=use, duration_s=duration_s)

    @property
    def profile(self) -> ModelProfile:
        """The facts of the model that the first trial finds out."""
        return ModelProfile(
            num_params=self.model.parameters,
            trainable_params=self.model.parameters,
            param_bytes=2,
            activation_bytes_per_sample=round(self.seen_activations * self._activation_bytes(1)),
            flops_per_sample=self._flops_per_sample,
            slot_memory_bytes=self.gpu.memory_bytes,
            host_memory_bytes=self.host_memory_bytes,
            switches=self.switches,
            optimizer=OwnOptimizer("AdamW" if self.by_element else "Adafactor", self.by_element),
        )

    @property
    def _flops_per_sample(self) -> float:
        return self.model.flops_per_sample if self.counts_flops else 0.0

    def largest_micro_batch(self, zero: Mapping[str, Any]) -> int:
        """Return the largest micro batch that fits with a complete ZeRO section; 0 if none."""
        fixed = self.memory_bytes(zero, 0)
        per_sample = self.memory_bytes(zero, 1) - fixed
        room = self.gpu.memory_bytes - _CONTEXT_BYTES - fixed
        return max(0, math.floor(room / per_sample))

    def _with_noise(self, true: Outcome, trial: Trial, found: Finding) -> Outcome:
        assert true.metrics is not None
        step_sd = self.step_sd if found.step_sd is None else found.step_sd
        rng = random.Random(f"{self.seed} {trial.id} {trial.name}")
        slower = math.exp(rng.gauss(0, self.run_sd)) * (1 + self.drift) ** trial.id
        slower /= self.lucky.get(trial.kind.value, 1.0)
        steps = [
            true.metrics.latency * slower * math.exp(rng.gauss(0, step_sd)) for _ in range(STEPS)
        ]
        mean = sum(steps) / STEPS
        variance = sum((step - mean) ** 2 for step in steps) / (STEPS - 1)
        error = half_width(0.95, STEPS - 1) * math.sqrt(variance / STEPS) / mean
        factor = mean / true.metrics.latency
        old = true.metrics
        metrics = replace(
            old,
            throughput=old.throughput / factor,
            latency=mean,
            forward=old.forward * factor,
            backward=old.backward * factor,
            step=old.step * factor,
            FLOPS_per_gpu=(old.FLOPS_per_gpu or 0.0) / factor,
            tokens_per_second=old.tokens_per_second and old.tokens_per_second / factor,
            data=old.data * factor,
            ci95=error,
        )
        duration_s = self.setup_s + (2 + STEPS) * mean / 1e3
        return replace(true, metrics=metrics, step_ms=tuple(steps), duration_s=duration_s)

    def _training(self, trial: Trial, found: Finding) -> TrainingCurve:
        """Return losses that depend on the global batch, and on the run if it is not seeded."""
        start = 4.0 if self.seeded else 4.0 + random.Random(f"{self.seed} {trial.id}").random()
        rate = 0.01 + 1e-5 * trial.batch.train_batch_size
        if trial.strategy in self.trains_otherwise:
            rate *= 0.4
        numbers = tuple(range(1, STEPS + 1))
        losses = tuple(start * math.exp(-rate * (number - 1)) for number in numbers)
        gas = trial.batch.gas
        facts = StepFacts(gas, gas * STEPS, found.late, found.evaluated, tokens_error=0.01)
        return TrainingCurve(steps=numbers, losses=losses, precision="bf16", facts=facts)

    # -- memory

    def memory_bytes(self, zero: Mapping[str, Any], micro_batch: int) -> float:
        """Return the bytes that a device needs for a complete ZeRO section."""
        stage, parameters = zero["stage"], self.model.parameters
        parts = [self.slots if stage >= least else 1 for least in (3, 2, 1)]
        on_device = (2 * (not _offloads(zero, "param")), 2, 12 * (not _offloads(zero, "optimizer")))
        states = sum(size * parameters / part for size, part in zip(on_device, parts, strict=True))
        buckets = 0.0
        if stage:
            copies = 2 if zero["overlap_comm"] else 1
            buckets = 2 * copies * min(zero["reduce_bucket_size"], parameters)
        if stage in (1, 2):
            buckets += 2 * min(zero["allgather_bucket_size"], parameters)
        if stage == 3:
            live = min(zero["stage3_max_live_parameters"], parameters)
            prefetched = 2 * self.model.layer + zero["stage3_prefetch_bucket_size"]
            buckets += 2 * min(live, prefetched)
        return _FRAGMENTED * (states + buckets + self._activation_bytes(micro_batch))

    def _host_bytes(self, zero: Mapping[str, Any]) -> float:
        """Return the bytes that a rank needs on its host for what is offloaded."""
        share = self.model.parameters / (self.slots if zero["stage"] else 1)
        return share * (16 * _offloads(zero, "optimizer") + 2 * _offloads(zero, "param"))

    def _activation_bytes(self, micro_batch: float) -> float:
        """Return the bytes that a forward pass keeps, logits included."""
        tokens = micro_batch * self.model.tokens
        kept = 34 * tokens * self.model.hidden * self.model.layers
        return kept + tokens * self.model.vocabulary * (2 + 4)

    # -- time

    def time(self, zero: Mapping[str, Any], micro_batch: int, gas: int) -> Time:
        """Return the true time of an optimizer step of a complete ZeRO section."""
        forward = self._forward(micro_batch, host_s=_HOOKS_S if zero["stage"] == 3 else 0.0)
        passes = [self._passes(zero, forward, last=last) for last in (False, True)]
        slow = self._near_the_edge(zero, micro_batch) * self._effect(zero)
        forwards, backwards = (
            ((gas - 1) * each + final) * slow for each, final in zip(*passes, strict=True)
        )
        return Time(forwards, backwards, self._optimizer(zero))

    def _passes(
        self, zero: Mapping[str, Any], forward: float, *, last: bool
    ) -> tuple[float, float]:
        """Return seconds of the forward and the backward pass of a micro step."""
        backward = 2 * forward
        found = dict.fromkeys((FORWARD, BACKWARD), 0.0)
        exposed = dict(found)
        for group in self._collectives(zero):
            if group.last != last or group.phase == STEP:
                continue
            moved = self._seconds(group)
            if not group.overlapped:
                exposed[group.phase] += moved
                continue
            found[group.phase] += moved
            # The first gather and the last bucket are never hidden.
            parts = self.model.layers if group.kind == ALL_GATHER else group.count
            exposed[group.phase] += moved / max(1, parts)
        return (
            max(forward, found[FORWARD]) + exposed[FORWARD],
            max(backward, found[BACKWARD]) + exposed[BACKWARD],
        )

    def _effect(self, zero: Mapping[str, Any]) -> float:
        names = [f"z{zero['stage']}", *(f"{name}={value}" for name, value in zero.items())]
        return math.prod(self.effects.get(name, 1.0) for name in names)

    def _forward(self, micro_batch: int, *, host_s: float) -> float:
        model, tokens = self.model, micro_batch * self.model.tokens
        h = model.hidden
        routed = math.ceil(tokens * model.active / model.experts)
        products = [(tokens, h, 3 * h), (tokens, h, h)]
        products += [(routed, h, 4 * h), (routed, 4 * h, h)] * model.experts
        layer = sum(self._product_s(*product) for product in products)
        layer += 4 * tokens * model.tokens * h / (self.gpu.peak * _EFFICIENCY * _OF_ATTENTION)
        layer += _ELEMENTWISE * tokens * h * 2 / self._bandwidth
        layers = model.layers * max(layer, _KERNELS * _LAUNCH_S + host_s)
        return layers + self._product_s(tokens, h, model.vocabulary)

    @property
    def _bandwidth(self) -> float:
        return 0.8 * self.gpu.bandwidth

    def _collectives(self, zero: Mapping[str, Any]) -> list[Collectives]:
        parameters = self.model.parameters
        return collectives.of_step(
            zero["stage"],
            zero,
            ranks=self.slots,
            params=parameters,
            trainable=parameters,
            itemsize=2,
        )

    def _seconds(self, group: Collectives) -> float:
        link, network = _OF_LINK * self.gpu.link, _OF_NETWORK * self.gpu.network
        return sum(Network(link, network, SLOTS_PER_HOST, Card.protocols).seconds(group))

    def _optimizer(self, zero: Mapping[str, Any]) -> float:
        stage, parameters = zero["stage"], self.model.parameters
        elements = parameters / (self.slots if stage else 1)
        if _offloads(zero, "optimizer"):
            seconds = elements * (_ADAM_BYTES / _HOST_ADAM + 4 / _HOST_LINK)
        else:
            seconds = elements * _ADAM_BYTES / self._bandwidth
        if _offloads(zero, "param"):
            seconds += 4 * elements / _HOST_LINK
        seconds += sum(map(self._seconds, (c for c in self._collectives(zero) if c.phase == STEP)))
        if stage == 3:
            seconds += _SUB_GROUP_S * math.ceil(elements / zero["sub_group_size"])
        return seconds

    def _near_the_edge(self, zero: Mapping[str, Any], micro_batch: int) -> float:
        used = (self.memory_bytes(zero, micro_batch) + _CONTEXT_BYTES) / self.gpu.memory_bytes
        return 1 + _SLOWER * max(0.0, (used - _EDGE) / (1 - _EDGE)) ** 2

    def _product_s(self, rows: int, inner: int, columns: int) -> float:
        """Return seconds of a matrix product, in whole waves of tiles."""
        tiles = math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
        waves = math.ceil(tiles / self.gpu.multiprocessors)
        efficiency = _UNALIGNED if rows % 8 else _EFFICIENCY
        flops = 2 * _TILE[0] * _TILE[1] * inner * self.gpu.multiprocessors * waves
        return flops / (self.gpu.peak * efficiency)


def with_defaults(zero: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ZeRO section with DeepSpeed's defaults for what it leaves out."""
    stage = int(zero.get("stage", 0))
    return {"stage": stage, **knobs.defaults(stage), **zero}


def _offloads(zero: Mapping[str, Any], what: str) -> bool:
    """Return whether "param" or "optimizer" lives on the host."""
    section = zero.get(f"offload_{what}") or {}
    return bool(section.get("device", "none") != "none")


def _with_finding(true: Outcome, found: Finding) -> Outcome:
    """Return an outcome with steps that wait for data, and longer samples."""
    old = true.metrics
    if old is None:
        return true
    slower, tokens = 1 / (1 - found.waiting), old.tokens_per_second
    metrics = replace(
        old,
        latency=old.latency * slower,
        data=old.latency * slower * found.waiting,
        throughput=old.throughput / slower,
        tokens_per_second=None if tokens is None else tokens * found.longer / slower,
    )
    return replace(true, metrics=metrics)


def _matches(where: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    return all(
        facts.get(name) in wanted
        if isinstance(wanted, (list, tuple))
        else facts.get(name) == wanted
        for name, wanted in where.items()
    )
