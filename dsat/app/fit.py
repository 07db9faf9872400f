"""`dsat estimate --fits`: a user's own configuration, held against the memory of cards."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dsat.app.estimate import simulated
from dsat.command import ds_config
from dsat.inputs.estimate_settings import EstimateSettings
from dsat.memory.estimate import SIMULATED
from dsat.memory.predictor import Anchor, Basis, MemoryModel
from dsat.simulation.client import SimulationUnavailable
from dsat.simulation.config_facts import HOW_TO_SIMULATE
from dsat.simulation.protocol import Question
from dsat.space.batch_rule import LARGEST_MICRO_BATCH
from dsat.values import format as fmt
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import Strategy, of_config


@dataclass(frozen=True)
class Fit:
    """Memory of a configuration against that of the cards.

    Attributes:
        slots, card_bytes: number of cards, and the memory of each.
        strategy, batch: of the user's configuration.
        needed_bytes: predicted peak of a card, without its context and the communication library.
        host_bytes: of the host's memory, for each card.
        fits: with 5 % to spare.
        largest: the largest micro batch that fits; 0 if none does.
        source: of the prediction, `SIMULATED` or `CLOSED_FORM`.
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
    source: str = SIMULATED

    def to_json(self) -> dict[str, Any]:
        batch = asdict(self.batch)
        del batch["parallelism"]
        return {**vars(self), "strategy": self.strategy.name, "batch": batch}

    def __str__(self) -> str:
        host = ""
        if self.host_bytes:
            host = f", and {fmt.memory(self.host_bytes)} of host memory for each"
        said = [
            f"{self.name} {'fits' if self.fits else 'does not fit'} {self.slots} x "
            f"{fmt.memory(self.card_bytes)}: {self.strategy.label} with micro batch "
            f"{self.batch.micro_batch} needs {fmt.memory(self.needed_bytes)} of each{host}. 5 % "
            "are left free; the device's context and the communication library come on top."
        ]
        if not self.fits and self.largest:
            said.append(f"The largest micro batch that fits is {self.largest}.")
        elif not self.fits:
            said.append("No micro batch fits: without --fits, a table shows which strategies do.")
        if self.source != SIMULATED:
            said.append(f"Source: {self.source}. {HOW_TO_SIMULATE}")
        return " ".join(said)


def fit(settings: EstimateSettings) -> Fit:
    """Simulate a user's own configuration, and hold it against the cards of `settings.fits`."""
    assert settings.fits is not None
    slots, card_bytes = settings.fits
    with simulated(settings) as (name, base, simulator):
        batch = ds_config.resolve_batch(base, slots, where="--fits")
        facts = simulator.facts(base)
        own = ds_config.for_use(base, {ds_config.BATCH_KEYS[2]: batch.gas})
        own = ds_config.without_batch_sizes(own)
        [estimate] = simulator.estimates([Question(own, batch.micro_batch, slots)])
        if isinstance(estimate, str):
            raise SimulationUnavailable(estimate)
    anchor = Anchor(own, batch.micro_batch, estimate)
    basis = Basis.of_model(facts, [anchor] if estimate.source == SIMULATED else [])
    model = MemoryModel(basis, slots=slots, limit_bytes=card_bytes, on_device=True)
    shape = model.shape(own, {})
    return Fit(
        name,
        slots,
        card_bytes,
        of_config(own),
        batch,
        model.predicted_bytes(shape, batch.micro_batch),
        estimate.host,
        model.fits(shape, batch.micro_batch),
        int(min(model.largest(shape), LARGEST_MICRO_BATCH)),
        estimate.source,
    )
