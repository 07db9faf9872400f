"""`dsat estimate --fits`: does a configuration fit the memory of these devices?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dsat.command import ds_config
from dsat.estimating.options import EstimateSettings
from dsat.memory.predictor import Anchor, Basis, MemoryModel
from dsat.prepare.simulated_model import simulate
from dsat.simulation.client import SimulationUnavailable
from dsat.simulation.protocol import Question
from dsat.space.batch_rule import LARGEST_MICRO_BATCH
from dsat.values import format as fmt
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import Strategy, of_config


@dataclass(frozen=True)
class Fit:
    """Memory of a configuration, compared with the memory of the devices.

    Attributes:
        slots, card_bytes: number of devices, and the memory of each.
        strategy, batch: of the user's configuration.
        needed_bytes: predicted peak of a device, without the CUDA context and NCCL.
        host_bytes: host memory of each rank.
        fits: with 5 % to spare.
        largest: the largest micro batch that fits; 0 if none does.
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

    def to_json(self) -> dict[str, Any]:
        batch = asdict(self.batch)
        del batch["parallelism"]
        return {**vars(self), "strategy": self.strategy.name, "batch": batch}

    def __str__(self) -> str:
        host = ""
        if self.host_bytes:
            host = f", and {fmt.memory(self.host_bytes)} of host memory for each"
        text = [
            f"{self.name} {'fits' if self.fits else 'does not fit'} {self.slots} x "
            f"{fmt.memory(self.card_bytes)}: {self.strategy.label} with micro batch "
            f"{self.batch.micro_batch} needs {fmt.memory(self.needed_bytes)} of each{host}. 5 % "
            "must stay free. The CUDA context and NCCL need memory on top."
        ]
        if not self.fits and self.largest:
            text.append(f"The largest micro batch that fits is {self.largest}.")
        elif not self.fits:
            text.append("No micro batch fits: without --fits, a table shows which strategies do.")
        return " ".join(text)


def fit(settings: EstimateSettings) -> Fit:
    """Simulate the user's own configuration, and compare it with the devices of `settings.fits`.

    Raises:
        UserInputError: the settings or the files are wrong.
        DsatError: the configuration cannot be simulated.
    """
    assert settings.fits is not None
    slots, card_bytes = settings.fits
    with simulate(settings) as model:
        batch = ds_config.resolve_batch(model.config, slots, where="--fits")
        facts = model.simulator.facts(model.config)
        own = ds_config.for_use(model.config, {ds_config.BATCH_KEYS[2]: batch.gas})
        own = ds_config.without_batch_sizes(own)
        [estimate] = model.simulator.estimates([Question(own, batch.micro_batch, slots)])
        if isinstance(estimate, str):
            raise SimulationUnavailable(estimate)
    basis = Basis.of_model(facts, [Anchor(own, batch.micro_batch, estimate)])
    memory = MemoryModel(basis, slots=slots, limit_bytes=card_bytes, on_device=True)
    shape = memory.shape(own, {})
    return Fit(
        name=model.name,
        slots=slots,
        card_bytes=card_bytes,
        strategy=of_config(own),
        batch=batch,
        needed_bytes=memory.predicted_bytes(shape, batch.micro_batch),
        host_bytes=estimate.host,
        fits=memory.fits(shape, batch.micro_batch),
        largest=int(min(memory.largest(shape), LARGEST_MICRO_BATCH)),
    )
