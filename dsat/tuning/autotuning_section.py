"""The `autotuning` section of a configuration, as DeepSpeed's own autotuner reads it.

The keys are those of deepspeed/autotuning/{constants,config}.py (0.19.8), of its README and of
https://www.deepspeed.ai/docs/config-json/#autotuning. `start_step`, `end_step`, `num_gpus` and
`num_nodes` come from its first releases, whose configurations are still around.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dsat.command.ds_config import AUTOTUNING, BATCH_KEYS, did_you_mean, flat, whole_number
from dsat.command.switches import CHECKPOINTING
from dsat.errors import UserInputError
from dsat.values.objective import METRICS
from dsat.values.trial import TrialOptions

_MORE_STEPS = TrialOptions.end_step - TrialOptions.start_step

_METRICS = {
    name: metric
    for metric, declared in METRICS.items()
    for name in (metric, *declared.autotuner_names)
}
_METHODS = {"gridsearch": "gridsearch", "random": "random", "model_based": "model"}

_WITHOUT_MEANING = {
    "metric_path": "every trial reports to dsat itself",
    "model_info": "dsat always profiles the model itself",
    "model_info_path": "dsat always profiles the model itself",
}


def _from_zero(value: Any, where: str) -> int:
    return whole_number(value, where, least=0)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise UserInputError(f"must be true or false, not {value!r}", where=where)
    return value


def _folder(value: Any, where: str) -> Path:
    if not isinstance(value, str) or not value.strip():
        raise UserInputError(f"must be the path of a folder, not {value!r}", where=where)
    return Path(value)


def _one_of(known: Mapping[str, str]) -> Callable[[Any, str], str]:
    def read_name(value: Any, where: str) -> str:
        name = value.strip() if isinstance(value, str) else ""
        if name not in known:
            raise UserInputError(
                f"must be one of {', '.join(known)}, not {value!r}",
                where=where,
                hint=did_you_mean(name, known).strip(),
            )
        return known[name]

    return read_name


def _at_most_one(problem: str) -> Callable[[Any, str], None]:
    def check(value: Any, where: str) -> None:
        if whole_number(value, where) > 1:
            raise UserInputError(f"is {value}, and {problem}", where=where, hint="Set it to 1.")

    return check


def _mappings(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise UserInputError(
            f"must be a mapping from settings to flags, not {value!r}", where=where
        )
    mappings: dict[str, str] = {}
    for raw_setting, raw_flag in value.items():
        if raw_flag is None:
            continue
        setting = str(raw_setting).strip()
        name = raw_flag.strip() if isinstance(raw_flag, str) else ""
        if not name.lstrip("-") or len(name.split()) > 1:
            raise UserInputError(
                f"must be a flag of the training script, not {raw_flag!r}",
                where=f"{where}.{setting}",
                hint='For example "--per_device_train_batch_size".',
            )
        mappings[setting] = name if name.startswith("-") else f"--{name}"
    return mappings


def _key(keys: str, read: Callable[[Any, str], Any], default: Any) -> Any:
    """Declare the keys of a field (the later ones are aliases), and the reader of its values."""
    metadata = {"keys": keys.split(), "read": read}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class ResultFolders:
    """The folders that DeepSpeed's autotuner leaves its results in.

    Attributes:
        results_dir, exps_dir: as written: relative to where the command is run.
        overwrite: delete earlier results. DeepSpeed's own default is true; here it is false.
    """

    results_dir: Path = _key("results_dir", _folder, Path("autotuning_results"))
    exps_dir: Path = _key("exps_dir", _folder, Path("autotuning_exps"))
    overwrite: bool = _key("overwrite", _flag, False)


@dataclass(frozen=True, kw_only=True)
class Autotuning(ResultFolders):
    """The `autotuning` section of a DeepSpeed configuration.

    Attributes:
        metric: one of `dsat.values.objective.METRIC_NAMES`.
        start_profile_step, end_profile_step: the first and the last optimizer step measured. By
            default as many as in any other search: DeepSpeed's own 3 make a poor interval.
        fast: search ZeRO stages and micro batches only.
        method: `gridsearch`, `random`, or `model` for `model_based`.
        early_stopping: end a ZeRO stage after so many trials without a better one; 0 for never.
        max_trials: maximum number of trials of one ZeRO stage.
        max_train_batch_size: the largest global batch; 0 if there is no limit.
        num_micro_batches: micro batches tried with each ZeRO section.
        num_gpus: slots of a trial; 0 for all.
        arg_mappings: setting -> the script's flag, with its leading dashes.
        notes: a line for the user on each key that is accepted but has no effect here.
    """

    metric: str = _key("metric", _one_of(_METRICS), "throughput")
    start_profile_step: int = _key("start_profile_step start_step", whole_number, 3)
    end_profile_step: int = _key("end_profile_step end_step", whole_number, 3 + _MORE_STEPS)
    fast: bool = _key("fast", _flag, True)
    method: str = _key("tuner_type", _one_of(_METHODS), "gridsearch")
    early_stopping: int = _key("tuner_early_stopping", _from_zero, 5)
    max_trials: int = _key("tuner_num_trials", whole_number, 50)
    max_train_batch_size: int = _key("max_train_batch_size", _from_zero, 0)
    min_train_batch_size: int = _key("min_train_batch_size", whole_number, 1)
    max_micro_batch: int = _key("max_train_micro_batch_size_per_gpu", whole_number, 1024)
    min_micro_batch: int = _key("min_train_micro_batch_size_per_gpu", whole_number, 1)
    num_micro_batches: int = _key("num_tuning_micro_batch_sizes", whole_number, 3)
    num_gpus: int = _key("num_gpus", whole_number, 0)
    arg_mappings: Mapping[str, str] = _key("arg_mappings", _mappings, {})
    notes: tuple[str, ...] = ()

    def slots_of(self, usable: int, *, where: str) -> int:
        """Return the slots of a trial.

        Raises:
            UserInputError: more are asked for than may be used.
        """
        if self.num_gpus > usable:
            raise UserInputError(
                f"asks for {self.num_gpus} slots, but only {usable} are available",
                where=f"{where}: {AUTOTUNING}.num_gpus",
                hint="Ask for fewer.",
            )
        return self.num_gpus or usable


# Keys without a field of their own.
_CHECKED: Mapping[str, Callable[[Any, str], Any]] = {
    "enabled": _flag,
    "mp_size": _at_most_one("model parallel jobs cannot be tuned"),
    "num_nodes": _at_most_one("trials run on one machine"),
    **dict.fromkeys(_WITHOUT_MEANING, lambda value, where: value),
}
_FIELDS = {key: each for each in fields(Autotuning) for key in each.metadata.get("keys", ())}
KEYS = frozenset({*_FIELDS, *_CHECKED})


def read(config: Mapping[str, Any], *, where: str) -> Autotuning:
    """Read the `autotuning` section of a DeepSpeed configuration; null counts as not given.

    Args:
        config: the DeepSpeed configuration; without the section, all is as by default.
        where: the file to name in errors.

    Raises:
        UserInputError: a key is unknown, or a value is impossible.
    """
    section, place = config.get(AUTOTUNING), f"{where}: {AUTOTUNING}"
    section = {} if section is None else section
    if not isinstance(section, Mapping):
        raise UserInputError(f"must be a mapping, not {section!r}", where=place)
    values: dict[str, Any] = {}
    for key, value in section.items():
        if key not in KEYS:
            raise UserInputError(
                f"there is no autotuning setting {key!r}",
                where=f"{place}.{key}",
                hint=did_you_mean(key, KEYS) + "Correct it or leave it out.",
            )
        if value is None:
            continue
        if key in _CHECKED:
            _CHECKED[key](value, f"{place}.{key}")
            continue
        own = _FIELDS[key]
        values[own.name] = own.metadata["read"](value, f"{place}.{key}")
    if "start_profile_step" in values:
        values.setdefault("end_profile_step", values["start_profile_step"] + _MORE_STEPS)
    if section.get("tuner_early_stopping", 5) is None:
        values["early_stopping"] = 0
    read_section = Autotuning(**values, notes=tuple(_notes(config, section, where)))
    _check_mappings(read_section.arg_mappings, config, place)
    return read_section


def _check_mappings(mappings: Mapping[str, str], config: Mapping[str, Any], where: str) -> None:
    """Raise UserInputError for a setting that looks like a misspelt one of the configuration."""
    others = flat({key: value for key, value in config.items() if key != AUTOTUNING})
    keys = {key for path in others for key in path.split(".")}
    settings = {*BATCH_KEYS, *keys, CHECKPOINTING}
    for setting in mappings:
        near = "" if setting in settings else did_you_mean(setting, settings)
        if near:
            raise UserInputError(
                f"the configuration has no setting {setting!r}",
                where=f"{where}.arg_mappings.{setting}",
                hint=near + "Correct it or leave it out.",
            )


def _notes(config: Mapping[str, Any], given: Mapping[str, Any], where: str) -> Iterator[str]:
    if given.get("enabled") is False:
        yield f"{where}: {AUTOTUNING}.enabled: false has no effect: you asked for tuning"
    for key, reason in _WITHOUT_MEANING.items():
        if given.get(key) is not None:
            yield f"{where}: {AUTOTUNING}.{key} has no effect: {reason}"
    if config.get("arg_mappings") is not None:
        yield f"{where}: arg_mappings has no effect: it belongs inside {AUTOTUNING}"
