"""`dsat estimate --fits`: does a configuration fit the memory of these devices?"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dsat.command import ds_config
from dsat.command.switches import CHECKPOINTING
from dsat.estimating import edges, fewest_cards
from dsat.estimating.options import EstimateSettings
from dsat.estimating.tables import LineByLine, needs_simulation
from dsat.memory import host
from dsat.memory.predictor import Anchor, Basis, MemoryModel, fits_host
from dsat.memory.strategies import COMPARED, compared, with_strategy
from dsat.prepare.simulated_model import SimulatedModel, simulate
from dsat.simulation.client import SimulationUnavailable
from dsat.simulation.protocol import Question
from dsat.values import format as fmt
from dsat.values import slow
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import Strategy, of_config

_log = logging.getLogger(__name__)
_GB = 10**9
_CHECKPOINTS, _UNPINNED = "activation checkpointing", '"pin_memory": false'


@dataclass(frozen=True)
class Fit:
    """Memory of a configuration, compared with the memory of the devices.

    Attributes:
        slots, card_bytes: number of devices, and the memory of each.
        strategy, batch: of the user's configuration.
        chosen: what dsat adds to the strategy that it has chosen, so that it fits.
        tried: what was tried with every strategy, by formula, without one that fits; empty for the
            user's own configuration.
        ways_out: what may help where no strategy fits.
        needed_bytes: predicted peak of a device, without the CUDA context and NCCL.
        host_bytes: bytes that the ranks of a host need: to load the weights, or to train.
        saved_bytes: bytes of these that `"pin_memory": false` saves.
        host_limit: bytes of the host; None if they are not known.
        fits: with 5 % to spare.
        largest: the largest micro batch that fits; 0 if none does.
        saved_by_checkpointing: bytes of a device, if it does not fit; 0 if that is on already, or
            cannot be turned on.
    """

    name: str
    slots: int
    card_bytes: int
    strategy: Strategy
    batch: BatchTriple
    chosen: tuple[str, ...]
    tried: tuple[str, ...]
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
        """Return whether the host holds its ranks, as far as its memory is known."""
        return fits_host(self.host_bytes, self.host_limit)

    def to_json(self) -> dict[str, Any]:
        batch = asdict(self.batch)
        del batch["parallelism"]
        return {**vars(self), "strategy": self.strategy.name, "batch": batch}

    def __str__(self) -> str:
        with_what = f"{_listed(self.chosen)}micro batch {self.batch.micro_batch}"
        text = [
            f"{self.name} {'fits' if self.fits else 'does not fit'} {self.slots} x "
            f"{_size(self.card_bytes)}: {self.strategy.label} with {with_what} needs "
            f"{fmt.memory(self.needed_bytes)} of each, and 5 % of that to spare. The CUDA context "
            "and NCCL need memory on top.",
            *self._host(),
        ]
        if not self.fits and self.fits_host:
            text.append(self._missing())
        if not self.fits and self.tried:
            ways = list(self.ways_out)
            if not self.fits_host:  # a device needs as much if its state is on NVMe
                ways.append('offloading to NVMe ("device": "nvme" in --ds-config)')
            tried = " and ".join(self.tried)
            text.append(f"No strategy fits, not even with {tried}. Use {', or '.join(ways)}.")
        return " ".join(text)

    def _missing(self) -> str:
        """Return by how much the device is too small, and what to do."""
        lacking = edges.missing(self.needed_bytes, self.card_bytes)
        text = f"It {edges.describe(lacking, self.saved_by_checkpointing)}."
        if self.largest:
            return f"{text} The largest micro batch that fits is {self.largest}."
        return text if self.tried else f"{text} Without --fits, a table shows which strategies fit."

    def _host(self) -> list[str]:
        """Return what the host needs."""
        text = []
        if self.host_bytes:
            of = "" if self.host_limit is None else f" of {_size(self.host_limit)}"
            ranks = fmt.count(host.ranks(self.slots), "rank")
            text.append(f"The host needs {fmt.memory(self.host_bytes)}{of} for {ranks}.")
        if self.host_limit is not None and not self.fits_host:
            lacking = edges.missing(self.host_bytes, self.host_limit)
            text.append(f"With 5 % to spare, the host lacks {fmt.memory(lacking)}.")
        if self.saved_bytes and (not self.fits_host or self.host_limit is None):
            text.append(f'"pin_memory": false saves {fmt.memory(self.saved_bytes)} of it.')
        return text


def _listed(parts: Sequence[str]) -> str:
    """Return what comes before the last part of a list."""
    return f"{', '.join(parts)} and " if parts else ""


def _size(size_bytes: int) -> str:
    """Return a size as the user is likely to have written it."""
    gigabytes, rest = divmod(size_bytes, _GB)
    size = fmt.memory(size_bytes)
    return size if rest else f"{gigabytes:,} GB ({size})"


def fit(settings: EstimateSettings) -> Fit:
    """Simulate the user's own configuration, and compare it with the devices of `settings.fits`.

    Raises:
        UserInputError: the settings or the files are wrong.
        DsatError: the configuration cannot be simulated.
    """
    assert settings.fits is not None
    slots, card_bytes, host_limit = settings.fits
    with simulate(settings) as model:
        batch = ds_config.resolve_batch(model.config, slots, where="--fits")
        facts = model.simulator.facts(model.config)
        own = ds_config.prepare_for_training(model.config, {ds_config.BATCH_KEYS[2]: batch.gas})
        own = ds_config.drop_batch_sizes(own)
        chosen: tuple[str, ...] | None = None
        tried: tuple[str, ...] = ()
        ways_out: tuple[str, ...] = ()
        if settings.model is not None and settings.ds_config is None:
            own, chosen = _fastest(model, settings)
            if chosen is None:
                tried, ways_out = _look_further(model, settings)
        recomputes = _CHECKPOINTS in (chosen or ())
        switches = {CHECKPOINTING: True} if recomputes else {}
        if recomputes:
            facts = model.simulator.facts(model.config, switches)
        asked = Question(own, batch.micro_batch, slots, switches)
        peak, anchors = None, []
        if not settings.formula or needs_simulation(own):
            with slow.logged(_log, _progress(own, chosen), at_once=True):
                [estimate] = model.simulator.estimates([asked])
            if isinstance(estimate, str):
                raise SimulationUnavailable(estimate)
            peak, anchors = estimate.peak, [Anchor(own, batch.micro_batch, estimate)]
        basis = Basis.of_model(facts, anchors)
        memory = MemoryModel(basis, slots=slots, limit_bytes=card_bytes, on_device=True)
        shape, saved = memory.shape(own, {}), 0
        recomputes = recomputes or settings.activation_checkpointing == "on"
        if peak is not None and not (recomputes or memory.fits(shape, batch.micro_batch)):
            [less] = model.simulator.estimates([asked._replace(switches={CHECKPOINTING: True})])
            saved = 0 if isinstance(less, str) else max(0, peak - less.peak)
    host_bytes = host.of_host(facts, own, shape.host_bytes, slots)
    saved_bytes = host.ranks(slots) * host.saved_without_pinning(facts, own, slots=slots)
    found = Fit(
        name=model.name,
        slots=slots,
        card_bytes=card_bytes,
        strategy=of_config(own),
        batch=batch,
        chosen=chosen or (),
        tried=tried,
        ways_out=ways_out,
        needed_bytes=memory.predicted_bytes(shape, batch.micro_batch),
        host_bytes=host_bytes,
        saved_bytes=saved_bytes,
        host_limit=settings.host_memory if host_limit is None else host_limit,
        fits=memory.fits(shape, batch.micro_batch),
        largest=int(memory.largest(shape)),
        saved_by_checkpointing=saved,
    )
    return replace(found, fits=found.fits and found.fits_host)


def _fastest(
    model: SimulatedModel, settings: EstimateSettings
) -> tuple[dict[str, Any], tuple[str, ...] | None]:
    """Return what to check if the user gives no configuration, and what it has to fit.

    It is the fastest that fits by formula: as the model is, with activation checkpointing, with
    memory of the host that is not pinned, or with both. If none does it is the leanest, and None.
    """
    assert settings.fits is not None
    slots, card_bytes, host_limit = settings.fits
    devices = replace(
        settings,
        fits=None,
        slot_counts=(slots,),
        slot_memories=(card_bytes,),
        host_memory=settings.host_memory if host_limit is None else host_limit,
    )
    is_free = settings.activation_checkpointing is None
    for pins, recomputes in itertools.product((True, False), (False, True)[: 1 + is_free]):
        config = model.config if pins else _unpinned(model.config)
        switches = {CHECKPOINTING: True} if recomputes else {}
        found = LineByLine(replace(model, config=config), devices, switches).fastest()
        if found is not None:
            chosen = (_CHECKPOINTS,) * recomputes + (_UNPINNED,) * (not pins)
            return with_strategy(config, found, slots), chosen
    return with_strategy(model.config, COMPARED[-1], slots), None


def _look_further(
    model: SimulatedModel, settings: EstimateSettings
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what was tried in vain, and what may help."""
    assert settings.fits is not None
    slots, card_bytes, host_limit = settings.fits
    may_recompute = settings.activation_checkpointing != "off"
    switches = {CHECKPOINTING: True} if may_recompute else {}
    config = _unpinned(model.config)
    found = fewest_cards.fewest(
        Basis.of_model(model.simulator.facts(config, switches)),
        config,
        functools.partial(with_strategy, config),
        compared(config),
        settings.host_memory if host_limit is None else host_limit,
        sizes=(card_bytes,),
    )
    enough = min((choice.cards for choice in found if choice.cards > slots), default=None)
    ways = ["more or larger GPUs" if enough is None else f"at least {enough} such GPUs"]
    if settings.lora is None:
        ways.append("adapters alone (--lora r=16,target=all-linear)")
    return (_CHECKPOINTS,) * may_recompute + (_UNPINNED,), tuple(ways)


def _progress(config: Mapping[str, Any], chosen: Sequence[str] | None) -> str:
    """Return what is simulated, and by formula the answer if dsat has chosen it."""
    label = of_config(config).label
    if chosen is None:
        return f"simulating {label}"
    added = f" with {' and '.join(chosen)}" if chosen else ""
    return f"by formula {label}{added} fits; simulating it"


def _unpinned(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration whose optimizer, where it is offloaded, is in pageable memory."""
    zero = dict(config.get("zero_optimization") or {})
    section = {"device": "none", **(zero.get("offload_optimizer") or {}), "pin_memory": False}
    return {**config, "zero_optimization": {**zero, "offload_optimizer": section}}
