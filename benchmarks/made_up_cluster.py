"""Made-up clusters: step time and memory of transformers on 4 to 64 GPUs, from published figures.

It shares no code with the model that `dsat model` searches with, and is told of by other means:

- Matrix products by tiles of 128 x 256 over the multiprocessors, in whole waves, at 0.6 of the peak
  where tokens are a multiple of 8, and 0.45 elsewhere (NVIDIA, "Matrix Multiplication Background
  User's Guide": tile and wave quantization, tensor core requirements). Attention at half of that.
- What is done element by element reads and writes `ELEMENTWISE` activations of a layer from memory
  at 0.8 of its bandwidth; no layer takes less than its kernels' launches.
- Collectives by a latency and a ring's bandwidth: all-reduce moves 2 (n - 1) / n of its bytes,
  gathers and reduce-scatters half of that; ZeRO moves as much as Rajbhandari et al. (2020), section
  7, say. Between hosts each GPU has its own link. What overlaps with the backward pass takes the
  longer of both; the last bucket, and the first gather, are never hidden. Stage 3's hooks take the
  host `_HOOKS_S` a layer, which shows where kernels are shorter.
- Memory: 2 + 2 + 12 bytes of each parameter, partitioned as the stage says (the same, section 3),
  34 bytes of each token and hidden unit a layer (Korthikanti et al. (2022), section 4, flash
  attention), logits in 16 and 32 bits, buckets, and 3 % of fragmentation.
- Above 94 % of the memory the allocator begins to free and to allocate anew; how steeply that slows
  a step down is assumed, as is how much runs vary (`RUN_SD`, `STEP_SD`).

GPUs are as NVIDIA's data sheets have them, 16-bit without sparsity. Rings reach 0.38 of the link
both ways, and 0.88 of the network, as they do on a DGX A100 (230 of 600 GB/s of NVLink, 22 of 25
GB/s of InfiniBand for each GPU).

`all_clusters` were looked at while the search was made. `held_out` were written down afterwards and
before anything had run on them: other GPUs, links, models and batch rules, the simulator as it was.
Their models are BERT-large (Devlin et al. (2018)) with its batch of 256, GPT-NeoX-20B (Black et al.
(2022)), Pythia-2.8B (Biderman et al. (2023)), Llama-2-7B (Touvron et al. (2023)), and a GPT of 24
layers in which two of eight experts see each token, as in Mixtral (Jiang et al. (2024)).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.tables import Header
from dsat.inputs import ds_config
from dsat.space import knobs
from dsat.space.overrides import overrides_for
from dsat.values.objective import Objective
from dsat.values.outcome import MemoryUse, Metrics, ModelProfile, Outcome, OutcomeKind
from dsat.values.trial import BatchTriple

RUN_SD, STEP_SD = 0.01, 0.005
STEPS = 10
_TILE = (128, 256)
_EFFICIENCY, _UNALIGNED, _OF_ATTENTION = 0.6, 0.45, 0.5
_ELEMENTWISE = 24  # activations of a layer that are read or written in its forward pass
_KERNELS, _LAUNCH_S = 16, 5e-6  # of a layer, in its forward pass
_HOOKS_S = 8e-4  # of a layer, in its forward pass
_SUB_GROUP_S = 2e-4  # each sub-group of stage 3's optimizer step
_ADAM_BYTES = 30  # read and written for each element
_OF_LINK, _OF_NETWORK = 230 / 600, 22 / 25  # that a ring reaches
_LATENCY_INSIDE_S, _LATENCY_BETWEEN_S = 2e-5, 6e-5
_CONTEXT = int(1.2e9)
_HOST_MEMORY = 2**40 // 8  # for each GPU
_FRAGMENTED = 1.03
_EDGE, _SLOWER = 0.94, 0.5
_SETUP_S = 30.0
_SLOTS_PER_HOST = 8
_CHOICES: dict[str, list[Any]] = {
    "reduce_bucket_size": [5 * 10**8, 5 * 10**6, 5 * 10**7, 10**9],
    "allgather_bucket_size": [5 * 10**8, 5 * 10**6, 5 * 10**7, 10**9],
    "overlap_comm": [True, False],
    "stage3_prefetch_bucket_size": [5 * 10**7, 5 * 10**6, 5 * 10**8],
    "stage3_param_persistence_threshold": [10**5, 10**4, 10**6],
    "sub_group_size": [10**9, 10**8, 10**7],
}


@dataclass(frozen=True)
class Model:
    """A transformer; `vocabulary` is the width of its output."""

    layers: int
    hidden: int
    tokens: int  # of a sample
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
class _Gpu:
    """A GPU: FLOP/s, bytes, bytes/s of its memory, of its links both ways and of its network."""

    memory_bytes: int
    bandwidth: float
    peak: float = 312e12
    multiprocessors: int = 108
    link: float = 600e9
    network: float = 25e9


@dataclass(frozen=True)
class Time:
    """Seconds of an optimizer step, by part."""

    forward: float
    backward: float
    step: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.step


class Cluster:
    """A model on a made-up cluster; answers trials as a recorded table does.

    Args:
        own: the user's own micro batch.
        batch: the global batch that the user asks for, if any.
    """

    cap = None

    def __init__(
        self,
        name: str,
        model: Model,
        gpu: _Gpu,
        *,
        slots: int,
        own: int = 1,
        batch: int | None = None,
    ) -> None:
        self._model, self._gpu = model, gpu
        self._slots = slots
        self._memory = gpu.memory_bytes
        self._bandwidth = 0.8 * gpu.bandwidth
        parameters = model.parameters
        self.header = Header(
            name=name,
            command="train.py",
            ds_config={
                "train_micro_batch_size_per_gpu": own,
                **({} if batch is None else {"train_batch_size": batch}),
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            },
            slots=slots,
            slot_memory_bytes=gpu.memory_bytes,
            profile=ModelProfile(
                num_params=parameters,
                trainable_params=parameters,
                param_bytes=2,
                activation_bytes_per_sample=round(self._activations(1)),
                flops_per_sample=model.flops_per_sample,
                slot_memory_bytes=gpu.memory_bytes,
                host_memory_bytes=_HOST_MEMORY,
            ),
            profile_duration_s=_SETUP_S + 5,
            about={"machine": "made up", "measured steps": f"{STEPS} to {STEPS}"},
        )

    @property
    def choices(self) -> dict[str, list[Any]]:
        return dict(_CHOICES)

    @functools.cached_property
    def largest_micro_batch(self) -> int:
        """The largest that fits with any settings."""
        return max(self._largest(zero) for zero in self._settings())

    @property
    def profile_outcome(self) -> Outcome:
        return Outcome(
            OutcomeKind.OK,
            profile=self.header.profile,
            duration_s=self.header.profile_duration_s,
        )

    def config(self, settings: Mapping[str, Any], batch: BatchTriple) -> dict[str, Any]:
        """The DeepSpeed configuration of settings and batch sizes."""
        return ds_config.for_use(self.header.ds_config, overrides_for(settings, batch))

    def answer(self, config: Mapping[str, Any]) -> Outcome:
        """The outcome of a trial of a whole DeepSpeed configuration, without noise."""
        batch = ds_config.resolve_batch(config, self._slots, where="the configuration")
        zero = _with_defaults(config.get("zero_optimization") or {})
        memory = self._memory_of(zero, batch.micro_batch)
        if memory + _CONTEXT > self._memory:
            return Outcome(OutcomeKind.OOM, message="out of memory", duration_s=_SETUP_S)
        time = self._time(zero, batch.micro_batch, batch.gas)
        latency, throughput = 1e3 * time.total, batch.train_batch_size / time.total
        allocated = round(memory / _FRAGMENTED)
        metrics = Metrics(
            throughput=throughput,
            latency=latency,
            forward=1e3 * time.forward,
            backward=1e3 * time.backward,
            step=1e3 * time.step,
            FLOPS_per_gpu=throughput * self._model.flops_per_sample / self._slots,
            num_steps=STEPS,
            ci95=2.26 * STEP_SD / math.sqrt(STEPS),
        )
        use = MemoryUse({"backward": allocated}, {"backward": round(memory)}, {}, _CONTEXT)
        return Outcome(
            OutcomeKind.OK,
            metrics=metrics,
            memory=use,
            duration_s=_SETUP_S + (2 + STEPS) * time.total,
        )

    def run_sd(self, outcome: Outcome) -> float:
        """Standard deviation of a measured time, as a fraction of it."""
        return math.hypot(RUN_SD, STEP_SD / math.sqrt(STEPS))

    def best(self, objective: Objective) -> float:
        """The best throughput of all settings and micro batches, accumulated to a fixed batch only.

        Raises:
            ValueError: the objective is another one.
        """
        if objective.metric != "throughput":
            raise ValueError(objective.metric)
        return self._best_throughput

    @functools.cached_property
    def _best_throughput(self) -> float:
        fixed = self.header.train_batch_size
        return max(
            size * gas * self._slots / self._time(zero, size, gas).total
            for zero in self._settings()
            for size in range(1, self._largest(zero) + 1)
            for gas, rest in [(1, 0) if fixed is None else divmod(fixed, size * self._slots)]
            if gas and not rest
        )

    def _settings(self) -> Iterator[dict[str, Any]]:
        """All settings that differ in anything, with DeepSpeed's defaults for the rest."""
        for stage in range(4):
            names = [name for name in _CHOICES if name in _with_defaults({"stage": stage})]
            for values in itertools.product(*(_CHOICES[name] for name in names)):
                yield _with_defaults({"stage": stage, **dict(zip(names, values, strict=True))})

    def _largest(self, zero: Mapping[str, Any]) -> int:
        room = self._memory - _CONTEXT
        fixed = self._memory_of(zero, 0)
        per_sample = self._memory_of(zero, 1) - fixed
        return max(0, math.floor((room - fixed) / per_sample))

    # -- memory

    def _activations(self, micro_batch: float) -> float:
        """Bytes that a forward pass keeps, and the logits."""
        tokens = micro_batch * self._model.tokens
        kept = 34 * tokens * self._model.hidden * self._model.layers
        return kept + tokens * self._model.vocabulary * (2 + 4)

    def _memory_of(self, zero: Mapping[str, Any], micro_batch: int) -> float:
        stage, parameters = zero["stage"], self._model.parameters
        parts = [self._slots if stage >= least else 1 for least in (3, 2, 1)]
        states = sum(size * parameters / part for size, part in zip((2, 2, 12), parts, strict=True))
        buckets = 0.0
        if stage:
            copies = 2 if zero["overlap_comm"] else 1
            buckets = 2 * copies * min(zero["reduce_bucket_size"], parameters)
        if stage in (1, 2):
            buckets += 2 * min(zero["allgather_bucket_size"], parameters)
        if stage == 3:
            layer = self._model.layer
            live = min(zero["stage3_max_live_parameters"], parameters)
            buckets += 2 * min(live, 2 * layer + zero["stage3_prefetch_bucket_size"])
        return _FRAGMENTED * (states + buckets + self._activations(micro_batch))

    # -- time

    def _time(self, zero: Mapping[str, Any], micro_batch: int, gas: int) -> Time:
        stage = zero["stage"]
        forward = self._forward(micro_batch, host_s=_HOOKS_S if stage == 3 else 0.0)
        backward = 2 * forward
        reduced, boundary = self._reductions(zero)
        gathered = self._gathers(zero)
        if stage == 3:
            forward = max(forward, gathered) + gathered / self._model.layers
        hidden = zero.get("overlap_comm", False)
        moved = reduced + (gathered if stage == 3 else 0.0)

        def with_reductions(moved: float, buckets: int) -> float:
            exposed = moved / max(1, buckets)
            return max(backward, moved) + exposed if hidden else backward + moved

        count = self._buckets(zero)
        each = with_reductions(moved, count) if stage >= 2 else backward
        last = with_reductions(boundary, count) if stage == 1 else each
        step = self._optimizer(zero) + (boundary if stage == 0 else 0.0)
        slow = self._near_the_edge(zero, micro_batch)
        return Time(gas * forward * slow, ((gas - 1) * each + last) * slow, step)

    def _forward(self, micro_batch: int, *, host_s: float) -> float:
        model, tokens = self._model, micro_batch * self._model.tokens
        h = model.hidden
        routed = math.ceil(tokens * model.active / model.experts)
        products = [(tokens, h, 3 * h), (tokens, h, h)]
        products += [(routed, h, 4 * h), (routed, 4 * h, h)] * model.experts
        layer = sum(self._product_s(*product) for product in products)
        layer += 4 * tokens * model.tokens * h / (self._gpu.peak * _EFFICIENCY * _OF_ATTENTION)
        layer += _ELEMENTWISE * tokens * h * 2 / self._bandwidth
        layers = model.layers * max(layer, _KERNELS * _LAUNCH_S + host_s)
        return layers + self._product_s(tokens, h, model.vocabulary)

    def _collective(self, total: float, times: float, count: float = 1) -> float:
        """Seconds to move `times` (n - 1) / n of so many bytes in `count` collectives."""
        n, over_hosts = self._slots, self._slots > _SLOTS_PER_HOST
        gpu = self._gpu
        rate = _OF_NETWORK * gpu.network if over_hosts else _OF_LINK * gpu.link
        latency = _LATENCY_BETWEEN_S if over_hosts else _LATENCY_INSIDE_S
        return times * (n - 1) / n * total / rate + count * latency

    def _buckets(self, zero: Mapping[str, Any]) -> int:
        if zero["stage"] == 0:
            return 1
        return math.ceil(self._model.parameters / int(zero["reduce_bucket_size"]))

    def _reductions(self, zero: Mapping[str, Any]) -> tuple[float, float]:
        """Seconds of each micro step, and of the last one before the optimizer's step."""
        moved, count = 2 * self._model.parameters, self._buckets(zero)
        if zero["stage"] == 0:
            return 0.0, self._collective(moved, 2)
        if zero["stage"] == 1:
            return 0.0, self._collective(moved, 1, count)
        return self._collective(moved, 1, count), 0.0

    def _gathers(self, zero: Mapping[str, Any]) -> float:
        """Seconds of gathering the parameters once, for stage 3."""
        if zero["stage"] != 3:
            return 0.0
        model = self._model
        small = zero["stage3_param_persistence_threshold"] < model.hidden
        count = model.layers * (6 if small else 4)
        grouped = model.layer / max(1, zero["stage3_prefetch_bucket_size"])
        count += model.layers * math.ceil(grouped)
        return self._collective(2 * model.parameters, 1, count)

    def _optimizer(self, zero: Mapping[str, Any]) -> float:
        stage, parameters = zero["stage"], self._model.parameters
        elements = parameters / (self._slots if stage else 1)
        seconds = elements * _ADAM_BYTES / self._bandwidth
        if stage in (1, 2):
            count = math.ceil(parameters / zero["allgather_bucket_size"])
            seconds += self._collective(2 * parameters, 1, count)
        if stage == 3:
            seconds += _SUB_GROUP_S * math.ceil(elements / zero["sub_group_size"])
        return seconds

    def _near_the_edge(self, zero: Mapping[str, Any], micro_batch: int) -> float:
        used = (self._memory_of(zero, micro_batch) + _CONTEXT) / self._memory
        return 1 + _SLOWER * max(0.0, (used - _EDGE) / (1 - _EDGE)) ** 2

    def _product_s(self, rows: int, inner: int, columns: int) -> float:
        """Seconds of a matrix product, in whole waves of tiles."""
        gpu = self._gpu
        tiles = math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
        waves = math.ceil(tiles / gpu.multiprocessors)
        efficiency = _UNALIGNED if rows % 8 else _EFFICIENCY
        flops = 2 * _TILE[0] * _TILE[1] * inner * gpu.multiprocessors * waves
        return flops / (gpu.peak * efficiency)


