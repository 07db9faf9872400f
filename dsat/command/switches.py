"""Switches of a training script and its environment, besides the DeepSpeed configuration.

`Trial.script_args` holds the values that differ from the script's own. A switch is named as in
`SWITCHES`, or else as a flag of the script with its dashes, as `ENV:NAME` for a variable, or as
`TrainingArguments.NAME` for another field of the Trainer's arguments. Values that depend on the
installed packages and the model are detected in the rank (`dsat.in_trial.script_switches`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dsat.values.outcome import ScriptSwitch

CHECKPOINTING = "gradient_checkpointing"
NEWER_CHECKPOINTING = "activation_checkpointing"  # since transformers 5, which accepts both names
ATTENTION = "attn_implementation"
COMPILE = "torch_compile"
LIGER = "use_liger_kernel"
WORKERS = "dataloader_num_workers"
BIND_CORES = "bind_cores_to_rank"
CHECKPOINTING_FLAGS = (f"--{CHECKPOINTING}", f"--{NEWER_CHECKPOINTING}")
# Kinds of gradient checkpointing.
EVERY_SECOND, REENTRANT, OFFLOADED = "every_2_layers", "reentrant", "offload"
MODEL_SWITCHES = (CHECKPOINTING, ATTENTION, LIGER)  # a simulation can set them
VARIABLE, ARGUMENT = "ENV:", "TrainingArguments."  # prefixes of names of switches
_TOKENS = "tokens_per_second"

# Warnings of trials that replaced values that the script's code passes to a framework.
OTHER_BATCH = "the script's TrainingArguments set batch sizes, which trials replace"
OTHER_CONFIG = (
    "the script's code passes a DeepSpeed configuration (to TrainingArguments or "
    "DeepSpeedPlugin), which trials replace"
)
OTHER_PARALLELISM = "the script's ParallelismConfig sets sp_size, which trials replace"
OTHER_ACCUMULATION = (
    "the script's Lightning Trainer sets accumulate_grad_batches, which trials replace"
)
OTHER_LIMITS = (
    "the script's Lightning Trainer counts micro batches (limit_train_batches or "
    "val_check_interval), and trials replace these numbers"
)
# By warning: code that the verdict recommends for the script; `{0}` is the best `BatchTriple`, and
# `{1}` the script's own.
OF_CODE = {
    OTHER_BATCH: "TrainingArguments(per_device_train_batch_size={0.micro_batch}, "
    "gradient_accumulation_steps={0.gas})",
    OTHER_CONFIG: "best_ds_config.json instead of the configuration in its code",
    OTHER_ACCUMULATION: "lightning.Trainer(accumulate_grad_batches={0.gas}), and "
    "DeepSpeedStrategy(config=...) with best_ds_config.json, minus gradient_accumulation_steps",
    OTHER_LIMITS: "limit_train_batches and val_check_interval of lightning.Trainer (if whole "
    "numbers) times {0.gas}/{1.gas}",
    OTHER_PARALLELISM: "ParallelismConfig(sp_size={0.parallelism.sequence})",
}


@dataclass(frozen=True)
class Switch:
    """A switch that dsat knows.

    Attributes:
        reason: why another value may be faster.
        values: values to try besides the script's own; empty if the rank detects them.
        field: whether it is a field of TrainingArguments, and so a flag of scripts that parse them.
        code: code that sets the switch in a script, with `{value}` for the value.
        on_request: whether it needs `--search`, as it changes what is computed or seldom helps.
        on_device: whether it matters on accelerators only.
        offloading: whether it matters with offloading only.
        memory: whether it changes the memory of activations.
        metric: the only metric by which its values are comparable; empty for any metric.
    """

    reason: str
    values: tuple[Any, ...] = ()
    field: bool = True
    code: str = ""
    on_request: bool = False
    on_device: bool = False
    offloading: bool = False
    memory: bool = False
    metric: str = ""


def _variable(reason: str, *values: str) -> Switch:
    return Switch(reason, values, field=False, on_request=True, on_device=True)


_PACKING = "saves the computation for padding; samples differ, so losses change"
SWITCHES: Mapping[str, Switch] = {
    CHECKPOINTING: Switch(
        "recomputes activations in the backward pass instead of storing them",
        code="model.gradient_checkpointing_enable()",
        memory=True,
    ),
    ATTENTION: Switch(
        "kernel of the attention layers",
        field=False,
        code='model.set_attn_implementation("{value}"), or attn_implementation="{value}" in '
        "from_pretrained",
        memory=True,
    ),
    WORKERS: Switch("worker processes load data during the training"),
    "dataloader_pin_memory": Switch("copies batches to the device faster", (True,), on_device=True),
    "dataloader_persistent_workers": Switch(
        "keeps data loader workers from epoch to epoch", (True,), on_request=True
    ),
    "optim": Switch("one kernel updates many parameters", ("adamw_torch_fused", "adamw_torch")),
    COMPILE: Switch(
        "compiled kernels read and write memory less often",
        (True,),
        code="engine.compile() after deepspeed.initialize",
        on_device=True,
    ),
    LIGER: Switch(
        "uses fused kernels of Liger, which do not store the logits",
        (True,),
        code="liger_kernel.transformers._apply_liger_kernel_to_instance(model=model)",
        on_device=True,
        memory=True,
    ),
    BIND_CORES: Switch(
        "gives each rank's optimizer its own cores, near its memory",
        (True,),
        field=False,
        on_device=True,
        offloading=True,
    ),
    "packing": Switch(_PACKING, (True,), on_request=True, memory=True, metric=_TOKENS),
    "padding_free": Switch(_PACKING, (True,), on_request=True, memory=True, metric=_TOKENS),
    # Environment variables of CUDA (CUDA C++ Programming Guide) and NCCL (NCCL User Guide).
    "ENV:CUDA_DEVICE_MAX_CONNECTIONS": _variable("kernels start in the order of the script", "1"),
    "ENV:NCCL_MIN_NCHANNELS": _variable("more blocks of the device move data", "16", "32"),
    "ENV:NCCL_BUFFSIZE": _variable("larger pieces cost less latency", str(2**23), str(2**24)),
}


def is_switch(name: str) -> bool:
    """Return whether a name denotes a switch of the script, not a DeepSpeed setting."""
    return name in SWITCHES or name.startswith(("--", VARIABLE, ARGUMENT))


def is_set_by_script(name: str) -> bool:
    """Return whether a switch can still be set inside a running script.

    Flags cannot, because they are already parsed. Of variables, only those of NCCL and CUDA can,
    because these libraries read them at first use.
    """
    if name.startswith(VARIABLE):
        return name in SWITCHES or name.startswith(f"{VARIABLE}NCCL_")
    return name != BIND_CORES and not name.startswith("--")


def affects_memory(name: str) -> bool:
    """Return whether a switch is known to change the memory of activations."""
    return name in SWITCHES and SWITCHES[name].memory


def field_of(name: str) -> str | None:
    """Return the field of TrainingArguments that a switch sets; None if it sets none."""
    if name.startswith(ARGUMENT):
        return name.removeprefix(ARGUMENT)
    return name if name in SWITCHES and SWITCHES[name].field else None


def is_of_code(name: str, switches: Mapping[str, ScriptSwitch]) -> bool:
    """Return whether the script has TrainingArguments but sets the field `name` outside of them."""
    has_arguments = any(switch.in_arguments for switch in switches.values())
    is_field = name in switches and field_of(name) is not None
    return is_field and has_arguments and not switches[name].in_arguments


def flag_of(name: str, args: Iterable[str], *, takes_hf_flags: bool) -> str | None:
    """Return the script's flag for a switch; None if it has none.

    `args` are its arguments. With `takes_hf_flags`, every field of TrainingArguments is a flag.
    """
    if name.startswith("--"):
        return name
    field = field_of(name)
    names = CHECKPOINTING_FLAGS if name == CHECKPOINTING else (f"--{field or name}",)
    words = {word.partition("=")[0].replace("-", "_") for word in args if word.startswith("--")}
    flags = [flag for flag in names if flag.replace("-", "_") in words]
    if takes_hf_flags and field is not None:
        flags.append(names[0])
    return flags[0] if flags else None


def flag_values(flag: str, value: Any) -> dict[str, Any]:
    """Return the flags that give a switch its value: `{"--optim": "adamw_torch"}`.

    Some kinds of gradient checkpointing need two flags.
    """
    if flag in CHECKPOINTING_FLAGS and isinstance(value, str):
        return {flag: True, f"{flag}_kwargs": json.dumps(checkpointing(value))}
    return {flag: value}


def fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values of switches to fields of TrainingArguments; other switches are dropped."""
    fields_of_values: dict[str, Any] = {}
    for name, value in values.items():
        field = field_of(name)
        if name == CHECKPOINTING and isinstance(value, str):
            fields_of_values |= {name: True, f"{name}_kwargs": checkpointing(value)}
        elif field is not None and value is not None:
            fields_of_values[field] = value
    return fields_of_values


