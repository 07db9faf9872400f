"""What may be tried: the knobs of each strategy, their conditions, and the micro batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from dsat.inputs import ds_config
from dsat.space.overrides import GAS, SCRIPT_SWITCHES, strategy_settings
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import CPU, NONE, Strategy

LARGEST_MICRO_BATCH = 2**20


@dataclass(frozen=True)
class Situation:
    """What decides whether a knob can matter.

    Attributes:
        cpu_adam: an offloaded optimizer will be DeepSpeedCPUAdam.
    """

    strategy: Strategy
    slots: int
    cpu_adam: bool = False


@dataclass(frozen=True)
class Condition:
    """When a knob can matter."""

    text: str
    holds: Callable[[Situation], bool]


_ALWAYS = Condition("always", lambda s: True)
_SEVERAL_SLOTS = Condition("more than one slot", lambda s: s.slots > 1)
_FETCHES = Condition(
    "more than one slot, or offloaded parameters",
    lambda s: s.slots > 1 or s.strategy.offload_param != NONE,
)
_OPTIMIZER_OFFLOADED = Condition(
    "an offloaded optimizer", lambda s: s.strategy.offload_optimizer != NONE
)
_PARTLY_OFFLOADED = Condition(
    "DeepSpeedCPUAdam on the cpu",
    lambda s: s.strategy.offload_optimizer == CPU and s.cpu_adam,
)
_COPIES_TO_HOST = Condition(
    "more than one slot and an offloaded optimizer",
    lambda s: s.slots > 1 and s.strategy.offload_optimizer != NONE,
)
_PARAMETERS_OFFLOADED = Condition(
    "offloaded parameters", lambda s: s.strategy.offload_param != NONE
)
_IF_ASKED_FOR = Condition("only with --tune", lambda s: False)


@dataclass(frozen=True)
class Knob:
    """One setting that a search may choose.

    Attributes:
        key: in `zero_optimization`; a dot leads into a section of it.
        values: DeepSpeed's default first.
        stages: the ZeRO stages that read it.
        condition: when it can matter in them.
        reason: why it is worth trying, in one line.
        elements: whether the values count parameters, so that any beyond the model's are alike.
    """

    key: str
    values: tuple[Any, ...]
    stages: tuple[int, ...]
    condition: Condition
    reason: str
    elements: bool = False


_BUCKETS = (5 * 10**8, *(n * 10**m for m in range(6, 9) for n in (1, 5) if (n, m) != (5, 8)))
_BUCKETS += (10**9, 5 * 10**9)

# Where a setting is read, and that it does nothing on one slot, was seen in deepspeed 0.19.8:
# runtime/utils.py:1012 (allgather), runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py:780,1673,
# runtime/zero/parameter_offload.py, runtime/zero/partition_parameters.py:74,1559. The buckets' and
# switches' values are those of Determined's DeepSpeed Autotune 0.37 (DEFAULT_ZERO_SEARCH_SPACE).
KNOBS = (
    Knob(
        "reduce_bucket_size",
        _BUCKETS,
        (1, 2, 3),
        _ALWAYS,
        "small buckets save memory, large ones need fewer reductions",
        elements=True,
    ),
    Knob(
        "allgather_bucket_size",
        _BUCKETS,
        (1, 2),
        _SEVERAL_SLOTS,
        "small buckets save memory, large ones need fewer gathers",
        elements=True,
    ),
    Knob(
        "overlap_comm",
        (False, True),
        (1, 2),
        _SEVERAL_SLOTS,
        "hides reductions behind the backward pass, for a second bucket",
    ),
    Knob(
        "overlap_comm",  # zero/config.py:382: on by default in stage 3 alone
        (True, False),
        (3,),
        _SEVERAL_SLOTS,
        "hides reductions behind the backward pass, for a second bucket",
    ),
    Knob(
        "reduce_scatter",
        (True, False),
        (1, 2, 3),
        _SEVERAL_SLOTS,
        "reduce-scatter moves less than all-reduce, in more operations",
    ),
    Knob(
        "contiguous_gradients",
        (True, False),
        (1, 2, 3),
        _ALWAYS,
        "avoids fragmentation at the price of a copy",
    ),
    Knob(
        "round_robin_gradients",
        (False, True),
        (1, 2),
        _COPIES_TO_HOST,
        "spreads the copies of gradients to the host over the ranks",
    ),
    Knob(
        "allgather_partitions",
        (True, False),
        (1, 2, 3),
        _IF_ASKED_FOR,
        "one gather against several broadcasts; nothing in deepspeed 0.19.8 reads it",
    ),
    Knob(
        "stage3_max_live_parameters",
        (10**9, 10**8, 10**10),
        (3,),
        _FETCHES,
        "more parameters kept after use need fewer gathers",
        elements=True,
    ),
    Knob(
        "stage3_max_reuse_distance",
        (10**9, 10**8, 10**10),
        (3,),
        _FETCHES,
        "keeps parameters that are soon used again",
        elements=True,
    ),
    Knob(
        "stage3_prefetch_bucket_size",
        (5 * 10**7, 5 * 10**6, 5 * 10**8),
        (3,),
        _FETCHES,
        "fetching further ahead hides gathers",
        elements=True,
    ),
    Knob(
        "stage3_param_persistence_threshold",
        (10**5, 10**4, 10**6),
        (3,),
        _FETCHES,
        "small parameters are cheaper kept than gathered",
        elements=True,
    ),
    Knob(
        "sub_group_size",
        (10**9, 10**8, 10**7),
        (3,),
        _ALWAYS,
        "small groups need smaller copies in the optimizer step, and more of them",
        elements=True,
    ),
    Knob(
        "offload_optimizer.pin_memory",
        (True, False),
        (1, 2, 3),
        _OPTIMIZER_OFFLOADED,
        "pinned memory is copied faster, and is not to be had for anything else",
    ),
    Knob(
        "offload_optimizer.ratio",
        (1.0, 0.75, 0.5),
        (3,),
        _PARTLY_OFFLOADED,
        "the rest of the optimizer's step is made on the accelerator",
    ),
    Knob(
        "offload_param.pin_memory",
        (True, False),
        (3,),
        _PARAMETERS_OFFLOADED,
        "pinned memory is copied faster, and is not to be had for anything else",
    ),
)
# What `--tune` and `--fix` may name besides the knobs: whole sections, and the script's switches.
SECTIONS = ("offload_optimizer", "offload_param")
KNOB_NAMES = tuple(dict.fromkeys((*(k.key for k in KNOBS), *SECTIONS, *SCRIPT_SWITCHES)))


def allowed_micro_batches(
    *,
    train_batch_size: int | None,
    divisible_by: int,
    slots: int,
    listed: Sequence[int] = (),
    smallest: int = 1,
    largest: int = LARGEST_MICRO_BATCH,
) -> Sequence[int]:
    """All micro batches that may be tried, ascending.

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
    candidates: Collection[int] = listed
    if train_batch_size is not None:
        per_slot, rest = divmod(train_batch_size, slots)
        small = [d for d in range(1, int(per_slot**0.5) + 1) if per_slot % d == 0]
        divisors = {*small, *(per_slot // d for d in small)} if not rest else set()
        candidates = divisors & set(listed) if listed else divisors
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
        """How many settings it has."""
        return prod(len(values) for _, values in self.knobs)

    @property
    def strides(self) -> tuple[int, ...]:
        """By how much the number of settings grows with the next value of each knob."""
        counts = [len(values) for _, values in self.knobs]
        return tuple(prod(counts[:position]) for position in range(len(counts)))

    def settings(self, index: int) -> dict[str, Any]:
        """The settings number `index`; number 0 has the first value of every knob."""
        chosen = {"stage": self.strategy.stage, **self.base}
        for key, values in self.knobs:
            index, digit = divmod(index, len(values))
            chosen[key] = values[digit]
        return chosen


@dataclass(frozen=True)
class Freedom:
    """What of the settings a search may choose.

    Attributes:
        fixed: settings of `zero_optimization` that the user chose by hand.
        tune: settings that they freed all the same, or want searched that otherwise are not.
        choices: values that they listed, by setting; these and no others are tried.
        switches: switches of the script that can be searched, with the user's own value.
        nvme_path: where offloading to NVMe may write.
    """

    fixed: Collection[str] = ()
    tune: Collection[str] = ()
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    switches: Mapping[str, bool] = field(default_factory=dict)
    nvme_path: str | None = None


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
        """The batch sizes that go with a micro batch and with settings that may name gas."""
        step = micro_batch * self.slots
        if self._train_batch_size is not None:
            gas = self._train_batch_size // step
        elif self._max_train_batch_size is not None:
            gas = max(1, self._max_train_batch_size // step)
        else:
            gas = int((settings or {}).get(GAS, self._gas))
        return BatchTriple(step * gas, micro_batch, gas)

    def describe(self) -> list[str]:
        """One line per branch: what is searched in it."""
        return [
            f"{branch.strategy.label}: "
            + (", ".join(f"{key} {_short(values)}" for key, values in branch.knobs) or "no knobs")
            for branch in self.branches
        ]


def defaults(stage: int) -> dict[str, Any]:
    """What DeepSpeed takes in a stage for settings of `zero_optimization` that are not given."""
    return {k.key: k.values[0] for k in KNOBS if stage in k.stages and "." not in k.key}


def smallest_buckets(*, fixed: Collection[str], stage: int) -> dict[str, int]:
    """The bucket sizes that need the least memory, but for those the user chose."""
    return {
        knob.key: min(knob.values)
        for knob in KNOBS
        if knob.values is _BUCKETS and stage in knob.stages and knob.key not in fixed
    }


def _branch(
    strategy: Strategy,
    slots: int,
    freedom: Freedom,
    config: Mapping[str, Any],
    num_params: int | None,
    roomy_bucket: int | None,
) -> Branch:
    zero = config.get("zero_optimization") or {}
    situation = Situation(strategy, slots, _makes_cpu_adam(config))
    knobs: list[tuple[str, tuple[Any, ...]]] = []
    for knob in KNOBS:
        if strategy.stage not in knob.stages or not _is_free(knob.key, freedom):
            continue
        asked_for = knob.condition is _IF_ASKED_FOR and (
            knob.key in freedom.tune or knob.key in freedom.choices
        )
        if not (asked_for or knob.condition.holds(situation)):
            continue
        listed = freedom.choices.get(knob.key)
        values = tuple(listed) if listed else _useful_values(knob, num_params, roomy_bucket)
        own = zero.get(knob.key)
        if not listed and own is not None and own != ds_config.AUTO:
            values = (own, *(value for value in values if value != own))
        knobs.append((knob.key, values))
    known = {knob.key for knob in KNOBS}
    for key, listed in freedom.choices.items():
        if key not in known and (strategy.stage > 0 or key == GAS):
            if key == "offload_param" and strategy.stage != 3:
                continue
            knobs.append((key, tuple(listed)))
    for switch, own in freedom.switches.items():
        if _is_free(switch, freedom):
            knobs.append((switch, (own, not own)))
    base = strategy_settings(strategy, config, freedom.nvme_path)
    return Branch(strategy, base, tuple(knobs))


def _is_free(key: str, freedom: Freedom) -> bool:
    if key in freedom.choices or key in freedom.tune:
        return True
    section = key.partition(".")[0]
    return not any(
        ds_config.same_setting(fixed, name) for fixed in freedom.fixed for name in (key, section)
    )


def _makes_cpu_adam(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed makes its own Adam for an offloaded optimizer (engine.py, 0.19.8)."""
    optimizer = config.get("optimizer") or {}
    parameters = optimizer.get("params") or {}
    kind = str(optimizer.get("type", "")).lower()
    return kind in ("adam", "adamw") and not parameters.get("torch_adam", False)


def _useful_values(knob: Knob, num_params: int | None, roomy_bucket: int | None) -> tuple[Any, ...]:
    """A size beyond the model is like any other beyond it: the smallest of them is enough."""
    values = knob.values if num_params is None else _within_model(knob, num_params)
    if knob.values is _BUCKETS and roomy_bucket is not None and values[0] > roomy_bucket:
        roomy = [value for value in values if value <= roomy_bucket]
        first = max(roomy) if roomy else min(values)
        values = (first, *(value for value in values if value != first))
    return values


def _within_model(knob: Knob, num_params: int) -> tuple[Any, ...]:
    if not knob.elements:
        return knob.values
    enough = min((value for value in knob.values if value >= num_params), default=None)
    kept = [value for value in knob.values if value < num_params or value == enough]
    if knob.values[0] not in kept and enough is not None:  # the default, by another name
        kept.remove(enough)
        kept.insert(0, enough)
    return tuple(kept)


def _short(values: Sequence[Any]) -> str:
    def text(value: Any) -> str:
        if isinstance(value, (bool, str, float)):
            return str(value).lower()
        if isinstance(value, int):
            return f"{value:.0e}" if value >= 10**6 else str(value)
        return str(dict(value)) if isinstance(value, Mapping) else str(value)

    return "|".join(text(value) for value in values)
