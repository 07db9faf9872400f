"""Memory of every configuration of a run: from a few simulations, corrected by every trial.

One configuration of each strategy is simulated, at about its largest micro batch. Formulas derive
the strategy's other configurations, and trials add what no simulation sees. The memory of a phase
is a maximum of polynomials of degree 1 or 2 in the micro batch. The largest micro batch that fits
is computed from these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsat.command.switches import CHECKPOINTING, affects_memory
from dsat.memory import closed_form, host
from dsat.memory.calibration import Calibration, Observation, asked_bytes, calibrate, observe
from dsat.memory.closed_form import Line
from dsat.memory.estimate import CLOSED_FORM, PHASES, SIMULATED, MemoryEstimate
from dsat.memory.facts import ModelFacts, Setup
from dsat.space.batch_rule import LARGEST_MICRO_BATCH
from dsat.values import parallelism
from dsat.values.codec import Recorded
from dsat.values.outcome import MemoryUse, ModelProfile, Outcome, OutcomeKind
from dsat.values.zero_strategy import NVME, read_strategy

# The prediction times this margin must fit, before and after an exact measurement.
UNCALIBRATED_MARGIN, CALIBRATED_MARGIN = 1.05, 1.02
# Reserved memory shows fragmentation if it is at least the first fraction of the limit. At most the
# second multiple of allocated memory counts: torch frees unused memory before it runs out.
_TELLING_PART, _MOST_FRAGMENTED = 0.5, 1.25
# If a trial was predicted to fit but ran out of memory, the margin of its strategy grows by at most
# the first factor, and the margin of all strategies by at most the second.
_CAUTION, _CAUTION_OF_ALL = 1.15, 1.05
_BEYOND = 1.04  # a margin grows until prediction times margin is this multiple of the limit
_RECOMPUTED = 2**-1.5  # assumed effect of checkpointing on activations, if it was not simulated
# Bytes per sample that a prediction may miss, as fractions of the activations: workspaces in a
# simulation; the unseen part of the backward pass in a profile.
_WORKSPACES, _UNSEEN = 0.05, 0.5


@dataclass(frozen=True)
class Anchor:
    """A simulated configuration.

    Attributes:
        slots: number of simulated slots; None if it is the number for which memory is predicted.
    """

    config: Mapping[str, Any]
    micro_batch: int
    estimate: MemoryEstimate
    slots: int | None = None


@dataclass(frozen=True)
class Variant:
    """The model with certain values of the script's switches, such as `gradient_checkpointing`.

    Attributes:
        anchors: simulated configurations. A strategy may have several: for other numbers of slots,
            or at a smaller micro batch if memory grows with the square of the micro batch.
    """

    script_args: Mapping[str, Any]
    facts: ModelFacts
    anchors: tuple[Anchor, ...] = ()


@dataclass(frozen=True)
class Basis(Recorded):
    """Simulations, or a profile, from which a search predicts memory.

    The first variant has the user's switches. `note` says why nothing was simulated, if so.
    """

    variants: tuple[Variant, ...]
    note: str = ""

    @classmethod
    def of_profile(
        cls, profile: ModelProfile, script_args: Mapping[str, Any], note: str = ""
    ) -> Basis:
        """Make a basis from a profile, without simulations."""
        return cls((Variant(dict(script_args), ModelFacts.of_profile(profile)),), note)

    @classmethod
    def of_model(cls, facts: ModelFacts, anchors: Iterable[Anchor] = ()) -> Basis:
        return cls((Variant({}, facts, tuple(anchors)),))

    @functools.cached_property
    def _known_corrections(self) -> dict[int, list[_Corrections]]:
        return {}

    def corrections(self, slots: int) -> list[_Corrections]:
        """Return the corrections of the formulas for a number of slots, one for each variant."""
        if slots not in self._known_corrections:
            corrections = [_corrections(variant, slots) for variant in self.variants]
            self._known_corrections[slots] = corrections
        return self._known_corrections[slots]

    @property
    def simulated(self) -> bool:
        return any(variant.anchors for variant in self.variants)


@dataclass(frozen=True)
class Shape:
    """Memory of a configuration as a function of the micro batch, before calibration.

    Attributes:
        strategy: name of the strategy.
        phases: lines by phase; the highest one is the peak.
        host_bytes: bytes of each rank on the host, the same at any micro batch.
        source: `SIMULATED` or `CLOSED_FORM`.
        is_guess: whether nothing was simulated or profiled with these switches of the script.
    """

    strategy: str
    phases: Mapping[str, Sequence[Line]]
    host_bytes: float
    source: str
    is_guess: bool

    @functools.cached_property
    def highest(self) -> Sequence[Line]:
        """Lines that may decide the peak, without any line that is below another one everywhere."""
        lines = {
            (line.fixed, line.per_sample, line.per_pair)
            for lines in self.phases.values()
            for line in lines
        }
        upper: list[Line] = []
        for fixed, per_sample, per_pair in sorted(lines, reverse=True):
            if not upper or per_sample > upper[-1].per_sample or per_pair > upper[-1].per_pair:
                upper.append(Line(fixed, per_sample, per_pair=per_pair))
        return upper

    def peak(self, phase: str, micro_batch: float) -> float:
        return closed_form.highest(self.phases[phase], micro_batch)


_Corrections = Mapping[str, Mapping[str, float]]
_HOST = "host"
_OF_PAIRS = {name: f"{name}, of pairs" for name in PHASES}  # keys of bytes per pair of samples


def _corrections(variant: Variant, slots: int) -> _Corrections:
    """Return simulated minus formula bytes, by `_group` and by phase or `_HOST`."""
    by_group: dict[str, dict[float, Mapping[str, float]]] = {}
    divided = {_group(a.config): read_strategy(a.config).stage > 0 for a in variant.anchors}
    first: dict[tuple[str, int], Anchor] = {}
    for anchor in variant.anchors:
        group, num_slots = _group(anchor.config), anchor.slots or slots
        more = _excess(variant.facts, anchor, num_slots)
        reference = first.setdefault((group, num_slots), anchor)
        if reference.micro_batch > anchor.micro_batch:
            large = _excess(variant.facts, reference, num_slots)
            for name, pair_name in _OF_PAIRS.items():
                pairs = reference.micro_batch**2 - anchor.micro_batch**2
                more[pair_name] = max(0.0, (large[name] - more[name]) / pairs)
                more[name] -= more[pair_name] * anchor.micro_batch**2
        elif reference is not anchor:
            continue
        by_group.setdefault(group, {})[num_slots] = more
    return {
        group: _interpolate(by_slots, slots, divided[group]) for group, by_slots in by_group.items()
    }


def _excess(facts: ModelFacts, anchor: Anchor, slots: int) -> dict[str, float]:
    """Return simulated minus formula bytes, by phase or `_HOST`; bytes per pair are 0."""
    formula = closed_form.lines(facts, anchor.config, slots=slots)
    more = {
        name: getattr(anchor.estimate, name)
        - closed_form.highest(formula[name], anchor.micro_batch)
        for name in PHASES
    }
    host_bytes = sum(host.training(facts, anchor.config, slots=slots))
    # State on NVMe is simulated on the host.
    uses_nvme = NVME in read_strategy(anchor.config).offloading.values()
    more[_HOST] = anchor.estimate.host - host_bytes if host_bytes and not uses_nvme else 0.0
    return {**more, **dict.fromkeys(_OF_PAIRS.values(), 0.0)}


def _interpolate(
    corrections: Mapping[float, Mapping[str, float]], slots: int, divided: bool
) -> Mapping[str, float]:
    """Interpolate corrections between numbers of slots, linearly in 1 / slots.

    Beyond the known numbers, the corrections of the nearest one apply. But if the slots divide the
    state (`divided`), negative corrections, as for a smaller optimizer state, fade to 0.
    """
    largest = {
        n: max(0.0, more) if divided else more for n, more in corrections[max(corrections)].items()
    }
    corrections = {**corrections, math.inf: largest}
    fewer = max((n for n in corrections if n <= slots), default=min(corrections))
    more = min(n for n in corrections if n >= slots)
    if fewer >= more:
        return corrections[more]
    part = (1 / fewer - 1 / slots) / (1 / fewer - 1 / more)
    return {
        name: bytes_ + part * (corrections[more][name] - bytes_)
        for name, bytes_ in corrections[fewer].items()
    }


def _group(config: Mapping[str, Any]) -> str:
    """Return a name of strategy and parallelism; equal names share a simulation's corrections."""
    return " ".join(
        [read_strategy(config).name, parallelism.read_parallelism(config).label]
    ).strip()


