"""Rewriting of the user's command to name copies of its files that hold the best configuration.

Sources: accelerate 1.15 (commands/launch.py, commands/config/config_args.py), axolotl 0.19,
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

from dsat.command import script_args
from dsat.command.ds_config import BATCH_KEYS
from dsat.command.switches import CHECKPOINTING, NEWER_CHECKPOINTING

_, _MICRO_BATCH, _GAS = BATCH_KEYS
COPIES_FOLDER = "best_files"  # beside the best configuration
_SUFFIXES = (".yaml", ".yml", ".json")
_LARGEST_BYTES = 2**20  # larger files are data
_CONFIG = "deepspeed"  # key of the DeepSpeed configuration or its path
_OF_DEEPSPEED = {"zero_optimization", *BATCH_KEYS}
_LAUNCHERS = (
    ("accelerate-launch",),
    ("accelerate", "launch"),
    ("python", "-m", "accelerate.commands.launch"),
)
_CONFIG_FILE, _DEEPSPEED_FILE = "--config_file", "--deepspeed_config_file"
_GAS_FLAG = f"--{_GAS}"
# Keys in accelerate's own file: one that identifies it, and its DeepSpeed section. Key in a file of
# TRL: the path of accelerate's file.
_OF_ACCELERATE, _SECTION, _ACCELERATE = "distributed_type", "deepspeed_config", "accelerate_config"
# Keys that this section must not have if it names a DeepSpeed file. Without `zero3_init_flag`, the
# stage in that file decides about zero.Init, as in the trials.
_IN_THE_DEEPSPEED_FILE = """
    gradient_accumulation_steps gradient_clipping offload_optimizer_device
    offload_optimizer_nvme_path offload_param_device offload_param_nvme_path zero3_init_flag
    zero3_save_16bit_model zero_stage