def _with_defaults(zero: Mapping[str, Any]) -> dict[str, Any]:
    stage = int(zero.get("stage", 0))
    return {"stage": stage, **knobs.defaults(stage), **zero}


def all_clusters() -> list[Cluster]:
    """GPT of 1.3 and 6.7 billion parameters, and a vision transformer of 257 tokens a picture."""
    small, large = _Gpu(40 * 2**30, 1555e9), _Gpu(80 * 2**30, 2039e9)
    return [
        Cluster("made-up-8-gpt-1b", Model(24, 2048, 1024, 50304), small, slots=8),
        Cluster("made-up-8-vit", Model(32, 1280, 257, 1000), large, slots=8, own=8),
        Cluster("made-up-32-gpt-7b", Model(32, 4096, 2048, 50304), large, slots=32),
    ]


def held_out() -> list[Cluster]:
    """What nothing was tuned on: other GPUs and links, a fixed batch, experts, stage 3 alone."""
    gib = 2**30
    v100 = _Gpu(32 * gib, 900e9, 125e12, 80, link=300e9)
    l40s = _Gpu(48 * gib, 864e9, 362e12, 142, link=64e9, network=6.25e9)
    h100 = _Gpu(80 * gib, 3350e9, 989e12, 132, link=900e9, network=50e9)
    a100 = _Gpu(40 * gib, 1555e9)
    pythia, neox = Model(32, 2560, 2048, 50304), Model(44, 6144, 2048, 50432)
    experts = Model(24, 1024, 2048, 50304, experts=8, active=2)
    return [
        Cluster(
            "held-out-4-v100-bert", Model(24, 1024, 512, 30522), v100, slots=4, own=8, batch=256
        ),
        Cluster("held-out-16-l40s-pythia", pythia, l40s, slots=16),
        Cluster("held-out-8-h100-llama", Model(32, 4096, 4096, 32000), h100, slots=8, batch=128),
        Cluster("held-out-64-a100-neox", neox, a100, slots=64),
        Cluster("held-out-8-a100-experts", experts, a100, slots=8),
    ]
