"""Work of a simulated step on one type of GPU, as input of the physical model of step time.

A roofline gives the time of a kernel: FLOPs over the FLOP/s that the GPU reaches, or bytes over the
bandwidth of its memory. The time of an empty kernel is added to each compute kernel, and is the
minimum of any other kernel. Collectives move bytes over links and wait for each hop (`Network`).
The host launches kernels and runs the hooks of parameters; if this takes longer than the kernels,
the step takes longer.

Results have the columns of `dsat.search.step_time.work`, so that trials calibrate the same terms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

import numpy as np

from dsat.search import step_time
from dsat.search.collectives import ALL_TO_ALL, Network, columns
from dsat.search.gpus import MEMORY_PART, GpuModel
from dsat.search.normal import Array
from dsat.search.step_time import COLUMNS, GROUP_LAUNCHES, Hardware
from dsat.values import hazards
from dsat.values.parallelism import DATA_ONLY, Parallelism
from dsat.values.step_trace import (
    ATTENTION,
    BACKWARD,
    COMPUTE_KINDS,
    FORWARD,
    HOST,
    MEMORY,
    STEP,
    TRANSFER,
    Collectives,
    Kernels,
    ModelTrace,
    StepTrace,
)

_PASSES = (FORWARD, BACKWARD)
_UNIT_S = 1e-3  # the unit of launches and hooks
# Seconds of a CPU core that DeepSpeed's hooks of one trained parameter take in a forward and
# in a backward pass, by stage (measured with 300 small layers, DeepSpeed 0.19.8).
_HOOKS_S = {0: (0.0, 0.0), 1: (0.0, 3.5e-5), 2: (0.0, 6e-5), 3: (5.3e-4, 4e-4)}
# Bytes/s that an optimizer on the host moves with one thread (a row of the benchmark, whose
# launcher sets OMP_NUM_THREADS=1), and the part of the memory's peak that all threads reach
# (DeepSpeed#6834: 10 s for 2.27 billion parameters on each of 8 GPUs of a DGX A100).
_THREAD_BANDWIDTH, _HOST_PART = 3e9, 0.26

# Mean and standard deviation of the logarithms of the learned factors before any measurement.
# "compute", by how much scripts are slower than the roofline, is from the fitted rows of
# benchmarks/projection.py.
PRIORS = {
    "compute": (0.25, 0.18),
    "overhead": (0.0, 0.3),
    "link": (0.0, 0.25),
    "host": (0.0, 0.4),
    "edge": (0.0, 0.7),
}


@dataclass(frozen=True)
class Cluster:
    """Hosts with one type of GPU.

    Attributes:
        slots: number of all GPUs.
        per_host: GPUs of a host.
        network_bandwidth: bytes/s between a GPU and other hosts.
        threads: threads of a rank; 0 for one on each core of its share of the host.
    """

    gpu: GpuModel
    slots: int
    per_host: int
    network_bandwidth: float
    threads: int = 0

    @classmethod
    def of(
        cls, gpu: GpuModel, slots: int, network_bandwidth: float | None = None, threads: int = 0
    ) -> Cluster:
        """Return a cluster of the GPU's usual hosts, by default with their usual network."""
        network = gpu.network_bandwidth if network_bandwidth is None else network_bandwidth
        return cls(gpu, slots, gpu.per_host, network, threads)

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s of a rank's optimizer on the host, limited by its threads and memory share."""
        gpu, ranks = self.gpu, min(self.slots, self.per_host)
        usual = max(1, gpu.per_host * gpu.host_cores // ranks)
        memory = gpu.per_host * gpu.host_bandwidth * _HOST_PART / ranks
        return min((self.threads or usual) * _THREAD_BANDWIDTH, memory)

    @property
    def network(self) -> Network:
        """The links among the cluster's GPUs."""
        gpu = self.gpu
        return Network(gpu.link_bandwidth, self.network_bandwidth, self.per_host, gpu.protocols)


def hardware_of(gpu: GpuModel) -> Hardware:
    """Return a GPU's speed for work with launches in `_UNIT_S` and host optimizer in seconds."""
    return replace(
        step_time.hardware_of(gpu, 2), host_memory_bandwidth=1.0, launch_s=_UNIT_S, filling=0.0
    )


def scaled(trace: StepTrace, slots: int, *, sharded: bool) -> StepTrace:
    """Return a trace scaled to another number of slots.

    Groups that span all ranks, perhaps with a stride, grow with the number of ranks. Smaller
    groups, as in tensor parallelism, keep their size.

    Args:
        slots: the new number of slots.
        sharded: whether each rank updates only its part of the parameters.
    """
    ratio = slots / trace.slots

    def grown(group: Collectives) -> Collectives:
        ranks = round(group.ranks * ratio) if group.ranks * group.stride >= trace.slots else None
        return group if ranks is None else replace(group, ranks=max(1, ranks))

    def shared(kernels: Kernels) -> Kernels:
        is_shared = kernels.phase == STEP or kernels.kind in (HOST, TRANSFER)
        return replace(kernels, bytes=kernels.bytes / ratio) if sharded and is_shared else kernels

    return replace(
        trace,
        slots=slots,
        kernels=tuple(map(shared, trace.kernels)),
        collectives=tuple(map(grown, trace.collectives)),
    )


def work_of(
    trace: StepTrace,
    model: ModelTrace,
    micro_batch: int,
    cluster: Cluster,
    stage: int,
    parallelism: Parallelism = DATA_ONLY,
) -> Array:
    """Return the work of a configuration, one value for each of `step_time.COLUMNS`.

    Args:
        trace: step of the configuration, `scaled` to the cluster's slots, at any micro batch.
        model: passes of the model without DeepSpeed.
        micro_batch: samples of a micro step.
        cluster: the cluster that runs the step.
        stage: ZeRO stage.
        parallelism: how slots share samples, and so the work of the model's kernels.
    """
    gpu, hardware, shared = cluster.gpu, hardware_of(cluster.gpu), parallelism.shared
    collectives = _scale_batch(trace, micro_batch, parallelism)
    kernels = [
        replace(k, flops=k.flops / shared, bytes=k.bytes / shared) for k in model.at(micro_batch)
    ]
    compute = {p: _seconds(kernels, p, COMPUTE_KINDS, gpu) for p in _PASSES}
    memory = {p: _seconds(kernels, p, (MEMORY,), gpu) for p in _PASSES}
    total_s = sum(compute.values()) + sum(memory.values())
    every = any(not k.last for k in trace.kernels)  # micro steps before the last were traced too
    if not every:
        collectives += [replace(group, last=False) for group in collectives]
    hooks_s = _hooks_s(kernels, stage) * trace.parameters
    hooks_s += _pair_s(stage) * trace.parameters**2
    # Factor from bytes of host work in the passes to bytes that the link moves in the same time.
    pcie_for_host = hardware.pcie_bandwidth / cluster.host_bandwidth
    extra = {kind: _once(trace, kind) if every else 0.0 for kind in (MEMORY, HOST, TRANSFER)}
    work = {
        "flops": sum(compute.values()) * hardware.flops / micro_batch,
        "rows": 8.0,  # the roofline counts whole tiles already
        "forward": (compute[FORWARD] + memory[FORWARD]) / total_s if total_s else 1 / 3,
        "weights": sum(memory.values()) * hardware.memory_bandwidth,
        "copies": _added_bytes(trace, model, last=not every),
        "launches": model.small.launches(_PASSES) * gpu.launch_s / _UNIT_S,
        "hooks": hooks_s / _UNIT_S,
        **columns(collectives, cluster.network),
        "optimizer": trace.bytes_of(MEMORY, (STEP,)) + extra[MEMORY],
        "groups": trace.launches((STEP,)) * gpu.launch_s / (GROUP_LAUNCHES * _UNIT_S),
        "transferred": trace.bytes_of(TRANSFER, _PASSES, last=not every)
        + trace.bytes_of(HOST, _PASSES, last=not every) * pcie_for_host,
        "transferred_last": trace.bytes_of(TRANSFER, (STEP,)) + extra[TRANSFER],
        "host_optimizer": (trace.bytes_of(HOST, (STEP,)) + extra[HOST]) / cluster.host_bandwidth,
        "data_parallel": cluster.slots / shared,
    }
    assert work.keys() == set(COLUMNS)
    return np.array([work[name] for name in COLUMNS])


def _hooks_s(kernels: Sequence[Kernels], stage: int) -> float:
    """Return the seconds of a parameter's hooks in a micro step, including recomputation."""
    forward, backward = (
        sum(k.flops * k.count for k in kernels if k.phase == phase) for phase in _PASSES
    )
    recomputed = min(1.0, max(0.0, backward / forward - 2)) if forward else 0.0
    return (1 + recomputed) * _HOOKS_S[stage][0] + _HOOKS_S[stage][1]


def _pair_s(stage: int) -> float:
    """Sum `Hazard.pair_s` over the faults of the installed DeepSpeed in a stage."""
    faults = hazards.find_by_version(version("deepspeed"))
    return sum(fault.pair_s for fault in faults if stage in fault.stages)


def _seconds(
    kernels: Iterable[Kernels], phase: str, kinds: Collection[str], gpu: GpuModel
) -> float:
    """Return the seconds of a phase's kernels of some kinds."""
    kernels_of_phase = (k for k in kernels if k.phase == phase and k.kind in kinds)
    return sum(k.count * _kernel_s(k, gpu) for k in kernels_of_phase)


def _kernel_s(kernel: Kernels, gpu: GpuModel) -> float:
    moved = kernel.bytes / (gpu.memory_bandwidth * MEMORY_PART)
    if kernel.kind == MEMORY:
        return max(moved, gpu.kernel_s)
    part = gpu.attention if kernel.kind == ATTENTION else gpu.matmul
    computed = kernel.flops / (gpu.peak(kernel.itemsize) * part)
    return max(computed, moved) + gpu.kernel_s


def _once(trace: StepTrace, kind: str) -> float:
    """Return how many more bytes of `kind` the last micro step's passes move than earlier ones."""
    last, earlier = (trace.bytes_of(kind, _PASSES, last=is_last) for is_last in (True, False))
    return max(0.0, last - earlier)


def _added_bytes(trace: StepTrace, model: ModelTrace, *, last: bool) -> float:
    """Return the bytes that the engine moves in the passes in addition to the model's kernels."""
    model_bytes = sum(k.bytes * k.count for k in model.at(trace.micro_batch) if k.kind == MEMORY)
    return max(0.0, trace.bytes_of(MEMORY, _PASSES, last=last) - model_bytes)


def _scale_batch(trace: StepTrace, micro_batch: int, parallelism: Parallelism) -> list[Collectives]:
    """Return the collectives at another micro batch; those that carry activations are scaled."""
    ratio = micro_batch / trace.micro_batch

    def carries_activations(group: Collectives) -> bool:
        is_tensor_parallel = group.ranks == parallelism.tensor > 1 and group.stride == 1
        return group.phase != STEP and (is_tensor_parallel or group.kind.startswith(ALL_TO_ALL))

    return [
        replace(group, bytes=ratio * group.bytes) if carries_activations(group) else group
        for group in trace.collectives
    ]
