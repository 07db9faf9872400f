"""Strategies to search, and those to try in turn if the user's own does not fit.

Each strategy to try is predicted to need less device memory than all earlier ones, except with
NVMe. A higher stage that needs no less than a lower one is left out, as it communicates more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dsat.command import ds_config
from dsat.command.switches import SWITCHES
from dsat.memory import closed_form
from dsat.memory.facts import ModelFacts
from dsat.space.deepspeed_settings import SECTIONS, smallest_buckets
from dsat.space.overrides import overrides_for, strategy_settings
from dsat.space.plan import Plan
from dsat.space.space import Space
from dsat.values.outcome import ModelProfile, Outcome, ScriptSwitch
from dsat.values.parallelism import Parallelism
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import NONE, NVME, USUAL_ORDER, Strategy, read_strategy

# Facts of a made-up model that is large compared to any bucket, to order strategies by memory.
_SOME_MODEL = ModelFacts(
    num_params=10**11,
    trainable_params=10**11,
    largest_param=0,
    forward_bytes_per_sample=0.0,
    backward_bytes_per_sample=0.0,
    first_gradient_bytes_per_sample=0.0,
)


def searched(plan: Plan) -> tuple[Strategy, ...]:
    """Return the strategies to search if the user's own strategy fits.

    Offloading stays as the user configured it, unless `--search` includes it: if the model fits
    without it, offloading only costs time.
    """
    strategies = [read_strategy(plan.base_config, stage) for stage in plan.searched_stages]
    if any(section in plan.tune for section in SECTIONS):
        strategies += [s for s in USUAL_ORDER if _may_use(plan, s) and _may_offload(plan, s)]
    return tuple(dict.fromkeys(strategies))


def fallbacks(plan: Plan) -> tuple[Strategy, ...]:
    """Return the strategies to try in turn if the user's own strategy does not fit."""
    least = _peak_bytes(plan, read_strategy(plan.base_config))
    strategies = []
    for strategy in USUAL_ORDER:
        if not _may_use(plan, strategy):
            continue
        need = _peak_bytes(plan, strategy)
        # NVMe saves host memory, not device memory.
        if need < least or strategy.offload_optimizer == NVME:
            strategies.append(strategy)
            least = min(least, need)
    return tuple(strategies)


def divisions(plan: Plan) -> list[Parallelism]:
    """Return the parallelisms to search, the user's own first, then by devices per sample."""
    space = make_space(plan, only=(read_strategy(plan.base_config),))
    shared = [plan.parallelism(settings) for settings in space.branches[0].list_parallelisms()]
    return sorted(shared, key=lambda one: (one != plan.parallelism(), one.shared))


def profile_overrides(
    plan: Plan, strategy: Strategy, micro_batch: int, shared: Parallelism | None = None
) -> dict[str, Any]:
    """Return a profile trial's overrides; `shared` is its parallelism, by default the user's."""
    base, user_parallelism = plan.base_config, plan.parallelism()
    shared = shared or user_parallelism
    settings = strategy_settings(strategy, base, plan.nvme_path)
    if strategy != read_strategy(base):
        settings["stage"] = strategy.stage
    if strategy.stage > 0:
        # Default buckets take gigabytes regardless of the model: small ones let more models fit.
        settings |= smallest_buckets(fixed=plan.fixed, stage=strategy.stage)
    if shared != user_parallelism:
        settings |= shared.settings
    batch = BatchTriple.on(plan.slots_per_trial, shared, micro_batch=micro_batch)
    return overrides_for(settings, batch)


def make_space(
    plan: Plan, profile: ModelProfile | None = None, *, only: Sequence[Strategy] = ()
) -> Space:
    """Return the space that a plan searches, without the settings that the user fixed.

    Args:
        profile: None before the model is profiled.
        only: the strategies; if empty, `searched` chooses them.
    """
    roomy_bucket = None  # elements in a sixteenth of a device's memory
    if profile is not None:
        roomy_bucket = profile.slot_memory_bytes // (16 * profile.param_bytes)
    return Space(
        strategies=only or searched(plan),
        micro_batches=plan.allowed_micro_batches,
        slots=plan.slots_per_trial,
        gas=plan.own_batch.gas,
        train_batch_size=plan.train_batch_size,
        max_train_batch_size=plan.max_train_batch_size,
        freedom=plan,
        num_params=None if profile is None else profile.num_params,
        heads=0 if profile is None else profile.attention_heads or 0,
        roomy_bucket=roomy_bucket,
        moves_to_host=profile is not None and profile.optimizer.moves_to_host,
        found_switches={} if profile is None else _comparable(plan, profile),
    )


def keeps_micro_batch(plan: Plan, outcome: Outcome) -> bool:
    """Return whether the search keeps the user's micro batch, because the loss compares samples.

    It does so only if it also keeps the global batch size, and the user listed no micro batches.
    """
    is_kept = plan.train_batch_size == plan.own_batch.train_batch_size and not plan.micro_batches
    is_kept = is_kept and plan.own_batch.micro_batch in plan.allowed_micro_batches
    return is_kept and outcome.training is not None and outcome.training.compares_samples


def _comparable(plan: Plan, profile: ModelProfile) -> dict[str, ScriptSwitch]:
    """Return the script's switches whose values can be compared under the plan's metric."""
    metrics = {name: SWITCHES[name].metric for name in profile.switches if name in SWITCHES}
    switches = profile.switches.items()
    return {n: s for n, s in switches if metrics.get(n, "") in ("", plan.metric)}


def _may_use(plan: Plan, strategy: Strategy) -> bool:
    if strategy.stage not in plan.searched_stages:
        return False
    user_strategy = read_strategy(plan.base_config, strategy.stage)
    return all(
        device == user_strategy.offloading[section]
        or (
            (device != NVME or plan.nvme_path is not None)
            and section not in plan.fixed
            and (plan.offload_helps or section in plan.tune)
        )
        for section, device in strategy.offloading.items()
    )


def _may_offload(plan: Plan, strategy: Strategy) -> bool:
    user_strategy = read_strategy(plan.base_config, strategy.stage)
    return all(
        device in (NONE, user_strategy.offloading[section]) or section in plan.tune
        for section, device in strategy.offloading.items()
    )


def _peak_bytes(plan: Plan, strategy: Strategy) -> tuple[int, int]:
    """Return predicted peaks of `_SOME_MODEL` in bytes: of all phases, and of all but `init`."""
    config = plan.config(profile_overrides(plan, strategy, micro_batch=1))
    is_auto = ds_config.data_types(config)[0] is None
    facts = replace(_SOME_MODEL, param_bytes=2 if is_auto else 4)
    peaks = closed_form.estimate(facts, config, slots=plan.slots_per_trial, micro_batch=1)
    return peaks.peak, max(peaks.forward, peaks.backward, peaks.step)
