"""The plan: everything that decides a run's trials, recorded in the journal's first line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from dsat.inputs import ds_config
from dsat.inputs.ds_config import AUTO
from dsat.inputs.option import options_of
from dsat.inputs.settings import BY_FORMULA, Settings
from dsat.space.space import LARGEST_MICRO_BATCH, allowed_micro_batches
from dsat.values.codec import Recorded
from dsat.values.objective import Objective
from dsat.values.trial import BatchTriple

# Names in messages of the fields that no single option decides.
_LABELS = {
    "base_config": "DeepSpeed configuration",
    "own_batch": "own",
    "choices": "list of values of",
    "search_options": "option of the search",
    "switches": "the script's switch",
    "defaults": "DeepSpeed's default of",
    "offload_helps": "slots with memory of their own",
    "measured.program": "program (a digest of entrypoint, hyperparameters and argument mappings)",
    "measured.steps": "profile steps (start, end, most)",
}
_OPTIONS = {own.name: own for own in options_of(Settings)}
LONGEST_S = 60.0  # what `Plan.longest_s` usually is
_ABSENT = "not given"
# Fields that the first runs did not record; see `dsat.tuning.replay.as_begun`.
_ASKED_SINCE = ("defaults", "slots_per_host")
_MAY_DIFFER = ("max_trials", "finals", "indifference")


@dataclass(frozen=True)
class Plan(Recorded):
    """The plan of a run, in plain values.

    Attributes:
        method: a name of `dsat.search.SEARCHES`.
        search_options: that search's own options.
        max_trials: the most trials of the run, the profile trial included.
        zero_stages: the ZeRO stages to search.
        slots_per_trial: data-parallel slots of every trial.
        slots_per_host: of these, if they are on several hosts; 0 if they are on one.
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
        defaults: what the DeepSpeed that runs the trials takes for knobs that are not given, by
            their paths; a missing knob is unsupported. Empty if unknown.
        max_seq_length: the longest sequence of the data, in tokens, if the user gave it.
        finals: how many trials there may be after the search to decide between its leaders and the
            user's own configuration; None for a share of `max_trials`.
        indifference: the gain, as a fraction, that a larger global batch is not worth.
        ramp: before the search the user's own micro batch is doubled as long as that is worth it.
        longest_s: a trial may measure for so many seconds, or for as long as 20 of the user's own
            optimizer steps take; None for as long as it takes.
        own_first: the first trial is the user's own configuration, and profiles the model; runs of
            earlier versions profiled it in a trial of its own.
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
    slots_per_host: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    max_seq_length: int | None = None
    finals: int | None = 0
    indifference: float = 0.02
    ramp: bool = False
    longest_s: float | None = None
    own_first: bool = False
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def objective(self) -> Objective:
        return Objective(self.metric)

    def config(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole DeepSpeed configuration of a trial.

        Args:
            overrides: of the trial, over the user's configuration.
        """
        return ds_config.for_use(self.base_config, overrides)

    @property
    def fixed(self) -> tuple[str, ...]:
        """Settings of `zero_optimization` that are not searched.

        They are those that the user chose by hand ("auto" excepted) and did not free, and those
        that they fixed.
        """
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
        """Tell whether batch sizes keep to the user's constraints."""
        if self.train_batch_size not in (None, batch.train_batch_size):
            return False
        largest = self.max_train_batch_size
        if largest is not None and batch.train_batch_size > largest:
            return False
        return batch.micro_batch % self.divisible_by == 0

    def difference(self, earlier: Plan) -> str | None:
        """Return the first difference to an earlier plan, `FIELD was X, now Y`, or None.

        Fields that only end a run may differ: the number of trials, and the finals.
        """
        mine, theirs = self.to_json(), earlier.to_json()
        for name, value in mine.items():
            if name in _MAY_DIFFER or value == theirs[name]:
                continue
            if name in _ASKED_SINCE and not theirs[name]:
                continue
            own = _OPTIONS.get(name)
            if own is not None:
                called = own.keyword.replace("_", " ")
                return f"{called} was {own.write(theirs[name])}, now {own.write(value)}"
            path, was, now = _first_difference(theirs[name], value)
            label = _LABELS.get(".".join([name, *path]))
            if label is None:
                label = _LABELS.get(name, name.replace("_", " ")) + f" {'.'.join(path)}"
            return f"{label.strip()} was {was}, now {now}"
        return None


def values_of(settings: Settings) -> dict[str, Any]:
    """Return the fields of a plan that single options decide."""
    names = [each.name for each in fields(Plan) if each.name in _OPTIONS]
    return {name: getattr(settings, name) for name in names}


def _first_difference(was: Any, now: Any) -> tuple[list[str], str, str]:
    """Return the keys that lead to the first difference of two values, and both sides of it."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*was, *now]):
            if key not in was or key not in now:
                return [key], _said(was.get(key, _ABSENT)), _said(now.get(key, _ABSENT))
            if was[key] != now[key]:
                path, *values = _first_difference(was[key], now[key])
                return [key, *path], values[0], values[1]
    return [], _said(was), _said(now)


def _said(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
