"""The plan: everything that decides a run's trials, recorded in the journal's first line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsat.command import ds_config, switches
from dsat.options import write_memory_size
from dsat.space.batch_rule import BatchRule
from dsat.space.locate import canonical_config
from dsat.space.space import Freedom
from dsat.values.codec import Recorded
from dsat.values.objective import Objective

# Names of fields in messages, where the field's own name is unclear.
_LABELS = {
    "slot_memory_bytes": "slot memory",
    "seed": "random seed",
    "tune": "search",
    "fix": "keep",
    "listed_switches": "vary",
    "base_config": "DeepSpeed configuration",
    "own_batch": "own",
    "choices": "list of values of",
    "search_options": "option of the search",
    "switches": "the script's switch",
    "defaults": "DeepSpeed's default of",
    "offload_helps": "devices with separate memory",
    "measured.program": "the command, its arguments, hyperparameters or argument mappings",
    "measured.steps": "profile steps (start, end, most)",
    "measured.device": "device",
}
_DIGEST = "measured.program"  # its values mean nothing to users
BY_SIMULATION, BY_FORMULA, NO_MEMORY_MODEL = MEMORY_MODELS = ("simulation", "formula", "none")
LONGEST_S = 20.0  # `Plan.longest_s` of a new plan
_ABSENT = "not given"


def _write_switches(values: Mapping[str, Any]) -> str:
    return " ".join(switches.write(name, listed) for name, listed in values.items()) or _ABSENT


# Writers of fields whose values users do not write as JSON.
_WRITERS: Mapping[str, Callable[[Any], str]] = {
    "slot_memory_bytes": write_memory_size,
    "listed_switches": _write_switches,
}
# Fields that may differ when a run is resumed. The resumed run keeps its earlier `longest_s`.
_MAY_DIFFER = ("max_trials", "finals", "indifference", "longest_s", "faulty_stages")


@dataclass(frozen=True, kw_only=True)
class Plan(Recorded, BatchRule, Freedom):
    """The plan of a run, in plain values.

    Attributes:
        method: a name of `dsat.search.SEARCHES`.
        max_trials: number of trials allowed, including the profile and the finals.
        faulty_stages: excluded stages, which the installed DeepSpeed refuses or trains wrongly.
        slot_memory_bytes: memory limit of a device; None for all its memory.
        memory_model: how memory is predicted, one of `MEMORY_MODELS`.
        max_seq_length: longest sequence of the data in tokens; None if not given.
        finals: largest number of trials in the finals; None for a share of `max_trials`.
        indifference: gain, as a fraction, below which a larger global batch is not worth it.
        ramp: whether to raise micro batches step by step, while that increases the throughput.
        longest_s: time limit of a trial's measurement in seconds (see `Run.longest_s`); None for no
            limit.
        measured: program, steps to measure, and device. Results are comparable only if these are
            equal.
    """

    method: str
    metric: str
    max_trials: int
    zero_stages: tuple[int, ...]
    seed: int
    search_options: Mapping[str, Any] = field(default_factory=dict)
    faulty_stages: tuple[int, ...] = ()
    slot_memory_bytes: int | None = None
    memory_model: str = BY_FORMULA
    max_seq_length: int | None = None
    finals: int | None = 0
    indifference: float = 0.02
    ramp: bool = False
    longest_s: float | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def objective(self) -> Objective:
        return Objective(self.metric)

    @property
    def searched_stages(self) -> tuple[int, ...]:
        """The ZeRO stages to search, without faulty ones."""
        return tuple(stage for stage in self.zero_stages if stage not in self.faulty_stages)

    def config(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Return the whole DeepSpeed configuration of a trial."""
        return ds_config.prepare_for_training(self.base_config, overrides)

    def fingerprint(self, overrides: Mapping[str, Any], script_args: Mapping[str, Any]) -> str:
        """Return a digest of a trial's switches and canonical configuration.

        Configurations that DeepSpeed treats alike have the same digest.
        """
        config = canonical_config(self.config(overrides))
        return ds_config.fingerprint({"config": config, "script_args": dict(script_args)})

    def measured_beside(self, other: Plan) -> dict[str, Any]:
        """Return `measured`, without the device if only one of the two plans names one."""
        both = "device" in self.measured and "device" in other.measured
        return {key: its for key, its in self.measured.items() if both or key != "device"}

    def difference(self, earlier: Plan) -> str | None:
        """Return the first difference from an earlier plan, `FIELD was X, now Y`, or None.

        Differences in `_MAY_DIFFER` do not count.
        """
        mine = {**self.to_json(), "measured": self.measured_beside(earlier)}
        theirs = {**earlier.to_json(), "measured": earlier.measured_beside(self)}
        for name, value in mine.items():
            if name not in _MAY_DIFFER and value != theirs[name]:
                return difference_of(name, theirs[name], value)
        return None


def difference_of(name: str, earlier: Any, today: Any) -> str:
    """Describe the first difference between two values of a field: `FIELD was X, now Y`."""
    write = _WRITERS.get(name)
    if write is not None:
        earlier, today = (_ABSENT if value is None else write(value) for value in (earlier, today))
    path, was, now = first_difference(earlier, today)
    whole = ".".join([name, *path])
    label = _LABELS.get(whole)
    if label is None:
        label = _LABELS.get(name, name.replace("_", " ")) + f" {'.'.join(path)}"
    if whole == _DIGEST:
        return f"{label} changed"
    return f"{label.strip()} was {was}, now {now}"


def first_difference(was: Any, now: Any) -> tuple[list[str], str, str]:
    """Return the path of keys to the first difference between two values, and the values there."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*was, *now]):
            if key not in was or key not in now:
                return [key], _value_text(was.get(key, _ABSENT)), _value_text(now.get(key, _ABSENT))
            if was[key] != now[key]:
                path, *values = first_difference(was[key], now[key])
                return [key, *path], values[0], values[1]
    return [], _value_text(was), _value_text(now)


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
