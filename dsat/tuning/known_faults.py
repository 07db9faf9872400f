"""Known faults of the installed DeepSpeed: strategies that meet one are not searched."""

from __future__ import annotations

import logging
from dataclasses import replace

from dsat.run.training_check import training_with
from dsat.space.plan import Plan
from dsat.values import hazards
from dsat.values.zero_strategy import of_config

_log = logging.getLogger(__name__)


def drop_faulty_stages(plan: Plan, version: str | None, *, is_listed: bool) -> Plan:
    """Remove stages from a plan whose training is wrong or fails in a DeepSpeed version.

    If the user named the stages (`is_listed`), none is removed.
    """
    config, gas = plan.config({}), plan.own_batch.gas
    own = hazards.find(version, training_with(config, gas, plan), *hazards.KINDS)
    known = version or ""
    for fault in own:
        whose = "may have" if fault.unseen else "has"
        _log.warning("your own configuration %s a known fault: %s", whose, fault.describe(known))
    stage = of_config(config).stage
    accumulates = gas if plan.train_batch_size is None else max(gas, 2)
    faulty = []
    for other in plan.zero_stages:
        zero = {**(config.get("zero_optimization") or {}), "stage": other}
        training = training_with({**config, "zero_optimization": zero}, accumulates, plan)
        found = hazards.find(version, training, hazards.GRADIENTS, hazards.FAILS)
        certain = [fault for fault in found if not fault.unseen]
        if certain and other != stage and not is_listed:
            _log.warning("stage %d is not searched: %s", other, certain[0].describe(known))
            faulty.append(other)
    return replace(plan, faulty_stages=tuple(faulty))
