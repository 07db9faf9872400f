"""Keep a trial from changing anything outside its own folder: checkpoints, trackers, outputs.

No trial may overwrite a checkpoint, move `latest`, resume from another trial's checkpoint, or add a
run to a tracker's history. The full-length run (`--run-full-experiment`) does all of it.
"""

from __future__ import annotations

import functools
import os
import pathlib
import shutil
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import wrapt

from dsat.in_trial import config_injection, failures
from dsat.in_trial.rank_files import SPEC_FILE, RankSpec

_Skip = Callable[[str], None]  # takes the name of a function that did nothing
NOT_SAVED = "checkpoints are neither saved, loaded nor deleted in trials: {} did nothing"
# Variables that turn trackers off. MLflow has none, so it writes into the trial's folder.
TRACKERS_OFF: Mapping[str, str] = {
    "WANDB_MODE": "disabled",  # docs.wandb.ai: environment variables
    "COMET_MODE": "disabled",  # read by transformers and by comet_ml.start
    "COMET_START_ONLINE": "0",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "TRACKIO_MODE": "disabled",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",  # transformers' own
}
# Sections of a DeepSpeed configuration that report, or slow down what they report (`deepspeed/
# monitor/config.py`, `profiling/config.py`, `comm/config.py`; 0.19.8), and single switches.
_SECTIONS = ("tensorboard", "wandb", "csv_monitor", "comet", "flops_profiler", "comms_logger")
_SWITCHES = ("wall_clock_breakdown", "memory_breakdown", "dump_state")
# Files of a checkpoint of DeepSpeed's, and what of them it keeps for itself (`_load_checkpoint` of
# runtime/engine.py, 0.15.4 to 0.19.8).
_MODEL_STATES = "*mp_rank_00_model_states.pt"
_OF_DEEPSPEED = frozenset(
    "module optimizer lr_scheduler sparse_tensor_module_names skipped_steps global_steps "
    "dp_world_size mp_world_size data_sampler random_ltd".split()
)
# Functions and methods that write checkpoints or resume, by the module that defines them; an engine
# says whether it has saved.
_SAVERS: Mapping[str, tuple[str, ...]] = {
    "deepspeed.runtime.engine": tuple(
        f"DeepSpeedEngine.save_{what}" for what in ("checkpoint", "16bit_model", "fp16_model")
    ),
    "accelerate.accelerator": (
        *("Accelerator.save_state", "Accelerator.save_model", "Accelerator.load_state"),
    ),
    "transformers.trainer": ("Trainer.save_model", "Trainer.save_state"),
    "lightning.pytorch.trainer.trainer": ("Trainer.save_checkpoint",),
    "pytorch_lightning.trainer.trainer": ("Trainer.save_checkpoint",),
    "torch.distributed.checkpoint": ("save", "async_save"),
}
# Functions and methods whose second argument is the path of what they write, and its name.
_FILE_WRITERS: Mapping[str, tuple[str, str]] = {
    "torch": ("save", "f"),
    "safetensors.torch": ("save_file", "filename"),
    "transformers.modeling_utils": ("PreTrainedModel.save_pretrained", "save_directory"),
    "peft.peft_model": ("PeftModel.save_pretrained", "save_directory"),
    "diffusers.models.modeling_utils": ("ModelMixin.save_pretrained", "save_directory"),
    "diffusers.pipelines.pipeline_utils": ("DiffusionPipeline.save_pretrained", "save_directory"),
}


class SideEffects:
    """Prevention of changes outside a trial's folder, in this process.

    Savers are adapted as soon as they are imported: the script may bind them to names of its own,
    before it imports DeepSpeed. They act as ever until `deepspeed.initialize` is called, for what
    a script writes before that is prepared data, which it reads again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._warned: set[str] = set()
        self._trains = threading.Event()
        self._files = _Files(folder.resolve(), self._skip)
        hook = wrapt.register_post_import_hook
        for module, names in _SAVERS.items():
            hook(functools.partial(_adapt_savers, self._skip, names, self._trains), module)
        for module, writer in _FILE_WRITERS.items():
            hook(functools.partial(self._files.adapt_writer, self._trains, writer), module)
        self._files.adapt_changes()

    def prevent(self, *, simulated: bool) -> None:
        """Make savers and trackers do nothing; DeepSpeed must be importable.

        Args:
            simulated: tensors may be fake, and none is written.
        """
        self._files.keep()
        hook = wrapt.register_post_import_hook
        off, logs = trackers_off(self._folder), str(self._folder / "tensorboard")
        os.environ.update(off)
        if simulated:
            self._trains.set()
        config_injection.on_initialize(self._begin)
        hook(functools.partial(_adapt_engine, self._skip), "deepspeed.runtime.engine")
        # What a script says in its code counts more than variables.
        uri = off["MLFLOW_TRACKING_URI"]
        for module, name, argument, value in (
            ("torch.utils.tensorboard.writer", "SummaryWriter.__init__", "log_dir", logs),
            ("tensorboardX", "SummaryWriter.__init__", "logdir", logs),
            ("mlflow.tracking.client", "MlflowClient.__init__", "tracking_uri", uri),
        ):
            hook(functools.partial(_fix_first, name, argument, value), module)
        hook(functools.partial(_adapt_hydra, self._folder), "hydra._internal.hydra")
        hook(_adapt_wandb, "wandb")
        hook(functools.partial(_adapt_savers, self._skip, ("set_tracking_uri",), None), "mlflow")

    def _begin(self, arguments: dict[str, Any]) -> None:
        _without_reports(arguments)
        self._trains.set()
        self._files.begun.set()  # a simulation, too, prepares its data before

    def _skip(self, name: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            print(f"dsat: {NOT_SAVED.format(name)}", file=sys.stderr)


def of_command(folder: str) -> SideEffects | None:
    """Adapt a process of the user's command; None in a full-length run, which changes all it does.

    Args:
        folder: of the trial, without a specification if the ranks are only recorded.
    """
    path = Path(folder)
    if (path / SPEC_FILE).exists() and RankSpec.of_folder(path).is_full_run:
        return None
    return SideEffects(path)


def trackers_off(folder: Path) -> dict[str, str]:
    """Return the variables with which no tracker writes anywhere but into a trial's folder."""
    return {**TRACKERS_OFF, "MLFLOW_TRACKING_URI": (folder / "mlruns").resolve().as_uri()}


