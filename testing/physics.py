"""Time and memory of a transformer on made-up GPUs: the physics of `testing.world`.

It shares one thing with dsat's predictions: the list of DeepSpeed's collectives, which is checked
against traced steps. All other figures come from elsewhere:

- Matrix products by tiles of 128 x 256 over the multiprocessors, in whole waves, at 0.6 of the peak
  where tokens are a multiple of 8, and at 0.45 elsewhere (NVIDIA, "Matrix Multiplication Background
  User's Guide": tile and wave quantization, tensor core requirements). Attention at half of that.
- Element-wise work reads and writes `_ELEMENTWISE` activations of a layer at 0.8 of the memory
  bandwidth. A layer takes at least the time to launch its kernels.
- Collectives as DeepSpeed 0.19.8 calls them, by rings with NCCL's latencies
  (`dsat.search.collectives`). A pass and its overlapping collectives take the longer of the two
  times. The last bucket and the first gather are never hidden. Stage 3's hooks take `_HOOKS_S` of
  host time per layer, which matters where kernels are shorter.
- Memory: 2 + 2 + 12 bytes per parameter, partitioned by stage (Rajbhandari et al. (2020), ZeRO,
  section 3); 34 bytes per token and hidden unit of a layer (Korthikanti et al. (2022), section 4,
  flash attention); logits in 16 and 32 bits; buckets; 3 % of fragmentation. Offloaded states are in
  host memory and cross the link to the host once per step.
- Above 94 % of the memory, the allocator begins to free and reallocate. The size of this slowdown
  is assumed.

GPUs follow NVIDIA's data sheets, for 16-bit operations without sparsity. Rings reach 0.38 of the
bidirectional link and 0.88 of the network, as on a DGX A100 (230 of 600 GB/s of NVLink, 22 of 25
GB/s of InfiniBand per GPU).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsat.search import collectives
from dsat.search.collectives import Network
from dsat.search.gpus import GpuModel
from dsat.space import deepspeed_settings
from dsat.values.step_trace import ALL_GATHER, BACKWARD, FORWARD, STEP, Collectives

GIB = 2**30
SLOTS_PER_HOST = 8
_TILE = (128, 256)
_EFFICIENCY, _UNALIGNED, _OF_ATTENTION = 0.6, 0.45, 0.5
_ELEMENTWISE = 24  # activations that a layer reads or writes in its forward pass
_KERNELS, _LAUNCH_S = 16, 5e-6  # of a layer, in its forward pass
_HOOKS_S = 8e-4  # of a layer, in its forward pass
_SUB_GROUP_S = 2e-4  # for each sub-group of stage 3's optimizer step
_ADAM_BYTES = 30  # bytes read and written per element
_OF_LINK, _OF_NETWORK = 230 / 600, 22 / 25  # the part that a ring reaches
_HOST_LINK, _HOST_ADAM = 25e9, 20e9  # bytes/s per GPU: link to the host, host's Adam
CONTEXT_BYTES = int(1.2e9)
FRAGMENTED = 1.03
_EDGE, _SLOWER = 0.94, 0.5


@dataclass(frozen=True)
class Model:
    """A transformer with an output of width `vocabulary`; a sample has `tokens` tokens."""

    layers: int
    hidden: int
    tokens: int
    vocabulary: int
    experts: int = 1  # feed-forward layers that replace one
    active: int = 1  # experts that each token uses

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
    """A GPU: bytes of memory, FLOP/s, and bytes/s of its memory, links (both ways) and network."""

    memory_bytes: int
    bandwidth: float
    peak: float = 312e12
    multiprocessors: int = 108
    link: float = 600e9
    network: float = 25e9


A100 = Gpu(40 * GIB, 1555e9)
GPT_300M = Model(layers=24, hidden=1024, tokens=1024, vocabulary=50304)


@dataclass(frozen=True)
class Time:
    """Seconds of an optimizer step, by phase."""

    forward: float
    backward: float
    step: float

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.step

    def scaled(self, factor: float) -> Time:
        return Time(factor * self.forward, factor * self.backward, factor * self.step)


@dataclass(frozen=True)
class Physics:
    """Time and memory of a model's training.

    Attributes:
        slots: number of slots of every trial.
        effects: factors of the step time, by setting (`overlap_comm=False`), switch of the script,
            or strategy (`z2`).
    """

    model: Model = GPT_300M
    gpu: Gpu = A100
    slots: int = 1
    effects: Mapping[str, float] = field(default_factory=dict)

    # -- memory

    def memory_bytes(self, zero: Mapping[str, Any], micro_batch: int) -> float:
        """Return the bytes that a device needs, without its CUDA context.

        Args:
            zero: a ZeRO section that states every setting; see `with_defaults`.
        """
        stage, parameters = zero["stage"], self.model.parameters
        parts = [self.slots if stage >= least else 1 for least in (3, 2, 1)]
        on_device = (2 * (not _offloads(zero, "param")), 2, 12 * (not _offloads(zero, "optimizer")))
        states = sum(size * parameters / part for size, part in zip(on_device, parts, strict=True))
        buckets = 0.0
        if stage:
            copies = 2 if zero["overlap_comm"] else 1
            buckets = 2 * copies * min(zero["reduce_bucket_size"], parameters)
        if stage == 3:
            live = min(zero["stage3_max_live_parameters"], parameters)
            prefetched = 2 * self.model.layer + zero["stage3_prefetch_bucket_size"]
            buckets += 2 * min(live, prefetched)
        return FRAGMENTED * (states + buckets + self.activation_bytes(micro_batch))

    def host_bytes(self, zero: Mapping[str, Any]) -> float:
        """Return the bytes that a rank's offloaded states need in host memory."""
        share = self.model.parameters / (self.slots if zero["stage"] else 1)
        return share * (16 * _offloads(zero, "optimizer") + 2 * _offloads(zero, "param"))

    def activation_bytes(self, micro_batch: float) -> float:
        """Return the bytes that a forward pass keeps, including the logits."""
        tokens = micro_batch * self.model.tokens
        kept = 34 * tokens * self.model.hidden * self.model.layers
        return kept + tokens * self.model.vocabulary * (2 + 4)

    def largest_micro_batch(self, zero: Mapping[str, Any]) -> int:
        """Return the largest micro batch that fits; 0 if none fits."""
        fixed = self.memory_bytes(zero, 0)
        per_sample = self.memory_bytes(zero, 1) - fixed
        room = self.gpu.memory_bytes - CONTEXT_BYTES - fixed
        return max(0, math.floor(room / per_sample))

    # -- time

    def time(self, zero: Mapping[str, Any], micro_batch: int, gas: int) -> Time:
        """Return the true time of an optimizer step."""
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
        """Return the seconds of the forward and the backward pass of a micro step."""
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
        return collectives.list_collectives(
            zero["stage"],
            zero,
            ranks=self.slots,
            params=parameters,
            trainable=parameters,
            itemsize=2,
        )

    def _seconds(self, group: Collectives) -> float:
        link, network = _OF_LINK * self.gpu.link, _OF_NETWORK * self.gpu.network
        return Network(link, network, SLOTS_PER_HOST, GpuModel.protocols).seconds(group)

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
        used = (self.memory_bytes(zero, micro_batch) + CONTEXT_BYTES) / self.gpu.memory_bytes
        return 1 + _SLOWER * max(0.0, (used - _EDGE) / (1 - _EDGE)) ** 2

    def _product_s(self, rows: int, inner: int, columns: int) -> float:
        """Return the seconds of a matrix product, in whole waves of tiles."""
        tiles = math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
        waves = math.ceil(tiles / self.gpu.multiprocessors)
        efficiency = _UNALIGNED if rows % 8 else _EFFICIENCY
        flops = 2 * _TILE[0] * _TILE[1] * inner * self.gpu.multiprocessors * waves
        return flops / (self.gpu.peak * efficiency)


def with_defaults(zero: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ZeRO section completed with DeepSpeed's defaults."""
    stage = int(zero.get("stage", 0))
    return {"stage": stage, **deepspeed_settings.defaults(stage), **zero}


def _offloads(zero: Mapping[str, Any], what: str) -> bool:
    """Return whether `what`, "param" or "optimizer", is offloaded to the host."""
    section = zero.get(f"offload_{what}") or {}
    return bool(section.get("device", "none") != "none")
