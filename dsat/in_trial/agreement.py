"""The rank of this process, the number of ranks, and reductions over the ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

# Variables in which launchers pass a process's rank and the number of ranks: those of torch and
# DeepSpeed, Open MPI, MPICH and Intel MPI, Slurm.
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


def rank_and_size() -> tuple[int, int]:
    """Return the rank and the number of ranks; 0 and 1 without a launcher."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    for rank, size in _RANKS:
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def local_size() -> int:
    """Return the number of ranks on this host, from the launcher's variables; 1 without them."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")


class Ranks:
    """Reductions over all ranks; every rank must call them, and gets the same result.

    Args:
        engine: a DeepSpeed engine. If its data-parallel group contains all ranks, the reductions
            use this group.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def maximum(self, values: list[float]) -> list[float]:
        return self._reduce(values, "MAX")[0]

    def mean(self, values: list[float]) -> list[float]:
        total, ranks = self._reduce(values, "SUM")
        return [value / ranks for value in total]

    def slowest(self, rows: list[list[float]]) -> list[list[float]]:
        """Return the maximum over the ranks for each element of rows of equal width."""
        flat = self.maximum([value for row in rows for value in row])
        width = len(rows[0])
        return [flat[i : i + width] for i in range(0, len(flat), width)]

    def _reduce(self, values: list[float], operation: str) -> tuple[list[float], int]:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized() or dist.get_world_size() == 1:
            return values, 1
        # float32 holds bytes and milliseconds to seven digits, and every device supports it.
        tensor = torch.tensor(values, dtype=torch.float32, device=self._engine.device)
        group = getattr(self._engine, "data_parallel_group", None)
        if dist.get_world_size(group) < dist.get_world_size():  # some ranks share samples
            group = None
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation), group=group)
        return [float(value) for value in tensor.tolist()], dist.get_world_size()
