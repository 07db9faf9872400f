"""Physical model of the seconds of an optimizer step.

    kernels  = max(launches + stage 3's hooks, weights / memory bandwidth
               + (FLOPs + padding of the last wave of tiles) / reached FLOP/s)
    forward  = max(kernels / 3, gather)
    backward = max(2 / 3 kernels, reduce + gather) + the last bucket     with overlap_comm, else
               their sum; stages 0 and 1 reduce in the last micro step only
    boundary = optimizer bytes / memory bandwidth (of the host if the optimizer is offloaded)
               + communication and transfers after the last backward pass
    step     = (gas * (forward + backward + copies + transfers to and from the host))
               * (1 + slow-down near the memory limit) + boundary

Every term is a count of FLOPs, bytes or launches divided by a rate of the hardware (`Hardware`).
Counts follow from the model's profile and the DeepSpeed settings (`work`), or from a simulated step
(`dsat.projecting`). The factors on the terms (`FACTORS`) are learned from trials
(`dsat.search.speed`); before any trial they are 1.

numpy only: the container of Determined's search runner has no SciPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsat.command.ds_config import AUTO, fill_in_sizes
from dsat.command.switches import CHECKPOINTING, EVERY_SECOND, is_switch
from dsat.search import collectives, gpus
from dsat.search.collectives import Network, Protocol
from dsat.search.gpus import GpuModel
from dsat.search.normal import Array
from dsat.space.deepspeed_settings import HPZ, defaults
from dsat.values.outcome import ModelProfile
from dsat.values.parallelism import DATA_ONLY, Parallelism, apply_settings
from dsat.values.zero_strategy import CPU, NONE, NVME, Strategy


@dataclass(frozen=True)
class Hardware:
    """Speed of one slot; by default a GPU of NVIDIA's DGX A100.

    Only ratios matter once a trial has been measured.

    Attributes:
        flops: FLOP/s that matrix products reach; by default half of the A100's peak.
        memory_bandwidth: bytes/s of the slot's memory.
        link_bandwidth: bytes/s of a collective inside a host.
        network_bandwidth: bytes/s of a slot to other hosts.
        protocols: protocols of collectives, as in `GpuModel`.
        pcie_bandwidth: bytes/s between the slot and its host.
        host_memory_bandwidth: bytes/s of the host's memory, per slot.
        launch_s: seconds that the host takes to launch the kernels of a micro step.
        filling: time that a micro step loses in an unfilled last wave of tiles, as the number of
            matrix rows computed in that time.
        edge: fraction by which micro steps slow down when no memory is left.
    """

    flops: float = 156e12
    memory_bandwidth: float = 1.6e12
    link_bandwidth: float = 230e9
    network_bandwidth: float = 22e9
    protocols: tuple[Protocol, ...] = GpuModel.protocols
    pcie_bandwidth: float = 25e9
    host_memory_bandwidth: float = 25e9
    launch_s: float = 5e-3
    filling: float = 800.0
    edge: float = 0.05


# A CPU core in fp32, with shared memory instead of links.
CPU_CORE = Hardware(
    flops=7e10,
    memory_bandwidth=3e9,
    link_bandwidth=2e9,
    network_bandwidth=1e9,
    protocols=((1.0, 5e-4, 5e-4),),
    pcie_bandwidth=1e10,
    host_memory_bandwidth=3e9,
    launch_s=1e-2,
    filling=16.0,
    edge=0.001,
)


@dataclass(frozen=True)
class Job:
    """A model and the slots that train it.

    Attributes:
        params, trainable: numbers of all and of the trainable parameters.
        param_bytes: bytes of a parameter in the forward pass.
        flops_per_sample: FLOPs of a forward and a backward pass, without recomputation.
        parallelism: parallelism of the user's own configuration.
        slots_per_host: devices per host if there are several hosts; else 0.
        hardware: speed of each slot.
        hidden_size: the model's hidden size, for a Trainer's "auto" sizes; None if unknown.
    """

    params: float
    trainable: float
    param_bytes: int
    flops_per_sample: float
    slots: int
    slots_per_host: int = 0
    parallelism: Parallelism = DATA_ONLY
    hardware: Hardware = Hardware()
    hidden_size: int | None = None

    @property
    def network(self) -> Network:
        hardware = self.hardware
        return Network(
            hardware.link_bandwidth,
            hardware.network_bandwidth,
            self.slots_per_host or self.slots,
            hardware.protocols,
        )

    def divided(self, shared: Parallelism) -> Job:
        """Return one rank's share of the model; `slots` becomes the size of its ZeRO group."""
        return replace(
            self,
            params=self.params / shared.tensor,
            trainable=self.trainable / shared.tensor,
            flops_per_sample=self.flops_per_sample / shared.shared,
            slots=self.slots // shared.tensor,
            slots_per_host=-(-self.slots_per_host // shared.tensor),
        )

    @classmethod
    def of_profile(cls, profile: ModelProfile, *, slots: int, slots_per_host: int = 0) -> Job:
        """Return the job of a profiled model; an unknown GPU counts as the default `Hardware`."""
        gpu = gpus.find_by_device_name(profile.device_name)
        if gpu is not None:
            hardware = hardware_of(gpu, profile.param_bytes)
        else:
            hardware = Hardware() if profile.host_memory_bytes else CPU_CORE
        return cls(
            params=profile.num_params,
            trainable=profile.trainable_params,
            param_bytes=profile.param_bytes,
            flops_per_sample=max(1.0, profile.flops_per_sample),
            slots=slots,
            slots_per_host=slots_per_host,
            parallelism=profile.parallelism,
            hardware=hardware,
            hidden_size=profile.hidden_size,
        )


def hardware_of(gpu: GpuModel, itemsize: int) -> Hardware:
    """Return the speed of a GPU in a usual host, for elements of `itemsize` bytes."""
    return Hardware(
        flops=gpu.peak(itemsize) * gpu.matmul,
        memory_bandwidth=gpu.memory_bandwidth * gpus.MEMORY_PART,
        link_bandwidth=gpu.link_bandwidth,
        network_bandwidth=gpu.network_bandwidth,
        protocols=gpu.protocols,
        pcie_bandwidth=gpu.pcie_bandwidth,
    )


# Columns of `work`.
COLUMNS = (
    "flops",  # per sample
    "rows",  # rows of matrix products, per sample
    "forward",  # fraction of the kernels' time in the forward pass
    "weights",  # bytes that a micro step reads and writes, regardless of its samples
    "copies",  # bytes of gradients that a micro step copies
    "launches",  # launches of a micro step, in units of `Hardware.launch_s`
    "hooks",  # hooks of stage 3, in the same unit
    "reduced",  # seconds of overlapped reductions of a micro step before the last
    "reduced_last",  # the same for the last micro step if that has more; else 0
    "reductions",  # number of overlapped reductions in the last micro step
    "waited",  # seconds of collectives that kernels wait for, per micro step
    "gathered",  # seconds of overlapped gathers in each of the two passes
    "boundary",  # seconds of links at the boundary, and the last micro step's excess of `waited`
    "optimizer",  # bytes that the optimizer and copies at the boundary read and write
    "groups",  # groups of parameters that the optimizer updates one by one
    "transferred",  # bytes between slot and host, per micro step
    "transferred_last",  # bytes between slot and host at the boundary
    "host_optimizer",  # bytes that an offloaded optimizer reads and writes in host memory
    "data_parallel",  # data-parallel size
)

# Learned factors, with mean and standard deviation of their logarithms before any measurement.
# Apart from the hardware's speed, counted times are right within a factor of about two.
FACTORS: Mapping[str, tuple[float, float]] = {
    "compute": (0.0, 5.0),  # on all times: the speed of the hardware
    "overhead": (0.0, 1.0),  # on the part of a micro step that does not depend on its samples
    "link": (0.0, 0.7),  # on collectives
    "host": (0.0, 0.7),  # on the optimizer, and on transfers between slot and host
    "edge": (0.0, 0.7),  # on the slow-down near the memory limit
}

_ADAM_BYTES = 30  # bytes that Adam reads and writes per parameter in mixed precision
_TILE = 8  # rows of a matrix product that tensor cores process at once
_HOOKS = 0.2  # time of stage 3's hooks, as a fraction of a micro step's launches
_NEAR_THE_EDGE = 0.06  # fraction of free memory below which the allocator frees and reallocates
_SMOOTH = 0.01  # smoothness of a maximum
_NVME_TIMES = 5.0  # ratio of a transfer's time to NVMe and over PCIe
GROUP_LAUNCHES = 0.04  # launches of an optimizer group, as a fraction of a micro step's


def work(job: Job, strategy: Strategy, settings: Mapping[str, Any]) -> Array:
    """Count the work of one slot in an optimizer step, in the order of `COLUMNS`, (columns,).

    Communication of tensor and sequence parallelism is not counted, but learned from trials.

    Args:
        settings: flat settings of a proposal; missing ones have DeepSpeed's defaults, and "auto"
            means a Trainer's value.
    """
    found = dict.fromkeys(COLUMNS, 0.0)
    shared = apply_settings(settings, job.parallelism)
    found["data_parallel"] = shared.data(job.slots)
    job = job.divided(shared)
    stage, n = strategy.stage, job.slots
    filled = fill_in_sizes(settings, job.hidden_size)
    zero = {**defaults(stage), **{key: value for key, value in filled.items() if value != AUTO}}
    get = zero.get
    gradient_bytes = float(job.param_bytes * job.trainable)
    found["forward"], found["launches"] = 1 / 3, 1.0
    found["flops"] = job.flops_per_sample * _recomputed(get(CHECKPOINTING))
    # Both passes together multiply and add three times for each parameter and row.
    found["rows"] = max(1.0, job.flops_per_sample / (6 * max(1.0, job.params)))
    found["weights"] = 4.0 * job.param_bytes * job.params
    sharded = job.trainable / (n if stage else 1)
    found["optimizer"] = _ADAM_BYTES * sharded
    listed = collectives.list_collectives(
        stage,
        zero,
        ranks=n,
        params=job.params,
        trainable=job.trainable,
        itemsize=job.param_bytes,
        hpz=(get(HPZ) or 1) if job.slots_per_host else 1,
    )
    found |= collectives.columns(listed, job.network)
    # Reduced gradients are copied into their partitions, and gathered parameters out of buffers.
    if stage == 1:
        found["optimizer"] += 4 * gradient_bytes
    elif stage > 1:
        found["copies"] = 2 * gradient_bytes
        found["optimizer"] += 2 * gradient_bytes
    found["hooks"] = _HOOKS * (stage == 3)
    found["groups"] = max(1.0, sharded / float(get("sub_group_size") or 1e9)) if stage == 3 else 1.0
    _add_offloading(found, strategy, sharded, gradient_bytes / (n if stage > 1 else 1), job)
    assert len(found) == len(COLUMNS)
    return np.array(list(found.values()))


def acts_on_whole_step(setting: str) -> bool:
    """Return whether a setting is a switch of the script whose effect no term describes."""
    return is_switch(setting) and setting != CHECKPOINTING


def _recomputed(checkpointing: Any) -> float:
    """Return the factor on FLOPs if all, half or none of the forward pass is recomputed."""
    if checkpointing == EVERY_SECOND:
        return 7 / 6
    return 1.0 if checkpointing in (None, False) else 4 / 3


def _add_offloading(
    found: dict[str, float], strategy: Strategy, sharded: float, gradient_bytes: float, job: Job
) -> None:
    """Move the work of an offloaded optimizer to the host, and add transfers to and from it."""
    slow = _NVME_TIMES if NVME in (strategy.offload_optimizer, strategy.offload_param) else 1.0
    if strategy.offload_optimizer != NONE:
        found["host_optimizer"] = slow * _ADAM_BYTES * sharded
        found["optimizer"] = 0.0
        found["transferred"] += slow * gradient_bytes
        found["transferred_last"] = slow * job.param_bytes * sharded
    if strategy.offload_param in (CPU, NVME):
        found["transferred"] += slow * 2 * job.param_bytes * job.params / job.slots


class Terms:
    """Parts of n optimizer steps in seconds, before learned factors, (n,) each.

    Args:
        work: work of each step, (n, columns); see the function `work`.
        micro_batch, gas: samples per micro step, and micro steps per step, (n,).
        room: memory predicted to be free, as a fraction, (n,).
    """

    def __init__(
        self, hardware: Hardware, work: Array, micro_batch: Array, gas: Array, room: Array
    ) -> None:
        w = dict(zip(COLUMNS, np.ascontiguousarray(work.T), strict=True))
        pcie, memory = hardware.pcie_bandwidth, hardware.memory_bandwidth
        # Kernels of a micro step: time that grows with its samples, and time that does not.
        rows = np.ceil(w["rows"] * micro_batch / _TILE) * _TILE
        row_s = w["flops"] / hardware.flops / w["rows"]
        self._samples = row_s * rows
        self._besides = row_s * hardware.filling + w["weights"] / memory
        self._launched = hardware.launch_s * (w["launches"] + w["hooks"])
        self._forward = w["forward"]
        # Communication that overlaps kernels: stage 3's gathers in each of the two passes; then all
        # of the backward pass, in earlier micro steps and in the last one.
        self._gathered = w["gathered"]
        self._reduced = w["reduced"] + w["gathered"]
        self._last = np.where(w["reduced_last"] > 0, w["reduced_last"], self._reduced)
        self._unhidden = 1 / np.maximum(1.0, w["reductions"])  # fraction after the backward pass
        # Times that kernels wait for: copies, links, and the host.
        self._copied = w["copies"] / memory
        self._waited = w["waited"]
        self._transferred = w["transferred"] / pcie
        # After the last backward pass: links, and everything else.
        self._boundary = w["boundary"]
        updated = w["optimizer"] / memory + w["transferred_last"] / pcie
        updated = updated + GROUP_LAUNCHES * hardware.launch_s * w["groups"]
        self._updated = updated + w["host_optimizer"] / hardware.host_memory_bandwidth
        self._gas = gas
        self._slowed = hardware.edge * np.maximum(0.0, 1 - room / _NEAR_THE_EDGE) ** 2

    def seconds(self, theta: Array) -> Array:
        """Predict the seconds of the steps, (n,) or (m, n).

        Args:
            theta: logarithms of the learned factors, (number of factors,); or of m sets of factors,
                (number of factors, m, 1), for m predictions.
        """
        factor = dict(zip(FACTORS, np.exp(np.clip(theta, -30.0, 30.0)), strict=True))
        overhead, link, host = factor["overhead"], factor["link"], factor["host"]
        kernels = _larger(overhead * self._launched, self._samples + overhead * self._besides)
        forward = kernels * self._forward
        backward = kernels - forward

        def beside(communication: Array) -> Array:
            """Return seconds of a backward pass hiding all but the last bucket's communication."""
            shown: Array = communication * self._unhidden
            return shown + _larger(backward, communication)

        passes = _larger(forward, link * self._gathered) + overhead * self._copied
        passes = (passes + link * self._waited + host * self._transferred) * self._gas
        passes += beside(link * self._reduced) * (self._gas - 1) + beside(link * self._last)
        passes *= 1 + factor["edge"] * self._slowed
        step = passes + link * self._boundary + host * self._updated
        return np.asarray(factor["compute"] * step)


def _larger(one: Array, other: Array) -> Array:
    """Return the maximum of positive numbers, smooth where they are similar."""
    apart, product = one - other, _SMOOTH * one * other
    return np.asarray((one + other + np.sqrt(apart**2 + 4 * product)) / 2)