def _without_reports(arguments: dict[str, Any]) -> None:
    """Have an engine monitor, profile and print nothing.

    In place: the script may yet read its batch size from its configuration.
    """
    passed = config_injection.passed_config(arguments)
    if passed is None:
        return
    config, off = passed.content, dict[str, Any]()
    for name in _SECTIONS:
        if isinstance(config.get(name), Mapping) and config[name].get("enabled"):
            off[name] = {**config[name], "enabled": False}
    off.update({name: False for name in _SWITCHES if config.get(name)})
    if not off:  # DeepSpeed itself reads a file that needs no change
        return
    config.update(off)
    if arguments.get(passed.name) is not config:  # it is a file's
        arguments.update({**config_injection.without_config(arguments), "config": config})


def _adapt_engine(skip: _Skip, module: Any) -> None:
    engine = module.DeepSpeedEngine

    @functools.wraps(engine.load_checkpoint)
    def load_checkpoint(_: Any, load_dir: Any, tag: Any = None, *__: Any, **___: Any) -> Any:
        skip("DeepSpeedEngine.load_checkpoint")
        return client_state(Path(load_dir), tag)

    engine.load_checkpoint = load_checkpoint


def client_state(folder: Path, tag: str | None) -> tuple[str | None, dict[str, Any] | None]:
    """Return what a script itself has put into a checkpoint, as `load_checkpoint` does.

    Model and optimizer stay as they are: a checkpoint fits one ZeRO stage, and trials have others.

    Returns:
        The path of a file, and the client state; None for both if there is no checkpoint.
    """
    latest = folder / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    files = [] if tag is None else sorted((folder / str(tag)).glob(_MODEL_STATES))
    if not files:
        return None, None
    import torch

    # The script asks for its own checkpoint, which DeepSpeed would unpickle as well.
    mapped = zipfile.is_zipfile(files[0])
    found = torch.load(files[0], map_location="cpu", mmap=mapped, weights_only=False)
    return str(files[0]), {key: found[key] for key in found if key not in _OF_DEEPSPEED}


def _replace(owner: Any, name: str, skip: _Skip, when: threading.Event | None) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def nothing(*args: Any, **kwargs: Any) -> Any:
        if when is not None and not when.is_set():
            return original(*args, **kwargs)
        skip(f"{getattr(owner, '__name__', owner)}.{name}")
        return True

    setattr(owner, name, nothing)


def _adapt_savers(
    skip: _Skip, names: tuple[str, ...], when: threading.Event | None, module: Any
) -> None:
    for name in names:
        of, attribute = _owner(module, name)
        if hasattr(of, attribute):
            _replace(of, attribute, skip, when)


def _owner(module: Any, name: str) -> tuple[Any, str]:
    """Return the module or its class that has a function, and the function's name there."""
    owner, _, attribute = name.rpartition(".")
    return (getattr(module, owner, None) if owner else module), attribute


class _Function:
    """A function in place of a builtin one, which like that becomes no method in a class.

    Pickles name it, so that another process finds its own.
    """

    def __init__(self, module: Any, name: str, call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, getattr(module, name))
        self.__module__, self.__name__ = module.__name__, name
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce__(self) -> str:
        return self.__name__


