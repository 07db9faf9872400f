"""Speeds of GPU models and their links, from `gpus.json`, which names its sources."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from dsat.errors import UserInputError

_GIB = 2**30
MEMORY_PART = 0.85  # fraction of the memory bandwidth that elementwise kernels reach
_OTHER_KINDS = frozenset(("laptop", "mig", "nvl", "pcie"))  # words for slower variants of a GPU
_OF_ANY = re.compile(r"nvidia|amd|instinct|geforce|sxm\d*|hbm\w*")  # words that drivers add
_OF_MANY = re.compile(r"\d+gb|pcie|rtx|nvl")  # words that alone identify no GPU
_MEMORY = re.compile(r"(\d+)gb")
_SAME_MEMORY = 0.1  # largest relative difference of equal sizes: names and drivers round them
_PCIE_PART, _NETWORK_PART = 0.88, 0.9  # fractions of the bandwidths that transfers reach


@dataclass(frozen=True)
class GpuModel:
    """Speeds of a GPU model and its links, and its memory.

    Attributes:
        flops: dense peak in FLOP/s, keyed by bytes per element.
        matmul, attention: fractions of the peak that matrix products and attention reach in
            training.
        memory_bandwidth: peak in bytes/s.
        link_bandwidth: bytes/s that a large collective reaches in one host.
        pcie_bandwidth: bytes/s that copies reach between GPU and host.
        network_bandwidth: bytes/s that a GPU reaches to other hosts.
        per_host: GPUs of a usual host.
        host_cores, host_bandwidth: physical cores of a usual host, and its peak memory bandwidth
            in bytes/s; both per GPU.
        kernel_s: seconds of the shortest kernel.
        launch_s: seconds that Python and torch take to call one operator.
        protocols: NCCL's protocols LL, LL128 and Simple, of which the fastest is used. Each has the
            fraction of the bandwidth that it reaches, and the seconds of a hop inside a host and
            between hosts (NCCL, src/graph/tuning.cc, for rings).
    """

    name: str
    memory_bytes: int
    flops: Mapping[int, float]
    matmul: float
    attention: float
    memory_bandwidth: float
    link_bandwidth: float
    pcie_bandwidth: float
    network_bandwidth: float
    per_host: int
    host_cores: float
    host_bandwidth: float
    kernel_s: float = 3e-6
    launch_s: float = 6e-6
    protocols: tuple[tuple[float, float, float], ...] = (
        (0.5, 0.6e-6, 2.7e-6),
        (120 / 128, 1.9e-6, 4.0e-6),
        (1.0, 3.4e-6, 14e-6),
    )

    def peak(self, itemsize: int) -> float:
        """Return the peak FLOP/s for `itemsize` bytes per element, or for the next larger size."""
        sizes = sorted(self.flops)
        return self.flops[next((size for size in sizes if size >= itemsize), sizes[-1])]


def find(name: str) -> GpuModel:
    """Find a GPU model by its name, by part of its name, or by a device's name; see `named`.

    Raises:
        UserInputError: the table has no such model.
    """
    gpu = named(name)
    if gpu is None:
        raise UserInputError(
            f"unknown GPU {name}; known GPUs: {', '.join(table())}",
            hint="To use another GPU, add it to dsat/search/gpus.json.",
        )
    return gpu


def find_by_device_name(name: str) -> GpuModel | None:
    """Return the GPU model of a device that a driver names; None if none matches.

    If no model has the memory size in the name (`NVIDIA H100 96GB HBM3`), the size is ignored.
    """
    return named(name) or named(re.sub(r"\d+GB", "", name))


def named(name: str) -> GpuModel | None:
    """Return the GPU model of a name (`NVIDIA L40S`, `a100-80gb`, `H100`); None if none matches.

    First, a model matches if the given name has all words of the model's name; the longest name
    wins. Else, a model matches if its name has all words of the given name; the largest memory
    wins. A variant in the given name (`pcie`) must be in the model's name too. A memory size in the
    given name must be about the model's.
    """
    query = _words(name)
    gpus = {key: gpu for key, gpu in table().items() if _has_memory(gpu, query)}
    words = {key: _words(key) for key in gpus}
    inside = [
        key
        for key, model in words.items()
        if (model <= query and not (query - model) & _OTHER_KINDS) or _plain(key) == _plain(name)
    ]
    specific = {word for word in query if not _OF_ANY.fullmatch(word)}
    tells = any(not _OF_MANY.fullmatch(word) for word in specific)
    around = [key for key, model in words.items() if tells and specific <= model]
    if inside:
        return gpus[max(inside, key=len)]
    return max((gpus[key] for key in around), key=lambda gpu: gpu.memory_bytes, default=None)


@functools.cache
def table() -> dict[str, GpuModel]:
    """Return all GPU models, by name."""
    text = (resources.files("dsat.search") / "gpus.json").read_text(encoding="utf-8")
    return {name: _gpu(name, entry) for name, entry in json.loads(text)["gpus"].items()}


def _words(name: str) -> frozenset[str]:
    """Split a name into lower-case words; `80G` and `80GiB` become `80gb`."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return frozenset(re.sub(r"^(\d+)gi?b?$", r"\1gb", word) for word in words)


def _has_memory(gpu: GpuModel, words: frozenset[str]) -> bool:
    """Return whether each memory size in a device's name is about the memory of a GPU model."""
    sizes = [int(match[1]) * _GIB for match in map(_MEMORY.fullmatch, words) if match]
    return all(abs(size - gpu.memory_bytes) < _SAME_MEMORY * gpu.memory_bytes for size in sizes)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _gpu(name: str, entry: Mapping[str, Any]) -> GpuModel:
    """Convert an entry of the file, whose `units` section defines the units."""
    return GpuModel(
        name=name,
        memory_bytes=int(entry["memory_gib"] * _GIB),
        flops={int(size): 1e12 * tflops for size, tflops in entry["tflops"].items()},
        matmul=entry["matmul"],
        attention=entry["attention"],
        memory_bandwidth=1e9 * entry["bandwidth"],
        link_bandwidth=1e9 * entry["link"] * entry["link_part"],
        pcie_bandwidth=1e9 * entry["pcie"] * _PCIE_PART,
        network_bandwidth=1e9 / 8 * entry["network"] * _NETWORK_PART,
        per_host=entry["per_host"],
        host_cores=entry["host_cores"],
        host_bandwidth=1e9 * entry["host_bandwidth"],
    )
