"""Cards and their links, by name: `cards.json`, which names the source of each number."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dsat.command.experiment import read_mapping
from dsat.errors import UserInputError

_GIB = 2**30
MEMORY_PART = 0.85  # of the memory's bandwidth that elementwise kernels reach
_OTHER_KINDS = frozenset(("laptop", "mig", "nvl", "pcie"))  # slower ones of the same name
_OF_ANY = re.compile(r"nvidia|amd|instinct|geforce|sxm\d*|hbm\w*")  # of drivers
_OF_MANY = re.compile(r"\d+gb|pcie|rtx|nvl")  # which name no card on their own
_USUAL_HOST = {"host_cores": 8, "host_bandwidth": 25.6}  # where a user's own file has none
_PCIE_PART, _NETWORK_PART = 0.88, 0.9  # of the specification, that copies and collectives reach


@dataclass(frozen=True)
class Card:
    """Rates and memory of a card, and of its links.

    Attributes:
        memory_bytes: of the card.
        flops: dense peak in FLOP/s, by the bytes of an element.
        matmul, attention: parts of the peak that matrix products of a training and attention reach.
        memory_bandwidth: peak in bytes/s.
        link_bandwidth: bytes/s of a large collective in one host.
        pcie_bandwidth: bytes/s between card and host.
        network_bandwidth: bytes/s of a card to other hosts.
        per_host: cards of a usual host.
        host_cores, host_bandwidth: physical cores of a usual host, and the peak of its memory in
            bytes/s, for each of its cards.
        kernel_s: seconds of the shortest kernel.
        launch_s: seconds in which Python and torch call one operator; 0 if that is a part of the
            kernels, as on a CPU.
        protocols: of collectives, of which the fastest is taken: part of the bandwidth, seconds of
            a hop in a host, and between hosts (NCCL, src/graph/tuning.cc: rings of LL, LL128 and
            Simple).
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
    host_cores: float = _USUAL_HOST["host_cores"]
    host_bandwidth: float = 1e9 * _USUAL_HOST["host_bandwidth"]
    kernel_s: float = 3e-6
    launch_s: float = 6e-6
    protocols: tuple[tuple[float, float, float], ...] = (
        (0.5, 0.6e-6, 2.7e-6),
        (120 / 128, 1.9e-6, 4.0e-6),
        (1.0, 3.4e-6, 14e-6),
    )

    @property
    def is_cpu(self) -> bool:
        """Tell whether slots are processor cores: kernels and their launches are one."""
        return not self.launch_s

    def peak(self, itemsize: int) -> float:
        """Return the peak for elements of so many bytes, or of the next larger size there is."""
        sizes = sorted(self.flops)
        return self.flops[next((size for size in sizes if size >= itemsize), sizes[-1])]


def find(name: str, own: Path | None = None) -> Card:
    """Find a card by its name, or by a part of it: `H100`, `a100-80gb`, `NVIDIA L40S`.

    Args:
        own: a file with further cards, of the form of `cards.json`.

    Raises:
        UserInputError: there is none, or the file is none.
    """
    known = {**table(), **(_read(own) if own is not None else {})}
    found = _named(name, known)
    if found is None:
        raise UserInputError(
            f"unknown card {name}; known cards: {', '.join(known)}",
            hint="Describe it in a file like dsat/inputs/cards.json and name that with --cards.",
        )
    return found


def of_device(name: str) -> Card | None:
    """Return the card of a driver's name for a device; None if it is not in the table."""
    return _named(name, table()) if name else None


def _named(name: str, known: Mapping[str, Card]) -> Card | None:
    """Return the card whose name has all of its words in another one, or the other way round."""
    wanted = _words(name)
    words = {key: _words(key) for key in known}
    inside = [
        key
        for key, own in words.items()
        if (own <= wanted and not (wanted - own) & _OTHER_KINDS) or _plain(key) == _plain(name)
    ]
    asked = {word for word in wanted if not _OF_ANY.fullmatch(word)}
    tells = any(not _OF_MANY.fullmatch(word) for word in asked)
    around = [key for key, own in words.items() if tells and asked <= own]
    if inside:
        return known[max(inside, key=len)]
    return max((known[key] for key in around), key=lambda card: card.memory_bytes, default=None)


@functools.cache
def table() -> dict[str, Card]:
    """Return all cards, by name."""
    text = (resources.files("dsat.inputs") / "cards.json").read_text(encoding="utf-8")
    return {name: _card(name, entry) for name, entry in json.loads(text)["cards"].items()}


def _words(name: str) -> frozenset[str]:
    """`NVIDIA A100-SXM4-80GB` without its marks; `80G` is `80gb`."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return frozenset(re.sub(r"^(\d+)gi?b?$", r"\1gb", word) for word in words)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _read(path: Path) -> dict[str, Card]:
    entries = read_mapping(path).get("cards")
    if not isinstance(entries, Mapping) or not entries:
        raise UserInputError('has no "cards"', where=str(path))
    try:
        return {str(name): _card(str(name), entry) for name, entry in entries.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserInputError(
            f"a card is not described as in dsat/inputs/cards.json: {error!r}", where=str(path)
        ) from None


def _card(name: str, entry: Mapping[str, Any]) -> Card:
    """Return a card of its entry in the file, where bandwidths are in 10^9 bytes/s."""
    entry = {**_USUAL_HOST, **entry}

    def number(key: str, entries: Mapping[str, Any] = entry, most: float = 1e9) -> float:
        value = entries[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
            raise ValueError(f"{key} is {value!r}")
        return float(value)

    if not entry["tflops"]:
        raise ValueError("tflops has no size of elements")
    return Card(
        name=name,
        memory_bytes=int(number("memory_gib") * _GIB),
        flops={int(size): 1e12 * number(size, entry["tflops"]) for size in entry["tflops"]},
        matmul=number("matmul", most=1),
        attention=number("attention", most=1),
        memory_bandwidth=1e9 * number("bandwidth"),
        link_bandwidth=1e9 * number("link") * number("link_part", most=1),
        pcie_bandwidth=1e9 * number("pcie") * _PCIE_PART,
        network_bandwidth=1e9 / 8 * number("network") * _NETWORK_PART,
        per_host=math.ceil(number("per_host")),
        host_cores=number("host_cores"),
        host_bandwidth=1e9 * number("host_bandwidth"),
    )
