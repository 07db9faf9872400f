"""The user's own command, with copies of its configuration files that hold the best configuration.

Read for it: accelerate 1.15 (commands/launch.py, commands/config/config_args.py), axolotl 0.19,
LLaMA-Factory 0.9.5 (hparams/parser.py), TRL 1.16 (cli/accelerate_config.py), ms-swift 4.6
(cli/main.py) and transformers 5.23 (hf_argparser.py).
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from dsat.inputs import script_args
from dsat.inputs.ds_config import BATCH_KEYS
from dsat.inputs.switches import CHECKPOINTING, NEWER_CHECKPOINTING

_, _MICRO_BATCH, _GAS = BATCH_KEYS
_SUFFIXES = (".yaml", ".yml", ".json")
_LARGEST_BYTES = 2**20  # what is larger is data
_LAUNCHERS = (
    ("accelerate-launch",),
    ("accelerate", "launch"),
    ("python", "-m", "accelerate.commands.launch"),
)
_CONFIG_FILE, _DEEPSPEED_FILE = "--config_file", "--deepspeed_config_file"
_GAS_FLAG = f"--{_GAS}"


@dataclass(frozen=True)
class Form:
    """Kind of configuration file that frameworks read.

    Attributes:
        marks: any of these keys, or of these words of keys together, tells a file of this kind.
        config: dotted key of the DeepSpeed configuration's path.
        keys: keys of the batch sizes, by DeepSpeed's names.
        accelerate: key of a configuration of accelerate.
        in_the_file: dotted keys of settings that the DeepSpeed file has in their place.
        fields: keys of the fields of TrainingArguments that the framework takes from the file;
            empty if it takes all of them, by their own names.
        opposites: keys that switch off what a field switches on, by the field.
    """

    marks: tuple[str, ...]
    config: str
    keys: Mapping[str, str] = field(default_factory=dict)
    accelerate: str = ""
    in_the_file: tuple[str, ...] = ()
    fields: Mapping[str, str] = field(default_factory=dict)
    opposites: Mapping[str, str] = field(default_factory=dict)

    def is_of(self, data: Collection[str]) -> bool:
        """Return whether a file with these keys is of this kind."""
        return any(all(key in data for key in mark.split()) for mark in self.marks)

    def key_of(self, name: str) -> str | None:
        """Return the key that sets a field of TrainingArguments; None if there is none."""
        return self.fields.get(name) if self.fields else name


_SECTION = "deepspeed_config"
ACCELERATE = Form(
    ("distributed_type",),
    f"{_SECTION}.deepspeed_config_file",
    # A configuration that names a DeepSpeed file must not say itself what is in there. The flag of
    # zero.Init follows the file's stage, as in the trials.
    in_the_file=(
        "mixed_precision",
        f"{_SECTION}.gradient_accumulation_steps",
        f"{_SECTION}.gradient_clipping",
        f"{_SECTION}.offload_optimizer_device",
        f"{_SECTION}.offload_optimizer_nvme_path",
        f"{_SECTION}.offload_param_device",
        f"{_SECTION}.offload_param_nvme_path",
        f"{_SECTION}.zero3_init_flag",
        f"{_SECTION}.zero3_save_16bit_model",
        f"{_SECTION}.zero_stage",
    ),
)
AXOLOTL = Form(
    tuple(f"base_model {key}" for key in ("micro_batch_size", "datasets", "pretraining_dataset")),
    "deepspeed",
    {_MICRO_BATCH: "micro_batch_size", _GAS: _GAS},
    # Those that core/builders/base.py of axolotl reads (July 2026).
    fields={
        "optim": "optimizer",
        "dataloader_num_workers": "dataloader_num_workers",
        "dataloader_pin_memory": "dataloader_pin_memory",
        "torch_compile": "torch_compile",
        CHECKPOINTING: CHECKPOINTING,
        f"{CHECKPOINTING}_kwargs": f"{CHECKPOINTING}_kwargs",
    },
)
# TRL, ms-swift, and scripts whose HfArgumentParser reads a file.
TRAINER = Form(
    ("per_device_train_batch_size", "deepspeed", "accelerate_config"),
    "deepspeed",
    {_MICRO_BATCH: "per_device_train_batch_size", _GAS: _GAS},
    accelerate="accelerate_config",
)
# It recomputes activations unless it is told not to (model/model_utils/checkpointing.py).
LLAMA_FACTORY = replace(
    TRAINER,
    marks=("finetuning_type", "disable_gradient_checkpointing"),
    opposites={CHECKPOINTING: f"disable_{CHECKPOINTING}"},
)
FORMS = (ACCELERATE, AXOLOTL, LLAMA_FACTORY, TRAINER)


@dataclass(frozen=True)
class Answer:
    """The best configuration.

    Attributes:
        path: of its file; copies of the user's own files are written beside it.
        config: what is in it.
        switches: of the script, fields of TrainingArguments.
        in_arguments: the script's arguments name the DeepSpeed configuration.
        by_accelerate: accelerate hands the script its DeepSpeed configuration.
    """

    path: Path
    config: Mapping[str, Any]
    switches: Mapping[str, Any]
    in_arguments: bool = False
    by_accelerate: bool = False

    def values(self, form: Form) -> dict[str, Any]:
        """Return batch sizes and switches by the keys of a file; nothing if it has neither."""
        sizes = {key: self.config.get(name) for name, key in form.keys.items()}
        found = {key: value for key, value in sizes.items() if isinstance(value, int)}
        if form.keys:
            keys = {form.key_of(name): value for name, value in self.switches.items()}
            found |= {key: value for key, value in keys.items() if key is not None}
            for name, key in form.opposites.items():
                if isinstance(value := self.switches.get(name), bool):
                    found[key] = not value
        return found


@dataclass(frozen=True)
class Rewritten:
    """A command that trains with the best configuration, and the files that it names.

    Attributes:
        words: of the command.
        copies: texts of the user's own files with the answer in them, by name.
    """

    words: list[str]
    copies: Mapping[str, str]


def rewritten(words: Sequence[str], folder: Path, answer: Answer) -> Rewritten | None:
    """Return a command with copies of the configuration files that it names.

    Args:
        words: of the command, without variables in front of it.
        folder: where it is started.
        answer: what the copies hold.

    Returns:
        None if no argument, file or launcher takes the DeepSpeed configuration.
    """
    return _Rewriting(list(words), folder, answer).result()


def form_of_training(words: Sequence[str], folder: Path) -> Form | None:
    """Return the kind of the file, if a command names one, that holds its batch sizes."""
    forms = (_form_of(_load(folder / _value(word))) for word in words if _is_file(word, folder))
    return next((form for form in forms if form is not None and form.keys), None)


class _Rewriting:
    """One command, rewritten word by word."""

    def __init__(self, words: list[str], folder: Path, answer: Answer) -> None:
        self._words, self._folder, self._answer = words, folder, answer
        self._copies: dict[str, str] = {}
        self._names: dict[Path, str] = {}
        self._takes_config = answer.in_arguments

    def result(self) -> Rewritten | None:
        """Rewrite the words; None if nothing takes the DeepSpeed configuration."""
        forms = [self._replace(position) for position in range(len(self._words))]
        for form in filter(None, forms):
            self._override(form)
        self._follow_launcher()
        return Rewritten(self._words, self._copies) if self._takes_config else None

    def _replace(self, position: int) -> Form | None:
        """Put a copy in the place of a file; return the kind of file that it is."""
        word, before = self._words[position], self._words[position - 1]
        if position and before.replace("-", "_") == f"__{TRAINER.accelerate}":
            self._words[position] = self._accelerate_file(word)
        elif _is_file(word, self._folder):
            copy, form = self._copy(self._folder / _value(word))
            self._words[position] = word.removesuffix(_value(word)) + copy if form else word
            return form
        return None

    def _copy(self, path: Path) -> tuple[str, Form | None]:
        """Make the copy of a file; return its path, and the kind of file that it is."""
        data = _load(path)
        form = _form_of(data)
        if form is None:
            return str(path), None
        answer = self._answer
        for key in form.in_the_file:
            _remove(data, key)
        if form is ACCELERATE or (_has(data, form.config) and not answer.by_accelerate):
            _set(data, form.config, str(answer.path))
            self._takes_config = True
        for key, value in _named_as(answer.values(form), data).items():
            _set(data, key, value)
        if form.accelerate and isinstance(data.get(form.accelerate), str):
            data[form.accelerate] = self._accelerate_file(data[form.accelerate])
        name = self._name_of_copy(path)
        self._copies[name] = _text(data, path)
        return str(answer.path.parent / name), form

    def _name_of_copy(self, path: Path) -> str:
        """Return a file's own name, with a number where another file has it already."""
        others = {name for own, name in self._names.items() if own != path}
        numbered = (f"{path.stem}-{number}{path.suffix}" for number in itertools.count(2))
        names = itertools.chain([path.name], numbered)
        return self._names.setdefault(path, next(name for name in names if name not in others))

    def _accelerate_file(self, named: str) -> str:
        """Return the copy of a configuration of accelerate, by its path or TRL's name for it."""
        path = self._folder / named
        trl = None if path.is_file() else importlib.util.find_spec("trl")
        if trl is not None and trl.origin is not None:
            path = Path(trl.origin).parent / "accelerate_configs" / f"{named}.yaml"
        return self._copy(path)[0] if path.is_file() else named

    def _override(self, form: Form) -> None:
        """Give flags, and LLaMA-Factory's `key=value`, which override the file, its values."""
        given = [word.partition("=")[0].lstrip("-").replace("-", "_") for word in self._words]
        values = _named_as(self._answer.values(form), given)
        values = {k: json.dumps(v) if isinstance(v, Mapping) else v for k, v in values.items()}
        if not self._answer.by_accelerate:
            values[form.config] = str(self._answer.path)
        flags = {key: f"--{key}" for key in values}
        self._words = [
            f"{key}={values[key]}" if (key := word.partition("=")[0]) in values else word
            for word in script_args.rewrite(self._words, values, flags, add=False)
        ]

    def _follow_launcher(self) -> None:
        """Give `accelerate launch` the configuration, where no file in its options does so."""
        name = Path(self._words[0]).name
        begin = ("python" if name.startswith("python") else name, *self._words[1:])
        end = next((len(each) for each in _LAUNCHERS if begin[: len(each)] == each), None)
        if end is None or not self._answer.by_accelerate:
            return
        script = next((i for i, word in enumerate(self._words) if i >= end and _starts(word)), end)
        path, gas = str(self._answer.path), self._answer.config.get(_GAS)
        best = {_DEEPSPEED_FILE: path, _GAS_FLAG: gas}
        options = list(
            script_args.rewrite(
                self._words[end:script], best, {flag: flag for flag in best}, add=False
            )
        )
        default = _default_file()
        if not self._takes_config and default.is_file():
            options[:0] = [_CONFIG_FILE, self._copy(default)[0]]
        elif not self._takes_config and _DEEPSPEED_FILE not in options:
            options[:0] = [_DEEPSPEED_FILE, path]
        if _GAS_FLAG not in options and isinstance(gas, int):
            options += [_GAS_FLAG, str(gas)]
        self._words[end:script] = options
        self._takes_config = True


