"""The entrypoint of a container that is forked: the one of `entrypoint.py`, in one process."""

from __future__ import annotations

import importlib

from testing.forked import run_module


def main(words: list[str]) -> None:
    """Run a trial.

    Args:
        words: the entrypoint of its experiment, `python3 -m MODULE WORD...`.
    """
    from testing import fast_time

    fast_time.pauses = 100.0
    importlib.import_module("testing.master.container.sitecustomize")
    run_module("determined.exec.prep_container", "--download_context_directory", "--resources")
    run_module("determined.exec.prep_container", "--rendezvous")
    run_module(*words[2:])
