"""Arguments of the Python API: their types, and their conversion to settings.

Options on the command line have the same names; the commands' settings classes describe them.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from dsat.command.ds_config import did_you_mean
from dsat.errors import UserInputError
from dsat.options import Option
from dsat.prepare.target import names_experiment

PathLike = str | os.PathLike[str]
Target = PathLike | Sequence[PathLike]
Size = int | str  # bytes, or text such as "24GiB"
Duration = float | str  # seconds, or text such as "10m"
Fraction = float | str  # or text such as "2%"


class TargetOptions(TypedDict, total=False):
    """Options that describe a target."""

    ds_config: PathLike | None
    add_files: PathLike | Sequence[PathLike]


class ModelOptions(TargetOptions, total=False):
    """Options that `dsat.estimate` and `dsat.project` share."""

    model: PathLike | None
    seq_length: int | None
    lora: Mapping[str, Any] | str | None
    dtype: str | None
    activation_checkpointing: str | None


class EstimateOptions(ModelOptions, total=False):
    """The options of `dsat.estimate`."""

    slot_memory: Size | Sequence[Size]
    host_memory: Size | None
    devices: int | Sequence[int]
    formula: bool


class ProjectOptions(ModelOptions, total=False):
    """The options of `dsat.project`."""

    to: str
    train_batch_size: int | None
    network: float | None
    tokens: float | str | None
    price: float | None
    from_run: PathLike | None


class TuneOptions(TargetOptions, total=False):
    """The options of `dsat.tune`."""

    arg_mapping: Mapping[str, str] | Sequence[str] | str
    max_trials: int
    metric: str
    finals: int | None
    random_seed: int
    memory_model: str
    zero_stages: int | Sequence[int] | None
    search: str | Sequence[str]
    keep: str | Sequence[str]
    vary: Mapping[str, Sequence[Any]] | Sequence[str] | str
    nvme_path: str | None
    train_batch_size: int | str
    max_train_batch_size: int | None
    min_micro_batch: int
    max_micro_batch: int | None
    divisible_by: int
    max_seq_length: int | None
    trial_timeout: Duration
    slot_memory: Size | None
    start_profile_step: int
    end_profile_step: int
    max_measured_steps: int
    devices: int | None
    max_slots: int | None
    max_concurrent_trials: int
    engine: str
    no_fork: bool
    run_dir: PathLike | None
    resume: bool
    run_full_experiment: bool
    dry_run: bool
    search_runner_config: PathLike | None
    max_search_runner_restarts: int
    detach: bool
    ray_address: str | None
    nodes: int | None
    gpus_per_node: str | None
    stop_when: Fraction
    early_stopping: int | None
    max_rungs: int
    min_binary_search_trials: int
    asha_early_stopping: int
    divisor: int
    search_range_factor: float | None
    trials_per_random_config: int
    num_micro_batches: int | None


def read_target(target: Target, model_dir: PathLike | None) -> dict[str, Any]:
    """Convert a target to settings; raise UserInputError if it is neither a path nor a command."""
    if isinstance(target, (str, os.PathLike)):
        path = Path(target)
        if len(str(path).split()) > 1 and not os.path.exists(path):
            raise UserInputError(
                "there is no such file",
                where=f"target {target!r}",
                hint='Give a command as a list of words, such as ["deepspeed", "train.py"].',
            )
        if model_dir is None and not names_experiment(path.name):
            return {"command": (str(path),)}
        return {"config": path, "model_dir": path.parent if model_dir is None else Path(model_dir)}
    if model_dir is not None:
        raise UserInputError("is for an experiment configuration, not a command", where="model_dir")
    words = list(target) if isinstance(target, Sequence) else []
    if not words or not all(isinstance(word, (str, os.PathLike)) for word in words):
        raise UserInputError(
            "is neither a path nor a list of words",
            where=f"target {target!r}",
            hint='Give a script, an experiment configuration, or a command such as ["train.py"].',
        )
    return {"command": tuple(map(os.fspath, words))}


def read_keywords(
    options: Iterable[Option], given: Mapping[str, Any], called: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Read keyword arguments of the Python API.

    Args:
        options: options of the API function.
        given: values by keyword.
        called: the call's name in messages, such as `project()`.

    Returns:
        The converted values, and the keywords that the user wrote. Both are mappings by the name of
        the setting, or by keyword for options of a method or of a place such as Ray.

    Raises:
        UserInputError: a value is wrong.
        TypeError: a keyword is unknown.
    """
    by_keyword = {
        keyword: each for each in options if not each.shell_only for keyword in each.keywords
    }
    values, words = {}, {}
    for keyword, value in given.items():
        if keyword not in by_keyword:
            hint = did_you_mean(keyword, by_keyword).strip()
            problem = f"{called} got an unexpected keyword argument {keyword!r}. {hint}"
            raise TypeError(problem.strip())
        declared = by_keyword[keyword]
        name = declared.name or declared.keyword
        try:
            values[name] = declared.from_python(value)
        except ValueError as error:
            raise UserInputError(str(error), where=keyword) from None
        words[name] = keyword
    return values, words


def document(function: Any, options: Iterable[Option]) -> None:
    """Add options to a function's signature and docstring, for `help()` and notebooks."""
    signature = inspect.signature(function)
    known = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    listed = [own for own in options if not own.shell_only]
    keywords = [
        inspect.Parameter(own.keyword, inspect.Parameter.KEYWORD_ONLY, default=own.default)
        for own in listed
    ]
    function.__signature__ = signature.replace(parameters=[*known, *keywords])
    lines = [f"    {own.keyword}: {own.help_text.replace('%%', '%')}" for own in listed]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__), "", "Options:", *lines])
