"""`dsat estimate --fits`: a user's own configuration, held against the memory of cards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsat.app.estimate import NO_SWITCH, configuration, ladder, simulated
from dsat.errors import UserInputError
from dsat.inputs import ds_config
from dsat.inputs.estimate_settings import EstimateSettings
from dsat.memory.predictor import Anchor, Basis, MemoryModel, Variant
from dsat.memory.simulation_client import SimulationUnavailable
from dsat.report import format as fmt
from dsat.space.space import LARGEST_MICRO_BATCH
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import Strategy, of_config


@dataclass(frozen=True)
class Fit:
    """Memory of a configuration against that of the cards.

    Attributes:
        name: of the experiment, or of the command's script.
        slots, card_bytes: number of cards, and the memory of each.
        strategy, batch: of the user's configuration.
        needed_bytes: predicted peak of a card, without its context and the communication library.
        host_bytes: of the host's memory, for each card.
        fits: with 5 % to spare.
        largest: the largest micro batch that fits; 0 if none does.
        instead: the first other strategy that would hold the micro batch, by formula.
    """

    name: str
    slots: int
    card_bytes: int
    strategy: Strategy
    batch: BatchTriple
    needed_bytes: int
    host_bytes: int
    fits: bool
    largest: int
    instead: Strategy | None

    def to_json(self) -> dict[str, Any]:
        instead = None if self.instead is None else self.instead.name
        batch = vars(self.batch)
        return {**vars(self), "strategy": self.strategy.name, "batch": batch, "instead": instead}

    def __str__(self) -> str:
        of = f"{self.slots} x {fmt.memory(self.card_bytes)}"
        host = f", and {fmt.memory(self.host_bytes)} of host memory for each" * bool(
            self.host_bytes
        )
        said = [
            f"{self.name} {'fits' if self.fits else 'does not fit'} {of}: {self.strategy.label} "
            f"with micro batch {self.batch.micro_batch} needs {fmt.memory(self.needed_bytes)} of "
            f"each{host}. 5 % are left free; the device's context and the communication library "
            "come on top."
        ]
        if not self.fits:
            said.append(
                f"The largest micro batch that fits is {self.largest}."
                if self.largest
                else "No micro batch fits."
            )
            if self.instead is not None:
                said.append(f"{self.instead.label} would hold it, by formula.")
        return " ".join(said)


def fit(settings: EstimateSettings) -> Fit:
    """Simulate a user's own configuration, and hold it against the cards of `settings.fits`.

    Raises:
        UserInputError: something of the settings or the files is wrong.
        DsatError: the script, or its configuration, cannot be simulated.
    """
    assert settings.fits is not None
    slots, card_bytes = settings.fits
    with simulated(settings) as (name, base, simulator):
        batch = ds_config.resolve_batch(base, slots, where="--fits")
        recomputed = settings.activation_checkpointing
        simulator.recompute(None if recomputed is None else recomputed == "on")
        facts = simulator.facts(base)
        if recomputed == "on" and not simulator.recomputes:
            raise UserInputError(NO_SWITCH, where="--activation-checkpointing on")
        own = _as_trained(base, batch)
        estimate = simulator.estimate(own, micro_batch=batch.micro_batch, slots=slots)
        if estimate.note:
            raise SimulationUnavailable(estimate.note)
        anchor = Anchor(own, batch.micro_batch, estimate)

    def model(anchors: tuple[Anchor, ...]) -> MemoryModel:
        return MemoryModel(
            Basis((Variant({}, facts, anchors),)),
            slots=slots,
            limit_bytes=card_bytes,
            on_device=True,
        )

    exact, by_formula = model((anchor,)), model(())
    shape = exact.shape(own, {})
    others = [other for other in ladder(base) if other != of_config(own)]
    holding = (
        other
        for other in others
        if by_formula.fits(
            by_formula.shape(configuration(base, other, slots), {}), batch.micro_batch
        )
    )
    return Fit(
        name,
        slots,
        card_bytes,
        of_config(own),
        batch,
        exact.predicted_bytes(shape, batch.micro_batch),
        estimate.host,
        exact.fits(shape, batch.micro_batch),
        int(min(exact.largest(shape), LARGEST_MICRO_BATCH)),
        next(holding, None),
    )


def _as_trained(base: Mapping[str, Any], batch: BatchTriple) -> dict[str, Any]:
    """Return the user's configuration, with accumulation as it is on so many slots."""
    own = ds_config.for_use(base, {ds_config.BATCH_KEYS[2]: batch.gas})
    return {key: value for key, value in own.items() if "batch_size" not in key}
