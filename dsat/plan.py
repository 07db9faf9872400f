"""Everything that decides which trials a run makes; recorded in the journal's first line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from dsat.trial import BatchTriple, Objective


@dataclass(frozen=True)
class Plan:
    """What a tuner needs to know; plain values only.

    Attributes:
        method: a name of `dsat.search.SEARCHES`.
        search_options: that search's own options.
        max_trials: the most trials of the run, the profile trial included.
        zero_stages: the ZeRO stages to search.
        slots_per_trial: data-parallel slots of every trial.
        base_config: the user's DeepSpeed configuration with their own overrides laid over it.
        own_batch: the batch sizes of the user's own configuration.
        train_batch_size: if given, the exact global batch of every configuration.
        divisible_by: micro batches are multiples of this.
        slot_memory_bytes: if given, what a slot may use at most.
        measured: what is run and how it is measured (entrypoint, hyperparameters, steps): results
            are comparable only while it stays the same.
    """

    method: str
    metric: str
    max_trials: int
    zero_stages: tuple[int, ...]
    seed: int
    slots_per_trial: int
    base_config: Mapping[str, Any]
    own_batch: BatchTriple
    search_options: Mapping[str, Any] = field(default_factory=dict)
    train_batch_size: int | None = None
    divisible_by: int = 1
    slot_memory_bytes: int | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def objective(self) -> Objective:
        return Objective(self.metric)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Settings of `zero_optimization` that the user chose by hand: they stay as they are.

        What is left to the Hugging Face Trainer with "auto" is not chosen.
        """
        zero = self.base_config.get("zero_optimization", {})
        return tuple(key for key, value in zero.items() if value != "auto")

    def admits(self, batch: BatchTriple) -> bool:
        """Whether batch sizes keep to what the user demanded of them."""
        exact = self.train_batch_size in (None, batch.train_batch_size)
        return exact and batch.micro_batch % self.divisible_by == 0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "zero_stages": list(self.zero_stages)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        values = {f.name: data[f.name] for f in fields(cls)}
        values["zero_stages"] = tuple(values["zero_stages"])
        values["own_batch"] = BatchTriple(**values["own_batch"])
        return cls(**values)

    def difference(self, other: Plan) -> str | None:
        """The first field in which another plan would decide differently; the number of trials
        may differ, since it only ends a run."""
        mine, theirs = self.to_json(), replace(other, max_trials=self.max_trials).to_json()
        return next((key for key, value in mine.items() if theirs[key] != value), None)
