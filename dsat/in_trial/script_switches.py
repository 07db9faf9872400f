"""Detection and setting of a script's switches, inside the script's processes.

The available switches follow from the objects that the script makes (the Trainer's arguments, the
model that it passes to `deepspeed.initialize`) and from the packages that are installed.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from typing import Any

from dsat.command import switches as known
from dsat.command.ds_config import data_types
from dsat.command.switches import ATTENTION, CHECKPOINTING, COMPILE, LIGER, SWITCHES, WORKERS
from dsat.errors import InvalidTrial
from dsat.in_trial import config_injection, recomputation
from dsat.in_trial.agreement import local_size
from dsat.values import host_limits
from dsat.values.outcome import ScriptSwitch

_WORKERS = (2, 4, 8)
_OPTIMIZERS = SWITCHES["optim"].values
# Attention kernels: name, attribute of models that support the kernel, package that it needs.
_ATTENTION = (
    ("eager", "", ""),
    ("sdpa", "_supports_sdpa", ""),
    ("flash_attention_2", "_supports_flash_attn", "flash_attn"),
    ("flash_attention_3", "_supports_flash_attn", "flash_attn_interface"),
)


class ScriptSwitches:
    """Switches of the script that runs in this process.

    Args:
        targets: the trial's values, by name; names that are not switches are ignored.
        overrides: the trial's settings of DeepSpeed.

    Attributes:
        found: each switch with its values, the script's own first; initially empty.
    """

    def __init__(
        self, targets: Mapping[str, Any], overrides: Mapping[str, Any], *, on_cpu: bool
    ) -> None:
        self.found: dict[str, ScriptSwitch] = {}
        self._targets = {n: value for n, value in targets.items() if known.is_switch(n)}
        self._on_cpu = on_cpu
        self._deep_compiles = (overrides.get("compile") or {}).get("deepcompile") is True
        self._has_arguments = self._is_on_by_arguments = False

    # -- the Trainer's arguments

    def set_arguments(self, args: Any, config: Mapping[str, Any]) -> None:
        """Record the switches of `TrainingArguments`, and set the trial's values.

        Call this before transformers checks them. Raises InvalidTrial for a missing field.
        """
        self._has_arguments = True
        self._is_on_by_arguments = bool(self._targets.get(CHECKPOINTING, _checkpointing_of(args)))
        for name, values in _find_in_arguments(args, config).items():
            self.found[name] = ScriptSwitch(values, in_arguments=True)
        for name, value in self._targets.items():
            field = known.field_of(name)
            if name == CHECKPOINTING:
                _set_checkpointing(args, value)
            elif field is not None and value is not None:
                if not hasattr(args, field):
                    raise InvalidTrial(f"{type(args).__name__} has no field {field}")
                setattr(args, field, value)

    # -- the model and its engine

    def before_engine(self, arguments: Mapping[str, Any]) -> None:
        """Record the switches of a model that is to be trained, and set the trial's values.

        Raises:
            InvalidTrial: as in `switch_model`; or a switch needs `TrainingArguments`, which the
                script does not use; or Ulysses has replaced the attention kernel to switch.
        """
        model, original = arguments.get("model"), config_injection.trained_config(arguments)
        if original is None or not hasattr(model, "modules"):
            return  # not to be trained, or rejected by DeepSpeed
        may_flash = not self._on_cpu and data_types(original.content)[0] in ("bf16", "fp16")
        for name, values in find_in_model(model, may_flash=may_flash).items():
            self.found.setdefault(name, ScriptSwitch(values))
        targets = dict(self._targets)
        # Ulysses has replaced the attention kernel of the model by now.
        if config_injection.shared_sequences(arguments) > 1:
            self.found.pop(ATTENTION, None)
            if targets.get(ATTENTION) is not None:
                raise InvalidTrial(
                    "Ulysses needs its own attention kernel, so trials cannot change the kernel"
                )
        if self._has_arguments:
            targets = {n: v for n, v in targets.items() if n not in (CHECKPOINTING, LIGER)}
            if recomputation.is_on(model) and not self._is_on_by_arguments:
                # The script itself turned checkpointing on, as LLaMA-Factory does.
                self.found[CHECKPOINTING] = ScriptSwitch((True, False))
                if self._targets.get(CHECKPOINTING) is False:
                    targets[CHECKPOINTING] = False
        else:
            self.found.setdefault(COMPILE, ScriptSwitch((False, True)))
            for name in targets:  # in the same order on all ranks
                if known.field_of(name) and name not in (CHECKPOINTING, COMPILE, LIGER):
                    raise InvalidTrial(
                        f"{name} is a field of TrainingArguments, which the script does not use"
                    )
        switch_model(model, targets)

    def after_engine(self, engine: Any) -> None:
        """Compile the engine's model if the trial needs that, unless it is compiled already."""
        is_wanted = self._targets.get(COMPILE) is True and not self._has_arguments
        if (is_wanted or self._deep_compiles) and not engine.is_compiled:
            engine.compile()


def cores_of_this_rank() -> int:
    """Return this rank's share of the host's cores; 0 if there are fewer cores than ranks."""
    is_bound = os.sched_getaffinity(0) < os.sched_getaffinity(os.getppid())  # by the launcher
    sharers = 1 if is_bound else local_size()
    return len(host_limits.usable_cores()) // sharers


