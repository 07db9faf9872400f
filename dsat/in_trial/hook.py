"""Hook that every Python process of the user's command runs first.

A copy of this file is `sitecustomize.py` in the first folder of `PYTHONPATH`. It gives the script
the trial's arguments and variables, and installs the adapters. When the process imports DeepSpeed
or transformers, `dsat.in_trial.rank` prepares it to be a rank. In a process that a rank starts, the
hook only protects files. Another folder of `PYTHONPATH` holds dsat, and nothing else of the
environment in which dsat is installed.
"""

from __future__ import annotations

import atexit
import importlib.machinery
import importlib.util
import json
import mmap
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

TRIAL_VARIABLE = "DSAT_TRIAL_DIR"  # the trial's folder
RUN_VARIABLE = "DSAT_RUN_DIR"  # the run's folder; in all processes that dsat starts
OWNER_VARIABLE = "DSAT_OWNER"  # the process of dsat that started this one
# ID of the rank's process, also in the processes that it starts; unset if a command starts ranks.
RANK_VARIABLE = "DSAT_RANK_PID"
HOOK_FOLDER, SPARE_FOLDER = "hook", "spare"  # the second holds packages that may be missing
UNMARKED_FILE = "unmarked"  # exists if a process of the trial could not show that it has the hook
CHANGES_FILE = "command.json"  # of the trial: arguments and variables that differ from the user's
_LOCAL_RANK = ("--local_rank=", "--local-rank=")  # of DeepSpeed's launcher and torch's older one


def _begin(folder: Path) -> None:
    """Prepare this process, which is or may become a rank of the trial in a folder."""
    rank = os.environ.get(RANK_VARIABLE)
    start = {
        "pid": os.getpid(),
        "argv": list(sys.argv),
        "cwd": os.getcwd(),
        "cores": sorted(os.sched_getaffinity(0)),
        "env": dict(os.environ),
    }
    is_below_rank = rank not in (None, str(os.getpid()))
    if not is_below_rank:
        _change_arguments(folder / CHANGES_FILE)
    from dsat.in_trial.adapters import install

    install.begin(folder, is_below_rank=is_below_rank)  # before other modules bind functions
    if not is_below_rank:
        _watch(folder, start, is_rank=rank is not None)


def _change_arguments(path: Path) -> None:
    """Replace the arguments and variables of the user's command with the trial's."""
    if not path.exists():  # the process started with the trial's
        return
    changes = json.loads(path.read_text(encoding="utf-8"))
    args = sys.argv[1:]
    local_rank = [word for word in args[:1] if word.startswith(_LOCAL_RANK)]
    for old, new in changes["args"] if sys.argv[0] in changes["programs"] else ():
        if args[len(local_rank) :] == old:
            sys.argv[1:] = [*local_rank, *new]
    old, new = changes["env"]
    if old.items() <= os.environ.items():
        for name in old:
            del os.environ[name]
        os.environ.update(new)


def _watch(folder: Path, start: dict[str, Any], *, is_rank: bool) -> None:
    """When this process imports DeepSpeed or transformers, let `dsat.in_trial.rank` prepare it."""
    import wrapt

    from dsat.in_trial.adapters.trial import TRIAL

    def prepare(_: ModuleType) -> None:
        deepspeed = sys.modules.get("deepspeed")
        if deepspeed is not None and not hasattr(deepspeed, "initialize"):
            return  # DeepSpeed below 0.18 imports transformers itself, and is not ready yet
        from dsat.in_trial import rank

        rank.begin(folder, start, is_rank=is_rank)

    def this_rank() -> Any:
        from dsat.in_trial import rank

        return rank.get_rank(folder)

    names = ["deepspeed", "transformers"]  # imported before their adapted modules
    if is_rank:
        names.append("determined")  # its harness imports the script later
        # A rank may end before it imports DeepSpeed.
        TRIAL.on_uncaught = lambda error: this_rank().fail(error)
        atexit.register(lambda: this_rank().finish())
    for name in names:
        wrapt.register_post_import_hook(prepare, name)


def _mark_process(folder: Path) -> None:
    """Map this file into memory: dsat recognises the process and its forks by /proc/PID/maps."""
    try:
        import ctypes

        with open(__file__, "rb") as file:  # some file systems map no files, or no shared ones
            mapping = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except (ImportError, OSError):
        (folder / UNMARKED_FILE).touch()
        return
    # Keep it mapped while Python exits: torch's sockets are still open then.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


def _run_hidden_sitecustomize() -> None:
    """Run the environment's own `sitecustomize`, which this file hides."""
    folder = os.path.dirname(os.path.abspath(__file__))
    elsewhere = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), SPARE_FOLDER))
    # Another program's Python may be older than dsat supports.
    if TRIAL_VARIABLE in os.environ and sys.version_info >= (3, 10):
        _folder = Path(os.environ[TRIAL_VARIABLE])
        _begin(_folder)
        _mark_process(_folder)
    _run_hidden_sitecustomize()
