"""The space of configurations: strategies, values of their knobs, and micro batches."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsat.inputs import ds_config
from dsat.space.knobs import BUCKETS, KNOBS, Knob, Situation
from dsat.space.overrides import GAS, strategy_settings
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import Strategy

LARGEST_MICRO_BATCH = 2**20


def allowed_micro_batches(
    *,
    train_batch_size: int | None,
    divisible_by: int,
    slots: int,
    listed: Sequence[int] = (),
    smallest: int = 1,
    largest: int = LARGEST_MICRO_BATCH,
) -> Sequence[int]:
    """Return all micro batches that may be tried, ascending.

    Args:
        train_batch_size: if given, micro batch x gas x slots must be exactly this.
        divisible_by: micro batches must be multiples of this.
        slots: data-parallel slots of a trial.
        listed: if given, only these.
        smallest, largest: bounds, both allowed.

    Returns:
        An ascending sequence, empty when the constraints cannot be met together.
    """
    if train_batch_size is None and not listed:
        first = -(-smallest // divisible_by) * divisible_by
        return range(first, largest + 1, divisible_by)
    candidates = set(listed)
    if train_batch_size is not None:
        per_slot, rest = divmod(train_batch_size, slots)
        most = 0 if rest else min(math.isqrt(per_slot), LARGEST_MICRO_BATCH)
        small = [d for d in range(1, most + 1) if per_slot % d == 0]
        divisors = {*small, *(per_slot // d for d in small)}
        candidates = divisors & candidates if listed else divisors
    return tuple(
        size
        for size in sorted(candidates)
        if size % divisible_by == 0 and smallest <= size <= largest
    )


@dataclass(frozen=True)
class Branch:
    """A strategy and all settings that may be tried with it.

    Attributes:
        base: settings that all of its configurations have; flat, as in a proposal.
        knobs: what differs, DeepSpeed's default (or the user's own choice) first.
    """

    strategy: Strategy
    base: Mapping[str, Any]
    knobs: tuple[tuple[str, tuple[Any, ...]], ...]

    @property
    def count(self) -> int:
        """The number of its settings."""
        return math.prod(len(values) for _, values in self.knobs)

    @property
    def strides(self) -> tuple[int, ...]:
        """The step in the number of settings from one value of a knob to the next."""
        counts = [len(values) for _, values in self.knobs]
        return tuple(math.prod(counts[:position]) for position in range(len(counts)))

    def settings(self, index: int) -> dict[str, Any]:
        """Return the settings number `index`; number 0 has the first value of every knob."""
        chosen = {"stage": self.strategy.stage, **self.base}
        for key, values in self.knobs:
            index, digit = divmod(index, len(values))
            chosen[key] = values[digit]
        return chosen


@dataclass(frozen=True)
class Freedom:
    """The settings that a search may choose.

    Attributes:
        fixed: settings of `zero_optimization` that the user chose by hand.
        tune: settings that they freed all the same, or want searched that otherwise are not.
        choices: values that they listed, by setting; these and no others are tried.
        switches: switches of the script that can be searched, with the user's own value.
        nvme_path: where offloading to NVMe may write.
        on_device: whether slots have memory of their own.
        slots_per_host: of a trial over several hosts; 0 if it is on one.
        defaults: the installed DeepSpeed's, by the paths of the knobs that it has; empty if it was
            not asked.
    """

    fixed: Collection[str] = ()
    tune: Collection[str] = ()
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    switches: Mapping[str, bool] = field(default_factory=dict)
    nvme_path: str | None = None
    on_device: bool = False
    slots_per_host: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)


class Space:
    """Every configuration that may be tried: strategy x knob values x micro batch.

    Args:
        strategies: the strategies to search.
        micro_batches: allowed micro batches, ascending.
        slots: data-parallel slots of a trial.
        gas: gradient accumulation steps, unless a global batch decides them.
        train_batch_size: if given, gas makes every batch exactly this.
        max_train_batch_size: if given, gas makes every batch as large as this lets it be.
        freedom: what of the settings may be chosen.
        config: the user's DeepSpeed configuration.
        num_params: sizes that the model could never fill are left out.
        roomy_bucket: elements that a bucket may have without crowding a slot; the first settings
            of a branch have no larger one, whatever DeepSpeed's default.
    """

    def __init__(
        self,
        *,
        strategies: Sequence[Strategy],
        micro_batches: Sequence[int],
        slots: int,
        gas: int = 1,
        train_batch_size: int | None = None,
        max_train_batch_size: int | None = None,
        freedom: Freedom = Freedom(),
        config: Mapping[str, Any] | None = None,
        num_params: int | None = None,
        roomy_bucket: int | None = None,
    ) -> None:
        self.micro_batches = micro_batches
        self.slots = slots
        self.slots_per_host = freedom.slots_per_host
        self._gas = gas
        self._train_batch_size = train_batch_size
        self._max_train_batch_size = max_train_batch_size
        self.branches = tuple(
            _branch(strategy, slots, freedom, config or {}, num_params, roomy_bucket)
            for strategy in strategies
        )

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return tuple(branch.strategy for branch in self.branches)

    def batch(self, micro_batch: int, settings: Mapping[str, Any] | None = None) -> BatchTriple:
        """Return the batch sizes of a micro batch, with settings that may name gas."""
        step = micro_batch * self.slots
        if self._train_batch_size is not None:
            gas = self._train_batch_size // step
        elif self._max_train_batch_size is not None:
            gas = max(1, self._max_train_batch_size // step)
        else:
            gas = int((settings or {}).get(GAS, self._gas))
        return BatchTriple(step * gas, micro_batch, gas)

    def describe(self) -> list[str]:
        """Return one line per branch with the knobs that are searched in it."""
        return [
            f"{branch.strategy.label}: "
            + (", ".join(f"{key} {_short(values)}" for key, values in branch.knobs) or "no knobs")
            for branch in self.branches
        ]


def _branch(
    strategy: Strategy,
    slots: int,
    freedom: Freedom,
    config: Mapping[str, Any],
    num_params: int | None,
    roomy_bucket: int | None,
) -> Branch:
    situation = Situation(
        strategy,
        slots,
        cpu_adam=_makes_cpu_adam(config),
        on_device=freedom.on_device,
        bf16=(config.get("bf16") or config.get("bfloat16") or {}).get("enabled") is True,
        slots_per_host=freedom.slots_per_host,
    )
    knobs: list[tuple[str, tuple[Any, ...]]] = []
    for knob in KNOBS:
        if not _is_searched(knob, situation, freedom):
            continue
        values = tuple(freedom.choices.get(knob.key, ()))
        if not values:
            values = _useful_values(knob, situation, freedom.defaults, num_params, roomy_bucket)
            values = _with_first(_own_value(knob, config), values)
        if len(values) > 1 or not knob.divides_slots:
            knobs.append((knob.key, values))
    names = {knob.key for knob in KNOBS}
    for key, listed in freedom.choices.items():
        has_it = key == GAS or strategy.stage >= (3 if key == "offload_param" else 1)
        if key not in names and has_it:
            knobs.append((key, tuple(listed)))
    for switch, own in freedom.switches.items():
        if _is_free(switch, freedom):
            knobs.append((switch, (own, not own)))
    return Branch(strategy, strategy_settings(strategy, config, freedom.nvme_path), tuple(knobs))


def _is_searched(knob: Knob, situation: Situation, freedom: Freedom) -> bool:
    in_stage = situation.strategy.stage in knob.stages and knob.when(situation)
    if not in_stage or not _is_free(knob.key, freedom):
        return False
    if knob.key in freedom.tune or knob.key in freedom.choices:
        return True
    known = knob.path in freedom.defaults if freedom.defaults else not knob.is_later
    return known and knob.unasked(situation)


def _is_free(key: str, freedom: Freedom) -> bool:
    if key in freedom.choices or key in freedom.tune:
        return True
    section = key.partition(".")[0]
    return not any(
        ds_config.same_setting(fixed, name) for fixed in freedom.fixed for name in (key, section)
    )


def _makes_cpu_adam(config: Mapping[str, Any]) -> bool:
    """Tell whether DeepSpeed makes its own Adam for an offloaded optimizer (engine.py, 0.19.8)."""
    optimizer = config.get("optimizer") or {}
    parameters = optimizer.get("params") or {}
    kind = str(optimizer.get("type", "")).lower()
    return kind in ("adam", "adamw") and not parameters.get("torch_adam", False)


def _own_value(knob: Knob, config: Mapping[str, Any]) -> Any:
    """Return the user's own value of a knob, or None."""
    found = ds_config.at(config, knob.path)
    first = knob.values[0]
    if isinstance(first, Mapping) and isinstance(found, Mapping):  # of a section, what is searched
        found = {key: found.get(key, value) for key, value in first.items()}
    return None if found == ds_config.AUTO else found


def _with_first(first: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the values with a given one first, if it is not None."""
    if first is None:
        return tuple(values)
    return (first, *(value for value in values if value != first))


def _useful_values(
    knob: Knob,
    situation: Situation,
    defaults: Mapping[str, Any],
    num_params: int | None,
    roomy_bucket: int | None,
) -> tuple[Any, ...]:
    """Return the values worth trying: of sizes beyond the model only the smallest."""
    values = _with_first(defaults.get(knob.path), knob.usable(situation))
    if num_params is not None and knob.elements:
        enough = min((value for value in values if value >= num_params), default=None)
        if enough is not None and values[0] >= num_params:  # the default, by another name
            values = _with_first(enough, values)
        values = tuple(value for value in values if value < num_params or value == enough)
    if knob.values is BUCKETS and roomy_bucket is not None and values[0] > roomy_bucket:
        roomy = [value for value in values if value <= roomy_bucket]
        values = _with_first(max(roomy) if roomy else min(values), values)
    return values


def _short(values: Sequence[Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, int) and not isinstance(value, bool):
            return f"{value:.0e}" if value >= 10**6 else str(value)
        return str(dict(value)) if isinstance(value, Mapping) else str(value).lower()

    return "|".join(text(value) for value in values)
