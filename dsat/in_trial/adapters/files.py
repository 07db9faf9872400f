"""Functions that change files; files older than the trial are protected.

They act from the start of the process on.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsat.in_trial import failures
from dsat.in_trial.adapters import calls
from dsat.in_trial.adapters.calls import Original
from dsat.in_trial.adapters.trial import Phase, RunningTrial
from dsat.in_trial.adapters.user_files import UserFiles, absolute

NOT_CHANGED = "trials leave older files alone: {} did nothing"
NOT_SAVED = "checkpoints are neither saved, loaded nor deleted in trials: {} did nothing"
INSTEAD = "trials leave older files alone: what the script writes is in the trial's folder instead"
_BESIDE = ("dir_fd", "src_dir_fd", "dst_dir_fd")  # as in the steps of `shutil.rmtree`


def _argument(name: str, position: int, args: Any, kwargs: Any) -> Any:
    return kwargs.get(name, args[position] if len(args) > position else None)


def _files_of(trial: RunningTrial, kwargs: Any) -> UserFiles | None:
    """Return the protected files; None if a path is relative to a folder descriptor."""
    return None if any(kwargs.get(name) is not None for name in _BESIDE) else trial.files


def remove(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Leave what is older than the trial; let a folder of that name be created again."""
    files, path = _files_of(trial, kwargs), _argument("path", 0, args, kwargs)
    if files is None or not files.is_to_stay(path):
        return original(*args, **kwargs)
    files.remove(path)
    trial.say(NOT_CHANGED.format(original.name))
    return None


def change(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Leave what is older than the trial as it is."""
    files, path = _files_of(trial, kwargs), _argument("path", 0, args, kwargs)
    if files is None or not files.is_to_stay(path):
        return original(*args, **kwargs)
    trial.say(NOT_CHANGED.format(original.name))
    return None


def move(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Neither move nor replace what is older than the trial."""
    files = _files_of(trial, kwargs)
    source, target = _argument("src", 0, args, kwargs), _argument("dst", 1, args, kwargs)
    if files is None or not (files.is_to_stay(source) or files.is_to_stay(target)):
        return original(*args, **kwargs)
    files.move(source, target)
    trial.say(NOT_CHANGED.format(original.name))
    return None


def create(name: str, position: int) -> Callable[..., Any]:
    """Return a wrapper of a function that creates what its argument names."""

    def create_folder_or_link(
        trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any
    ) -> Any:
        """Succeed if the script removed the existing one, or if only an earlier trial made it."""
        files, path = _files_of(trial, kwargs), _argument(name, position, args, kwargs)
        if files is not None and files.is_removed(path) and os.path.lexists(path):
            return None
        try:
            result = original(*args, **kwargs)
        except FileExistsError:
            if files is None or not files.is_left_by_a_trial(path):
                raise
            result = None
        if files is not None:
            files.note_created(path)
        return result

    return create_folder_or_link


def open_file(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Open a copy in the trial's folder in place of an older file that would be changed."""
    path, mode = _argument("file", 0, args, kwargs), _argument("mode", 1, args, kwargs) or "r"
    if isinstance(path, int) or not isinstance(mode, str):
        return original(*args, **kwargs)
    found = trial.files.instead_of(path, mode)
    if found is path:
        return original(*args, **kwargs)
    if mode.strip("bt") != "r":
        trial.say(INSTEAD)
        mode = mode.replace("x", "w")
    others = {name: value for name, value in kwargs.items() if name not in ("file", "mode")}
    return original(found, mode, *args[2:], **others)


def read(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Read the script's copy of an older file, if it wrote one."""
    given = _argument("filename", 0, args, kwargs)
    if not isinstance(given, (str, os.PathLike)):
        return original(*args, **kwargs)
    found = str(trial.files.instead_of(given, "r"))
    return calls.call_with(original, "filename", 0, found, args, kwargs)


def save(name: str, position: int) -> Callable[..., Any]:
    """Return a wrapper of a function that writes what its argument names.

    Before the engine a script prepares data, which it reads again.
    """

    def save_model(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
        """Write nothing but temporary files once the engine is made."""
        given = _argument(name, position, args, kwargs)
        path = absolute(given) if isinstance(given, (str, os.PathLike)) else None
        if path is None:
            return original(*args, **kwargs)
        if trial.phase is Phase.MEASURING or trial.is_simulated:
            if trial.files.is_scratch(path.resolve()):
                return original(*args, **kwargs)
            failures.unwritten.add(path.resolve())
            trial.say(NOT_SAVED.format(original.name))
            return None
        found = trial.files.instead_of(given, "w")
        if found is given:
            return original(*args, **kwargs)
        trial.say(INSTEAD)
        return calls.call_with(original, name, position, str(found), args, kwargs)

    return save_model


def skip(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Do nothing once the engine is made."""
    if trial.phase is Phase.PREPARING and not trial.is_simulated:
        return original(*args, **kwargs)
    trial.say(NOT_SAVED.format(original.name))
    return True


def load_checkpoint(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Load only the script's own client state from a checkpoint, no weights."""
    trial.say(NOT_SAVED.format(original.name))
    tag = _argument("tag", 1, args, kwargs)
    return client_state(Path(_argument("load_dir", 0, args, kwargs)), tag)


# Files of a checkpoint of DeepSpeed's, and what of them it keeps for itself (`_load_checkpoint` of
# runtime/engine.py, 0.15.4 to 0.19.8).
_MODEL_STATES = "*mp_rank_00_model_states.pt"
_OF_DEEPSPEED = frozenset(
    "module optimizer lr_scheduler sparse_tensor_module_names skipped_steps global_steps "
    "dp_world_size mp_world_size data_sampler random_ltd".split()
)


def client_state(folder: Path, tag: str | None) -> tuple[str | None, dict[str, Any] | None]:
    """Return the client state of a checkpoint, as `load_checkpoint` does.

    Model and optimizer stay as they are: a checkpoint fits one ZeRO stage, and trials have others.

    Returns:
        The path of a file, and the client state; None for both if there is no checkpoint.
    """
    latest = folder / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    found = [] if tag is None else sorted((folder / str(tag)).glob(_MODEL_STATES))
    if not found:
        return None, None
    import torch

    # The script asks for its own checkpoint, which DeepSpeed would unpickle as well.
    mapped = zipfile.is_zipfile(found[0])
    states = torch.load(found[0], map_location="cpu", mmap=mapped, weights_only=False)
    return str(found[0]), {key: states[key] for key in states if key not in _OF_DEEPSPEED}
