"""Collectives of an optimizer step under ZeRO, and the time that they take.

`list_collectives` lists the collectives that DeepSpeed 0.19.8 calls. `Network` predicts the time of
such a list, or of a list that was traced in a simulated step. `list_collectives` was compared with
traced steps of stages 0 to 3, with and without `overlap_comm`, `reduce_scatter` and
`use_multi_rank_bucket_allreduce`:

- Stage 0 all-reduces the gradients after the last backward pass (runtime/engine.py:3073).
- Stages 1 and 2 all-reduce whole buckets too, and then copy each rank's part
  (runtime/zero/stage_1_and_2.py:1695). With `reduce_scatter` but no
  `use_multi_rank_bucket_allreduce`, they reduce each part to its rank. Stage 1 reduces in the last
  micro step, stage 2 in every one. Both gather the updated parameters once a step, with one call
  for each parameter group (runtime/utils.py:1016).
- Stage 3 reduce-scatters gradients, or all-reduces them with `contiguous_gradients` but no
  `reduce_scatter`. It gathers the parameters for both passes of every micro step, except those that
  stay gathered from the forward to the backward pass.
- With `overlap_comm`, collectives before the step run on a separate stream, beside the kernels.
  Without it, kernels wait, also for stage 3's gathers (runtime/zero/parameter_offload.py:195).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dsat.values.step_trace import (
    ALL_GATHER,
    ALL_REDUCE,
    BACKWARD,
    FORWARD,
    REDUCE_SCATTER,
    STEP,
    Collectives,
)

REDUCE = "reduce"
ALL_TO_ALL = "alltoall"  # prefix of torch's names for it
_STAGE_0_BUCKET = 5e8  # elements of an all-reduce in stage 0
_HOP_S = 3.4e-6  # seconds that an overlapped reduction adds: a hop of NCCL's Simple ring
_GATHERS = 32  # gathers of a large model that are not full prefetch buckets

# Fraction of the bandwidth, seconds of a hop inside a host, and seconds of a hop between hosts.
Protocol = tuple[float, float, float]


@dataclass(frozen=True)
class Network:
    """Links among the ranks of a training.

    Attributes:
        link_bandwidth: bytes/s of a large collective inside a host.
        network_bandwidth: bytes/s of a rank to other hosts.
        per_host: ranks per host.
        protocols: as in `GpuModel`; the fastest one is used.
    """

    link_bandwidth: float
    network_bandwidth: float
    per_host: int
    protocols: tuple[Protocol, ...]

    def seconds(self, collectives: Collectives) -> float:
        """Return the seconds that collectives take.

        The latency of a ring grows with the number of ranks. NCCL's tree, for all-reduces only, has
        a latency that grows with the logarithm of the number of hosts (src/graph/tuning.cc).
        """
        ranks = collectives.ranks
        if ranks < 2:
            return 0.0
        inside = min(ranks, max(1, self.per_host // collectives.stride))
        hosts = math.ceil(ranks / inside)
        rounds = 2 if collectives.kind == ALL_REDUCE else 1
        moved_s = rounds * self._moved_s(collectives, inside, hosts)

        def spent(protocol: Protocol) -> float:
            part, hop_s, host_hop_s = protocol
            hops = rounds * ((ranks - hosts) * hop_s + (hosts - 1) * host_hop_s)
            if rounds > 1 and hosts > 1:  # NCCL uses a tree where that is faster
                tree = (inside - 1) * hop_s + math.ceil(math.log2(hosts)) * host_hop_s
                hops = min(hops, 2 * tree)
            return moved_s / part + collectives.count * hops

        return min(map(spent, self.protocols))

    def _moved_s(self, collectives: Collectives, inside: int, hosts: int) -> float:
        """Return the seconds to move the bytes once, without latency; a host has `inside` ranks."""
        ranks, bandwidth = collectives.ranks, self.link_bandwidth
        if collectives.kind.startswith(ALL_TO_ALL):  # every rank has one network port
            local, remote = (inside - 1) / bandwidth, (ranks - inside) / self.network_bandwidth
            return collectives.bytes / ranks * max(local, remote)
        if hosts > 1:  # a ring passes through all ports of the smallest host
            ports = ranks - inside * (hosts - 1)
            bandwidth = min(bandwidth, ports * self.network_bandwidth)
        return collectives.bytes * (ranks - 1) / ranks / bandwidth


def list_collectives(
    stage: int,
    settings: Mapping[str, Any],
    *,
    ranks: int,
    params: float,
    trainable: float,
    itemsize: int,
    hpz: int = 1,
) -> list[Collectives]:
    """List the collectives of the last micro step and of each earlier one.

    Args:
        settings: the ZeRO section; missing settings have DeepSpeed's defaults.
        ranks: number of ranks that share the optimizer's state.
        params, trainable: numbers of all and of the trainable parameters.
        itemsize: bytes of a parameter, and of a gradient.
        hpz: ranks that share a secondary copy of the parameters (`zero_hpz_partition_size`).
    """
    if ranks < 2:
        return []
    overlapped = stage > 0 and settings.get("overlap_comm") is True
    group = partial(Collectives, ranks=ranks, stride=1, overlapped=overlapped)
    kind = _reduction(stage, settings)
    bucket = settings.get("reduce_bucket_size") if stage else None
    count = max(1, math.ceil(trainable / float(bucket or _STAGE_0_BUCKET)))
    if kind == REDUCE:  # a bucket is cut where another rank's part begins
        count += ranks - 1
    gradient_bytes = itemsize * trainable
    groups = [group(BACKWARD, True, kind, bytes=gradient_bytes, count=count)]
    if stage >= 2:
        groups.append(group(BACKWARD, False, kind, bytes=gradient_bytes, count=count))
    if stage in (1, 2):
        gathered = group(STEP, True, ALL_GATHER, bytes=gradient_bytes, count=1)
        groups.append(replace(gathered, overlapped=False))
    if stage == 3:
        live_part = _kept_live(settings, params)
        prefetched = max(1.0, float(settings.get("stage3_prefetch_bucket_size") or 5e7))
        gathers = 1 if live_part == 1 else round(_GATHERS + params / prefetched)
        param_bytes = itemsize * params
        regather_bytes, regathers = (1 - live_part) * param_bytes, gathers if live_part < 1 else 0
        for last in (True, False):
            groups.append(group(FORWARD, last, ALL_GATHER, bytes=param_bytes, count=gathers))
            regather = group(BACKWARD, last, ALL_GATHER, bytes=regather_bytes, count=regathers)
            groups.append(replace(regather, ranks=hpz) if hpz > 1 else regather)
    return groups


def _reduction(stage: int, settings: Mapping[str, Any]) -> str:
    scatters = settings.get("reduce_scatter", True) is not False
    if stage == 3:
        whole = not scatters and settings.get("contiguous_gradients", True) is not False
        return ALL_REDUCE if whole else REDUCE_SCATTER
    if stage and scatters and settings.get("use_multi_rank_bucket_allreduce") is False:
        return REDUCE
    return ALL_REDUCE


def _kept_live(settings: Mapping[str, Any], params: float) -> float:
    """Return the fraction of parameters that are still gathered when the backward pass begins.

    A parameter stays gathered within `stage3_max_live_parameters`, or if at most
    `stage3_max_reuse_distance` parameters are used before its next use. Between its uses in the two
    passes, every later parameter is used twice, so half the distance counts.
    """
    live, reuse = (
        float(value) if isinstance(value := settings.get(name), (int, float)) else 1e9
        for name in ("stage3_max_live_parameters", "stage3_max_reuse_distance")
    )
    return min(1.0, max(live, reuse / 2) / max(1.0, params))


def columns(collectives: Iterable[Collectives], network: Network) -> dict[str, float]:
    """Return the columns of `step_time.work` that describe collectives.

    Args:
        collectives: of the last micro step and of each earlier one.
    """
    earlier, last = defaultdict[str, float](float), defaultdict[str, float](float)
    for group in collectives:
        sums = last if group.last else earlier
        seconds = network.seconds(group)
        if group.phase == STEP:
            sums["boundary"] += seconds
        elif not group.overlapped:
            sums["waited"] += seconds
        elif group.kind == ALL_GATHER:  # half of it in each pass
            sums["gathered"] += seconds / 2
        else:
            sums["reduced"] += seconds + _HOP_S * group.count
            sums["reductions"] += group.count
    return {
        "reduced": earlier["reduced"],
        "reduced_last": last["reduced"] if last["reduced"] > earlier["reduced"] else 0.0,
        "reductions": last["reductions"],
        "waited": earlier["waited"],
        "gathered": earlier["gathered"],
        "boundary": last["boundary"] + last["waited"] - earlier["waited"],
    }
