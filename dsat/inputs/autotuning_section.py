"""The `autotuning` section of a configuration, as DeepSpeed's own autotuner reads it.

The keys are those of deepspeed/autotuning/{constants,config}.py (0.19.8), of its README and of
https://www.deepspeed.ai/docs/config-json/#autotuning. `start_step`, `end_step`, `num_gpus` and
`num_nodes` come from its first releases, whose configurations are still around.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsat.errors import UserInputError
from dsat.inputs.ds_config import BATCH_KEYS, did_you_mean, whole_number
from dsat.inputs.script_args import CHECKPOINTING
from dsat.inputs.value_lists import distinct, listed_values
from dsat.values.trial import TrialOptions

SECTION = "autotuning"

# `fwd` and `bwd` are what its metric file calls them now, the whole words what it did before.
_METRICS = {
    "throughput": "throughput",
    "latency": "latency",
    "FLOPS": "FLOPS_per_gpu",
    "flops": "FLOPS_per_gpu",
    "FLOPS_per_gpu": "FLOPS_per_gpu",
    "tokens_per_second": "tokens_per_second",
    "forward": "forward",
    "fwd": "forward",
    "backward": "backward",
    "bwd": "backward",
    "step": "step",
}
_METHODS = {"gridsearch": "gridsearch", "random": "random", "model_based": "model"}

_WITHOUT_MEANING = {
    "metric_path": "every trial reports to dsat itself",
    "model_info": "dsat always profiles the model itself",
    "model_info_path": "dsat always profiles the model itself",
}
_KEYS = frozenset(
    """
    arg_mappings enabled end_profile_step end_step exps_dir fast max_train_batch_size
    max_train_micro_batch_size_per_gpu metric metric_path min_train_batch_size
    min_train_micro_batch_size_per_gpu model_info model_info_path mp_size num_gpus num_nodes
    num_tuning_micro_batch_sizes overwrite results_dir start_profile_step start_step
    tuner_early_stopping tuner_num_trials tuner_type
    """.split()
)


@dataclass(frozen=True)
class Autotuning:
    """The `autotuning` section of a DeepSpeed configuration.

    Attributes:
        metric: one of `dsat.values.trial.METRIC_NAMES`.
        start_profile_step, end_profile_step: the first and the last optimizer step measured. If
            the last is not written, as many as in any other search, more than DeepSpeed's own 3.
        fast: search ZeRO stages and micro batches only.
        method: `gridsearch`, `random`, or `model` for `model_based`.
        early_stopping: end a ZeRO stage after so many trials without a better one.
        max_trials: the most trials of one ZeRO stage.
        max_train_batch_size: the largest global batch; None if there is no limit.
        num_micro_batches: how many micro batches are tried with one ZeRO section.
        arg_mappings: setting -> the script's flag, with its leading dashes.
        results_dir, exps_dir: as written: relative to where the command is run.
        overwrite: throw earlier results away. DeepSpeed's own default is true; here it is false.
        notes: a line for the user on each key that is accepted but has no effect here.
    """

    metric: str
    start_profile_step: int
    end_profile_step: int
    fast: bool
    method: str
    early_stopping: int | None
    max_trials: int
    max_train_batch_size: int | None
    min_train_batch_size: int
    max_micro_batch: int
    min_micro_batch: int
    num_micro_batches: int
    arg_mappings: Mapping[str, str]
    results_dir: Path
    exps_dir: Path
    overwrite: bool
    notes: tuple[str, ...]


def read(config: Mapping[str, Any], *, where: str) -> Autotuning:
    """Read the `autotuning` section of a DeepSpeed configuration; null counts as not given.

    Args:
        config: the DeepSpeed configuration; without the section, all is as by default.
        where: the file to name in errors.

    Raises:
        UserInputError: a key is unknown, a value cannot be, or two contradict each other.
    """
    section = _Section(config, where)
    section.refuse_unknown()
    mp_size = section.whole("mp_size", 1)
    if mp_size > 1:
        raise UserInputError(
            f"model parallel jobs cannot be tuned, and mp_size is {mp_size}",
            where=section.at("mp_size"),
            hint="Set it to 1 if the model is not split over GPUs.",
        )
    _gpus(section)
    start_key, start = section.alias("start_profile_step", "start_step")
    end_key, end = section.alias("end_profile_step", "end_step")
    start = 3 if start is None else start
    if end is None:  # DeepSpeed's own default is three steps, whose interval means little
        end = start + TrialOptions.end_step - TrialOptions.start_step
    section.in_order(start_key, start, end_key, end)
    smallest = section.whole("min_train_micro_batch_size_per_gpu", 1)
    largest = section.whole("max_train_micro_batch_size_per_gpu", 1024)
    section.in_order(
        "min_train_micro_batch_size_per_gpu",
        smallest,
        "max_train_micro_batch_size_per_gpu",
        largest,
    )
    min_total = section.whole("min_train_batch_size", 1)
    max_total = section.whole("max_train_batch_size", 0, least=0) or None
    if max_total is not None:
        section.in_order("min_train_batch_size", min_total, "max_train_batch_size", max_total)
    patience = section.whole("tuner_early_stopping", 5, least=0)
    if section.says_null("tuner_early_stopping"):
        patience = 0
    return Autotuning(
        metric=section.one_of("metric", _METRICS, "throughput"),
        start_profile_step=start,
        end_profile_step=end,
        fast=section.flag("fast", True),
        method=section.one_of("tuner_type", _METHODS, "gridsearch"),
        early_stopping=patience or None,
        max_trials=section.whole("tuner_num_trials", 50),
        max_train_batch_size=max_total,
        min_train_batch_size=min_total,
        max_micro_batch=largest,
        min_micro_batch=smallest,
        num_micro_batches=section.whole("num_tuning_micro_batch_sizes", 3),
        arg_mappings=_arg_mappings(config, section),
        results_dir=section.path("results_dir", "autotuning_results"),
        exps_dir=section.path("exps_dir", "autotuning_exps"),
        overwrite=section.flag("overwrite", False),
        notes=tuple(_notes(config, section)),
    )


def slots(config: Mapping[str, Any], *, where: str, available: int) -> int:
    """Return the slots of a trial: `autotuning.num_gpus`, by default all that are available.

    Args:
        config: the DeepSpeed configuration.
        where: the file to name in errors.
        available: slots of this machine, or as many of them as may be used (`--num_gpus`).

    Raises:
        UserInputError: more are asked for than there are, or several numbers or machines.
    """
    section = _Section(config, where)
    count = _gpus(section) or available
    if count > available:
        raise UserInputError(
            f"asks for {count} slots, and {available} may be used",
            where=section.at("num_gpus"),
            hint="Ask for fewer.",
        )
    return count


class _Section:
    """The `autotuning` section, with a reader for each kind of value."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        section = config.get(SECTION)
        self.where = f"{where}: {SECTION}"
        if section is not None and not isinstance(section, Mapping):
            raise UserInputError(f"must be a mapping, not {section!r}", where=self.where)
        self._values: Mapping[str, Any] = section or {}

    def at(self, key: str) -> str:
        return f"{self.where}.{key}"

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def says_null(self, key: str) -> bool:
        return key in self._values and self._values[key] is None

    def refuse_unknown(self) -> None:
        for key in self._values:
            if key not in _KEYS:
                raise UserInputError(
                    f"there is no autotuning setting {key!r}",
                    where=self.at(key),
                    hint=did_you_mean(key, _KEYS) + "Correct it or leave it out.",
                )

    def whole(self, key: str, default: int, *, least: int = 1) -> int:
        value = self.get(key)
        return default if value is None else whole_number(value, self.at(key), least=least)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UserInputError(f"must be true or false, not {value!r}", where=self.at(key))
        return value

    def path(self, key: str, default: str) -> Path:
        value = self.get(key)
        if value is None:
            return Path(default)
        if not isinstance(value, str) or not value.strip():
            raise UserInputError(f"must be the path of a folder, not {value!r}", where=self.at(key))
        return Path(value)

    def one_of(self, key: str, known: Mapping[str, str], default: str) -> str:
        value = self.get(key)
        if value is None:
            return default
        name = value.strip() if isinstance(value, str) else ""
        if name not in known:
            raise UserInputError(
                f"must be one of {', '.join(known)}, not {value!r}",
                where=self.at(key),
                hint=did_you_mean(name, known).strip(),
            )
        return known[name]

    def alias(self, key: str, older: str) -> tuple[str, int | None]:
        """Return the name under which a setting is given, and its value or None."""
        if self.get(older) is None:
            return key, None if self.get(key) is None else self.whole(key, 0)
        value = self.whole(older, 0)
        if self.get(key) is not None and self.whole(key, 0) != value:
            raise UserInputError(
                f"{key} {self.get(key)} and {older} {value} are two names of one setting",
                where=self.at(older),
                hint=f"Leave {older} out.",
            )
        return older, value

    def in_order(self, low_key: str, low: int, high_key: str, high: int) -> None:
        if low > high:
            raise UserInputError(
                f"{low_key} {low} is more than {high_key} {high}",
                where=self.at(low_key),
                hint="Correct one of them.",
            )


