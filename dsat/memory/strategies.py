"""Strategies that predictions compare, and the user's configuration with another strategy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsat.command import ds_config
from dsat.space.overrides import overrides_for, strategy_settings
from dsat.values import parallelism
from dsat.values.parallelism import DATA_ONLY, Parallelism
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import NVME, USUAL_ORDER, Strategy

# A device needs the same memory whether state is offloaded to NVMe or to the host.
COMPARED = tuple(s for s in USUAL_ORDER if NVME not in (s.offload_optimizer, s.offload_param))


def compared(config: Mapping[str, Any]) -> list[Strategy]:
    """Return the strategies of `COMPARED` that DeepSpeed accepts with the user's settings."""
    return [strategy for strategy in COMPARED if strategy.stage >= ds_config.least_stage(config)]


def apply_strategy(config: Mapping[str, Any], strategy: Strategy, slots: int) -> dict[str, Any]:
    """Return the user's configuration with another strategy, without batch sizes.

    Tensor and sequence parallelism stay if they divide the slots. The accumulation steps are the
    user's, or follow from the global batch and the micro batch, or else are 1.
    """
    user_parallelism = parallelism.read_parallelism(config)
    shared = DATA_ONLY if slots % user_parallelism.shared else user_parallelism
    settings = {**strategy_settings(strategy, config), "stage": strategy.stage}
    if shared != user_parallelism:
        settings |= shared.settings
    gas = _accumulation_steps(config, slots, shared)
    merged = ds_config.prepare_for_training(
        config, overrides_for(settings, BatchTriple(gas, 1, gas))
    )
    return ds_config.drop_batch_sizes(merged)


def _accumulation_steps(config: Mapping[str, Any], slots: int, shared: Parallelism) -> int:
    total, micro, gas = (config.get(key) for key in ds_config.BATCH_KEYS)
    if isinstance(gas, int):
        return gas
    if isinstance(total, int) and isinstance(micro, int):
        return max(1, total // (micro * shared.data(slots)))
    return 1