""".split()


@dataclass(frozen=True)
class Form:
    """A kind of file that holds a framework's training arguments.

    Attributes:
        marks: a file is of this kind if it has all (space-separated) keys of one of these texts.
        fields: keys by field of TrainingArguments; empty if all fields keep their names.
        opposites: keys that hold the inverted value, by field of TrainingArguments.
        is_strict: whether the reader of the file may refuse keys that dsat adds.
    """

    marks: tuple[str, ...]
    micro_batch: str
    fields: Mapping[str, str] = field(default_factory=dict)
    opposites: Mapping[str, str] = field(default_factory=dict)
    is_strict: bool = False

    def key_of(self, name: str) -> str | None:
        """Return the key that sets a field of TrainingArguments; None if there is none."""
        if self.is_strict:
            return None
        return self.fields.get(name) if self.fields else name


AXOLOTL = Form(
    tuple(f"base_model {key}" for key in ("micro_batch_size", "datasets", "pretraining_dataset")),
    "micro_batch_size",
    # Keys that core/builders/base.py of axolotl reads (July 2026).
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
    ("per_device_train_batch_size", f"output_dir {_CONFIG}", _ACCELERATE),
    "per_device_train_batch_size",
)
# LLaMA-Factory recomputes activations unless disabled (model/model_utils/checkpointing.py).
LLAMA_FACTORY = replace(
    TRAINER,
    marks=("finetuning_type", "disable_gradient_checkpointing"),
    opposites={CHECKPOINTING: f"disable_{CHECKPOINTING}"},
)
# A file whose format only the script knows.
OTHER = Form((_CONFIG,), BATCH_KEYS[1], is_strict=True)
FORMS = (AXOLOTL, LLAMA_FACTORY, TRAINER, OTHER)


@dataclass(frozen=True)
class Answer:
    """The best configuration, and how the script gets it.

    Attributes:
        path: file of the best configuration; copies of the user's files are written into
            `COPIES_FOLDER` beside it.
        switches: values of fields of TrainingArguments.
        in_arguments: whether the script's arguments name the DeepSpeed configuration.
        by_accelerate: whether accelerate passes the DeepSpeed configuration to the script.
        variables: environment variables of the command, besides dsat's.
    """

    path: Path
    config: Mapping[str, Any]
    switches: Mapping[str, Any]
    in_arguments: bool = False
    by_accelerate: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def values(self, form: Form) -> dict[str, Any]:
        sizes = {form.micro_batch: self.config.get(_MICRO_BATCH), _GAS: self.config.get(_GAS)}
        values = {key: value for key, value in sizes.items() if isinstance(value, int)}
        keys = {form.key_of(name): value for name, value in self.switches.items()}
        values |= {key: value for key, value in keys.items() if key is not None}
        for name, key in form.opposites.items():
            if isinstance(value := self.switches.get(name), bool):
                values[key] = not value
        return values


def rewrite_command(words: Sequence[str], folder: Path, answer: Answer) -> Rewriting | None:
    """Rewrite a command to name copies of its files that hold the best configuration.

    Returns None if no argument, file or launcher takes the DeepSpeed configuration.
    """
    rewriting = Rewriting(words, folder, answer)
    return rewriting if rewriting.takes_config else None


def form_of_training(words: Sequence[str], folder: Path) -> Form | None:
    """Return the kind of the first file of training arguments in a command; None without one."""
    files = (folder / script_args.path_in(word) for word in words if _is_file(word, folder))
    return next(filter(None, (_form_of(_load(file), folder, file.parent) for file in files)), None)


class Rewriting:
    """A command that trains with the best configuration.

    `copies` are the texts of the files to write, by name. `takes_config` says whether an argument,
    a file or the launcher takes the DeepSpeed configuration.
    """

    def __init__(self, words: Sequence[str], folder: Path, answer: Answer) -> None:
        self.words = list(words)
        self.copies: dict[str, str] = {}
        self.takes_config = answer.in_arguments
        self._folder, self._answer = folder, answer
        self._names: dict[Path, str] = {}
        forms = [self._replace(position) for position in range(len(self.words))]
        for form in filter(None, forms):
            self._override(form)
        if answer.by_accelerate:
            self._follow_launcher()

    def _replace(self, position: int) -> Form | None:
        """Replace a word that names a file by the file's copy; return the file's form, or None."""
        word, previous = self.words[position], self.words[position - 1]
        if position and previous.replace("-", "_") == f"__{_ACCELERATE}":
            self.words[position] = self._accelerate_file(word)
        elif _is_file(word, self._folder):
            name = script_args.path_in(word)
            copy, form = self._copy(self._folder / name)
            self.words[position] = word.removesuffix(name) + (copy or name)
            return form
        return None

    def _copy(self, path: Path) -> tuple[str, Form | None]:
        """Copy a file with the best configuration; return the copy's path (or "") and kind."""
        data, best = _load(path), str(self._answer.path)
        form = _form_of(data, self._folder, path.parent)
        if form is not None:
            if (config := data.get(_CONFIG)) and not self._answer.by_accelerate:
                data[_CONFIG] = dict(self._answer.config) if isinstance(config, Mapping) else best
                self.takes_config = True
            values = _rename_checkpointing(self._answer.values(form), data)
            data.update({k: v for k, v in values.items() if k in data or not form.is_strict})
            if isinstance(reference := data.get(_ACCELERATE), str):
                data[_ACCELERATE] = self._accelerate_file(reference)
        elif _is_of_accelerate(data):
            data.pop("mixed_precision", None)
            section = data.get(_SECTION)
            section = data[_SECTION] = section if isinstance(section, dict) else {}
            for key in _IN_THE_DEEPSPEED_FILE:
                section.pop(key, None)
            section["deepspeed_config_file"] = best
            self.takes_config = True
        else:
            return "", None
        name = self._name_of_copy(path)
        self.copies[name] = _text(data, path)
        return str(self._answer.path.parent / COPIES_FOLDER / name), form

    def _name_of_copy(self, path: Path) -> str:
        """Return a file's name, with a number if another copied file has the same name."""
        taken_names = {name for other, name in self._names.items() if other != path}
        numbered = (f"{path.stem}-{number}{path.suffix}" for number in itertools.count(2))
        names = itertools.chain([path.name], numbered)
        return self._names.setdefault(path, next(name for name in names if name not in taken_names))

    def _accelerate_file(self, name: str) -> str:
        """Copy accelerate's configuration, a path or a name in TRL; return the new path or name."""
        path = self._folder / name
        trl = None if path.is_file() else importlib.util.find_spec("trl")
        if trl is not None and trl.origin is not None:
            path = Path(trl.origin).parent / "accelerate_configs" / f"{name}.yaml"
        return (self._copy(path)[0] if path.is_file() else "") or name

    def _override(self, form: Form) -> None:
        """Change the flags and LLaMA-Factory's `key=value` words that would override the file."""
        names = [word.partition("=")[0].lstrip("-").replace("-", "_") for word in self.words]
        values = _rename_checkpointing(self._answer.values(form), names)
        values = {k: json.dumps(v) if isinstance(v, Mapping) else v for k, v in values.items()}
        if not self._answer.by_accelerate:
            values[_CONFIG] = str(self._answer.path)
        flags = {key: f"--{key}" for key in values}
        self.words = [
            f"{key}={values[key]}" if (key := word.partition("=")[0]) in values else word
            for word in script_args.rewrite(self.words, values, flags, add=False)
        ]

    def _follow_launcher(self) -> None:
        """Set the options of `accelerate launch`; add the DeepSpeed file if it is not named yet."""
        name = Path(self.words[0]).name
        begin = ("python" if name.startswith("python") else name, *self.words[1:])
        end = next((len(words) for words in _LAUNCHERS if begin[: len(words)] == words), None)
        if end is None:
            return
        begins = (
            position
            for position, word in enumerate(self.words[end:], start=end)
            if word.endswith(".py") or word in ("-m", "--module")
        )
        script = next(begins, end)
        path, gas = str(self._answer.path), self._answer.config.get(_GAS)
        best = {_DEEPSPEED_FILE: path, _GAS_FLAG: gas}
        flags = {flag: flag for flag in best}
        options = list(script_args.rewrite(self.words[end:script], best, flags, add=False))
        default = self._folder / _default_file({**os.environ, **self._answer.variables})
        if not self.takes_config and default.is_file():
            options[:0] = [_CONFIG_FILE, self._copy(default)[0] or str(default)]
        elif not self.takes_config and _DEEPSPEED_FILE not in options:
            options[:0] = [_DEEPSPEED_FILE, path]
        if _GAS_FLAG not in options and isinstance(gas, int):
            options += [_GAS_FLAG, str(gas)]
        self.words[end:script] = options
        self.takes_config = True


