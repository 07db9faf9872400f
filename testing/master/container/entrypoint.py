"""The entrypoint of a container, in place of the master's `entrypoint.sh`.

The same steps with the same modules of determined, in one process, for the start of four Python
processes would take longer than the trials of most tests.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil


def main() -> None:
    folder = Path(os.environ["HOSTNAME_CONTAINER_FOLDER"])
    end_with_the_agent()
    for name, number in (("stdout.log", 1), ("stderr.log", 2)):
        link = folder / "run" / "train" / "logs" / name
        link.symlink_to(f"/proc/{os.getpid()}/fd/{number}")
    sys.path[0] = ""
    _run("determined.exec.prep_container", "--download_context_directory", "--resources")
    if Path("startup-hook.sh").exists():
        subprocess.run(["bash", "startup-hook.sh"], check=True)
    _run("determined.exec.prep_container", "--rendezvous")
    _run("determined.exec.launch")


def end_with_the_agent() -> None:
    """Kills the container when the other end of its standard input is closed.

    So nothing is left of a test that was killed. What runs in the container has no input.
    """
    alive = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)

    def watch() -> None:
        os.read(alive, 1)
        shutil.rmtree(Path(os.environ["HOSTNAME_CONTAINER_TMP"]).parent, ignore_errors=True)
        others = [process for process in psutil.process_iter() if is_here(process)]
        # Last the one that is waited for: with its end, this process ends, too.
        for process in sorted(others, key=_is_child):
            with contextlib.suppress(psutil.Error):
                process.kill()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def is_here(process: psutil.Process) -> bool:
    """Return whether another process belongs to this container."""
    name = "HOSTNAME_CONTAINER_FOLDER"
    try:
        return process.pid != os.getpid() and process.environ().get(name) == os.environ[name]
    except (psutil.Error, OSError):
        return False


def _is_child(process: psutil.Process) -> bool:
    try:
        return process.ppid() == os.getpid()
    except psutil.Error:
        return False


def _run(module: str, *arguments: str) -> None:
    """As `python3 -m module arguments` does it."""
    sys.argv = [module, *arguments]
    # A module that was imported before would run twice, with a warning.
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
