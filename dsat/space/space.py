"""The space of configurations: strategies, values of their settings, and micro batches."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dsat.command import ds_config
from dsat.command.switches import ATTENTION, SWITCHES, is_switch
from dsat.space.deepspeed_settings import BUCKETS, PARALLELISM, SETTINGS, Setting, Situation
from dsat.space.overrides import GAS, strategy_settings
from dsat.values import parallelism
from dsat.values.outcome import ScriptSwitch
from dsat.values.parallelism import SEQUENCE_SIZE, Parallelism
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import Strategy

_BOTH_SIZES = "parallelism"  # both parallel sizes as one setting, because they share the slots


@dataclass(frozen=True)
class Branch:
    """A strategy and all settings that may be tried with it.

    Attributes:
        base: flat settings that all configurations of the branch have.
        searched: names and values of searched settings. A setting's first value is the user's or
            DeepSpeed's default, or a smaller bucket if devices have little memory.
    """

    strategy: Strategy
    base: Mapping[str, Any]
    searched: tuple[tuple[str, tuple[Any, ...]], ...]

    @property
    def count(self) -> int:
        """Number of combinations of settings."""
        return math.prod(len(values) for _, values in self.searched)

    @property
    def strides(self) -> tuple[int, ...]:
        """Step of the index in `settings` from one value to the next, for each searched setting."""
        counts = [len(values) for _, values in self.searched]
        return tuple(math.prod(counts[:position]) for position in range(len(counts)))

    def list_parallelisms(self) -> list[dict[str, Any]]:
        """Return settings for each searched parallelism; other settings have their first values."""
        sizes = (*PARALLELISM, _BOTH_SIZES)
        for (key, values), stride in zip(self.searched, self.strides, strict=True):
            if key in sizes:
                return [self.settings(stride * digit) for digit in range(len(values))]
        return [self.settings(0)]

    def values_in(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the value of each searched setting in `settings`; None for a missing one."""
        sizes = {size: settings.get(size) for size in PARALLELISM}
        return {key: sizes if key == _BOTH_SIZES else settings.get(key) for key, _ in self.searched}

    def settings(self, index: int) -> dict[str, Any]:
        """Return the settings at an index; at 0, every searched setting has its first value."""
        settings = {"stage": self.strategy.stage, **self.base}
        for key, values in self.searched:
            index, digit = divmod(index, len(values))
            settings |= values[digit] if key == _BOTH_SIZES else {key: values[digit]}
        return settings


@dataclass(frozen=True, kw_only=True)
class Freedom:
    """Facts and options that decide which settings a search may choose.

    Attributes:
        base_config: the user's DeepSpeed configuration, with the user's overrides applied.
        tune, fix: settings of `--search`, and of `--keep`.
        choices: the only values to try, by setting.
        switches: switches of the script that the user's arguments set, with their values.
        listed_switches: values of further switches, from the user or the launcher. The first is the
            script's own value, or None if that is unknown.
        offload_helps: whether devices have separate memory, which offloading relieves.
        slots_per_host: devices per host if a trial needs several hosts; else 0.
        defaults: the installed DeepSpeed's defaults, by path; empty if unknown. Other settings are
            unsupported, and searched on request only.
    """

    base_config: Mapping[str, Any] = field(default_factory=dict)
    tune: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, bool] = field(default_factory=dict)
    listed_switches: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    nvme_path: str | None = None
    offload_helps: bool = False
    slots_per_host: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def parallelism(self, settings: Mapping[str, Any] | None = None) -> Parallelism:
        """Return the parallelism of flat settings; missing sizes are the user's."""
        return parallelism.apply_settings(
            settings or {}, parallelism.read_parallelism(self.base_config)
        )

    @property
    def fixed(self) -> tuple[str, ...]:
        """Settings that are not searched.

        They are the settings of `--keep`, and those that the user's `zero_optimization` sets to a
        value other than "auto", unless they are in `--search` or `choices`.
        """
        zero = self.base_config.get("zero_optimization") or {}
        freed = {"stage", *self.tune, *self.choices}
        set_by_user = [
            key for key, value in zero.items() if value != ds_config.AUTO and key not in freed
        ]
        return (*set_by_user, *self.fix)


