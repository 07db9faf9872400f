"""`dsat estimate --fits`: does a configuration fit the memory of these devices?"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from dsat.command import ds_config
from dsat.command.switches import CHECKPOINTING
from dsat.errors import DsatError, UserInputError
from dsat.estimating import edges, fewest_gpus
from dsat.estimating.line import Line
from dsat.estimating.options import EstimateSettings
from dsat.estimating.tables import LineByLine, needs_simulation
from dsat.memory import host
from dsat.memory.predictor import Anchor, Basis, MemoryModel, fits_host
from dsat.memory.strategies import apply_strategy
from dsat.prepare.simulated_model import SimulatedModel, simulate
from dsat.simulation.client import SimulationUnavailable
from dsat.simulation.protocol import Question
from dsat.values import format as fmt
from dsat.values import slow
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import Strategy, read_strategy

_log = logging.getLogger(__name__)
_GB = 10**9
_LORA = {"r": "16", "target": "all-linear"}
_CHECKPOINTS, _UNPINNED = "activation checkpointing", '"pin_memory": false'


@dataclass(frozen=True)
class Fit:
    """Memory of a configuration, compared with the memory of the devices.

    Attributes:
        dtype: type of the parameters; None if a script decides it.
        slots, gpu_bytes: number of devices, and the memory of each.
        strategy, batch: from the user's configuration; without one, dsat's choice.
        chosen: further changes by dsat, besides the strategy, that make the model fit.
        ways_out: remedies if no strategy fits; empty for the user's own configuration.
        needed_bytes: predicted peak of a device, without the CUDA context and NCCL.
        host_bytes: bytes that the ranks of a host need: to load the weights, or to train.
        saved_bytes: part of `host_bytes` that `"pin_memory": false` saves.
        host_limit: bytes of the host; None if unknown.
        fits: whether the memory of devices and host suffices, with a margin of 5 %.
        largest: the largest micro batch that fits the devices; 0 if none does.
        saved_by_checkpointing: bytes of a device that activation checkpointing would save, if the
            user's own configuration was simulated and does not fit; else 0.
    """

    name: str
    dtype: str | None
    slots: int
    gpu_bytes: int
    strategy: Strategy
    batch: BatchTriple
    chosen: tuple[str, ...]
    ways_out: tuple[str, ...]
    needed_bytes: int
    host_bytes: int
    saved_bytes: int
    host_limit: int | None
    fits: bool
    largest: int
    saved_by_checkpointing: int

    @property
    def fits_host(self) -> bool:
        """Return whether the host's memory suffices for its ranks; True if it is unknown."""
        return fits_host(self.host_bytes, self.host_limit)

    def to_json(self) -> dict[str, Any]:
        batch = asdict(self.batch)
        del batch["parallelism"]
        return {**vars(self), "strategy": self.strategy.name, "batch": batch}

    def __str__(self) -> str:
        dtype = f" in {self.dtype}" if self.dtype else ""
        added = f"{', '.join(self.chosen)} and " if self.chosen else ""
        setup = f"{added}micro batch {self.batch.micro_batch}"
        text = [
            f"{self.name} {'fits' if self.fits else 'does not fit'} {self.slots} x "
            f"{_size(self.gpu_bytes)}: {self.strategy.label}{dtype} with {setup} "
            f"needs {fmt.memory(self.needed_bytes)} per GPU, plus 5 % to spare. The CUDA context "
            "and NCCL need additional memory.",
            *self._host(),
        ]
        shortage = edges.missing(self.needed_bytes, self.gpu_bytes)
        if shortage > 0:
            text.append(f"It {edges.describe(shortage, self.saved_by_checkpointing)}.")
            if self.largest:
                text.append(f"The largest micro batch that fits is {self.largest}.")
            elif not self.ways_out:
                text.append("Without --fits, a table shows which strategies fit.")
        if self.ways_out:
            text.append(f"No other strategy fits. Use {', or '.join(self.ways_out)}.")
        return " ".join(text)

    def _host(self) -> list[str]:
        """Return sentences on the memory of the host."""
        text = []
        if self.host_bytes:
            has = "" if self.host_limit is None else f" and has {_size(self.host_limit)}"
            ranks = fmt.count(host.ranks(self.slots), "rank")
            text.append(f"The host needs {fmt.memory(self.host_bytes)} for {ranks}{has}.")
        if self.host_limit is not None and not self.fits_host:
            shortage = edges.missing(self.host_bytes, self.host_limit)
            text.append(f"With 5 % to spare, the host lacks {fmt.memory(shortage)}.")
        if self.saved_bytes and (not self.fits_host or self.host_limit is None):
            saved = fmt.memory(self.saved_bytes)
            text.append(f'"pin_memory": false saves {saved} of host memory.')
        return text


