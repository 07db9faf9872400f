"""Conversion of a proposal's flat settings (`offload_param.device`) to a trial's overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsat.command import ds_config
from dsat.command.switches import is_switch
from dsat.values.parallelism import SEQUENCE_SIZE
from dsat.values.trial import BatchTriple
from dsat.values.zero_strategy import NONE, NVME, Strategy, of_config

GAS = "gradient_accumulation_steps"
SEQUENTIAL = "stage3_allgather_sequential"
FORCE = "zero_force_ds_cpu_optimizer"
GATHER = "stage3_gather_16bit_weights_on_model_save"
# Settings of a proposal at the top level of a configuration.
TOP_LEVEL = (FORCE, SEQUENCE_SIZE)
# Sections besides `zero_optimization` that a proposal may set.
TOP_SECTIONS = ("activation_checkpointing", "bf16", "compile", "tensor_parallel")


def overrides_for(settings: Mapping[str, Any], batch: BatchTriple) -> dict[str, Any]:
    """Return a trial's DeepSpeed settings, which replace the user's."""
    zero: dict[str, Any] = {}
    overrides: dict[str, Any] = batch.config()
    for key, value in settings.items():
        if key in TOP_LEVEL:
            overrides[key] = value
        elif key != GAS and not is_switch(key):
            section, _, inner = key.partition(".")
            if section in TOP_SECTIONS:
                part = {inner: value} if inner else value
                overrides[section] = {**overrides.get(section, {}), **part}
            elif inner:
                zero[section] = {**zero.get(section, {}), inner: value}
            elif isinstance(value, Mapping):
                zero[key] = {**zero.get(key, {}), **value}
            else:
                zero[key] = value
    if zero.get(SEQUENTIAL) is True:  # as runtime/engine.py does, DeepSpeed 0.19.8
        zero["stage3_prefetch_bucket_size"] = 1
    return {"zero_optimization": zero, **overrides} if zero else overrides


def strategy_settings(
    strategy: Strategy,
    config: Mapping[str, Any],
    nvme_path: str | None = None,
    *,
    moves_to_host: bool = False,
) -> dict[str, Any]:
    """Return the flat settings, except `stage`, that give the user's configuration a strategy.

    They also switch off settings that DeepSpeed refuses in the strategy's stage.

    Args:
        nvme_path: folder into which offloading to NVMe may write.
        moves_to_host: see `OwnOptimizer`.
    """
    zero = config.get("zero_optimization") or {}
    own = of_config(config, 3)
    is_own = strategy.stage > 0 and strategy == of_config(config)  # where NVMe may mean the host
    settings: dict[str, Any] = {}
    for section, wanted in strategy.offloading.items():
        if is_own or wanted == own.offloading[section]:
            continue
        settings[f"{section}.device"] = wanted
        if wanted == NVME and nvme_path is not None:
            settings[f"{section}.nvme_path"] = nvme_path
    given = zero.get("offload_optimizer")
    if strategy.stage != 3 and isinstance(given, Mapping) and given.get("ratio", 1.0) != 1.0:
        settings["offload_optimizer.ratio"] = 1.0  # DeepSpeed asserts it
    if _refuses_scattering(strategy.stage, config):
        settings["reduce_scatter"] = False
    if strategy.stage == 3 != of_config(config).stage and zero.get(GATHER) is not True:
        # Only saving reads this, and the script expects whole weights. With another stage, the
        # user's `false` means nothing, because accelerate writes it.
        settings[GATHER] = True
    is_scripts_own = not (moves_to_host or config.get("optimizer"))
    own_offloads = of_config(config).offload_optimizer != NONE and FORCE in config
    if strategy.offload_optimizer != NONE and is_scripts_own and not own_offloads:
        settings[FORCE] = False  # else DeepSpeed refuses an optimizer that the script made
    return settings


def _refuses_scattering(stage: int, config: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed refuses `reduce_scatter`, which is on by default, in a stage.

    See zero/stage_1_and_2.py:344 and zero/stage3.py:360,392 of 0.19.8.
    """
    is_muon = str(ds_config.at(config, "optimizer.type")).lower() == "muon"
    prescales = config.get("prescale_gradients") is True
    predivides = config.get("gradient_predivide_factor", 1.0) not in (1.0, None, ds_config.AUTO)
    return (stage == 3 and is_muon) or (stage >= 2 and (prescales or predivides))
