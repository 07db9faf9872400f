"""Adapters of functions that change files: files older than the trial are protected.

Most act from the start of the process, others only once the engine is made.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsat.in_trial import failures
from dsat.in_trial.adapters.calls import Call
from dsat.in_trial.adapters.trial import Phase
from dsat.in_trial.adapters.user_files import UserFiles, absolute

NOT_CHANGED = "trials do not change older files: {} did nothing"
NOT_SAVED = "checkpoints are neither saved, loaded nor deleted in trials: {} did nothing"
NOT_LOADED = (
    "{} loaded only the client state, because saved models and optimizers fit only one stage"
)
INSTEAD = "trials do not change older files: the script's output goes to the trial's folder"
_BESIDE = ("dir_fd", "src_dir_fd", "dst_dir_fd")  # folder descriptors, which `shutil.rmtree` passes


def _files_of(call: Call) -> UserFiles | None:
    """Return the protected files; None if a path is relative to a folder descriptor."""
    is_beside = any(call.kwargs.get(name) is not None for name in _BESIDE)
    return None if is_beside else call.trial.files


def _say(call: Call, text: str) -> None:
    call.trial.say(text.format(call.name))


def remove(call: Call) -> Any:
    """Keep files and folders older than the trial, but let the script create the folder again."""
    files, path = _files_of(call), call.argument("path", 0)
    if files is None or not files.is_to_stay(path):
        return call.proceed()
    files.remove(path)
    _say(call, NOT_CHANGED)
    return None


def change(call: Call) -> Any:
    """Leave files older than the trial as they are."""
    files, path = _files_of(call), call.argument("path", 0)
    if files is None or not files.is_to_stay(path):
        return call.proceed()
    _say(call, NOT_CHANGED)
    return None


def move(call: Call) -> Any:
    """Neither move nor replace files and folders older than the trial."""
    files, source, target = _files_of(call), call.argument("src", 0), call.argument("dst", 1)
    if files is None or not (files.is_to_stay(source) or files.is_to_stay(target)):
        return call.proceed()
    files.move(source, target)
    _say(call, NOT_CHANGED)
    return None


def create(name: str, position: int) -> Callable[..., Any]:
    """Return a wrapper for a function that creates the path named by an argument."""

    def create_folder_or_link(call: Call) -> Any:
        """Succeed if the path exists only because dsat kept it or another trial created it."""
        files, path = _files_of(call), call.argument(name, position)
        if files is not None and files.is_removed(path) and os.path.lexists(path):
            return None
        try:
            result = call.proceed()
        except FileExistsError:
            if files is None or not files.is_left_by_a_trial(path):
                raise
            result = None
        if files is not None:
            files.note_created(path)
        return result

    return create_folder_or_link


def open_file(call: Call) -> Any:
    """Open a copy in the trial's folder instead of an older file that the script changes."""
    path, mode = call.argument("file", 0), call.argument("mode", 1) or "r"
    if isinstance(path, int) or not isinstance(mode, str):
        return call.proceed()
    target = call.trial.files.instead_of(path, mode)
    if target is path:
        return call.proceed()
    call = call.replace("file", 0, target)
    if mode.strip("bt") != "r":
        _say(call, INSTEAD)
        call = call.replace("mode", 1, mode.replace("x", "w"))
    return call.proceed()


def read(call: Call) -> Any:
    """Read the trial's copy of an older file, if the script has written to that file."""
    path = call.argument("filename", 0)
    if isinstance(path, (str, os.PathLike)):
        call = call.replace("filename", 0, str(call.trial.files.instead_of(path, "r")))
    return call.proceed()


def save(name: str, position: int) -> Callable[..., Any]:
    """Return a wrapper for a function that writes the file or folder named by an argument.

    Before the engine is made, the function writes, because the script may be preparing its data.
    """

    def save_model(call: Call) -> Any:
        """Once the engine is made, write only to temporary, cache and trial folders."""
        argument, files = call.argument(name, position), call.trial.files
        path = absolute(argument) if isinstance(argument, (str, os.PathLike)) else None
        if path is None:
            return call.proceed()
        if call.trial.phase is Phase.MEASURING or call.trial.is_simulated:
            if files.is_scratch(path.resolve()):
                return call.proceed()
            failures.unwritten.add(path.resolve())
            _say(call, NOT_SAVED)
            return None
        target = files.instead_of(argument, "w")
        if target is argument:
            return call.proceed()
        _say(call, INSTEAD)
        return call.replace(name, position, str(target)).proceed()

    return save_model


def skip(call: Call) -> Any:
    """Do nothing once the engine is made, and in processes that a rank started."""
    if call.trial.phase is Phase.PREPARING and not call.trial.is_simulated:
        return call.proceed()
    _say(call, NOT_SAVED)
    return True


def load_checkpoint(call: Call) -> Any:
    """Load only the client state from a checkpoint, not the model or the optimizer."""
    result = client_state(Path(call.argument("load_dir", 0)), call.argument("tag", 1))
    if result[0] is not None:
        failures.resumed.append(Path(result[0]).parent)
        _say(call, NOT_LOADED)
    return result


# Model files of a DeepSpeed checkpoint, and the keys in them that are not client state
# (`_load_checkpoint` of runtime/engine.py, 0.15.4 to 0.19.8).
_MODEL_STATES = "*mp_rank_00_model_states.pt"
_OF_DEEPSPEED = frozenset(
    "module optimizer lr_scheduler sparse_tensor_module_names skipped_steps global_steps "
    "dp_world_size mp_world_size data_sampler random_ltd".split()
)


def client_state(folder: Path, tag: str | None) -> tuple[str | None, dict[str, Any] | None]:
    """Return the client state of a checkpoint, as DeepSpeed's `load_checkpoint` does.

    Model and optimizer are not loaded: a checkpoint fits one ZeRO stage, and trials use several.

    Returns:
        The path of a model file, and the client state; None for both if there is no checkpoint.
    """
    latest = folder / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_text().strip()
    files = [] if tag is None else sorted((folder / str(tag)).glob(_MODEL_STATES))
    if not files:
        return None, None
    import torch

    # The checkpoint is the script's own, and DeepSpeed would unpickle it as well.
    is_zip = zipfile.is_zipfile(files[0])
    states = torch.load(files[0], map_location="cpu", mmap=is_zip, weights_only=False)
    return str(files[0]), {key: states[key] for key in states if key not in _OF_DEEPSPEED}
