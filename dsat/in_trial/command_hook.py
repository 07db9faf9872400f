"""Hook that every Python process of the user's command runs first.

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

# What dsat needs and the environment may lack; never in front of what it has.
if __name__ == "sitecustomize":
    sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "spare"))

from dsat.in_trial.start_recorder import (
    FOLDER_VARIABLE,
    AfterImport,
    run_hidden_sitecustomize,
    what_records,
)

TRIAL_VARIABLE = "DSAT_TRIAL_DIR"
CHANGES_FILE = "command.json"  # what is different in the trial, in its folder
_LOCAL_RANK = "--local_rank="
_Adapters = dict[str, Callable[[ModuleType], None]]


def _change_for_trial(folder: str) -> None:
    """Gives the script the arguments and variables of the trial, if it has those that were seen."""
    path = os.path.join(folder, CHANGES_FILE)
    if not os.path.exists(path):  # the first run, which is as the user has it
        return
    with open(path, encoding="utf-8") as file:
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


def _rank_of_trial(folder: str) -> _Adapters:
    """Return adapters that make a process a rank at its first relevant import."""

    def begin(module: ModuleType) -> None:
        deepspeed = sys.modules.get("deepspeed")
        if deepspeed is not None and not hasattr(deepspeed, "initialize"):
            return  # DeepSpeed below 0.18 imports transformers itself; it begins when that is done
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
        "transformers": begin,  # its lazy package, before any module that is adapted
        "multiprocessing.process": watch,
    }


def _both(first: _Adapters, then: _Adapters) -> _Adapters:
    """Join what adapts modules by their names."""

    def one_after_the_other(name: str) -> Callable[[ModuleType], None]:
        def adapt(module: ModuleType) -> None:
            for each in (first, then):
                if name in each:
                    each[name](module)

        return adapt

    return {name: one_after_the_other(name) for name in {**first, **then}}


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
        records = os.environ.get(FOLDER_VARIABLE)
        if records is not None:
            adapt = _both(what_records(records, __file__, goes_on=True), adapt)
        for name in adapt.keys() & sys.modules.keys():
            adapt[name](sys.modules[name])
        sys.meta_path.insert(0, AfterImport(adapt))
    run_hidden_sitecustomize(__file__)


if __name__ == "sitecustomize":
    _install()