@dataclass(frozen=True, kw_only=True, eq=False)
class Space:
    """Every configuration that may be tried: strategy x setting values x micro batch.

    Attributes:
        slots: devices of a trial.
        gas: gradient accumulation steps, unless a global batch size decides them.
        train_batch_size: exact global batch size; None if it is free.
        max_train_batch_size: size up to which accumulation fills the global batch; None if it does
            not.
        num_params: parameters of the model, beyond which sizes are equivalent; None if unknown.
        found_switches: switches found in the script, with their values.
        heads: attention heads of the model; 0 if unknown.
        roomy_bucket: limit of the bucket sizes, in elements, in the first settings of a branch;
            None for no limit.
        moves_to_host: see `OwnOptimizer`.
    """

    strategies: Sequence[Strategy]
    micro_batches: Sequence[int]
    slots: int
    gas: int = 1
    train_batch_size: int | None = None
    max_train_batch_size: int | None = None
    freedom: Freedom = Freedom()
    num_params: int | None = None
    heads: int = 0
    roomy_bucket: int | None = None
    found_switches: Mapping[str, ScriptSwitch] = field(default_factory=dict)
    moves_to_host: bool = False

    @functools.cached_property
    def searched_switches(self) -> dict[str, tuple[Any, ...]]:
        """Values of the script's switches that are searched, by name."""
        return searched_switches(self.freedom, self.found_switches)

    def script_args(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the switches that a trial sets, because their values are not the script's own."""
        searched = self.searched_switches
        return {
            name: value
            for name, value in settings.items()
            if is_switch(name) and (name not in searched or value != searched[name][0])
        }

    @functools.cached_property
    def branches(self) -> tuple[Branch, ...]:
        return tuple(_branch(strategy, self) for strategy in self.strategies)

    def batch(self, micro_batch: int, settings: Mapping[str, Any] | None = None) -> BatchTriple:
        """Return the batch sizes; raise ValueError if the micro batch exceeds the global batch."""
        shared = self.freedom.parallelism(settings)
        steps = int((settings or {}).get(GAS, self.gas))
        gas = self.accumulation(micro_batch, shared.data(self.slots), steps)
        return BatchTriple.on(self.slots, shared, micro_batch=micro_batch, gas=gas)

    def accumulation(self, micro_batch: Any, groups: Any, gas: Any) -> Any:
        """Return the accumulation steps of a configuration; arguments may be arrays.

        Args:
            groups: number of data-parallel groups.
            gas: accumulation steps to return unless a global batch size decides them.
        """
        step = micro_batch * groups
        if self.train_batch_size is not None:
            return self.train_batch_size // step
        if self.max_train_batch_size is not None:
            steps = self.max_train_batch_size // step
            return steps + (steps < 1)
        return gas

    def describe(self) -> list[str]:
        """Return one line per branch with the settings that are searched in it."""
        return [
            f"{branch.strategy.label}: "
            + (
                ", ".join(f"{key} {_short(values)}" for key, values in branch.searched)
                or "no further settings"
            )
            for branch in self.branches
        ]


def searched_switches(
    freedom: Freedom, switches: Mapping[str, ScriptSwitch]
) -> dict[str, tuple[Any, ...]]:
    """Return the values of the script's switches to search, the script's own value first.

    Switches of `Freedom.switches` are included only if `Freedom.listed_switches` has them too.
    """
    values = {n: s.values for n, s in switches.items() if n not in freedom.switches}
    first = {**{name: listed[0] for name, listed in values.items()}, **freedom.switches}
    for name, listed in freedom.listed_switches.items():
        if name in first:
            listed = _put_first(first[name], [value for value in listed if value is not None])
        values[name] = listed
    return {name: v for name, v in values.items() if _is_switch_searched(name, v, freedom)}


def _branch(strategy: Strategy, space: Space) -> Branch:
    freedom, config = space.freedom, space.freedom.base_config
    situation = Situation(
        strategy,
        space.slots,
        cpu_adam=_makes_cpu_adam(config),
        on_device=freedom.offload_helps,
        bf16=(config.get("bf16") or config.get("bfloat16") or {}).get("enabled") is True,
        slots_per_host=freedom.slots_per_host,
        heads=space.heads,
    )
    # The most promising settings come first, because a search may compare only the first changes.
    switches = space.searched_switches.items()
    searched = [(n, v) for n, v in switches if _matters(n, situation, freedom)]
    base = strategy_settings(strategy, config, freedom.nvme_path, moves_to_host=space.moves_to_host)
    for setting in SETTINGS:
        if setting.key in base or not _is_searched(setting, situation, freedom):
            continue
        values = tuple(freedom.choices.get(setting.key, ()))
        if not values:
            values = _useful_values(setting, situation, space)
            values = _put_first(_user_value(setting, config), values)
        if len(values) > 1 or not setting.divides_slots:
            searched.append((setting.key, values))
    searched = _merge_parallelism(searched, space)
    names = {setting.key for setting in SETTINGS}
    for key, listed in freedom.choices.items():
        has_it = key == GAS or strategy.stage >= (3 if key == "offload_param" else 1)
        if key not in names and has_it:
            searched.append((key, tuple(listed)))
    for switch, value in freedom.switches.items():
        if _is_free(switch, freedom) and switch not in space.searched_switches:
            searched.append((switch, (value, not value)))
    return Branch(strategy, base, tuple(searched))


def _is_switch_searched(name: str, values: Sequence[Any], freedom: Freedom) -> bool:
    """Return whether a switch is searched: it has several values and is not in `--keep`.

    A known switch that is tried on request only must also be requested.
    """
    switch = SWITCHES.get(name)
    if len(values) < 2 or not _is_free(name, freedom):
        return False
    is_requested = name in freedom.tune or name in freedom.listed_switches
    return switch is None or is_requested or not switch.on_request


def _matters(name: str, situation: Situation, freedom: Freedom) -> bool:
    """Return whether a switch can have an effect here, or was requested and needs no offloading."""
    switch = SWITCHES.get(name)
    if switch is None or (name in freedom.tune and not switch.offloading):
        return True
    offloads = situation.strategy.offloads
    return (situation.on_device or not switch.on_device) and (offloads or not switch.offloading)


def _merge_parallelism(
    settings: Sequence[tuple[str, tuple[Any, ...]]], space: Space
) -> list[tuple[str, tuple[Any, ...]]]:
    """Return the settings with only those parallelism sizes that divide the devices and the batch.

    Tensor and sequence parallelism become one setting, because they exclude each other: AutoTP
    replaces the groups that Ulysses passes (`_configure_tensor_parallel_states` of
    runtime/engine.py, DeepSpeed 0.19.8). With Ulysses, which works inside the model's own attention
    kernel, other kernels are not searched.
    """
    sizes = {key: values for key, values in settings if key in PARALLELISM}
    if not sizes:
        return list(settings)
    options = [dict(zip(sizes, row, strict=True)) for row in itertools.product(*sizes.values())]
    options = [option for option in options if _divides(option, space)]
    dropped = {*sizes, *([ATTENTION] if SEQUENCE_SIZE in sizes else [])}
    others = [(key, values) for key, values in settings if key not in dropped]
    if len(sizes) > 1:
        return [*others, (_BOTH_SIZES, tuple(options))]
    [key] = sizes
    return [*others, (key, tuple(option[key] for option in options))]


def _divides(sizes: Mapping[str, int], space: Space) -> bool:
    user_parallelism = space.freedom.parallelism()
    shared = space.freedom.parallelism(sizes)
    if shared == user_parallelism:
        return True
    total = space.train_batch_size or space.slots
    return min(shared.tensor, shared.sequence) == 1 and total % shared.data(space.slots) == 0


def _is_searched(setting: Setting, situation: Situation, freedom: Freedom) -> bool:
    is_usable = situation.strategy.stage in setting.stages and setting.when(situation)
    if not is_usable or not _is_free(setting.key, freedom):
        return False
    if setting.key in freedom.tune or setting.key in freedom.choices:
        return True
    is_supported = setting.path in freedom.defaults if freedom.defaults else not setting.is_later
    return is_supported and setting.unasked(situation)


def _is_free(key: str, freedom: Freedom) -> bool:
    if key in freedom.choices or key in freedom.tune:
        return True
    return not {key, key.partition(".")[0]} & set(freedom.fixed)


def _makes_cpu_adam(config: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed uses its CPU Adam when offloading (runtime/engine.py, 0.19.8)."""
    optimizer = config.get("optimizer") or {}
    parameters = optimizer.get("params") or {}
    kind = str(optimizer.get("type", "")).lower()
    return kind in ("adam", "adamw") and not parameters.get("torch_adam", False)


def _user_value(setting: Setting, config: Mapping[str, Any]) -> Any:
    """Return the user's own value of a setting; None if it is missing or "auto"."""
    user_value = ds_config.at(config, setting.path)
    first = setting.values[0]
    if isinstance(first, Mapping) and isinstance(user_value, Mapping):  # only the searched keys
        user_value = {key: user_value.get(key, value) for key, value in first.items()}
    return None if user_value == ds_config.AUTO else user_value


def _put_first(first: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    if first is None:
        return tuple(values)
    return (first, *(value for value in values if value != first))


def _useful_values(setting: Setting, situation: Situation, space: Space) -> tuple[Any, ...]:
    """Return the values worth trying; of sizes beyond the whole model, only the smallest.

    If the default bucket exceeds `roomy_bucket`, a smaller one comes first.
    """
    values = _put_first(space.freedom.defaults.get(setting.path), setting.usable(situation))
    num_params, roomy_bucket = space.num_params, space.roomy_bucket
    if num_params is not None and setting.elements:
        whole = min((value for value in values if value >= num_params), default=None)
        if whole is not None and values[0] >= num_params:  # equivalent to the default
            values = _put_first(whole, values)
        values = tuple(value for value in values if value < num_params or value == whole)
    if setting.values is BUCKETS and roomy_bucket is not None and values[0] > roomy_bucket:
        roomy = [value for value in values if value <= roomy_bucket]
        values = _put_first(max(roomy) if roomy else min(values), values)
    return values


def _short(values: Sequence[Any]) -> str:
    def text(value: Any) -> str:
        if value is None:
            return "yours"
        if isinstance(value, int) and not isinstance(value, bool):
            return f"{value:.0e}" if value >= 10**6 else str(value)
        return str(dict(value)) if isinstance(value, Mapping) else str(value).lower()

    return "|".join(text(value) for value in values)
