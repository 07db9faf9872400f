"""Every setting of DeepSpeed that a search may choose, its values, and when it can matter."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dsat.command.switches import SWITCHES
from dsat.space.overrides import SEQUENTIAL, TOP_LEVEL, TOP_SECTIONS
from dsat.values.parallelism import SEQUENCE_SIZE, TENSOR_SIZE
from dsat.values.zero_strategy import CPU, NONE, Strategy


@dataclass(frozen=True)
class Situation:
    """The facts that decide whether a setting can matter.

    Attributes:
        cpu_adam: whether an offloaded optimizer will be DeepSpeedCPUAdam.
        on_device: whether devices have separate memory and run kernels asynchronously.
        slots_per_host: devices per host if a trial needs several hosts; else 0.
        heads: attention heads of the model; 0 if unknown.
    """

    strategy: Strategy
    slots: int
    cpu_adam: bool = False
    on_device: bool = False
    bf16: bool = False
    slots_per_host: int = 0
    heads: int = 0

    @property
    def optimizer_offloaded(self) -> bool:
        return self.strategy.offload_optimizer != NONE

    @property
    def parameters_offloaded(self) -> bool:
        return self.strategy.offload_param != NONE

    @property
    def steps_on_host(self) -> bool:
        """Return whether DeepSpeedCPUAdam computes the optimizer step."""
        return self.strategy.offload_optimizer == CPU and self.cpu_adam


Condition = Callable[[Situation], bool]


def _always(_: Situation) -> bool:
    return True


def never(_: Situation) -> bool:
    """Condition of settings that are searched on request only (`--search`, or listed values)."""
    return False


def _several_slots(s: Situation) -> bool:
    return s.slots > 1


def _fetches(s: Situation) -> bool:
    return s.slots > 1 or s.parameters_offloaded


def _compiles(s: Situation) -> bool:
    return s.on_device and not s.strategy.offloads


@dataclass(frozen=True)
class Setting:
    """A setting of DeepSpeed that a search may choose.

    Attributes:
        key: dotted path inside `zero_optimization`, such as `offload_param.pin_memory`; a path from
            the top of the configuration if it begins with one of `TOP_LEVEL` or `TOP_SECTIONS`.
        values: DeepSpeed's default first.
        stages: ZeRO stages that read the setting.
        when: condition under which the setting can have an effect in these stages.
        elements: whether values count parameters; all values above the model's number of
            parameters are equivalent.
        unasked: condition for searching the setting without `--search`; `never` if it changes what
            is computed, or seldom helps.
        divides_slots: whether values are numbers of devices, which must divide a trial's devices.
        is_later: whether dsat added the setting after its last release. Fingerprints leave out its
            default, so that older runs can resume. It is searched without `--search` only if the
            installed DeepSpeed is known to have it.
    """

    key: str
    values: tuple[Any, ...]
    stages: tuple[int, ...]
    reason: str
    when: Condition = _always
    elements: bool = False
    unasked: Condition = _always
    divides_slots: bool = False
    is_later: bool = False

    @functools.cached_property
    def path(self) -> str:
        """Dotted path from the top of a configuration."""
        is_top = self.key.partition(".")[0] in (*TOP_SECTIONS, *TOP_LEVEL)
        return self.key if is_top else f"zero_optimization.{self.key}"

    def usable(self, situation: Situation) -> tuple[Any, ...]:
        """Return the values that suit the devices of a trial."""
        if not self.divides_slots:
            return self.values
        if self.key in PARALLELISM:  # only inside a host, because activations are communicated
            most = math.gcd(situation.slots_per_host or situation.slots, situation.heads)
            return tuple(v for v in self.values if most % v == 0)
        of_host = situation.slots_per_host
        values = (self.values[0], of_host) if of_host else self.values
        return tuple(v for v in values if situation.slots % v == 0 and v < situation.slots)


_ON_REQUEST: Mapping[str, Any] = {"unasked": never, "is_later": True}
HPZ = "zero_hpz_partition_size"
PARALLELISM = (TENSOR_SIZE, SEQUENCE_SIZE)
_SWITCH_ON, _SWITCH_OFF = (False, True), (True, False)  # the default first
# deepspeed/compile/config.py: DeepCompile offloads at most one of the two, in stage 3 only.
_DEEPCOMPILE = tuple(
    {"deepcompile": is_on, "offload_activation": activation, "offload_opt_states": states}
    for is_on, activation, states in (
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, False, True),
    )
)
_LOW_PRECISION_STATES = tuple(
    {"bf16_master_weights_and_grads": is_low, "bf16_optimizer_states": is_low}
    for is_low in _SWITCH_ON
)
_COMPILE_REASON = "DeepSpeed's own compiler, by engine.compile()"
_PIN_REASON = "copies from pinned memory are faster, but other programs cannot use that memory"
_OVERLAP_REASON = "hides reductions behind the backward pass, but needs a second bucket"

BUCKETS = (5 * 10**8, 10**6, 5 * 10**6, 10**7, 5 * 10**7, 10**8, 10**9, 5 * 10**9)

# Where DeepSpeed 0.19.8 reads the settings, and why some have no effect on one device:
# runtime/utils.py:1012 (allgather), runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py:780,1673,
# runtime/zero/parameter_offload.py, runtime/zero/partition_parameters.py:74,1559. The buckets' and
# switches' values are those of Determined's DeepSpeed Autotune 0.37 (DEFAULT_ZERO_SEARCH_SPACE).
SETTINGS = (
    Setting(
        "reduce_bucket_size",
        BUCKETS,
        (1, 2, 3),
        "small buckets save memory; large buckets need fewer reductions",
        elements=True,
    ),
    Setting(
        "allgather_bucket_size",
        BUCKETS,
        (1, 2),
        "no effect with torch 1.13 or newer, which gathers everything at once",
        when=_several_slots,
        unasked=never,  # all_gather_dp_groups of runtime/utils.py, deepspeed 0.19.8
        elements=True,
    ),
    Setting("overlap_comm", _SWITCH_ON, (1, 2), _OVERLAP_REASON, when=_several_slots),
    # zero/config.py:382: on by default in stage 3 alone.
    Setting("overlap_comm", _SWITCH_OFF, (3,), _OVERLAP_REASON, when=_several_slots),
    Setting(
        "reduce_scatter",
        _SWITCH_OFF,
        (1, 2, 3),
        "in stage 3, halves the traffic of an all-reduce; in stages 1 and 2, saves only copies",
        when=_several_slots,
    ),
    Setting(
        "contiguous_gradients", _SWITCH_OFF, (1, 2, 3), "avoids fragmentation, but needs a copy"
    ),
    Setting(
        "round_robin_gradients",
        _SWITCH_ON,
        (1, 2),
        "spreads the copies of gradients to the host over the ranks",
        when=lambda s: s.slots > 1 and s.optimizer_offloaded,
    ),
    Setting(
        "stage3_max_live_parameters",
        (10**9, 10**8, 10**10),
        (3,),
        "more parameters kept after use need fewer gathers",
        when=_fetches,
        elements=True,
    ),
    Setting(
        "stage3_max_reuse_distance",
        (10**9, 10**8, 10**10),
        (3,),
        "keeps parameters that are soon used again",
        when=_fetches,
        elements=True,
    ),
    Setting(
        "stage3_prefetch_bucket_size",
        (5 * 10**7, 5 * 10**6, 5 * 10**8),
        (3,),
        "fetching further ahead hides gathers",
        when=_fetches,
        elements=True,
    ),
    Setting(
        "stage3_param_persistence_threshold",
        (10**5, 10**4, 10**6),
        (3,),
        "keeping small parameters is cheaper than gathering them",
        when=_fetches,
        elements=True,
    ),
    Setting(
        "sub_group_size",
        (10**9, 10**8, 10**7),
        (3,),
        "small groups need smaller but more copies in the optimizer step",
        elements=True,
    ),
    Setting(
        "offload_optimizer.pin_memory",
        _SWITCH_OFF,
        (1, 2, 3),
        _PIN_REASON,
        when=lambda s: s.optimizer_offloaded,
    ),
    Setting(
        "offload_optimizer.ratio",
        (1.0, 0.75, 0.5),
        (3,),
        "the GPU computes the rest of the step; schedulers do not change its learning rate",
        when=lambda s: s.steps_on_host,
        **_ON_REQUEST,  # zero/stage3.py:317, 0.19.8: no scheduler changes that optimizer's rate
    ),
    Setting(
        "offload_param.pin_memory",
        _SWITCH_OFF,
        (3,),
        _PIN_REASON,
        when=lambda s: s.parameters_offloaded,
    ),
    Setting(
        "stage3_use_all_reduce_for_fetch_params",
        _SWITCH_ON,
        (3,),
        "fetching by all-reduce avoids the copies of a gather",
        when=_several_slots,
        unasked=lambda s: s.on_device,
        is_later=True,
    ),
    Setting(
        "stage3_module_granularity_threshold",
        (0, 10**5, 10**6, 10**7),
        (3,),
        "fetching small modules together costs the host less time",
        when=_several_slots,
        unasked=never,  # not every model can be simulated with it
        is_later=True,
    ),
    Setting(
        SEQUENTIAL,
        _SWITCH_ON,
        (3,),
        "gathers one parameter at a time, which takes less memory; nothing is fetched ahead",
        when=_several_slots,
        **_ON_REQUEST,
    ),
    Setting(
        HPZ,
        (1, 2, 4, 8, 16),
        (3,),
        "a second copy of the parameters within a host spares gathers between hosts",
        when=_several_slots,
        unasked=lambda s: s.slots_per_host > 0,
        divides_slots=True,
        is_later=True,
    ),
    *(
        Setting(
            key,
            tuple(2**n for n in range(11)),
            (0, 1, 2, 3),
            reason,
            when=_several_slots,
            divides_slots=True,
            **_ON_REQUEST,
        )
        for key, reason in (
            (
                TENSOR_SIZE,
                "dividing each layer over devices saves memory, but its activations are exchanged",
            ),
            (SEQUENCE_SIZE, "dividing each sequence over devices makes longer ones fit"),
        )
    ),
    # The following change what is computed, or depend on the script: see `unasked`.
    Setting(
        "zero_quantized_weights",
        _SWITCH_ON,
        (3,),
        "gathers 8 bits instead of 16; losses change",
        when=_several_slots,
        **_ON_REQUEST,
    ),
    Setting(
        "zero_quantized_gradients",
        _SWITCH_ON,
        (3,),
        "reduces 4 bits instead of 16; losses change",
        when=_several_slots,
        **_ON_REQUEST,
    ),
    Setting(
        "offload_optimizer.super_offload",
        _SWITCH_ON,
        (3,),
        "the optimizer step on the host overlaps the backward pass; for Superchips",
        when=lambda s: s.steps_on_host,
        **_ON_REQUEST,
    ),
    Setting(
        "bf16",
        _LOW_PRECISION_STATES,
        (1, 2, 3),
        "halves master weights, gradients and moments; losses change",
        # runtime/base_optimizer.py: on the host only DeepSpeedCPUAdam keeps its state in bf16.
        when=lambda s: s.bf16 and (not s.optimizer_offloaded or s.steps_on_host),
        **_ON_REQUEST,
    ),
    *(
        Setting("compile", values, stages, _COMPILE_REASON, when=_compiles, **_ON_REQUEST)
        for values, stages in ((_DEEPCOMPILE[:2], (1, 2)), (_DEEPCOMPILE, (3,)))
    ),
    Setting(
        "activation_checkpointing.cpu_checkpointing",
        _SWITCH_ON,
        (0, 1, 2, 3),
        "deepspeed.checkpointing keeps activations on the host",
        **_ON_REQUEST,
    ),
)
# Names that `--search` and `--keep` accept: settings, whole sections, and the script's switches.
SECTIONS = ("offload_optimizer", "offload_param")
SETTING_NAMES = tuple(dict.fromkeys((*(k.key for k in SETTINGS), *SECTIONS, *SWITCHES)))


def defaults(stage: int, *, later: bool = False) -> dict[str, Any]:
    """Return the defaults of a stage's `SETTINGS` that are direct keys of `zero_optimization`.

    With `later`, return only settings with `Setting.is_later`; otherwise, only the others.
    """
    own = [k for k in SETTINGS if stage in k.stages and k.is_later is later]
    own = [k for k in own if k.path == f"zero_optimization.{k.key}" and "." not in k.key]
    return {k.key: k.values[0] for k in own}


def smallest_buckets(*, fixed: Collection[str], stage: int) -> dict[str, int]:
    """Return the smallest bucket sizes of a stage, except for settings in `fixed`."""
    return {
        setting.key: min(setting.values)
        for setting in SETTINGS
        if setting.values is BUCKETS and stage in setting.stages and setting.key not in fixed
    }