def _arg_mappings(config: Mapping[str, Any], section: _Section) -> dict[str, str]:
    given = section.get("arg_mappings")
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise UserInputError(
            f"must be a mapping from settings to flags, not {given!r}",
            where=section.at("arg_mappings"),
        )
    settings = {*BATCH_KEYS, *_all_keys(config), CHECKPOINTING}
    mappings: dict[str, str] = {}
    for raw_setting, raw_flag in given.items():
        setting = str(raw_setting).strip()
        where = section.at(f"arg_mappings.{setting}")
        if raw_flag is None:
            continue
        near = "" if setting in settings else did_you_mean(setting, settings)
        if near:
            raise UserInputError(
                f"the configuration has no setting {setting!r}",
                where=where,
                hint=near + "Correct it or leave it out.",
            )
        name = raw_flag.strip() if isinstance(raw_flag, str) else ""
        if not name.lstrip("-") or len(name.split()) > 1:
            raise UserInputError(
                f"must be a flag of the training script, not {raw_flag!r}",
                where=where,
                hint='For example "--per_device_train_batch_size".',
            )
        flag = name if name.startswith("-") else f"--{name}"
        if mappings.setdefault(setting, flag) != flag:
            raise UserInputError(
                f"is mapped twice, to {mappings[setting]} and to {flag}", where=where
            )
    return mappings