def _rename_checkpointing(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Use transformers' newer names for activation checkpointing if `names` do."""
    if not any(name.startswith(NEWER_CHECKPOINTING) for name in names):
        return dict(values)
    return {
        re.sub(f"^{CHECKPOINTING}", NEWER_CHECKPOINTING, name): value
        for name, value in values.items()
    }


def _default_file(variables: Mapping[str, str]) -> Path:
    """Return the path of the file that `accelerate config` writes."""
    cache = variables.get("XDG_CACHE_HOME", "~/.cache")
    home = variables.get("HF_HOME", os.path.join(cache, "huggingface"))
    return Path(os.path.expanduser(home)) / "accelerate" / "default_config.yaml"


def _is_file(word: str, folder: Path) -> bool:
    path = folder / script_args.path_in(word)
    if path.suffix not in _SUFFIXES or not os.path.isfile(path):  # False for names too long
        return False
    return path.stat().st_size <= _LARGEST_BYTES


def _is_of_accelerate(data: Any) -> bool:
    return isinstance(data, dict) and _OF_ACCELERATE in data


def _form_of(data: Any, *folders: Path) -> Form | None:
    if not isinstance(data, dict) or _is_of_accelerate(data):
        return None
    form = next(
        (
            form
            for form in FORMS
            if any(all(key in data for key in mark.split()) for mark in form.marks)
        ),
        None,
    )
    if form is not OTHER:
        return form
    config = data.get(_CONFIG)  # this key may mean something else in a script's own file
    if isinstance(config, Mapping):
        return form if config.keys() & _OF_DEEPSPEED else None
    paths = [os.path.join(folder, os.path.expanduser(str(config))) for folder in folders]
    return form if any(map(os.path.isfile, paths)) else None


def _files(text: str) -> YAML:
    """Return a YAML reader and writer that keeps the comments, quotes and indentation of `text`."""
    files = YAML()
    files.preserve_quotes = True
    files.allow_duplicate_keys = True  # like PyYAML, which the frameworks use
    files.width = 4096  # do not wrap long lines
    if re.search(r":[^\S\n]*(?:#.*)?\n +- ", text):
        files.indent(sequence=4, offset=2)
    return files


def _load(path: Path) -> Any:
    """Return the content of a file (YAML with its comments); None if it cannot be read."""
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
