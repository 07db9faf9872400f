"""Stands for `pdsh` in a container: runs a command on several nodes by their `sshd.py`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sys
import threading


def main() -> int:
    """The largest status of all nodes, as `pdsh -S`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-S", action="store_true")
    parser.add_argument("-f", dest="fanout")
    parser.add_argument("-w", dest="hosts", required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    hosts = arguments.hosts.split(",")
    statuses = [255] * len(hosts)

    def run(index: int) -> None:
        command = " ".join(arguments.command).replace("%n", str(index)).replace("%h", hosts[index])
        try:
            statuses[index] = run_on(hosts[index], command)
        except OSError:
            print(f"{hosts[index]}: ssh exited with exit code 255", file=sys.stderr)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(statuses)


def run_on(host: str, command: str) -> int:
    """Runs a command on a node, shows its output and returns its status."""
    names = ("HOSTNAME_CONTAINER_FOLDER", "HOSTNAME_CONTAINER_TMP")
    request = {"command": command, **{name: os.environ[name] for name in names}}
    with (
        socket.create_connection((host, int(os.environ["DTRAIN_SSH_PORT"]))) as connection,
        connection.makefile("rw", encoding="utf-8") as stream,
    ):
        stream.readline()
        stream.write(json.dumps(request) + "\n")
        stream.flush()
        for line in stream:
            answer = json.loads(line)
            if "status" in answer:
                return int(answer["status"])
            sys.stdout.write(f"{host}: {answer['out']}")
            sys.stdout.flush()
    return 255


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main())