def _named_as(values: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return values by transformers' newer names of checkpointing where those are given."""
    newer = any(name.startswith(NEWER_CHECKPOINTING) for name in given)
    return {
        name.replace(CHECKPOINTING, NEWER_CHECKPOINTING, 1)
        if newer and name.startswith(CHECKPOINTING)
        else name: value
        for name, value in values.items()
    }


def _starts(word: str) -> bool:
    """Return whether the script or module begins with a word of a launcher's command."""
    return word.endswith(".py") or word in ("-m", "--module")


def _default_file() -> Path:
    """Return the file that `accelerate config` writes."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"


def _value(word: str) -> str:
    return word.rpartition("=")[2] if word.startswith("--") else word


def _is_file(word: str, folder: Path) -> bool:
    path = folder / _value(word)
    return path.suffix in _SUFFIXES and path.is_file() and path.stat().st_size <= _LARGEST_BYTES


def _form_of(data: Any) -> Form | None:
    if not isinstance(data, dict):
        return None
    return next((form for form in FORMS if form.is_of(data)), None)


def _files(text: str) -> YAML:
    """Return a reader and writer that keeps comments, quotes and the indentation of lists."""
    files = YAML()
    files.preserve_quotes = True
    files.allow_duplicate_keys = True  # as PyYAML, with which the frameworks read it
    files.width = 4096  # lines stay as long as they are
    if re.search(r":[^\S\n]*(?:#.*)?\n +- ", text):
        files.indent(sequence=4, offset=2)
    return files


def _load(path: Path) -> Any:
    """Return the content of a file with its comments; None if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else _files(text).load(text)
    except (OSError, ValueError, YAMLError):
        return None


def _text(data: Any, path: Path) -> str:
    if path.suffix == ".json":
        return json.dumps(data, indent=2) + "\n"
    text = io.StringIO()
    _files(path.read_text(encoding="utf-8")).dump(data, text)
    return text.getvalue()


def _has(data: Mapping[str, Any], key: str) -> bool:
    return bool(data.get(key))


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for name in sections:
        if not isinstance(data.get(name), dict):
            data[name] = {}
        data = data[name]
    data[last] = value


def _remove(data: dict[str, Any], key: str) -> None:
    *sections, last = key.split(".")
    for name in sections:
        section = data.get(name)
        if not isinstance(section, dict):
            return
        data = section
    data.pop(last, None)
