"""The experiment to tune: its files and DeepSpeed configuration, and a trial's hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import TaggedScalar
from ruamel.yaml.error import YAMLError

from dsat.command import document, ds_config, value_lists
from dsat.command.ds_config import CONFIG_KEY, DSAT_SWITCHES_KEY, OVERWRITE_KEY, did_you_mean
from dsat.command.ds_types import normalize
from dsat.errors import UserInputError
from dsat.values.trial import BatchTriple


@dataclass(frozen=True)
class Experiment:
    """The experiment to tune.

    Attributes:
        path: experiment configuration; for a command, its DeepSpeed configuration or folder.
        name: name in output, and part of the run folder's name.
        includes: other files and folders that the script needs.
        entrypoint: command line or list of arguments, as written.
        hparams: `hyperparameters`, with Determined's `{type: const, val: x}` replaced by `x`.
        ds_config: the DeepSpeed configuration, with the first value of every list of values to try.
        ds_config_name: name of the DeepSpeed configuration in errors.
        overrides: the user's own `overwrite_deepspeed_args`, also with first values of lists.
        choices: the lists of values to try, by setting.
        arg_mappings: flags of the script that repeat a setting, by setting.
    """

    path: Path
    name: str
    config: Mapping[str, Any]
    model_dir: Path
    entrypoint: str | tuple[str, ...]
    hparams: Mapping[str, Any]
    ds_config: Mapping[str, Any]
    ds_config_name: str
    includes: tuple[Path, ...] = ()
    overrides: Mapping[str, Any] = field(default_factory=dict)
    slots_per_trial: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    arg_mappings: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_config(self) -> dict[str, Any]:
        """The user's DeepSpeed configuration with the user's overrides."""
        return ds_config.merge(self.ds_config, self.overrides)


# Unquoted words that the master (go-yaml 2) reads as booleans.
_TRUTHS = {
    spelling: truth
    for truth, words in ((True, "y yes on true"), (False, "n no off false"))
    for word in words.split()
    for spelling in (word, word.capitalize(), word.upper())
}
# Path of the user's own overrides in an experiment configuration.
OVERRIDES = f"hyperparameters.{OVERWRITE_KEY}"
_SLOTS = "resources.slots_per_trial"
# Keys of an experiment configuration (Determined 0.37, experiment configuration reference).
_KEYS = (
    "bind_mounts checkpoint_policy checkpoint_storage data debug description entrypoint "
    "environment hyperparameters integrations labels log_policies max_restarts "
    "min_checkpoint_period min_validation_period name optimizations perform_initial_validation "
    "profiling project records_per_epoch reproducibility resources scheduling_unit searcher "
    "workspace"
).split()


def read(config: Path, model_dir: Path, includes: Sequence[Path] = ()) -> Experiment:
    """Read and check an experiment configuration and its DeepSpeed configuration.

    `includes` are other files and folders that the script needs. Raises UserInputError if something
    is missing, unreadable or invalid.
    """
    for path in (model_dir, *includes):
        if not path.exists():
            raise UserInputError("does not exist", where=str(path))
    if not model_dir.is_dir():
        raise UserInputError(
            "is not a folder", where=str(model_dir), hint="Give the folder with the script."
        )
    data = read_mapping(config)
    where = str(config)
    for key in data.keys() - set(_KEYS):  # later versions of Determined may have other keys
        if str(key).isidentifier() and (hint := did_you_mean(key, _KEYS, 0.8).strip()):
            raise UserInputError(f"there is no key {key!r}", where=where, hint=hint)
    entrypoint = data.get("entrypoint")
    if not isinstance(entrypoint, (str, list)) or not entrypoint:
        raise UserInputError(
            f"must be a command, not {entrypoint!r}" if entrypoint else "is missing",
            where=f"{where}: entrypoint",
            hint='Write, for example, "entrypoint: deepspeed train.py".',
        )
    if isinstance(entrypoint, list):  # the master accepts text only, no numbers
        entrypoint = data["entrypoint"] = list(map(str, entrypoint))
    hparams = _hyperparameters(data, where)
    ds, ds_name = _ds_config(hparams[CONFIG_KEY], model_dir, includes, where)
    ds, listed = value_lists.split(ds, where=ds_name)
    overrides = hparams.get(OVERWRITE_KEY) or {}
    key = f"{where}: {OVERRIDES}"
    if not isinstance(overrides, Mapping):
        raise UserInputError(f"must be a mapping, not {overrides!r}", where=key)
    overrides, listed_over = value_lists.split(overrides, where=key)
    listed = {**listed, **listed_over}
    if listed:  # the script must not read the lists
        overwrite = {OVERWRITE_KEY: overrides} if overrides else {}
        hparams = {**hparams, CONFIG_KEY: ds_config.prepare_for_training(ds), **overwrite}
    _check_searcher(data, where)
    slots = ds_config.at(data, _SLOTS)
    return Experiment(
        path=config,
        name=str(data.get("name") or model_dir.resolve().name),
        config=data,
        model_dir=model_dir,
        includes=tuple(includes),
        entrypoint=entrypoint if isinstance(entrypoint, str) else tuple(entrypoint),
        hparams=hparams,
        ds_config=ds,
        ds_config_name=ds_name,
        overrides=overrides,
        slots_per_trial=1 if slots is None else ds_config.whole_number(slots, f"{where}: {_SLOTS}"),
        env=_environment(data, where),
        choices=listed,
    )


def make_experiment(
    command: Sequence[str],
    name: str,
    folder: Path,
    config: Path | Mapping[str, Any],
    config_name: str = "deepspeed.initialize",
) -> Experiment:
    """Make an experiment from a command and a DeepSpeed configuration.

    `config` is a file, or the content, which errors call `config_name`. `folder` is the command's
    working folder, and `name` is part of the run folder's name.
    """
    if isinstance(config, Path):
        path, where, content = config, str(config), ds_config.read(config)
    else:
        path, where, content = folder, config_name, normalize(config)
    ds, listed = value_lists.split(content, where=where)
    return Experiment(
        path=path,
        name=name,
        config={"name": name, "entrypoint": list(command)},
        model_dir=folder,
        entrypoint=tuple(command),
        hparams={CONFIG_KEY: ds_config.prepare_for_training(ds)},
        ds_config=ds,
        ds_config_name=where,
        choices=listed,
    )


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML or JSON file that holds a mapping.

    Raises:
        UserInputError: the file cannot be read, cannot be parsed, or holds no mapping.
    """
    try:
        text = document.read_text(path)
        # Neither a master nor DeepSpeed reads values that JSON cannot hold.
        is_json = path.suffix == ".json"
        data = ds_config.parse(text) if is_json else document.copy_as_json(parse_yaml(text))
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = f"is not valid YAML: {getattr(error, 'problem', 'cannot be parsed')}{place}"
    except RecursionError:
        problem = "is nested too deeply"
    except ValueError as error:
        problem = str(error)
    else:
        if isinstance(data, dict):
            return data
        problem = "is not a mapping of keys to values"
    raise UserInputError(problem, where=str(path))


