"""Stands for `/usr/sbin/sshd` in a container: runs what `pdsh.py` of another container sends.

No SSH: one line of JSON with a command after the greeting, its output and its status in return.
Like a session of sshd, a command gets next to nothing of the container's environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import threading
from typing import IO

# Of a login, beside what belongs to the container itself.
_OF_A_LOGIN = ("HOME", "PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", dest="port", type=int, required=True)
    parser.add_argument("-f", dest="config")
    parser.add_argument("-D", dest="foreground", action="store_true")
    port = parser.parse_args().port
    with socket.create_server((os.environ["HOSTNAME_CONTAINER_ADDRESS"], port)) as server:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


def serve(connection: socket.socket) -> None:
    """One session; the other side may leave at any time, or only look whether this is here."""
    with contextlib.suppress(OSError), connection:
        stream = connection.makefile("rw", encoding="utf-8")
        stream.write("SSH-2.0-StandIn\n")
        stream.flush()
        line = stream.readline()
        if line:
            run(json.loads(line), stream)


def run(request: dict[str, str], stream: IO[str]) -> None:
    """Runs a command with the paths of the client's container turned into those of this one."""
    command = request["command"]
    for variable in ("HOSTNAME_CONTAINER_FOLDER", "HOSTNAME_CONTAINER_TMP"):
        command = command.replace(request[variable], os.environ[variable])
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("HOSTNAME") or name in _OF_A_LOGIN
    }
    process = subprocess.Popen(
        ["/bin/bash", "-c", command],
        env=environment,
        cwd=environment["HOME"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    for line in process.stdout:
        stream.write(json.dumps({"out": line}) + "\n")
        stream.flush()
    status = process.wait()
    stream.write(json.dumps({"status": 128 - status if status < 0 else status}) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
