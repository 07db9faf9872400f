"""The `autotuning` section of a DeepSpeed configuration, which sets defaults of a search.

The keys are from deepspeed/autotuning/{constants,config}.py and README.md (0.19.8), and from
https://www.deepspeed.ai/docs/config-json/#autotuning. `start_step`, `end_step`, `num_gpus` and
`num_nodes` come from the autotuner's first releases: old configurations still have them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsat.command.ds_config import AUTOTUNING, BATCH_KEYS, did_you_mean, flat, whole_number
from dsat.command.switches import CHECKPOINTING
from dsat.errors import UserInputError
from dsat.options import ANY
from dsat.search import usual_options
from dsat.space.deepspeed_settings import SETTING_NAMES
from dsat.tuning.settings import Settings
from dsat.values.objective import METRICS
from dsat.values.trial import TrialOptions

_MORE_STEPS = TrialOptions.end_step - TrialOptions.start_step

_METRICS = {
    name: metric
    for metric, declared in METRICS.items()
    for name in (metric, *declared.autotuner_names)
}
_METHODS = {"gridsearch": "gridsearch", "random": "random", "model_based": "model"}

_WITHOUT_EFFECT = {
    "metric_path": "trials report directly to dsat",
    "min_train_batch_size": "--train-batch-size sets the global batch",
    "overwrite": "every run has its own folder, and dsat deletes none",
    "model_info": "dsat always profiles the model itself",
    "model_info_path": "dsat always profiles the model itself",
}


@dataclass(frozen=True)
class Section:
    """An `autotuning` section.

    Attributes:
        values: defaults for settings of the search and options of its method, by name.
        keys: full keys in the file, by the name of the setting or option.
        results_dir, exps_dir: folders for DeepSpeed's result files and for descriptions of trials;
            None if the section names none.
        notes: messages about accepted keys without effect.
    """

    values: Mapping[str, Any]
    keys: Mapping[str, str]
    results_dir: Path | None = None
    exps_dir: Path | None = None
    notes: tuple[str, ...] = ()

    def apply(self, settings: Settings) -> Settings:
        """Return settings with the section's values; options that the user gave take precedence."""
        explicit = settings.given
        values = {name: value for name, value in self.values.items() if name not in explicit}
        method = values.get("method", settings.method)
        if values.pop("fast", False) and "fix" not in explicit:
            values["fix"] = tuple(name for name in SETTING_NAMES if name not in settings.tune)
        if "arg_mappings" in self.values:
            values["arg_mappings"] = {**self.values["arg_mappings"], **settings.arg_mappings}
        if "train_batch_size" in explicit and settings.train_batch_size != ANY:
            values.pop("max_train_batch_size", None)
        elif "max_train_batch_size" in values:
            values["train_batch_size"] = None
        if "end_profile_step" in values and "max_profile_steps" not in explicit:
            start = values.get("start_profile_step", settings.start_profile_step)
            measured = values["end_profile_step"] - start + 1
            values["max_profile_steps"] = max(settings.max_profile_steps, measured)
        search_values = {name: values.pop(name) for name in _SEARCH_OPTIONS if name in values}
        options = {k: search_values.get(k, usual) for k, usual in usual_options(method).items()}
        options |= {k: v for k, v in settings.search_options.items() if k in explicit}
        return replace(
            settings, **values, search_options=options, given={**self.keys, **settings.given}
        )


# -- values


def _number_or_none(value: Any, where: str) -> int | None:
    return whole_number(value, where, least=0) or None


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise UserInputError(f"must be true or false, not {value!r}", where=where)
    return value


def _folder(value: Any, where: str) -> Path:
    if not isinstance(value, str) or not value.strip():
        raise UserInputError(f"must be the path of a folder, not {value!r}", where=where)
    return Path(value)


def _one_of(names: Mapping[str, str]) -> Callable[[Any, str], str]:
    def read_name(value: Any, where: str) -> str:
        name = value.strip() if isinstance(value, str) else ""
        if name not in names:
            raise UserInputError(
                f"must be one of {', '.join(names)}, not {value!r}",
                where=where,
                hint=did_you_mean(name, names).strip(),
            )
        return names[name]

    return read_name


def _limit_to_one(problem: str) -> Callable[[Any, str], None]:
    def check(value: Any, where: str) -> None:
        if whole_number(value, where) > 1:
            raise UserInputError(f"is {value}, but {problem}", where=where, hint="Set it to 1.")

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


