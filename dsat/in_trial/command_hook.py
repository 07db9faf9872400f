"""What every Python process of a command runs first that a trial runs again.

A copy of this file lies as `sitecustomize.py` in a folder in front of `PYTHONPATH`. Nothing happens
but that the script gets the arguments of the trial, unless the process imports DeepSpeed: then
`dsat.in_trial.command_rank` makes it ready to be a rank of the trial. dsat is found by `PYTHONPATH`
as well, which holds nothing else of the environment that it is installed in.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dsat.in_trial.start_recorder import AfterImport, run_hidden_sitecustomize

TRIAL_VARIABLE = "DSAT_TRIAL_DIR"
CHANGES_FILE = "command.json"  # what is different in the trial, in its folder
_LOCAL_RANK = "--local_rank="


def _change_for_trial(folder: str) -> None:
    """Gives the script the arguments and variables of the trial, if it has those that were seen."""
    with open(os.path.join(folder, CHANGES_FILE), encoding="utf-8") as file:
        changes = json.load(file)
    seen, wanted = changes["args"]
    own = sys.argv[1:]
    local_rank = [word for word in own[:1] if word.startswith(_LOCAL_RANK)]
    if sys.argv[0] in changes["programs"] and own[len(local_rank) :] == seen:
        sys.argv[1:] = [*local_rank, *wanted]
    seen, wanted = changes["env"]
    if seen and seen.items() <= os.environ.items():
        for name in seen:
            del os.environ[name]
        os.environ.update(wanted)


def _rank_of_trial(folder: str) -> dict[str, Callable[[ModuleType], None]]:
    """What makes a process a rank, once it imports what ranks import, whichever comes first."""

    def begin(module: ModuleType) -> None:
        from dsat.in_trial import command_rank

        command_rank.begin(folder)

    def watch(module: ModuleType) -> None:
        """Processes that multiprocessing makes show their errors to nobody but each other."""
        process: Any = module.BaseProcess
        original = process.run

        def run(self: Any) -> None:
            try:
                original(self)
            except BaseException as error:
                _tell("failed", error)
                raise
            _tell("ended")

        process.run = run

    return {
        "deepspeed": begin,
        "transformers.training_args": begin,
        "multiprocessing.process": watch,
    }


def _tell(what: str, *arguments: Any) -> None:
    """Has the process tell its end, if it has come so far that it may be a rank."""
    module: Any = sys.modules.get("dsat.in_trial.command_rank")
    if module is not None:
        getattr(module, what)(*arguments)


def _install() -> None:
    trial = os.environ.get(TRIAL_VARIABLE)
    if trial is not None:
        _change_for_trial(trial)
        adapt = _rank_of_trial(trial)
        for name in adapt.keys() & sys.modules.keys():
            adapt[name](sys.modules[name])
        sys.meta_path.insert(0, AfterImport(adapt))
    run_hidden_sitecustomize(__file__)


if __name__ == "sitecustomize":
    _install()
