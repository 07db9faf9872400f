"""Containers as local processes; each is a folder, an environment and a process.

This is the part of an agent and a container image in a real cluster. A container's folder holds its
`/run/determined`, `/tmp` and home directory; `container/sitecustomize.py` redirects the determined
package to them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from dsat.engines.ports import free_ports
from testing.forked import Forked
from testing.master.allocation import Allocation
from testing.master.container.entrypoint import main
from testing.master.logs import LogLine, parse

IMAGE = Path(__file__).parent / "container"
# The launchers of DeepSpeed and determined copy most variables to other nodes, but none that begins
# with HOSTNAME. This variable must stay in its container.
FOLDER_VARIABLE = "HOSTNAME_CONTAINER_FOLDER"
# Variables that a container image sets for its libraries; here they are copied from this machine.
_KEPT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "TORCH_EXTENSIONS_DIR", "CC", "CXX")


@dataclass
class Running:
    """The first process of a container."""

    allocation: Allocation
    folder: Path
    process: Forked


class Processes:
    """Starts and kills containers.

    Args:
        folder: Parent of the containers' folders.
        on_log: Called with the task's id and a log line.
        on_exit: Called with an allocation and its exit status.
    """

    def __init__(
        self,
        folder: Path,
        on_log: Callable[[str, LogLine], None],
        on_exit: Callable[[Allocation, int], None],
        now: Callable[[], str],
    ) -> None:
        self._folder = folder
        self._on_log = on_log
        self._on_exit = on_exit
        self._now = now
        self._running: dict[str, Running] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        # A short prefix, as paths of sockets in this folder must fit in 107 bytes.
        self._tmp = tempfile.TemporaryDirectory(prefix="dm")

    def start(
        self, allocation: Allocation, variables: Mapping[str, str], words: Sequence[str] | None
    ) -> None:
        """Start a container with the variables of its task; `words` as in
        `container.entrypoint.main`."""
        folder = self._folder / allocation.id
        tmp = Path(self._tmp.name) / str(len(self._threads))
        environment = _laid_out(folder, tmp, allocation, variables)
        process = Forked(main, [words], environment=environment, folder=folder / "workdir")
        running = Running(allocation, folder, process)
        with self._lock:
            self._running[allocation.id] = running
        thread = threading.Thread(target=self._attend, args=(running,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def kill(self, allocation_id: str) -> None:
        """Kill an allocation's processes; do not wait for their end."""
        with self._lock:
            running = self._running.get(allocation_id)
        if running is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGKILL)

    def kill_all(self) -> None:
        for allocation_id in list(self._running):
            self.kill(allocation_id)
        for thread in self._threads:
            thread.join(timeout=600)
        self._tmp.cleanup()

    def of(self, allocation_id: str) -> list[psutil.Process]:
        """Return the living processes of an allocation."""
        with self._lock:
            running = self._running.get(allocation_id)
        if running is None:
            return []
        # The first process is forked, so the system shows the variables of its parent.
        return [psutil.Process(running.process.pid), *processes_in(running.folder)]

    def _attend(self, running: Running) -> None:
        """Read a container's output, wait for its end and report its exit status."""
        process = running.process
        readers = [
            threading.Thread(target=self._read, args=(running, stream, stdtype), daemon=True)
            for stream, stdtype in ((process.stdout, "stdout"), (process.stderr, "stderr"))
        ]
        for reader in readers:
            reader.start()
        status = process.wait()
        # When its first process ends, the whole container ends.
        for left in processes_in(running.folder):
            with contextlib.suppress(psutil.Error):
                left.kill()
        for reader in readers:
            reader.join(timeout=10)
        _clean_up(running.allocation.id)
        with self._lock:
            del self._running[running.allocation.id]
        self._on_exit(running.allocation, 128 - status if status < 0 else status)

    def _read(self, running: Running, stream: IO[bytes], stdtype: str) -> None:
        allocation = running.allocation
        with stream:
            for line in stream:
                text = line.decode("utf-8", "replace").replace("\r", "\n")
                parsed = parse(
                    text if text.endswith("\n") else f"{text}\n",
                    timestamp=self._now(),
                    stdtype=stdtype,
                    container_id=allocation.container_id,
                    agent_id=f"agent-{allocation.node}",
                )
                self._on_log(allocation.task_id, parsed)


def processes_in(folder: Path) -> list[psutil.Process]:
    """Return all processes of a container, also those whose parents have ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(FOLDER_VARIABLE) == str(folder):
                found.append(process)
    return found


def _clean_up(allocation_id: str) -> None:
    """Remove the SDK's files from this machine's `/tmp`, which all containers share."""
    for pattern in (f"tensorboard-{allocation_id}-*", f"hostfile-{allocation_id}.txt*"):
        for path in Path("/tmp").glob(pattern):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _laid_out(
    folder: Path, tmp: Path, allocation: Allocation, variables: Mapping[str, str]
) -> dict[str, str]:
    """Make the folders of a container, and return its environment."""
    for name in ("workdir", "home", "run/info", "run/train/logs", "run/train/model"):
        (folder / name).mkdir(parents=True)
    tmp.mkdir()
    ports = free_ports(3)  # containers of one machine share its network
    environment = {
        **{name: os.environ[name] for name in _KEPT if name in os.environ},
        "HOME": str(folder / "home"),
        "TMPDIR": str(tmp),
        "PATH": os.pathsep.join([os.path.dirname(sys.executable), "/usr/bin", "/bin"]),
        # The slots are CPUs, so DeepSpeed cannot detect its accelerator and local size.
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": str(max(1, len(allocation.slot_ids))),
        # The fixed ports of determined and of DeepSpeed's launcher.
        "INTER_TRAIN_PROCESS_COMM_PORT_1": str(ports[0]),
        "INTER_TRAIN_PROCESS_COMM_PORT_2": str(ports[1]),
        "HOSTNAME_CONTAINER_MASTER_PORT": str(ports[2]),
        **variables,
        "DET_AGENT_ID": f"agent-{allocation.node}",
        "DET_CONTAINER_ID": allocation.container_id,
        "DET_RESOURCES_ID": allocation.resources_id,
        "DET_RESOURCES_TYPE": "docker-container",
        "DET_SLOT_IDS": json.dumps(allocation.slot_ids),
        "DET_UNIQUE_PORT_OFFSET": str(min(allocation.slot_ids, default=0)),
        "HOSTNAME": f"node-{allocation.node}",
        FOLDER_VARIABLE: str(folder),
        "HOSTNAME_CONTAINER_TMP": str(tmp),
    }
    user_paths = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(IMAGE), *([user_paths] if user_paths else [])])
    return environment