def variables(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables that switches set, by name without `ENV:`."""
    return {
        name.removeprefix(VARIABLE): str(value)
        for name, value in values.items()
        if name.startswith(VARIABLE) and value is not None
    }


def instruction(name: str, value: Any, *, in_arguments: bool) -> str:
    """Return how to set a switch: `TrainingArguments(optim='adamw_torch')`, `NCCL_BUFFSIZE=...`."""
    if name.startswith(("--", VARIABLE)):
        return f"{name.removeprefix(VARIABLE)}={value}"
    if name == BIND_CORES:
        return "--bind_cores_to_rank of the deepspeed launcher"
    code = SWITCHES[name].code if name in SWITCHES else ""
    if field_of(name) is not None and (in_arguments or not code):
        arguments = ", ".join(f"{field}={v!r}" for field, v in fields({name: value}).items())
        return f"TrainingArguments({arguments})"
    if not code:  # a switch of another version of dsat
        return f"{name}={value}"
    return f"no `{code}`" if value is False else code.format(value=value)


def checkpointing(value: str) -> dict[str, Any]:
    """Return the keyword arguments for a kind of gradient checkpointing.

    Raises ValueError if the kind is unknown.
    """
    layers = re.fullmatch("every_([2-9])_layers", value)
    if layers:
        return {"every_n_layers": int(layers[1])}
    if value == REENTRANT:
        return {"use_reentrant": True}
    if value == OFFLOADED:
        return {"offload": True}
    ways = f"true, false, {REENTRANT}, {OFFLOADED} or {EVERY_SECOND}"
    raise ValueError(f"{value!r} must be {ways}")


def parse(text: Any) -> tuple[str, tuple[Any, ...]]:
    """Return name and values of `NAME=v1,v2`, `--flag=v1,v2`, `ENV:NAME=v1,v2` or `--flag`.

    Values of flags and variables stay text. Values of fields become numbers or booleans if they
    look like them. A bare flag has the values False and True. Any other name that is not in
    `SWITCHES` is a field, and gets the prefix `TrainingArguments.`.

    Args:
        text: one of these forms, or a tuple of the name and the values.

    Raises:
        ValueError: the form is invalid, or the kind of gradient checkpointing is unknown.
    """
    if isinstance(text, tuple):
        name, values = text
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is not the name of a switch")
        listed = values if isinstance(values, (list, tuple)) else [values]
        if name.startswith("--") and all(isinstance(value, bool) for value in listed):
            return name, tuple(listed) or (False, True)
        text = write(name, listed)
    name, equals, values = str(text).partition("=")
    listed = [value for value in values.split(",") if value]
    if re.fullmatch("--[A-Za-z0-9][A-Za-z0-9_.-]*", name) and (listed or not equals):
        return name, tuple(listed) or (False, True)
    if not listed or not re.fullmatch(r"(ENV:)?[A-Za-z_][A-Za-z0-9_.]*", name):
        raise ValueError(
            f"{text!r} is not of the form --FLAG=V1,V2 or NAME=V1,V2, for example "
            "--num_workers=0,4,8"
        )
    if name.startswith(VARIABLE):
        return name, tuple(listed)
    name = name if name in SWITCHES or name.startswith(ARGUMENT) else f"{ARGUMENT}{name}"
    parsed = tuple(_plain(value) for value in listed)
    if name == CHECKPOINTING:
        for value in parsed:
            if not isinstance(value, bool):
                checkpointing(str(value))
    return name, parsed


def write(name: str, values: Any) -> str:
    """Write a switch with one or several values in the form of `--vary`."""
    values = values if isinstance(values, (list, tuple)) else [values]
    words = [str(v).lower() if isinstance(v, bool) else str(v) for v in values]
    return f"{name}={','.join(words)}"


def _plain(text: str) -> Any:
    try:
        value = json.loads(text.lower())
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float)) else text
