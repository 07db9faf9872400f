"""Measure what this machine's slots do: matrix products, attention, memory, calls, links.

    python -m dsat.in_trial.probe

One process for each slot, started at once by `dsat.prepare.probe`, so that what they share (memory,
power, cores) counts. Rank 0 writes one line of JSON: medians over the ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_SIZES = {"cpu": (256, 1024, 4_000_000), "cuda": (1024, 8192, 256_000_000)}
_ATTENTION = {"cpu": (4, 512, 64), "cuda": (32, 4096, 128)}  # heads, tokens, elements of a head
_REPEATS = 10  # of each, on all ranks at once
_SMALL, _LARGE = 1024, 8_000_000  # elements of a collective


def main() -> None:
    """Measure, and print the result."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", rank=rank, world_size=ranks)
    found = _measure(kind, device, ranks)
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, found)
    dist.destroy_process_group()
    if rank == 0:
        medians = {key: statistics.median(each[key] for each in gathered) for key in found}
        name = torch.cuda.get_device_name() if kind == "cuda" else "cpu"
        json.dump({**medians, "device": name}, sys.stdout)


def _measure(kind: str, device: Any, ranks: int) -> dict[str, float]:
    small, large, elements = _SIZES[kind]

    def synchronize() -> None:
        if kind == "cuda":
            torch.cuda.synchronize()

    def seconds(action: Callable[[], object]) -> float:
        dist.barrier()
        action()
        synchronize()
        times = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            action()
            synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrices = [torch.randn(large, large, device=device).to(dtype) for _ in range(2)]
        itemsize = matrices[0].element_size()
        found[f"flops_{itemsize}"] = 2 * large**3 / seconds(lambda m=matrices: m[0] @ m[1])  # type: ignore[misc]
    heads, tokens, size = _ATTENTION[kind]
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    q = torch.randn(1, heads, tokens, size, device=device, dtype=dtype)
    took = seconds(
        lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    )
    found["attention"] = 2 * heads * tokens**2 * size / took / found[f"flops_{q.element_size()}"]
    x, y = (torch.ones(elements, device=device) for _ in range(2))
    found["memory_bandwidth"] = 2 * 4 * elements / seconds(lambda: torch.add(x, 1.0, out=y))
    if kind == "cuda":
        pinned = torch.ones(elements // 4, pin_memory=True)
        found["pcie_bandwidth"] = elements / seconds(lambda: x[: elements // 4].copy_(pinned))
    tiny = torch.ones(small, device=device)
    found["kernel_s"] = seconds(lambda: [tiny + 1 for _ in range(100)]) / 100
    if ranks > 1:
        few, many = (torch.ones(n, device=device) for n in (_SMALL, _LARGE))
        latency = seconds(lambda: dist.all_reduce(few))
        moved = 2 * (ranks - 1) / ranks * 4 * (_LARGE - _SMALL)
        taken = seconds(lambda: dist.all_reduce(many)) - latency
        found["link_bandwidth"] = moved / max(1e-9, taken)
        found["hop_s"] = latency / (2 * (ranks - 1))
    return found


if __name__ == "__main__":
    main()
