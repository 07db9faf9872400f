"""Adapters of launchers, and of the starts and ends of processes."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

from dsat.in_trial.adapters.calls import Original
from dsat.in_trial.adapters.trial import RunningTrial
from dsat.in_trial.rank_files import RECORDS_FOLDER, SEVERAL_NODES_FILE
from dsat.values.files import write_atomically

ALONE_VARIABLE = "DSAT_ALONE"  # the user's command has no launcher


def add_argument(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Note the script's flags, and make the rank's own `--local_rank` the default.

    The script's default is mostly 0 or -1, and DeepSpeed refuses to run if it is not the rank's.
    """
    if trial.local_rank is not None and "--local_rank" in args and "action" not in kwargs:
        kwargs = {**kwargs, "default": int(trial.local_rank), "required": False}
    flags = [name for name in args if isinstance(name, str) and name.startswith("--")]
    trial.script_options.update(dict.fromkeys(flags, kwargs.get("default")))
    return original(*args, **kwargs)


def refuse_nodes(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """End a launcher that starts a training on several nodes, in the first trial.

    That of `torchrun` and `accelerate launch` would wait for them.
    """
    records = None if trial.folder is None else trial.folder / RECORDS_FOLDER
    # A configuration of the launch; or an environment and the resources by node.
    nodes = getattr(args[0], "min_nodes", None) or len(args[-1])
    if records is not None and records.is_dir() and nodes > 1:
        write_atomically(records / SEVERAL_NODES_FILE, json.dumps({"nodes": nodes}))
        os._exit(1)
    return original(*args, **kwargs)


def run_process(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> None:
    """Report the end of a rank that is a process of multiprocessing, which calls no hooks."""
    try:
        original(*args, **kwargs)
    except BaseException as error:
        if trial.rank is not None:
            trial.rank.fail(error)
        raise
    if trial.rank is not None:
        trial.rank.finish()


def report_uncaught(
    trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any
) -> None:
    """Report the exception that ends a rank, once it was printed."""
    original(*args, **kwargs)
    if trial.on_uncaught is not None:
        trial.on_uncaught(args[1])


def exit_process(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> None:
    """Note that the script ends with `sys.exit`, which Python reports to no hook."""
    try:
        original(*args, **kwargs)
    except SystemExit as stop:
        if trial.rank is not None and threading.current_thread() is threading.main_thread():
            trial.rank.exit = stop
        raise


def starts_ranks(trial: RunningTrial, original: Original, _: Any, args: Any, kwargs: Any) -> Any:
    """Have Lightning find no variables of a rank, if the command has no launcher.

    It starts ranks itself, unless it is one.
    """
    if os.environ.pop(ALONE_VARIABLE, None) is not None:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
            os.environ.pop(name, None)
    return original(*args, **kwargs)
