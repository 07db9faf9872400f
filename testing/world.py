"""A made-up world: outcomes of trials on made-up GPUs, with everything that can go wrong.

Tests and benchmarks share it; time and memory are those of `testing.physics`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dsat.command import ds_config
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
from dsat.values.student import half_width
from dsat.values.trial import Trial
from testing.physics import (
    A100,
    CONTEXT_BYTES,
    FRAGMENTED,
    GIB,
    GPT_300M,
    Gpu,
    Model,
    Physics,
    with_defaults,
)

__all__ = [
    "A100",
    "GIB",
    "GPT_300M",
    "STEPS",
    "Failure",
    "Finding",
    "Gpu",
    "Model",
    "World",
    "with_defaults",
]
STEPS = 10
SETUP_S = 30.0


@dataclass(frozen=True)
class Failure:
    """A failure of some trials.

    Attributes:
        kind: kind of the outcome.
        where: facts of the trials that fail (`World.facts`), each a value or a list of values.
        message, detail: texts, as an engine words them.
        before_engine: it failed before `deepspeed.initialize`, whatever the configuration.
        fixed_batch: samples that the script feeds regardless of the configuration.
        batch_flag: a flag of the script that would change this number; trials that set it run.
        completed_steps: optimizer steps before an error of the script.
    """

    kind: str
    where: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""
    detail: str = ""
    before_engine: bool = False
    fixed_batch: int | None = None
    batch_flag: str = ""
    completed_steps: int = 0


@dataclass(frozen=True)
class Finding:
    """Something that the meter reports of some trials besides their time.

    Attributes:
        where: facts of the trials, as in `Failure`.
        warnings: further warnings of the outcome.
        waiting: part of each step that waits for data.
        late: numbers of steps that took far longer and were not measured.
        evaluated: part of the steps with a forward pass outside of training.
        longer: tokens of a sample, relative to the model's.
        step_sd: replaces the world's.
    """

    where: Mapping[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    waiting: float = 0.0
    late: tuple[int, ...] = ()
    evaluated: float = 0.0
    longer: float = 1.0
    step_sd: float | None = None


@dataclass(frozen=True)
class World(Physics):
    """A model on GPUs, and everything that can go wrong. An outcome depends on the trial alone.

    Attributes:
        at_once: number of trials that the devices can run at the same time.
        seed: seed of the noise.
        run_sd, step_sd: relative standard deviations of a run's and of a step's time.
        drift: each further trial is slower by this fraction, as on a machine that heats up.
        lucky: factors of the measured speed by kind of trial, which the true speed lacks.
        failures: the first failure that matches a trial decides its outcome.
        samples: samples that a device has; a larger micro batch cannot be measured.
        tells_samples: successful trials report `samples`, too.
        host_memory_bytes: host memory for each rank.
        seeded: losses repeat from run to run, so they can be compared.
        compares_samples: the script's loss is over pairs of samples.
        trains_otherwise: strategies (such as `z2`) whose losses fall more slowly.
        switches: switches of the script with their possible values, by name.
        device_name: name of every GPU.
        seen_activations: activation memory that the first trial observes, relative to the truth.
        tells_memory: whether trials report the memory that they used.
        counts_flops: whether the FLOPs of the model can be counted.
        counts_tokens: whether the model's inputs are sequences of tokens.
        findings: the first finding that matches a trial applies to it.
        sequences: shortest and longest sequence of the data, and positions of the model, in
            tokens; None if unknown.
        by_element: the optimizer treats each element of a parameter separately.
        accumulation_flag: the script's flag that repeats the accumulation steps; empty for none.
    """

    at_once: int = 1
    seed: int = 0
    run_sd: float = 0.01
    step_sd: float = 0.005
    drift: float = 0.0
    setup_s: float = SETUP_S
    lucky: Mapping[str, float] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    samples: int | None = None
    tells_samples: bool = False
    host_memory_bytes: int = 2**40 // 8
    seeded: bool = True
    compares_samples: bool = False
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
    accumulation_flag: str = ""

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
        """Return the outcome of a trial of a DeepSpeed configuration, with noise."""
        facts = self.facts(trial)
        for failure in self.failures:
            is_avoided = failure.batch_flag and trial.batch_flag == failure.batch_flag
            if _matches(failure.where, facts) and not is_avoided:
                is_less = (failure.fixed_batch or trial.batch.micro_batch) < trial.batch.micro_batch
                return Outcome(
                    OutcomeKind(failure.kind),
                    message=failure.message,
                    detail=failure.detail,
                    before_engine=failure.before_engine,
                    smaller_may_run=is_less,
                    most_samples=failure.fixed_batch if is_less else None,
                    fixed_batch=failure.fixed_batch,
                    batch_flag=failure.batch_flag,
                    completed_steps=failure.completed_steps,
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
            accumulation_flag=self.accumulation_flag if trial.profiles else "",
            most_samples=self.samples if self.tells_samples else None,
            memory=true.memory if self.tells_memory else None,
            training=self._training(trial, found),
            warnings=(*self.warnings, *found.warnings),
            sequences=self.sequences and SequenceLengths(*self.sequences),
        )

    def facts(self, trial: Trial) -> dict[str, Any]:
        """Return the facts of a trial, which failures and findings match."""
        return {
            **trial.script_args,
            "trial": trial.id,
            "kind": trial.kind.value,
            "stage": trial.stage,
            "strategy": trial.strategy,
            "micro_batch": trial.batch.micro_batch,
            "gas": trial.batch.gas,
            "batch_flag": trial.batch_flag,
            "accumulation_flag": trial.accumulation_flag,
        }

    def answer(self, config: Mapping[str, Any], switches: Mapping[str, Any] = {}) -> Outcome:
        """Return the outcome of a complete DeepSpeed configuration, without noise or failures."""
        batch = ds_config.resolve_batch(config, self.slots, where="the configuration")
        zero = with_defaults(config.get("zero_optimization") or {})
        memory = self.memory_bytes(zero, batch.micro_batch)
        if memory + CONTEXT_BYTES > self.gpu.memory_bytes:
            return Outcome(OutcomeKind.OOM, message="out of memory", duration_s=self.setup_s)
        if self.host_bytes(zero) > self.host_memory_bytes:
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
        allocated = round(memory / FRAGMENTED)
        use = MemoryUse({"backward": allocated}, {"backward": round(memory)}, {}, CONTEXT_BYTES)
        duration_s = self.setup_s + (2 + STEPS) * time.total
        return Outcome(OutcomeKind.OK, metrics=metrics, memory=use, duration_s=duration_s)

    @property
    def profile(self) -> ModelProfile:
        """The profile of the model that the first trial records."""
        return ModelProfile(
            num_params=self.model.parameters,
            trainable_params=self.model.parameters,
            param_bytes=2,
            activation_bytes_per_sample=round(self.seen_activations * self.activation_bytes(1)),
            flops_per_sample=self._flops_per_sample,
            slot_memory_bytes=self.gpu.memory_bytes,
            host_memory_bytes=self.host_memory_bytes,
            switches=self.switches,
            optimizer=OwnOptimizer("AdamW" if self.by_element else "Adafactor", self.by_element),
        )

    @property
    def _flops_per_sample(self) -> float:
        return self.model.flops_per_sample if self.counts_flops else 0.0

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
        return TrainingCurve(
            steps=numbers,
            losses=losses,
            precision="bf16",
            facts=facts,
            compares_samples=self.compares_samples,
        )


def _with_finding(true: Outcome, found: Finding) -> Outcome:
    """Return an outcome whose steps wait for data and whose samples are longer."""
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