def parse_yaml(text: str) -> Any:
    """Parse YAML as a Determined master does: unquoted, 1e-4 is a number and `on` is true."""
    reader = YAML(pure=True)  # the pure reader has a separate type for quoted text
    reader.preserve_quotes = True
    data = reader.load(text)
    document.check_size(data)
    return _convert_as_master(data)


def _convert_as_master(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _convert_as_master(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_convert_as_master(item) for item in value]
    if isinstance(value, TaggedScalar):
        return value.value
    if type(value) is str and value in _TRUTHS:
        return _TRUTHS[value]
    return str(value) if isinstance(value, str) else value


def trial_hparams(
    hparams: Mapping[str, Any],
    overrides: Mapping[str, Any],
    switches: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the hyperparameters of a trial, which `dsat.get_ds_config_from_hparams` applies.

    `overrides` are the trial's DeepSpeed settings, `switches` its values of script switches.
    """
    overwrite = hparams.get(OVERWRITE_KEY) or {}
    merged = {**hparams, OVERWRITE_KEY: ds_config.merge(overwrite, overrides)}
    return {**merged, DSAT_SWITCHES_KEY: dict(switches)} if switches else merged


def length_of_full_run(config: Mapping[str, Any]) -> int:
    """Return the number in `searcher.max_length` (a number, or `{unit: number}`); 1 if missing."""
    length = ds_config.at(config, "searcher.max_length")
    if isinstance(length, Mapping):
        [length] = length.values()
    return 1 if length is None else int(length)


def length_in_units(steps: int, config: Mapping[str, Any], batch: BatchTriple) -> int:
    """Convert optimizer steps to the searcher's unit: samples for `records`, else micro batches."""
    length = ds_config.at(config, "searcher.max_length")
    if isinstance(length, Mapping) and "records" in length:
        return steps * batch.train_batch_size
    return steps * batch.gas


def _hyperparameters(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    hparams = data.get("hyperparameters")
    where = f"{where}: hyperparameters"
    if not isinstance(hparams, Mapping) or CONFIG_KEY not in hparams:
        raise UserInputError(
            "is missing",
            where=f"{where}.{CONFIG_KEY}",
            hint=f"Add the path of your DeepSpeed configuration, for example {CONFIG_KEY}: "
            "ds_config.json.",
        )
    constants = {str(key): _constant(value, f"{where}.{key}") for key, value in hparams.items()}
    inline = {key: constants.get(key) for key in (CONFIG_KEY, OVERWRITE_KEY)}
    return constants | {
        key: normalize(value) for key, value in inline.items() if isinstance(value, Mapping)
    }


def _constant(value: Any, where: str) -> Any:
    """Return a value without Determined's `{type: const, val: x}`; refuse ranges."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "const":
        return value.get("val")
    if kind in ("int", "double", "log", "categorical"):
        raise UserInputError(
            f"is a range ({kind}), but dsat searches only DeepSpeed's settings",
            where=where,
            hint="Replace the range with one value.",
        )
    if isinstance(value, Mapping) and not where.endswith((CONFIG_KEY, OVERWRITE_KEY)):
        return {str(key): _constant(each, f"{where}.{key}") for key, each in value.items()}
    return value


def _ds_config(
    value: Any, model_dir: Path, includes: Sequence[Path], where: str
) -> tuple[dict[str, Any], str]:
    key = f"{where}: hyperparameters.{CONFIG_KEY}"
    if isinstance(value, Mapping):
        return dict(value), key
    if not isinstance(value, str) or not value:
        raise UserInputError(f"must be a path, not {value!r}", where=key)
    for folder in (model_dir, *(include.parent for include in includes)):
        if (folder / value).is_file():
            return ds_config.read(folder / value), str(folder / value)
    raise UserInputError(
        f"there is no file {value!r} in the folder {str(model_dir)!r}",
        where=key,
        hint="The path is relative to the model folder.",
    )


def _check_searcher(data: Mapping[str, Any], where: str) -> None:
    """Check `searcher.max_length`: a whole number, or `{unit: whole number}`."""
    searcher = data.get("searcher") or {}
    if not isinstance(searcher, Mapping):
        raise UserInputError(f"must be a mapping, not {searcher!r}", where=f"{where}: searcher")
    length = searcher.get("max_length", 1)
    values = list(length.values()) if isinstance(length, Mapping) else [length]
    if len(values) != 1 or isinstance(values[0], bool) or not isinstance(values[0], int):
        raise UserInputError(
            f"must be a whole number, or a mapping such as {{batches: 100}}, not {length!r}",
            where=f"{where}: searcher.max_length",
            hint="For example: max_length: {batches: 100}",
        )


def _environment(data: Mapping[str, Any], where: str) -> dict[str, str]:
    listed = ds_config.at(data, "environment.environment_variables") or []
    where = f"{where}: environment.environment_variables"
    # Variables may be listed by kind of device. All lists count, as a machine has one kind only.
    parts = [part or [] for part in listed.values()] if isinstance(listed, Mapping) else [listed]
    env = {}
    for part in parts:
        if not isinstance(part, list):
            raise UserInputError(
                f"must be a list of NAME=VALUE, or one such list per device type, not {part!r}",
                where=where,
            )
        for entry in part:
            name, equals, value = str(entry).partition("=")
            if not equals or not name:
                raise UserInputError(f"{entry!r} is not of the form NAME=VALUE", where=where)
            env[name] = value
    return env
