"""The knobs: every setting that a search may choose, its values, and when it can matter."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from dsat.space.overrides import SCRIPT_SWITCHES, TOP_SECTIONS
from dsat.values.zero_strategy import CPU, NONE, Strategy


@dataclass(frozen=True)
class Situation:
    """What decides whether a knob can matter.

    Attributes:
        cpu_adam: an offloaded optimizer will be DeepSpeedCPUAdam.
        on_device: slots have memory of their own, and queues of kernels to be kept filled.
        bf16: the model is trained in bf16.
        slots_per_host: of a trial over several hosts; 0 if it is on one.
    """

    strategy: Strategy
    slots: int
    cpu_adam: bool = False
    on_device: bool = False
    bf16: bool = False
    slots_per_host: int = 0


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
_ON_DEVICE = Condition("slots with memory of their own", lambda s: s.on_device)
_OVER_HOSTS = Condition("several hosts", lambda s: s.slots_per_host > 0)
_NOTHING_OFFLOADED = Condition(
    "slots with memory of their own, and nothing offloaded by ZeRO",
    lambda s: s.on_device and NONE == s.strategy.offload_optimizer == s.strategy.offload_param,
)
_NEVER = Condition("never", lambda s: False)
# runtime/base_optimizer.py: on the host only DeepSpeedCPUAdam keeps its state in bf16.
_STATES_IN_BF16 = Condition(
    "bf16, and no offloaded optimizer but DeepSpeedCPUAdam on the cpu",
    lambda s: s.bf16 and (s.strategy.offload_optimizer == NONE or _PARTLY_OFFLOADED.holds(s)),
)


@dataclass(frozen=True)
class Knob:
    """One setting that a search may choose.

    Attributes:
        key: in `zero_optimization`, or one that begins with a section of `TOP_SECTIONS`; a dot
            leads into a section.
        values: DeepSpeed's default first.
        stages: the ZeRO stages that read it.
        condition: when it can matter in them.
        reason: why it is worth trying, in one line.
        elements: whether the values count parameters, so that any beyond the model's are alike.
        unasked: when it is searched without `--tune` or a list of values: never, if it changes what
            is computed, or does something in some scripts only.
        divides_slots: the values are numbers of slots, and must divide those of a trial.
        is_later: it came after runs that are resumed without it, and whose trials' names are
            digests of configurations without its default. Searched unasked only where the
            installed DeepSpeed is known to have it.
    """

    key: str
    values: tuple[Any, ...]
    stages: tuple[int, ...]
    condition: Condition
    reason: str
    elements: bool = False
    unasked: Condition = _ALWAYS
    divides_slots: bool = False
    is_later: bool = False

    @property
    def path(self) -> str:
        """The keys that lead to it from the top of a configuration, with dots between them."""
        is_top = self.key.partition(".")[0] in TOP_SECTIONS
        return self.key if is_top else f"zero_optimization.{self.key}"

    def usable(self, situation: Situation) -> tuple[Any, ...]:
        """The values that DeepSpeed takes there; of slots that share something, those of a host."""
        if not self.divides_slots:
            return self.values
        of_host = situation.slots_per_host
        values = (self.values[0], of_host) if of_host else self.values
        return tuple(v for v in values if situation.slots % v == 0 and v < situation.slots)


HPZ = "zero_hpz_partition_size"
# deepspeed/compile/config.py: it offloads either of them, and in stage 3 only.
_DEEPCOMPILE = tuple(
    {"deepcompile": is_on, "offload_activation": activation, "offload_opt_states": states}
    for is_on, activation, states in (
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, False, True),
    )
)

BUCKETS = (5 * 10**8, *(n * 10**m for m in range(6, 9) for n in (1, 5) if (n, m) != (5, 8)))
BUCKETS += (10**9, 5 * 10**9)

# Where a setting is read, and that it does nothing on one slot, was seen in deepspeed 0.19.8:
# runtime/utils.py:1012 (allgather), runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py:780,1673,
# runtime/zero/parameter_offload.py, runtime/zero/partition_parameters.py:74,1559. The buckets' and
# switches' values are those of Determined's DeepSpeed Autotune 0.37 (DEFAULT_ZERO_SEARCH_SPACE).
KNOBS = (
    Knob(
        "reduce_bucket_size",
        BUCKETS,
        (1, 2, 3),
        _ALWAYS,
        "small buckets save memory, large ones need fewer reductions",
        elements=True,
    ),
    Knob(
        "allgather_bucket_size",
        BUCKETS,
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
    Knob(
        "stage3_use_all_reduce_for_fetch_params",
        (False, True),
        (3,),
        _SEVERAL_SLOTS,
        "fetching by all-reduce spares the host the copies of a gather",
        unasked=_ON_DEVICE,
        is_later=True,
    ),
    Knob(
        "stage3_allgather_sequential",
        (False, True),
        (3,),
        _SEVERAL_SLOTS,
        "gathers that need no buffer, one for each parameter",
        unasked=_ON_DEVICE,
        is_later=True,
    ),
    Knob(
        "stage3_module_granularity_threshold",
        (0, 10**5, 10**6, 10**7),
        (3,),
        _SEVERAL_SLOTS,
        "small modules that are fetched together cost the host less",
        unasked=_NEVER,  # not every model can be simulated with it
        is_later=True,
    ),
    Knob(
        HPZ,
        (1, 2, 4, 8, 16),
        (3,),
        _SEVERAL_SLOTS,
        "a second copy of the parameters within a host spares gathers between hosts",
        unasked=_OVER_HOSTS,
        divides_slots=True,
        is_later=True,
    ),
    # What follows changes what is computed, or depends on what the script does: see `unasked`.
    Knob(
        "zero_quantized_weights",
        (False, True),
        (3,),
        _SEVERAL_SLOTS,
        "gathers of 8 bits in place of 16; losses change",
        unasked=_NEVER,
        is_later=True,
    ),
    Knob(
        "zero_quantized_gradients",
        (False, True),
        (3,),
        _SEVERAL_SLOTS,
        "reductions of 4 bits in place of 16; losses change",
        unasked=_NEVER,
        is_later=True,
    ),
    Knob(
        "offload_optimizer.super_offload",
        (False, True),
        (3,),
        _PARTLY_OFFLOADED,
        "the host's steps run beside the backward pass; for Superchips",
        unasked=_NEVER,
        is_later=True,
    ),
    Knob(
        "bf16",
        tuple(
            {"bf16_master_weights_and_grads": is_low, "bf16_optimizer_states": is_low}
            for is_low in (False, True)
        ),
        (1, 2, 3),
        _STATES_IN_BF16,
        "master weights, gradients and moments of half the size; losses change",
        unasked=_NEVER,
        is_later=True,
    ),
    Knob(
        "compile",
        _DEEPCOMPILE[:2],
        (1, 2),
        _NOTHING_OFFLOADED,
        "DeepSpeed's own compiler, if the script calls engine.compile()",
        unasked=_NEVER,
        is_later=True,
    ),
    Knob(
        "compile",
        _DEEPCOMPILE,
        (3,),
        _NOTHING_OFFLOADED,
        "DeepSpeed's own compiler, if the script calls engine.compile()",
        unasked=_NEVER,
        is_later=True,
    ),
    Knob(
        "activation_checkpointing.cpu_checkpointing",
        (False, True),
        (0, 1, 2, 3),
        _ALWAYS,
        "what deepspeed.checkpointing keeps lies on the host",
        unasked=_NEVER,
        is_later=True,
    ),
)
# What `--tune` and `--fix` may name besides the knobs: whole sections, and the script's switches.
SECTIONS = ("offload_optimizer", "offload_param")
KNOB_NAMES = tuple(dict.fromkeys((*(k.key for k in KNOBS), *SECTIONS, *SCRIPT_SWITCHES)))


def defaults(stage: int, *, later: bool = False) -> dict[str, Any]:
    """What DeepSpeed takes in a stage for settings of `zero_optimization` that are not given.

    Args:
        later: those of knobs that came later, in place of the others; see `Knob`.
    """
    own = [k for k in KNOBS if stage in k.stages and k.is_later is later]
    own = [k for k in own if k.path == f"zero_optimization.{k.key}" and "." not in k.key]
    return {k.key: k.values[0] for k in own}


def smallest_buckets(*, fixed: Collection[str], stage: int) -> dict[str, int]:
    """The bucket sizes that need the least memory, but for those the user chose."""
    return {
        knob.key: min(knob.values)
        for knob in KNOBS
        if knob.values is BUCKETS and stage in knob.stages and knob.key not in fixed
    }