def _size(size_bytes: int) -> str:
    """Return a size in GB, if whole, and GiB: the user may have written either."""
    gigabytes, rest = divmod(size_bytes, _GB)
    size = fmt.memory(size_bytes)
    return size if rest else f"{gigabytes:,} GB ({size})"


class _Candidate(NamedTuple):
    """Configuration to simulate.

    Attributes:
        added: changes to the model or to the user's settings, in words.
        progress: message to log during the simulation.
    """

    config: dict[str, Any]
    added: tuple[str, ...]
    progress: str


def fit(settings: EstimateSettings) -> Fit:
    """Predict the memory of a configuration, and compare it with the devices of `settings.fits`.

    The configuration is the user's own. Without one, it is the fastest that fits, or else the one
    that lacks the least memory.

    Raises:
        UserInputError: the settings or the files are wrong.
        DsatError: the model or the configuration cannot be simulated.
    """
    devices = _devices(settings)
    with simulate(devices) as model:
        if devices.has_own:
            config = ds_config.prepare_for_training(model.config)
            note = f"simulating {read_strategy(config).label}"
            return _check(model, devices, _Candidate(config, (), note))
        for candidate in _candidates(model, devices):
            result = _check(model, devices, candidate)
            if result.fits:
                return result
        return replace(result, ways_out=_ways_out(model, devices))


def _devices(settings: EstimateSettings) -> EstimateSettings:
    """Return settings for a table of `settings.fits`; raise UserInputError if values conflict."""
    assert settings.fits is not None
    slots, gpu_bytes, host_memory = settings.fits
    if host_memory is None:
        host_memory = settings.host_memory
    elif settings.host_memory not in (None, host_memory):
        raise UserInputError(
            "contradicts the host memory in --fits", where="--host-memory", hint="Remove it."
        )
    return replace(
        settings,
        fits=None,
        slot_counts=(slots,),
        slot_memories=(gpu_bytes,),
        host_memory=host_memory,
    )


def _check(model: SimulatedModel, devices: EstimateSettings, candidate: _Candidate) -> Fit:
    """Predict a configuration's memory (by formula with `--formula`); compare it with `devices`."""
    [slots], [gpu_bytes] = devices.slot_counts, devices.slot_memories
    batch = ds_config.resolve_batch(model.config, slots, where="--fits")
    config = {**ds_config.drop_batch_sizes(candidate.config), ds_config.BATCH_KEYS[2]: batch.gas}
    switches = {CHECKPOINTING: True} if _CHECKPOINTS in candidate.added else {}
    facts = model.simulator.facts(model.config, switches)
    question = Question(config, batch.micro_batch, slots, switches)
    peak, anchors = None, []
    if not devices.formula or needs_simulation(config):
        with slow.logged(_log, candidate.progress, at_once=True):
            [estimate] = model.simulator.estimates([question])
        if isinstance(estimate, str):
            raise SimulationUnavailable(estimate)
        peak, anchors = estimate.peak, [Anchor(config, batch.micro_batch, estimate)]
    basis = Basis.of_model(facts, anchors)
    memory = MemoryModel(basis, slots=slots, limit_bytes=gpu_bytes, on_device=True)
    shape, saved = memory.shape(config, {}), 0
    fits = memory.fits(shape, batch.micro_batch)
    may_recompute = devices.has_own and devices.activation_checkpointing != "on"
    if peak is not None and may_recompute and not fits:
        [smaller] = model.simulator.estimates([question._replace(switches={CHECKPOINTING: True})])
        saved = 0 if isinstance(smaller, str) else max(0, peak - smaller.peak)
    host_bytes = host.bytes_of_host(facts, config, shape.host_bytes, slots)
    return Fit(
        name=model.name,
        dtype=model.dtype,
        slots=slots,
        gpu_bytes=gpu_bytes,
        strategy=read_strategy(config),
        batch=batch,
        chosen=candidate.added,
        ways_out=(),
        needed_bytes=memory.predicted_bytes(shape, batch.micro_batch),
        host_bytes=host_bytes,
        saved_bytes=host.saved_without_pinning(facts, config, slots=slots),
        host_limit=devices.host_memory,
        fits=fits and fits_host(host_bytes, devices.host_memory),
        largest=int(memory.largest(shape)),
        saved_by_checkpointing=saved,
    )


