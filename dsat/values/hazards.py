"""Known faults of DeepSpeed versions (`hazards.json`), and which trainings they affect."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from dsat.values import codec

GRADIENTS, NORM, SLOW, FAILS = KINDS = ("gradients", "norm", "slow", "fails")


@dataclass(frozen=True)
class Training:
    """Facts about a training that decide which known faults affect it."""

    config: Mapping[str, Any]
    stage: int
    precision: str
    gas: int
    ranks: int
    on_cpu: bool = False


@dataclass(frozen=True)
class Hazard:
    """A fault of some DeepSpeed versions.

    Attributes:
        versions: affected versions, as a specifier.
        kind: one of `KINDS`: gradients are wrong, only their reported norm is wrong, training is
            slow, or training fails.
        stages: affected ZeRO stages.
        precisions: affected number formats; empty for all.
        good: the first version known not to have the fault.
        sources: GitHub threads, `owner/name#number`.
        accumulates: whether the fault occurs only with gradient accumulation.
        several_ranks: whether the fault occurs only with several ranks.
        on_cpu: whether the fault occurs only on CPU cores.
        setting: path and value of a setting without which the fault does not occur; empty if none.
        unseen: a further condition, which the configuration does not show.
        checked: results of dsat's own trainings with affected versions.
        pair_s: seconds that the fault adds to a backward pass, divided by the square of the number
            of trained parameter tensors.
    """

    name: str
    versions: str
    kind: str
    stages: tuple[int, ...]
    effect: str
    good: str
    sources: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    accumulates: bool = False
    several_ranks: bool = False
    on_cpu: bool = False
    setting: tuple[str, ...] = ()
    unseen: str = ""
    checked: str = ""
    pair_s: float = 0.0

    def hits(self, training: Training) -> bool:
        """Return whether a training meets all conditions that its configuration shows."""
        return (
            training.stage in self.stages
            and (not self.precisions or training.precision in self.precisions)
            and (not self.accumulates or training.gas > 1)
            and (not self.several_ranks or training.ranks > 1)
            and (not self.on_cpu or training.on_cpu)
            and (not self.setting or _value(training.config, self.setting[0]) == self.setting[1])
        )

    @property
    def condition(self) -> str:
        """Description of the affected trainings: `stages 1, 2, bf16, several ranks`."""
        parts = [f"stage{'s' * (len(self.stages) > 1)} {', '.join(map(str, self.stages))}"]
        parts += self.precisions
        parts += ["gradient accumulation"] * self.accumulates
        parts += ["several ranks"] * self.several_ranks
        parts += ["CPU cores"] * self.on_cpu
        parts += [": ".join(self.setting)] if self.setting else []
        return ", ".join([*parts, *([f"if {self.unseen}"] if self.unseen else [])])

    def describe(self, version: str) -> str:
        """Return two sentences: the fault in this version, and a version without known faults."""
        sources = f" ({', '.join(self.sources)})" if self.sources else ""
        return (
            f"DeepSpeed {version} in {self.condition}: {self.effect}{sources}. "
            f"DeepSpeed {unaffected_version([self])} has no known fault"
        )


@functools.cache
def table() -> tuple[Hazard, ...]:
    """Return all known hazards."""
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    return tuple(codec.decode(Hazard, row) for row in json.loads(text))


def version_in(software: str) -> str | None:
    """Return DeepSpeed's version in a text such as `torch 2.8.0, deepspeed 0.19.8`, or None."""
    match = re.search(r"\bdeepspeed (\S+)", software)
    return match[1] if match else None


def find_by_version(version: str | None) -> list[Hazard]:
    """Return the hazards of a DeepSpeed version; empty if the version is unknown."""
    return [h for h in table() if is_one_of(version, h.versions)]


def is_one_of(version: str | None, versions: str) -> bool:
    """Return whether a version meets a specifier; False if the version is unknown."""
    try:
        public = Version(version or "").public
    except InvalidVersion:
        return False
    return SpecifierSet(versions).contains(public, prereleases=True)


def find(version: str | None, training: Training, *kinds: str) -> list[Hazard]:
    """Return the hazards of these kinds that affect a training, or may (see `Hazard.unseen`)."""
    return [h for h in find_by_version(version) if h.kind in kinds and h.hits(training)]


def unaffected_version(hazards: Iterable[Hazard]) -> str:
    """Return the lowest `good` version that fixes all of `hazards` and has no known fault.

    If there is none, return the highest `good` version.
    """
    minimum = max((Version(h.good) for h in hazards), default=Version("0"))
    fixes = sorted({Version(h.good) for h in table()})
    return str(next((v for v in fixes if v >= minimum and not find_by_version(str(v))), fixes[-1]))


def _value(config: Mapping[str, Any], path: str) -> Any:
    for key in path.split("."):
        config = config.get(key) if isinstance(config, Mapping) else None  # type: ignore[assignment]
    return config
