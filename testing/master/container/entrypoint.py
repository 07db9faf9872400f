"""The entrypoint of a container: the same steps as in the master's `entrypoint.sh`.

The first process of a container is forked. It launches the trial as another process; if trials are
made up, it runs the search runner itself.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

import psutil

from dsat.engines.agent.rank_process import PR_SET_PDEATHSIG, prctl
from testing.forked import run_module

_ending = threading.Lock()


def main(words: Sequence[str] | None) -> None:
    """Run a trial.

    Args:
        words: an experiment's entrypoint (`python3 -m MODULE WORD...`) to run in this process.
            None launches the trial as Determined does.
    """
    folder = Path(os.environ["HOSTNAME_CONTAINER_FOLDER"])
    prctl(PR_SET_PDEATHSIG, 0)  # `end_with_the_tests` kills all processes instead
    importlib.import_module("testing.master.container.sitecustomize")
    threading.Thread(target=end_with_the_tests, daemon=True).start()
    for name, number in (("stdout.log", 1), ("stderr.log", 2)):
        link = folder / "run" / "train" / "logs" / name
        link.symlink_to(f"/proc/{os.getpid()}/fd/{number}")
    run_module("determined.exec.prep_container", "--download_context_directory", "--resources")
    if Path("startup-hook.sh").exists():
        subprocess.run(["bash", "startup-hook.sh"], check=True)
    run_module("determined.exec.prep_container", "--rendezvous")
    try:
        if words is None:
            run_module("determined.exec.launch")
        else:
            from testing import fast_time

            fast_time.pauses = 100.0
            run_module(*words[2:])
    finally:
        with _ending:  # wait while `end_with_the_tests` kills the container's other processes
            pass


def end_with_the_tests() -> None:
    """Kill the container when the tests' process ends, even if that process is killed."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    wait([tests.sentinel])
    _ending.acquire()  # never released: this process ends below
    shutil.rmtree(Path(os.environ["HOSTNAME_CONTAINER_TMP"]).parent, ignore_errors=True)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            here = process.environ().get("HOSTNAME_CONTAINER_FOLDER")
            if here == os.environ["HOSTNAME_CONTAINER_FOLDER"]:
                process.kill()
    os.kill(os.getpid(), signal.SIGKILL)