def _candidates(model: SimulatedModel, devices: EstimateSettings) -> Iterator[_Candidate]:
    """Yield the candidates to check in turn if the user gives no configuration.

    First come the strategies that fit by formula, in five groups: without offloading, with an
    offloaded optimizer, with offloaded parameters too, and the last two in pageable host memory.
    Each group is tried without changes and then with activation checkpointing, the fastest first.
    Last comes the strategy that lacks the least memory with everything that saves memory.
    """
    [slots] = devices.slot_counts
    may_recompute = devices.activation_checkpointing is None

    @functools.cache
    def table_of(pins: bool, recomputes: bool) -> tuple[LineByLine, list[Strategy]]:
        config = model.config if pins else _unpin(model.config)
        switches = {CHECKPOINTING: True} if recomputes else {}
        table = LineByLine(replace(model, config=config), devices, switches)
        return table, list(table.fastest_first())

    # Number of offloaded states, and whether they are pinned.
    ways = ((0, True), (1, True), (2, True), (1, False), (2, False))
    recomputing = (False, True)[: 1 + may_recompute]
    for (offloaded, pins), recomputes in itertools.product(ways, recomputing):
        config = model.config if pins else _unpin(model.config)
        added = (_CHECKPOINTS,) * recomputes + (_UNPINNED,) * (not pins)
        changes = f" with {' and '.join(added)}" if added else ""
        table, fitting = table_of(pins, recomputes)
        for strategy in fitting:
            if strategy.offloaded == offloaded:
                note = f"simulating {strategy.label}{changes}, which fits by formula"
                yield _Candidate(apply_strategy(config, strategy, slots), added, note)
    nearest = min(table.lines(), key=lambda line: _lacking(line, devices)).strategy
    note = f"simulating {nearest.label}, which lacks the least memory by formula"
    if not nearest.offloads:
        added = tuple(change for change in added if change != _UNPINNED)
    yield _Candidate(apply_strategy(config, nearest, slots), added, note)


def _lacking(line: Line, devices: EstimateSettings) -> int:
    """Return the sum of the bytes that a device and a host lack."""
    shortage = max(0, edges.missing(line.needed, devices.slot_memories[0]))
    if devices.host_memory is not None:
        shortage += max(0, edges.missing(line.host, devices.host_memory))
    return shortage


def _ways_out(model: SimulatedModel, devices: EstimateSettings) -> tuple[str, ...]:
    """Return remedies for a model that no strategy fits."""
    [slots], [gpu_bytes] = devices.slot_counts, devices.slot_memories
    is_off = devices.activation_checkpointing == "off"
    switches = {} if is_off else {CHECKPOINTING: True}
    config = _unpin(model.config)
    basis = Basis.of_model(model.simulator.facts(config, switches))
    choices = fewest_gpus.fewest(basis, config, devices.host_memory, sizes=(gpu_bytes,))
    least = min((choice.gpus for choice in choices if choice.gpus > slots), default=None)
    larger = "more or larger GPUs" if choices else "larger GPUs"
    ways = [larger if least is None else f"at least {least} such GPUs"]
    if is_off:
        ways.append("activation checkpointing")
    table = LineByLine(replace(model, config=config), devices, switches)
    # A device needs as much memory as with offloading to the CPU, but only stage 3 supports NVMe.
    stage_3 = [s for s in table.lines() if s.strategy.stage == 3]
    if any(s.strategy.offloads and edges.missing(s.needed, gpu_bytes) <= 0 for s in stage_3):
        ways.append('offloading to NVMe ("device": "nvme" in --ds-config)')
    if devices.lora is None and _fits_with(replace(devices, lora=_LORA)):
        lora = ",".join(f"{key}={value}" for key, value in _LORA.items())
        ways.append(f"training only adapters (--lora {lora})")
    return tuple(ways)


def _fits_with(devices: EstimateSettings) -> bool:
    """Return whether any strategy fits by formula with everything that may save memory."""
    recomputes = devices.activation_checkpointing or "on"
    with (
        contextlib.suppress(DsatError),  # for example, the model has no linear layers
        simulate(replace(devices, activation_checkpointing=recomputes)) as model,
    ):
        table = LineByLine(replace(model, config=_unpin(model.config)), devices)
        return any(line.largest[devices.slot_memories[0]] for line in table.lines())
    return False


def _unpin(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that keeps an offloaded optimizer in pageable memory."""
    zero = dict(config.get("zero_optimization") or {})
    section = {"device": "none", **(zero.get("offload_optimizer") or {}), "pin_memory": False}
    return {**config, "zero_optimization": {**zero, "offload_optimizer": section}}
