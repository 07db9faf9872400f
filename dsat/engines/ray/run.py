"""Run a command on a node of a Ray cluster, with these three pipes and the same variables.

    python3 -m dsat.engines.ray.run SOCKET NODE COMMAND ...

Hands the pipes to the driver that listens on the socket, and waits for the command's end. The
command's standard input ends with this process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

_UNREACHED = 255


def main() -> int:
    """Run the command line above; return the command's exit status."""
    address, node, *command = sys.argv[1:]
    # The end of a Ray job signals all of its processes: dsat ends its own.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start = {"node": int(node), "command": command, "cwd": os.getcwd(), "env": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as driver:
        try:
            driver.connect(address)
            socket.send_fds(driver, [b"."], [0, 1, 2])
            driver.sendall(json.dumps(start).encode() + b"\n")
            for number in (0, 1):  # the driver's copies are the only ones: their end is seen
                os.close(number)
            return int(driver.makefile().readline() or _UNREACHED)
        except OSError as error:
            sys.stderr.write(f"Ray's driver cannot be reached: {error.strerror}\n")
            return _UNREACHED


if __name__ == "__main__":
    sys.exit(main())
