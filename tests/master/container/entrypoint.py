"""The entrypoint of a container, in place of the master's `entrypoint.sh`.

The same steps with the same modules of determined, in one process, for the start of four Python
processes would take longer than the trials of most tests.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path


def main() -> None:
    folder = Path(os.environ["HOSTNAME_CONTAINER_FOLDER"])
    for name, number in (("stdout.log", 1), ("stderr.log", 2)):
        link = folder / "run" / "train" / "logs" / name
        link.symlink_to(f"/proc/{os.getpid()}/fd/{number}")
    sys.path[0] = ""
    _run("determined.exec.prep_container", "--download_context_directory", "--resources")
    if Path("startup-hook.sh").exists():
        subprocess.run(["bash", "startup-hook.sh"], check=True)
    _run("determined.exec.prep_container", "--rendezvous")
    _run("determined.exec.launch")


def _run(module: str, *arguments: str) -> None:
    """As `python3 -m module arguments` does it."""
    sys.argv = [module, *arguments]
    # A module that was imported before would run twice, with a warning.
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
