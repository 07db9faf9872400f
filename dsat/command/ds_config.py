"""DeepSpeed configurations: reading files, and pure functions, which change no argument."""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dsat.command import document
from dsat.command.ds_types import SIZES, normalize
from dsat.errors import UserInputError
from dsat.values import hazards, parallelism
from dsat.values.format import count
from dsat.values.parallelism import SEQUENCE_SIZE
from dsat.values.trial import BatchTriple

# Hyperparameters of an experiment that hold the DeepSpeed configuration and its overrides.
CONFIG_KEY = "deepspeed_config"
OVERWRITE_KEY = "overwrite_deepspeed_args"
DSAT_MODE_KEY = "_use_dsat_mode"
DSAT_TRIAL_KEY = "_dsat_trial"  # on a cluster: the specification of the trial
DSAT_SWITCHES_KEY = "_dsat_switches"  # on a cluster: values of the script's switches

AUTOTUNING = "autotuning"  # the section of DeepSpeed's own autotuner
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
AUTO = "auto"
STAGES = (0, 1, 2, 3)
# How the Trainer computes "auto" settings of `zero_optimization` from the hidden size
# (integrations/deepspeed.py of transformers 5.23); accelerate computes the same values.
BY_HIDDEN_SIZE: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda hidden: hidden * hidden,
    "stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden * hidden),
    "stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def read(path: Path) -> dict[str, Any]:
    """Read a DeepSpeed configuration from a file of any name, and `normalize` it.

    Raises:
        UserInputError: the file cannot be read, cannot be parsed, or holds no mapping.
    """
    try:
        return normalize(parse(document.read_text(path)))
    except ValueError as error:
        raise UserInputError(str(error), where=str(path)) from None