def _notes(config: Mapping[str, Any], section: _Section) -> Iterator[str]:
    if section.get("enabled") is not None and not section.flag("enabled", True):
        yield f"{section.at('enabled')}: false has no effect: you asked for tuning"
    for key, reason in _WITHOUT_MEANING.items():
        if section.get(key) is not None:
            yield f"{section.at(key)} has no effect: {reason}"
    if config.get("arg_mappings") is not None:
        where = section.where.removesuffix(f": {SECTION}")
        yield f"{where}: arg_mappings has no effect: it belongs inside {SECTION}"


def _gpus(section: _Section) -> int | None:
    """Return the checked `num_gpus`."""
    nodes = _number(section, "num_nodes")
    if nodes not in (None, 1):
        raise UserInputError(
            f"trials run on one machine, not on {nodes}",
            where=section.at("num_nodes"),
            hint="Set it to 1.",
        )
    return _number(section, "num_gpus")


def _number(section: _Section, key: str) -> int | None:
    """Return a number, which may be the only one of a list; None if it is not given."""
    value = section.get(key)
    if value is None:
        return None
    values = listed_values(value, section.at(key)) or [value]
    found: list[int] = distinct(whole_number(each, section.at(key)) for each in values)
    if len(found) > 1:
        raise UserInputError(
            "lists several numbers, and one run searches with one of them",
            where=section.at(key),
            hint="Run the command once for each.",
        )
    return found[0]


def _all_keys(config: Mapping[str, Any]) -> Iterator[str]:
    for key, value in config.items():
        if key != SECTION:
            yield str(key)
            if isinstance(value, Mapping):
                yield from _all_keys(value)
