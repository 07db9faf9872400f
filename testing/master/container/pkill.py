"""Stands for `pkill` in a container: it sees the processes of its container and no others.

A real container has a process table of its own; here, DeepSpeed's launcher, which ends its workers
on other nodes with `pkill -f`, would end those of other trials and of the whole machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import sys

import psutil

VARIABLE = "HOSTNAME_CONTAINER_FOLDER"


def main() -> int:
    """As pkill: 0 if anything matched."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-f", dest="full", action="store_true", required=True)
    parser.add_argument("pattern")
    pattern = parser.parse_args().pattern
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = False
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            mine = process.environ().get(VARIABLE) == os.environ[VARIABLE]
            if mine and process.pid not in own and re.search(pattern, " ".join(process.cmdline())):
                process.send_signal(signal.SIGTERM)
                found = True
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