def _find_in_arguments(args: Any, config: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the possible values of each switch in `TrainingArguments`, the script's first."""
    value = _checkpointing_of(args)
    other_values: list[Any] = [not value]
    # Trainers whose field has the newer name support `every_n_layers`. But TRL's Trainers turn
    # checkpointing off to score and generate, then on without this option (trl/models/utils.py).
    is_trl = any(base.__module__.startswith("trl.") for base in type(args).__mro__)
    if hasattr(args, known.NEWER_CHECKPOINTING) and not is_trl:
        other_values.append(known.EVERY_SECOND)
    workers = int(args.dataloader_num_workers)
    cores_of_a_rank = cores_of_this_rank()
    values: dict[str, tuple[Any, ...]] = {
        CHECKPOINTING: (value, *other_values),
        WORKERS: (workers, *(n for n in _WORKERS if n <= max(2, cores_of_a_rank))),
    }
    names = ["dataloader_pin_memory", COMPILE]
    if workers:
        names.append("dataloader_persistent_workers")
    names += [name for name in ("packing", "padding_free") if getattr(args, name, None) is not None]
    if importlib.util.find_spec("liger_kernel") is not None:
        names.append(LIGER)
    if not config.get("optimizer") and _text(getattr(args, "optim", "")) in _OPTIMIZERS:
        names.append("optim")
    for name in names:
        if hasattr(args, name):
            values[name] = (_text(getattr(args, name)), *SWITCHES[name].values)
    distinct = {name: tuple(dict.fromkeys(options)) for name, options in values.items()}
    return {name: options for name, options in distinct.items() if len(options) > 1}


def find_in_model(model: Any, *, may_flash: bool) -> dict[str, tuple[Any, ...]]:
    """Return the possible values of each switch of a model, the current value first.

    `may_flash`: whether the device and the precision allow flash attention.
    """
    values: dict[str, tuple[Any, ...]] = {}
    is_on = recomputation.is_on(model)
    if is_on is not None:
        values[CHECKPOINTING] = (is_on, not is_on)
    part = _find_attention_part(model)
    kernel = None if part is None else part.config._attn_implementation
    if isinstance(kernel, str):
        kernels = [
            name
            for name, attribute, package in _ATTENTION
            if getattr(part, attribute or "config", None)
            and (not package or (may_flash and importlib.util.find_spec(package) is not None))
        ]
        values[ATTENTION] = tuple(dict.fromkeys((kernel, *kernels)))
    return values


def switch_model(model: Any, targets: Mapping[str, Any]) -> None:
    """Set switches of a model: gradient checkpointing, Liger's kernels, the attention kernel.

    Raises:
        InvalidTrial: the model lacks a switch or a kernel, or Liger cannot be imported.
    """
    if targets.get(CHECKPOINTING) is not None and not recomputation.switch(
        model, targets[CHECKPOINTING]
    ):
        raise InvalidTrial("the model has no known switch for gradient checkpointing")
    if targets.get(LIGER):
        _use_liger(model)
    kernel = targets.get(ATTENTION)
    if kernel is None:
        return
    part = _find_attention_part(model)
    if part is None:
        raise InvalidTrial("the model has no known switch for its attention kernel")
    part.set_attn_implementation(kernel)
    if part.config._attn_implementation != kernel:
        raise InvalidTrial(f"{type(part).__name__} does not support the attention kernel {kernel}")


def _find_attention_part(model: Any) -> Any:
    """Return the outermost transformers model; None if absent, or if its attention is fixed."""
    for module in model.modules():
        can_set = getattr(module, "_can_set_attn_implementation", None)
        if callable(getattr(module, "set_attn_implementation", None)) and callable(can_set):
            return module if can_set() else None
    return None


def _use_liger(model: Any) -> None:
    """Replace layers of a transformers model with Liger's kernels, as the Trainer does."""
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
    except ImportError as error:
        raise InvalidTrial(f"Liger cannot be used: {error}") from None
    _apply_liger_kernel_to_instance(model=_find_attention_part(model) or model)


def _checkpointing_of(args: Any) -> bool:
    value = getattr(args, known.NEWER_CHECKPOINTING, None)
    return bool(args.gradient_checkpointing if value is None else value)


def _set_checkpointing(args: Any, value: Any) -> None:
    """Turn gradient checkpointing on or off; a string names a variant, whose options are set."""
    name = known.NEWER_CHECKPOINTING
    if not hasattr(args, name):
        name = CHECKPOINTING
    setattr(args, name, value is not False)
    if isinstance(value, str):
        names = (f"{name}_kwargs", f"{CHECKPOINTING}_kwargs")
        options: Any = next(filter(None, (getattr(args, field, None) for field in names)), {})
        if isinstance(options, str):  # from the command line, unparsed
            options = json.loads(options)
        setattr(args, f"{name}_kwargs", {**options, **known.checkpointing(value)})


def _text(value: Any) -> Any:
    """Return the value of an enumeration's member, or any other value unchanged."""
    return getattr(value, "value", value)
