"""Everything that decides which trials a run makes; recorded in the journal's first line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from dsat.inputs import ds_config
from dsat.inputs.ds_config import AUTO
from dsat.space.space import LARGEST_MICRO_BATCH, allowed_micro_batches
from dsat.values.objective import Objective
from dsat.values.trial import BatchTriple

BY_SIMULATION, BY_FORMULA, NO_MEMORY_MODEL = MEMORY_MODELS = ("simulation", "formula", "none")

_TUPLES = ("zero_stages", "micro_batches", "tune", "fix")


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
        micro_batches: if given, only these micro batches.
        min_micro_batch, max_micro_batch: bounds on the micro batch, both allowed.
        max_train_batch_size: if given, gradient accumulation fills the global batch up to this.
        tune, fix: settings that the user freed, or wants left alone.
        choices: values that they listed, by setting.
        switches: the script's own switches that can be searched, with the user's value.
        memory_model: how memory is predicted, one of `MEMORY_MODELS`.
        offload_helps: whether slots have memory of their own, which offloading relieves.
        nvme_path: where offloading to NVMe may write.
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
    micro_batches: tuple[int, ...] = ()
    min_micro_batch: int = 1
    max_micro_batch: int | None = None
    max_train_batch_size: int | None = None
    tune: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, bool] = field(default_factory=dict)
    memory_model: str = BY_FORMULA
    offload_helps: bool = False
    nvme_path: str | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def objective(self) -> Objective:
        return Objective(self.metric)

    def config(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """The whole DeepSpeed configuration of a trial, as the engine gets it.

        Args:
            overrides: what the trial lays over the user's configuration.
        """
        return ds_config.for_use(self.base_config, overrides)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Settings of `zero_optimization` that stay as they are: those that the user chose by
        hand, "auto" excepted, and did not free, and those that they fixed."""
        zero = self.base_config.get("zero_optimization") or {}
        freed = {"stage", *self.tune, *self.choices}
        chosen = [key for key, value in zero.items() if value != AUTO and key not in freed]
        return (*chosen, *self.fix)

    @property
    def allowed_micro_batches(self) -> Sequence[int]:
        """All micro batches that may be tried, ascending."""
        largest = self.max_micro_batch or LARGEST_MICRO_BATCH
        if self.max_train_batch_size is not None:
            largest = min(largest, self.max_train_batch_size // self.slots_per_trial)
        return allowed_micro_batches(
            train_batch_size=self.train_batch_size,
            divisible_by=self.divisible_by,
            slots=self.slots_per_trial,
            listed=self.micro_batches,
            smallest=self.min_micro_batch,
            largest=largest,
        )

    def admits(self, batch: BatchTriple) -> bool:
        """Whether batch sizes keep to what the user demanded of them."""
        if self.train_batch_size not in (None, batch.train_batch_size):
            return False
        largest = self.max_train_batch_size
        if largest is not None and batch.train_batch_size > largest:
            return False
        return batch.micro_batch % self.divisible_by == 0

    def to_json(self) -> dict[str, Any]:
        lists = {name: list(getattr(self, name)) for name in _TUPLES}
        return {**asdict(self), **lists}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        # What an earlier version did not know of has its default.
        values = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        values.update({name: tuple(values[name]) for name in _TUPLES})
        values["own_batch"] = BatchTriple(**values["own_batch"])
        return cls(**values)

    def difference(self, other: Plan) -> str | None:
        """The first field in which another plan would decide differently; the number of trials
        may differ, since it only ends a run."""
        mine, theirs = self.to_json(), replace(other, max_trials=self.max_trials).to_json()
        return next((key for key, value in mine.items() if theirs[key] != value), None)