def parse(text: str) -> dict[str, Any]:
    """Parse a configuration as DeepSpeed does: JSON, or Hjson with its comments.

    Raises:
        ValueError: the text cannot be parsed, is no mapping, repeats a key, or has NaN or infinity.
    """
    # hjson is not used for valid JSON, because it converts 1.0 and 5e8 to integers.
    try:
        try:
            config = json.loads(text, object_pairs_hook=_refuse_duplicates)
        except json.JSONDecodeError:
            config = _parse_hjson(text)
        if not isinstance(config, dict):
            raise ValueError("is not a mapping of keys to values")
        return dict(document.copy_as_json(config))
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _parse_hjson(text: str) -> Any:
    import hjson

    try:
        return hjson.loads(text, object_pairs_hook=_refuse_duplicates)
    except hjson.HjsonDecodeError as error:
        raise ValueError(
            f"is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from None
    except OverflowError:  # hjson converts 1e999 to an integer
        raise ValueError("is not valid JSON: a number is too large. Write at most 1e308") from None


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a mapping; refuse duplicate keys, as DeepSpeed does."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = ", ".join(key for key, count in counts.items() if count > 1)
        raise ValueError(
            f"contains duplicate keys, which DeepSpeed refuses: {twice}. Keep one of each"
        )
    return mapping


# Sections that dsat reads, by dotted path.
_SECTIONS = """
    activation_checkpointing bf16 bfloat16 fp16 optimizer optimizer.params scheduler
    scheduler.params tensor_parallel torch_autocast zero_optimization
    zero_optimization.offload_optimizer zero_optimization.offload_param
""".split()


def check_sections(config: Mapping[str, Any], *, where: str) -> None:
    """Check the form of the sections that dsat reads; `in_trial.config_check` checks the rest.

    Raises UserInputError for a section that is not a mapping, an unknown stage, or a bucket or
    threshold (`SIZES`) that is neither null, "auto" nor a whole number of at least 0.
    """
    for path in _SECTIONS:
        value = at(config, path)
        if value is not None and not isinstance(value, Mapping):
            raise UserInputError(f"must be a mapping, not {value!r}", where=f"{where}: {path}")
    zero = config.get("zero_optimization") or {}
    check_stage(zero.get("stage", 0), where=f"{where}: zero_optimization.stage")
    for name in SIZES:
        path = f"zero_optimization.{name}"
        value = zero.get(name)
        if value not in (None, AUTO):
            whole_number(value, f"{where}: {path}", least=0)


def check_stage(stage: Any, *, where: str) -> None:
    """Raise UserInputError unless a value is a ZeRO stage."""
    if isinstance(stage, bool) or stage not in STAGES:
        raise UserInputError(f"must be 0, 1, 2 or 3, not {stage!r}", where=where)


def whole_number(value: Any, where: str, *, least: int = 1) -> int:
    """Return an integer of at least `least`, also for a float such as JSON's `5e8`.

    Raises UserInputError for any other value, or one above `LARGEST_INTEGER`.
    """
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise UserInputError(f"must be {kind}, not {value!r}", where=where)
    if number > document.LARGEST_INTEGER:
        raise UserInputError(f"{value!r} is too large", where=where)
    return number


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `overrides` into a copy of `base`: mappings key by key, other values replaced."""
    merged = {}
    for key, value in {**base, **overrides}.items():
        inner = base.get(key)
        if key in overrides and isinstance(value, Mapping) and isinstance(inner, Mapping):
            merged[key] = merge(inner, value)
        else:
            merged[key] = _copy(value)
    return merged


def _copy(value: Any) -> Any:
    """Copy a value; for JSON values, this is several times as fast as `copy.deepcopy`."""
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copy(inner) for inner in value]
    is_plain = value is None or isinstance(value, (str, int, float))
    return value if is_plain else copy.deepcopy(value)


def fill_in_auto(config: Mapping[str, Any], passed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration, with the values in `passed` for "auto" values."""
    result = {}
    for key, value in config.items():
        other = passed.get(key)
        if isinstance(value, Mapping):
            result[key] = fill_in_auto(value, other if isinstance(other, Mapping) else {})
        else:
            result[key] = copy.deepcopy(passed[key] if value == AUTO and key in passed else value)
    return result


def fill_in_sizes(zero: Mapping[str, Any], hidden_size: int | None) -> dict[str, Any]:
    """Replace "auto" sizes of `zero_optimization` as a Trainer does.

    Args:
        zero: the section, or a mapping that contains the section's settings among others.
        hidden_size: the model's hidden size; None to replace nothing.
    """
    computed = BY_HIDDEN_SIZE if hidden_size else {}
    return {
        key: computed[key](hidden_size or 0) if value == AUTO and key in computed else value
        for key, value in zero.items()
    }


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the settings of all sections, keyed by dotted path."""
    settings: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            settings |= flat(value, f"{prefix}{key}.")
        else:
            settings[prefix + key] = value
    return settings


def at(config: Mapping[str, Any], path: str) -> Any:
    """Return the setting at a dotted path; None if it is missing."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def check_groups(config: Mapping[str, Any], slots: int, *, where: str) -> None:
    """Raise UserInputError unless the parallel sizes and the hpZ size divide a trial's devices."""
    shared = parallelism.read_parallelism(config)
    if slots % shared.shared:
        raise UserInputError(
            f"{shared.label} needs a multiple of {shared.shared} devices, but a trial has {slots}",
            where=where,
            hint="Change the parallel size in the configuration, or the number of devices.",
        )
    zero = config.get("zero_optimization") or {}
    if not secondary_divides(config, slots, zero.get("stage", 0)):
        raise UserInputError(
            f"{secondary_group(config)} does not divide the {slots} devices of a trial",
            where=f"{where}: zero_optimization.zero_hpz_partition_size",
            hint="Change this size, or the number of devices.",
        )


def secondary_group(config: Mapping[str, Any]) -> int:
    """Return how many devices share a secondary copy of the parameters (hpZ); 1 without hpZ."""
    size = at(config, "zero_optimization.zero_hpz_partition_size")
    return 1 if size in (None, AUTO, 0) else int(size)


def secondary_divides(config: Mapping[str, Any], slots: int, stage: int) -> bool:
    """Return whether `slots` devices can be divided into groups of `secondary_group` devices.

    Only stage 3 has such groups (`_create_zero_param_parallel_group` in utils/groups.py, 0.19.8).
    """
    return stage != 3 or slots % min(secondary_group(config), slots) == 0


def refuse_zenflow(config: Mapping[str, Any], *, where: str) -> None:
    """Raise UserInputError if ZenFlow is on (`configure_zenflow` in runtime/zenflow/engine.py)."""
    if at(config, "zero_optimization.zenflow") not in (None, AUTO):
        raise UserInputError(
            "ZenFlow is not supported: dsat compares optimizer steps, and ZenFlow varies their "
            "number of micro batches",
            where=f"{where}: zero_optimization.zenflow",
            hint="Remove this section to tune or predict the rest.",
        )


def resolve_batch(config: Mapping[str, Any], slots: int, *, where: str) -> BatchTriple:
    """Derive the batch sizes of a trial from its configuration and devices, as DeepSpeed does.

    See `DeepSpeedConfig._set_batch_related_parameters`; AutoTP then divides the global batch.

    Args:
        config: a DeepSpeed configuration; null and "auto" count as missing.

    Raises:
        UserInputError: both global and micro batch are missing, a size is not a positive integer,
            sizes contradict each other, groups do not divide the devices, or ZenFlow is on.
    """
    check_groups(config, slots, where=where)
    refuse_zenflow(config, where=where)
    shared = parallelism.read_parallelism(config)
    counted = slots // shared.sequence  # DeepSpeed's count, which ignores AutoTP here
    sizes = {
        key: whole_number(config[key], f"{where}: {key}")
        for key in BATCH_KEYS
        if config.get(key, AUTO) not in (None, AUTO)
    }
    total, micro, gas = (sizes.get(key) for key in BATCH_KEYS)
    if total is None and micro is None:
        problem = "neither train_batch_size nor train_micro_batch_size_per_gpu is given"
        hint = 'Add one of them, for example "train_micro_batch_size_per_gpu": 1.'
        if AUTO in (config.get(key) for key in BATCH_KEYS):
            problem = 'the batch size is "auto", which only the Trainer and accelerate replace'
            hint = (
                "Set train_micro_batch_size_per_gpu to a number, or give --deepspeed and "
                "--per_device_train_batch_size on the command line."
            )
        raise UserInputError(problem, where=where, hint=hint)
    if micro is None:
        micro = (total or 0) // ((gas or 1) * counted)
    if gas is None:
        gas = 1 if total is None else total // max(1, micro * counted)
    total = total or micro * gas * counted
    if total != micro * gas * counted or min(total, micro, gas) < 1:
        listed = " and ".join(f"{key} {value}" for key, value in sizes.items())
        how, hint = "contradict each other", "Correct or delete one of these settings."
        if len(sizes) == 1:
            how, hint = "is impossible", "Correct it."
        raise UserInputError(
            f"{listed} {how} on {count(slots, 'device')}: train_batch_size must be "
            "train_micro_batch_size_per_gpu x gradient_accumulation_steps x devices"
            + (f" / {SEQUENCE_SIZE}" if shared.sequence > 1 else ""),
            where=where,
            hint=hint,
        )
    return BatchTriple(total // shared.tensor, micro, gas, shared)


def did_you_mean(word: object, words: Iterable[str], likeness: float = 0.6) -> str:
    """Return a sentence that suggests the most similar known word; empty if none is similar.

    `likeness` is the minimum similarity, up to 1 (`difflib.SequenceMatcher.ratio`).
    """
    import difflib

    near = difflib.get_close_matches(str(word), sorted(words), n=1, cutoff=likeness)
    return f"Did you mean {near[0]!r}? " if near else ""


# Short names of types, by long name (`DtypeEnum` of runtime/config.py, without "torch.").
_TYPES = {"float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32", "bfloat16": "bf16"}


def data_types(config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the types (fp16, bf16, fp32) of the model and of its accumulated gradients.

    See `get_data_types` of runtime/engine.py. A type is None if it is "auto"; the type
    of gradients is also None if it is not set.
    """
    flags = {name: at(config, f"{name}.enabled") for name in ("fp16", "bf16", "bfloat16")}
    model = next((name for name, enabled in flags.items() if enabled is True), None)
    if model is None and AUTO not in flags.values():
        model = "fp32"
    gradients = str(at(config, "data_types.grad_accum_dtype")).removeprefix("torch.")
    gradients = _TYPES.get(gradients, gradients)
    return _TYPES.get(str(model), model), gradients if gradients in _TYPES.values() else None


def least_stage(config: Mapping[str, Any], version: str | None = None) -> int:
    """Return the lowest ZeRO stage, 0 or 1, that DeepSpeed accepts with the configured types.

    See `DeepSpeedConfig._do_error_check`, `DeepSpeedEngine._do_optimizer_sanity_check` (0.19.8).
    An unknown `version` of DeepSpeed counts as a recent one.
    """
    model, accumulated = data_types(config)
    accepted = [(model, model)]
    if hazards.is_one_of(version, "<0.18.5"):
        accepted.append(("bf16", "fp32"))
    if None not in (model, accumulated) and (model, accumulated) not in accepted:
        return 1
    sections = [config.get(name) or {} for name in ("bf16", "bfloat16", "fp16")]
    low = any(
        value is True and key.endswith(("_master_weights_and_grads", "_optimizer_states"))
        for section in sections
        for key, value in section.items()
    )
    return 1 if low else 0


def prepare_for_training(
    config: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a configuration, with overrides, in the form that trainings read.

    It has a ZeRO section (accelerate 1.15 requires one; DeepSpeed's default is stage 0). It has no
    autotuning section, and no global batch size that is null.
    """
    prepared = merge(config, overrides or {})
    prepared.pop(AUTOTUNING, None)
    prepared["zero_optimization"] = prepared.get("zero_optimization") or {"stage": 0}
    if prepared.get(BATCH_KEYS[0], AUTO) is None:
        del prepared[BATCH_KEYS[0]]
    return prepared


def drop_batch_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without batch sizes; accumulation steps stay."""
    return {key: value for key, value in config.items() if "batch_size" not in key}


def fingerprint(config: Mapping[str, Any]) -> str:
    """Return a hexadecimal digest of a configuration."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