Reader = Callable[[Any, str], Any]
# By key: the name of the setting or option, and the function that reads its value.
_VALUES: Mapping[str, tuple[str, Reader]] = {
    "metric": ("metric", _one_of(_METRICS)),
    "start_profile_step": ("start_profile_step", whole_number),
    "start_step": ("start_profile_step", whole_number),
    "end_profile_step": ("end_profile_step", whole_number),
    "end_step": ("end_profile_step", whole_number),
    "fast": ("fast", _flag),
    "tuner_type": ("method", _one_of(_METHODS)),
    # The trial of the user's own configuration comes in addition.
    "tuner_num_trials": ("max_trials", lambda value, where: whole_number(value, where) + 1),
    "max_train_batch_size": ("max_train_batch_size", _number_or_none),
    "max_train_micro_batch_size_per_gpu": ("max_micro_batch", whole_number),
    "min_train_micro_batch_size_per_gpu": ("min_micro_batch", whole_number),
    "num_gpus": ("slots", whole_number),
    "arg_mappings": ("arg_mappings", _mappings),
    "tuner_early_stopping": ("early_stopping", _number_or_none),
    "num_tuning_micro_batch_sizes": ("num_micro_batches", whole_number),
    "results_dir": ("results_dir", _folder),
    "exps_dir": ("exps_dir", _folder),
}
_SEARCH_OPTIONS = ("early_stopping", "num_micro_batches")  # options of a method
_CHECKED: Mapping[str, Reader] = {
    "enabled": _flag,
    "mp_size": _limit_to_one("dsat tunes model parallelism only with AutoTP or Ulysses"),
    "num_nodes": _limit_to_one("dsat takes the machines from a hostfile, Slurm or Ray"),
    **dict.fromkeys(_WITHOUT_EFFECT, lambda value, where: value),
}
KEYS = frozenset({*_VALUES, *_CHECKED})


def read(config: Mapping[str, Any], *, where: str) -> Section | None:
    """Read the `autotuning` section of a DeepSpeed configuration; None if missing or disabled.

    Null counts as missing. Raises UserInputError for unknown keys and bad values, even if disabled.
    """
    section, place = config.get(AUTOTUNING), f"{where}: {AUTOTUNING}"
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise UserInputError(f"must be a mapping, not {section!r}", where=place)
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in section.items():
        whole_key = f"{place}.{key}"
        if key not in KEYS:
            raise UserInputError(
                f"there is no autotuning setting {key!r}",
                where=whole_key,
                hint=did_you_mean(key, KEYS) + "Correct it or leave it out.",
            )
        if value is None:
            continue
        if key in _CHECKED:
            _CHECKED[key](value, whole_key)
        else:
            name, reader = _VALUES[key]
            values[name], keys[name] = reader(value, whole_key), whole_key
    if section.get("enabled") is False:
        return None
    if "start_profile_step" in values:
        values.setdefault("end_profile_step", values["start_profile_step"] + _MORE_STEPS)
    _check_mappings(values.get("arg_mappings", {}), config, place)
    folders = {key: values.pop(key, None) for key in ("results_dir", "exps_dir")}
    ignored = [key for key in _WITHOUT_EFFECT if section.get(key) is not None]
    notes = [f"{place}.{key} has no effect: {_WITHOUT_EFFECT[key]}" for key in ignored]
    if config.get("arg_mappings") is not None:
        notes.append(f"{where}: arg_mappings has no effect: it belongs inside {AUTOTUNING}")
    return Section(values, keys, **folders, notes=tuple(notes))


def _check_mappings(mappings: Mapping[str, str], config: Mapping[str, Any], where: str) -> None:
    """Raise UserInputError if a mapped setting looks like a misspelt key of the configuration."""
    settings_outside = flat({key: value for key, value in config.items() if key != AUTOTUNING})
    keys = {key for path in settings_outside for key in path.split(".")}
    settings = {*BATCH_KEYS, *keys, CHECKPOINTING}
    for setting in mappings:
        near = "" if setting in settings else did_you_mean(setting, settings)
        if near:
            raise UserInputError(
                f"the configuration has no setting {setting!r}",
                where=f"{where}.arg_mappings.{setting}",
                hint=near + "Correct it or leave it out.",
            )
