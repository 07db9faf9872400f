"""Settings in which a trial differs from the user's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsat.command.ds_config import BATCH_KEYS, flat
from dsat.command.switches import SWITCHES
from dsat.space.deepspeed_settings import SETTINGS
from dsat.space.plan import Plan
from dsat.values import format as fmt
from dsat.values.text import hide_secrets_in_values
from dsat.values.trial import Trial

STAGE = "zero_optimization.stage"
TRAIN_BATCH, MICRO_BATCH, GAS = BATCH_KEYS
# Settings that are shown before all others, in this order.
_NAMES = {
    STAGE: "ZeRO stage",
    MICRO_BATCH: "micro batch",
    GAS: "accumulation steps",
    TRAIN_BATCH: "global batch",
}
_REASONS = {
    **{setting.path: setting.reason for setting in SETTINGS},
    MICRO_BATCH: "more samples share the fixed costs of each forward and backward pass",
    GAS: "more micro batches share the costs of each optimizer step",
    TRAIN_BATCH: "micro batch x accumulation steps x devices",
    STAGE: "what the ranks divide: 1 optimizer states, 2 also gradients, 3 also parameters",
    **{name: switch.reason for name, switch in SWITCHES.items()},
}


@dataclass(frozen=True)
class Difference:
    """A setting that differs.

    Attributes:
        key: dotted path of the setting, or name of a switch.
        own, its: the user's value and the trial's; None if not set.
        default: DeepSpeed's default; None if unknown.
    """

    key: str
    own: Any
    its: Any
    default: Any = None

    @property
    def texts(self) -> tuple[str, str]:
        first, second = (
            fmt.setting(self.default if value is None else value) or "(not set)"
            for value in (self.own, self.its)
        )
        return first, second

    @property
    def reason(self) -> str:
        """Reason to change the setting; empty if unknown."""
        return _REASONS.get(self.key, "")

    def __str__(self) -> str:
        name = _NAMES.get(self.key, self.key.removeprefix("zero_optimization."))
        return f"{name} {' -> '.join(self.texts)}"


def differences(plan: Plan, trial: Trial, switches: Mapping[str, Any]) -> list[Difference]:
    """Return the differences, stage and batch sizes first, without secrets.

    A setting that is not set counts as DeepSpeed's default.
    """
    own = _settings({**plan.config(plan.own_batch.config()), **switches})
    its = _settings({**plan.config(trial.overrides), **switches, **trial.script_args})
    found, others = [], sorted((own.keys() | its.keys()) - _NAMES.keys())
    for key in (*_NAMES, *others):
        default = _default_of(plan, key, trial.stage)
        if own.get(key, default) != its.get(key, default):
            found.append(Difference(key, own.get(key), its.get(key), default))
    return found


def _default_of(plan: Plan, key: str, stage: int) -> Any:
    if key == STAGE:
        return 0
    declared = (s.values[0] for s in SETTINGS if s.path == key and stage in s.stages)
    known = plan.defaults.get(key)
    return next(declared, None) if known is None else known


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    return flat(hide_secrets_in_values(config))
