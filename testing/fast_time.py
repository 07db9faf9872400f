"""Make time run fast and import programs in advance, in the fork server of `testing.forked` only.

Import this before dsat, which binds the clocks as default arguments.
"""

import importlib
import os
import time
import warnings
from pathlib import Path

from testing.forked import AHEAD

CLOCK = 100.0
pauses = 10.0  # divisor of the duration of each sleep

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
        "pytest",  # imported by the main module, which each fork imports too
        "dsat.cli.commands",
        "dsat.cli.main",
        "dsat.determined_cluster.runner",
        "testing.master.container.entrypoint",
    ):
        importlib.import_module(name)

# A test needs no protection from a power failure.
os.fsync = lambda fd: None
# Forks have dsat already. Uploading an experiment without dsat's files takes half the time.
vars(importlib.import_module("dsat.determined_cluster.upload"))["_package"] = dict