class _Files:
    """Files outside of the trial's folder, which a training neither writes nor takes away.

    Attributes:
        begun: set when the training begins; until then files are as if there were no dsat.
    """

    def __init__(self, folder: Path, skip: _Skip) -> None:
        self._folder, self._skip = folder, skip
        self.begun = threading.Event()
        self._unlink = os.unlink

    def keep(self) -> None:
        """Note which files are older than the training that begins."""
        self._temporary = Path(tempfile.gettempdir()).resolve()
        self._there = set(os.listdir(self._temporary))  # before this trial
        with tempfile.TemporaryFile(dir=self._folder) as file:  # by the clock of its file system
            self._began_s = os.fstat(file.fileno()).st_ctime

    def adapt_writer(self, trains: threading.Event, writer: tuple[str, str], module: Any) -> None:
        """Have a function write nothing in training, unless it is given a path for scratch."""
        name, keyword = writer
        owner, attribute = _owner(module, name)
        original = getattr(owner, attribute)

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            path = kwargs.get(keyword, args[1] if len(args) > 1 else None)
            if not trains.is_set() or not isinstance(path, (str, os.PathLike)):
                return original(*args, **kwargs)
            target = Path(path).resolve()
            if self._is_scratch(target):
                return original(*args, **kwargs)
            failures.unwritten.add(target)
            self._skip(f"{module.__name__}.{name}")
            return None

        save.__module__ = module.__name__  # where pools of processes find it
        setattr(owner, attribute, save)

    def adapt_changes(self) -> None:
        """Have functions leave what is older than the trial in training: the user's checkpoints."""
        for module, names, keywords in (
            (os, ("remove", "unlink", "rmdir"), ("path",)),
            (shutil, ("rmtree",), ("path",)),
            (os, ("rename", "replace"), ("src", "dst")),
            (os, ("symlink",), ("", "dst")),
        ):
            for name in names:
                self._adapt_change(module, name, keywords)

    def _adapt_change(self, module: Any, name: str, keywords: tuple[str, ...]) -> None:
        original = getattr(module, name)

        def change(*args: Any, **kwargs: Any) -> Any:
            beside = any(kwargs.get(k) is not None for k in ("dir_fd", "src_dir_fd", "dst_dir_fd"))
            if not self.begun.is_set() or beside:  # rmtree's own steps
                return original(*args, **kwargs)
            given = dict(zip(keywords, args, strict=False)) | kwargs
            paths = [given[keyword] for keyword in keywords if keyword and keyword in given]
            left = [path for path in paths if self._is_to_be_left(path)]
            if not left:
                return original(*args, **kwargs)
            if left == paths[1:] and os.path.isfile(paths[0]):  # what was to take an older place
                self._unlink(paths[0])
            self._skip(f"{module.__name__}.{name}")
            return None

        function = _Function(module, name, change)
        setattr(module, name, function)
        if original in os.supports_dir_fd:
            os.supports_dir_fd.add(function)
        accessor = getattr(pathlib, "_NormalAccessor", None)  # python 3.10 keeps its own
        if module is os and getattr(accessor, name, None) is original:
            setattr(accessor, name, function)

    def _is_to_be_left(self, path: Any) -> bool:
        """Return whether a path is the user's, or of a file that was not written."""
        if isinstance(path, int):
            return False
        target = Path(os.path.abspath(os.fsdecode(path)))
        if self._is_scratch(target):
            return False
        if not os.path.lexists(target):
            return target.resolve() in failures.unwritten
        if self._is_older(target):
            return True
        inside = os.walk(target) if target.is_dir() and not target.is_symlink() else ()
        return any(self._is_older(Path(at, n)) for at, dirs, files in inside for n in dirs + files)

    def _is_older(self, path: Path) -> bool:
        try:
            return os.lstat(path).st_ctime < self._began_s
        except OSError:
            return False

    def _is_scratch(self, path: Path) -> bool:
        """Return whether a path is in the trial's folder, or in a temporary one of its own."""
        if path.is_relative_to(self._folder):
            return True
        if not path.is_relative_to(self._temporary) or path == self._temporary:
            return False
        return path.relative_to(self._temporary).parts[0] not in self._there


def _adapt_wandb(module: Any) -> None:
    def init(original: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        return original(*args, **{**kwargs, "mode": "disabled"})

    wrapt.wrap_function_wrapper(module, "init", init)


def _fix_first(name: str, argument: str, value: str, module: Any) -> None:
    """Have a function take a value for its first argument, whatever it is given."""

    def call(original: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        others = {k: v for k, v in kwargs.items() if k != argument}
        return original(value, *args[1:], **others)

    wrapt.wrap_function_wrapper(module, name, call)


def _adapt_hydra(folder: Path, module: Any) -> None:
    """Have Hydra make its output folder in the trial's (hydra-core 1.1 to 1.3)."""

    def run(original: Callable[..., Any], _: Any, args: Any, kwargs: Any) -> Any:
        overrides = [*kwargs["overrides"], f"hydra.run.dir={folder / 'hydra'}"]
        return original(*args, **{**kwargs, "overrides": overrides})

    wrapt.wrap_function_wrapper(module, "Hydra.run", run)