def _cap_bucket(config: Mapping[str, Any], facts: ModelFacts) -> Mapping[str, Any]:
    """Return a configuration whose gradient bucket is no larger than the trained parameters.

    On a CPU, only pages that a process writes use memory, and a small model writes to little of
    DeepSpeed's default bucket of 2 GB.
    """
    zero = config.get("zero_optimization") or {}
    bucket = min(Setup.of(facts, config, 1).bucket, facts.trainable_params)
    return {**config, "zero_optimization": {**zero, "reduce_bucket_size": bucket}}


def fits_host(host_bytes: float, limit_bytes: int | None) -> bool:
    """Return whether bytes, with a margin, fit in the host's memory; True if that is unknown."""
    return not limit_bytes or host_bytes * UNCALIBRATED_MARGIN <= limit_bytes


class MemoryModel:
    """Predicted memory of configurations, corrected by trials.

    Args:
        basis: simulations, or a profile.
        slots: slots of a trial.
        limit_bytes: memory limit of a slot.
        counts_context: whether the limit includes the device's context and libraries.
        host_limit_bytes: host memory per rank; 0 if unknown.
        on_device: whether slots have device memory, whose free part DeepSpeed can query.
    """

    def __init__(
        self,
        basis: Basis,
        *,
        slots: int,
        limit_bytes: int,
        counts_context: bool = False,
        host_limit_bytes: int = 0,
        on_device: bool = False,
    ) -> None:
        self.basis = basis
        self.limit_bytes = limit_bytes
        self.host_limit_bytes = host_limit_bytes
        self._on_device = on_device
        self._slots = slots
        self._corrections = basis.corrections(slots)
        self._counts_context = counts_context
        self._observations: list[Observation] = []
        self._calibration = Calibration()
        self._fragmentation, self._max_reserved = 1.0, 0
        self._bytes_per_pair = 0.0  # of samples, in all strategies
        self._margins: dict[str, float] = {}  # by strategy
        self._least_margin = 1.0

    def shape(self, config: Mapping[str, Any], script_args: Mapping[str, Any]) -> Shape:
        """Return the memory of a whole DeepSpeed configuration with switches of the script."""
        facts, corrections, is_guess = self._find_facts(script_args)
        strategy = read_strategy(config).name
        if self._counts_context and not self._on_device:
            config = _cap_bucket(config, facts)
        phases = closed_form.lines(facts, config, slots=self._slots)
        host_bytes = sum(host.training(facts, config, slots=self._slots))
        more = corrections.get(_group(config))
        if more is not None:
            phases = {
                name: tuple(
                    replace(line, fixed=line.fixed + more[name], per_pair=more[_OF_PAIRS[name]])
                    for line in lines
                )
                for name, lines in phases.items()
            }
            host_bytes += more[_HOST] if host_bytes else 0.0
        if self._on_device:  # DeepSpeed does not make copies that do not fit
            phases = {
                name: tuple(x for x in lines if not x.if_room or x.fixed <= self.limit_bytes)
                for name, lines in phases.items()
            }
        source = CLOSED_FORM if more is None else SIMULATED
        return Shape(strategy, phases, host_bytes, source, is_guess)

    def fits_host(self, shape: Shape) -> bool:
        """Return whether the host has enough memory for the ranks of a trial."""
        return fits_host(shape.host_bytes, self.host_limit_bytes)

    def predicted_bytes(self, shape: Shape, micro_batch: float) -> int:
        """Return the predicted peak memory of one slot, in bytes."""
        peak = max(shape.peak(phase, micro_batch) for phase in PHASES)
        peak += self._bytes_per_pair * micro_batch**2
        return round(peak + self._calibration.added_bytes(micro_batch) + self._context_bytes)

    def fits(self, shape: Shape, micro_batch: int) -> bool:
        """Return whether a trial should fit; if its shape is a guess, check only host memory."""
        if not self.fits_host(shape):
            return False
        if shape.is_guess:
            return True
        num_bytes = self.predicted_bytes(shape, micro_batch)
        return num_bytes * self._margin(shape.strategy) <= self.limit_bytes

    def largest(self, shape: Shape) -> float:
        """Return the largest micro batch that fits, a real number; 0 if none fits."""
        if not self.fits_host(shape):
            return 0.0
        room = self.limit_bytes / self._margin(shape.strategy) - self._context_bytes
        fixed, slope = self._calibration.fixed_bytes, self._calibration.bytes_per_sample
        lines = (
            Line(
                line.fixed + fixed,
                line.per_sample + slope,
                per_pair=line.per_pair + self._bytes_per_pair,
            )
            for line in shape.highest
        )
        largest = min(line.largest_within(room) for line in lines)
        return min(largest, float(LARGEST_MICRO_BATCH)) if largest >= 1 else 0.0

    def learn(self, shape: Shape, micro_batch: int, outcome: Outcome) -> None:
        """Correct later predictions by a trial's outcome, unless its shape is a guess."""
        if shape.is_guess:
            return
        if outcome.ok and outcome.memory is not None:
            self._learn_fragmentation(outcome.memory)
            peaks = {phase: round(shape.peak(phase, micro_batch)) for phase in PHASES}
            observation = observe(peaks, micro_batch, outcome.memory)
            if observation is not None:
                self._observations.append(observation)
                variant = self.basis.variants[0]
                activations = variant.facts.backward_bytes_per_sample
                slope = (_WORKSPACES if variant.anchors else _UNSEEN) * activations
                self._calibration = calibrate(self._observations, slope, -_UNSEEN * activations)
        elif outcome.kind is OutcomeKind.OOM and self.fits(shape, micro_batch):
            self._learn_pairs(shape, micro_batch, asked_bytes(outcome.message))
            if not self.fits(shape, micro_batch):
                return
            # The bytes per pair do not explain the failure, so margins grow.
            num_bytes = self.predicted_bytes(shape, micro_batch)
            margin = self._margin(shape.strategy)
            enough = _BEYOND * self.limit_bytes / max(1, num_bytes)
            self._margins[shape.strategy] = max(margin, min(_CAUTION * margin, enough))
            self._least_margin = max(
                self._least_margin, min(_CAUTION_OF_ALL * self._least_margin, enough)
            )

    def _learn_pairs(self, shape: Shape, micro_batch: int, allocation: int) -> None:
        """Derive bytes per pair from a failed allocation, of which a loss usually makes two."""
        if all(observation.micro_batch >= micro_batch for observation in self._observations):
            return  # no smaller micro batch ran, so nothing indicates quadratic growth
        missing_bytes = 2 * allocation - self.predicted_bytes(shape, micro_batch)
        self._bytes_per_pair += max(0.0, missing_bytes / micro_batch**2)

    def _learn_fragmentation(self, memory: MemoryUse) -> None:
        """Set the fragmentation from a trial, unless an earlier one reserved more memory."""
        reserved = max(memory.reserved_bytes.values(), default=0)
        allocated = max(memory.allocated_bytes.values(), default=0)
        if reserved < max(self._max_reserved, _TELLING_PART * self.limit_bytes) or not allocated:
            return
        self._max_reserved = reserved
        self._fragmentation = min(_MOST_FRAGMENTED, max(1.0, reserved / allocated))

    @property
    def _context_bytes(self) -> int:
        return self._calibration.context_bytes if self._counts_context else 0

    def _margin(self, strategy: str) -> float:
        is_calibrated = any(observation.is_exact for observation in self._observations)
        base = CALIBRATED_MARGIN if is_calibrated else UNCALIBRATED_MARGIN
        minimum = max(self._least_margin, self._margins.get(strategy, 0.0))
        return max(base * self._fragmentation, minimum)

    def _find_facts(self, script_args: Mapping[str, Any]) -> tuple[ModelFacts, _Corrections, bool]:
        """Return facts and corrections for values of switches, and whether they are a guess."""
        user = self.basis.variants[0]
        args = {
            **user.script_args,
            **{n: v for n, v in script_args.items() if affects_memory(n)},
        }
        for variant, corrections in zip(self.basis.variants, self._corrections, strict=True):
            if dict(variant.script_args) == args:
                # Without its own simulations, a variant has the corrections of the user's switches.
                return variant.facts, corrections or self._corrections[0], False
        factor = 1.0
        if args.get(CHECKPOINTING) != user.script_args.get(CHECKPOINTING):
            factor = 1 / _RECOMPUTED if args.get(CHECKPOINTING) is False else _RECOMPUTED
        return user.facts.scaled(factor), {}, True
