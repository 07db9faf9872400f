"""The fewest GPUs of each usual size that hold a model."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsat.command import ds_config
from dsat.memory import host
from dsat.memory.predictor import Basis, MemoryModel, fits_host
from dsat.memory.strategies import apply_strategy, compared
from dsat.search import gpus as known
from dsat.values import format as fmt
from dsat.values import parallelism
from dsat.values.table import Table
from dsat.values.zero_strategy import Strategy

SIZES = tuple(sorted({gpu.memory_bytes for gpu in known.table().values()}))
# Numbers of GPUs that people rent: any number in one host, or several whole hosts.
_MOST = 1024
_COUNTS = (*range(1, host.PER_HOST), *range(host.PER_HOST, _MOST + 1, host.PER_HOST))


@dataclass(frozen=True)
class Choice:
    """The fewest GPUs of a size that hold a model.

    Attributes:
        memory_bytes: memory of a GPU.
        gpus: number of GPUs: any number up to 8, whole hosts of 8 above.
        strategy: the first strategy that fits, in the order of `USUAL_ORDER`.
        micro_batch: the largest micro batch that fits.
        host_bytes: bytes that all ranks of a host need.
    """

    memory_bytes: int
    gpus: int
    strategy: Strategy
    micro_batch: int
    host_bytes: int

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "strategy": self.strategy.name}


def fewest(
    basis: Basis,
    base: Mapping[str, Any],
    host_memory: int | None = None,
    sizes: Sequence[int] = SIZES,
) -> list[Choice]:
    """Return the fewest GPUs of each size without offloading, and with it if that needs fewer.

    Args:
        base: the user's DeepSpeed configuration.
        host_memory: bytes of a host; None if unknown.
        sizes: memory sizes of GPUs in bytes.
    """
    offloading = [strategy for strategy in compared(base) if strategy.offloads]
    plain_strategies = [strategy for strategy in compared(base) if not strategy.offloads]
    shared = parallelism.read_parallelism(base)
    total, *fixed = (base.get(key) for key in ds_config.BATCH_KEYS)
    counts = [n for n in _COUNTS if n % shared.shared == 0]
    if isinstance(total, int):
        per_group = math.prod(size for size in fixed if isinstance(size, int))
        counts = [n for n in counts if total % (per_group * shared.data(n)) == 0]

    def choose(gpus: int, size: int, among: Sequence[Strategy]) -> list[Choice]:
        """Return a choice for each strategy in `among` that fits the GPUs; ignore host memory."""
        choices, facts = [], basis.variants[0].facts
        model = MemoryModel(basis, slots=gpus, limit_bytes=size, on_device=True)
        for strategy in among:
            config = apply_strategy(base, strategy, gpus)
            shape = model.shape(config, {})
            most = int(model.largest(shape))
            if most >= 1:
                host_bytes = host.bytes_of_host(facts, config, shape.host_bytes, gpus)
                choices.append(Choice(size, gpus, strategy, most, host_bytes))
        return choices

    def first(size: int, among: Sequence[Strategy]) -> Choice | None:
        # The more GPUs, the less memory each needs: a binary search finds the smallest number.
        first_index = bisect.bisect_left(counts, True, key=lambda n: bool(choose(n, size, among)))
        # A host with more ranks may need more memory, because each rank loads the weights.
        held = itertools.chain.from_iterable(choose(n, size, among) for n in counts[first_index:])
        return next((c for c in held if fits_host(c.host_bytes, host_memory)), None)

    choices = []
    for size in sizes:
        plain, offloaded = first(size, plain_strategies), first(size, offloading)
        is_less = offloaded and (plain is None or offloaded.gpus < plain.gpus)
        choices += [plain, offloaded if is_less else None]
    return [choice for choice in choices if choice is not None]


def table(choices: Sequence[Choice]) -> list[str]:
    """Return the lines of a Markdown table, or a sentence if nothing fits."""
    heads = ["GPU", "number", "strategy", "largest micro batch", "host"]
    rows = [
        [
            fmt.memory(choice.memory_bytes),
            str(choice.gpus),
            choice.strategy.label,
            str(choice.micro_batch),
            fmt.memory(choice.host_bytes) if choice.host_bytes else "-",
        ]
        for choice in choices
    ]
    if not rows:
        most = f"{_MOST} GPUs of {fmt.memory(SIZES[-1])}"
        return [f"No number of GPUs up to {most} is enough and divides your batch evenly."]
    return Table(heads, rows, numbers=[*heads[:2], *heads[3:]]).markdown()
