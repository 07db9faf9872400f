"""Adapters of launchers, and of functions that start or end processes."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from dsat.in_trial.adapters.calls import Call, caller
from dsat.in_trial.adapters.trial import Exit, ScriptFlag
from dsat.in_trial.failures import place_in_script
from dsat.in_trial.rank_files import RECORDS_FOLDER, SEVERAL_NODES_FILE
from dsat.values.files import write_atomically

ALONE_VARIABLE = "DSAT_ALONE"  # the user's command has no launcher


def add_argument(call: Call) -> Any:
    """Make the rank's number the default of `--local_rank`.

    DeepSpeed refuses to run with another number, and the script's default is mostly 0 or -1.
    """
    local_rank, kwargs = call.trial.local_rank, call.kwargs
    if local_rank is not None and "--local_rank" in call.args and "action" not in kwargs:
        kwargs = {**kwargs, "default": int(local_rank), "required": False}
    return call.proceed_with(*call.args, **kwargs)


def parse_arguments(call: Call) -> Any:
    """Record the script's flags.

    If a parser has subcommands, its own flags must precede the subcommand: another parser reads
    what follows.
    """
    leads = call.owner._subparsers is not None
    for action in call.owner._actions:
        flags = [name for name in action.option_strings if name.startswith("--")]
        call.trial.script_flags.update(dict.fromkeys(flags, ScriptFlag(action.default, leads)))
    return call.proceed()


def refuse_nodes(call: Call) -> Any:
    """In the first trial, end a launcher that would start a training on several nodes.

    `torchrun` and `accelerate launch` would wait for the other nodes.
    """
    assert call.trial.folder is not None
    records = call.trial.folder / RECORDS_FOLDER
    # Arguments: torch's launch configuration; or DeepSpeed's environment and resources by node.
    nodes = getattr(call.args[0], "min_nodes", None) or len(call.args[-1])
    if records.is_dir() and nodes > 1:
        write_atomically(records / SEVERAL_NODES_FILE, json.dumps({"nodes": nodes}))
        os._exit(1)
    return call.proceed()


def run_process(call: Call) -> None:
    """Report the end of a rank that multiprocessing started: such a process calls no exit hooks."""
    try:
        call.proceed()
    except BaseException as error:
        if call.trial.rank is not None:
            call.trial.rank.fail(error)
        raise
    if call.trial.rank is not None:
        call.trial.rank.finish()


def report_uncaught(call: Call) -> None:
    """Report the exception that ends a rank, after Python has printed it."""
    call.proceed()
    if call.trial.on_uncaught is not None:
        call.trial.on_uncaught(call.args[1])


def exit_process(call: Call) -> None:
    """Record that the script ends with `sys.exit`, which Python reports to no hook."""
    try:
        call.proceed()
    except SystemExit as stop:
        if threading.current_thread() is threading.main_thread():
            place = place_in_script(caller()) if stop.code not in (None, 0) else ""
            call.trial.exit = Exit(stop, place)
        raise


def leave_process(call: Call) -> None:
    """Report the end of a rank by `os._exit`, which calls no exit hooks."""
    rank, error = call.trial.rank, sys.exc_info()[1]
    try:
        if call.trial.meter is not None and rank.is_rank:
            if error is not None:  # of an `except` or `finally` that calls `os._exit`
                rank.fail(error)
            elif call.args == (0,):
                rank.finish()
    finally:
        call.proceed()


def starts_ranks(call: Call) -> Any:
    """Hide the variables of a rank from Lightning, if the command has no launcher.

    Lightning then starts the ranks itself, as it does without dsat.
    """
    if os.environ.pop(ALONE_VARIABLE, None) is not None:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
            os.environ.pop(name, None)
    return call.proceed()
