"""Time that runs fast, and what forked programs need; for the fork server of `testing.forked` only.

It has to be imported before dsat, where the clocks are the defaults of arguments.
"""

import importlib
import os
import time
import warnings
from pathlib import Path

from testing.forked import AHEAD

CLOCK = 100.0
pauses = 10.0  # by how much pauses are shortened

_monotonic, _sleep, _time = time.monotonic, time.sleep, time.time
time.monotonic = lambda: CLOCK * _monotonic()
time.sleep = lambda pause_s: _sleep(float(pause_s) / pauses)
time.time = lambda: _time() + _ahead_s()


def _ahead_s() -> float:
    path = os.environ.get(AHEAD)
    return float(Path(path).read_text()) if path else 0.0


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for name in (
        "determined.core",
        "determined.exec.prep_container",
        "determined.experimental",
        "determined.searcher",
        "pytest",  # of the main module, which a fork imports too
        "dsat.cli.commands",
        "dsat.cli.main",
        "dsat.determined_cluster.runner",
        "testing.master.container.entrypoint",
    ):
        importlib.import_module(name)

# Nobody cuts the power of a test.
os.fsync = lambda fd: None
# A fork has dsat already: a context without its files is enough, and is sent in half the time.
vars(importlib.import_module("dsat.determined_cluster.upload"))["_package"] = dict
