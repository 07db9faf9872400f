"""Parts of nodes of a Ray cluster.

Ray's driver is a process of its own (`dsat.engines.ray.driver`): nothing of Ray's is in dsat's
process, and the driver's end is the end of hosts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dsat.engines.local.hosts import Host
from dsat.engines.places.base import Environment, Node, Provider, hosts_on, place_option
from dsat.engines.ray.choice import ResourceRequest
from dsat.errors import EngineError, UserInputError
from dsat.inputs.option import WORD, at_least
from dsat.values.files import folder_for_sockets

_log = logging.getLogger(__name__)
# The driver of a job that was submitted has it (ray 2.60, `JobSupervisor`).
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"


class RayCluster(Provider):
    """Everything that is free of a Ray cluster, or the part of it that the user asks for."""

    options = (
        place_option(
            "--ray-address",
            "with --engine ray: of the cluster (default: as Ray finds it, by RAY_ADDRESS or on "
            "this machine)",
            kind=WORD,
            metavar="ADDRESS",
        ),
        place_option(
            "--nodes", "with --engine ray: take that many nodes", kind=at_least(1), metavar="N"
        ),
        place_option(
            "--gpus-per-node",
            "with --engine ray: take that many GPUs of each node",
            kind=WORD,
            metavar="[TYPE:]N",
        ),
    )

    def __init__(self) -> None:
        self._reservation: Reservation | None = None

    @classmethod
    def detect(cls, environment: Environment) -> bool:
        return _JOB_VARIABLE in environment.variables

    def acquire(self, environment: Environment, given: Mapping[str, Any]) -> list[Host]:
        request = ResourceRequest.of(given.get("nodes"), given.get("gpus_per_node"))
        address = given.get("ray_address")
        used = address or environment.variables.get("RAY_ADDRESS", "")
        if used.startswith("ray://"):
            raise UserInputError(
                f"{used} is for Ray Client, from outside of a cluster",
                where="--engine ray",
                hint="Start dsat on a node of it, or as a job: ray job submit -- python3 -m dsat "
                "...",
            )
        self._reservation = Reservation(address, request, say=_log.info)
        _log.info("tuning on free parts of a Ray cluster, %s", self._reservation.text)
        return hosts_on(self._reservation.nodes)

    def release(self) -> None:
        if self._reservation is not None:
            self._reservation.end()


class Reservation:
    """Equal parts of nodes, until this is ended or this process ends.

    Args:
        address: of the cluster; None for the one that Ray finds by itself, or else this machine.
        request: resources to reserve.
        say: gets a line for people while it is waited for.

    Attributes:
        nodes: the one that this process runs on comes first.
        text: description of the resources, for people.

    Raises:
        UserInputError: Ray is not installed.
        EngineError: the cluster is not reached, or gives nothing.
    """

    def __init__(
        self, address: str | None, request: ResourceRequest, *, say: Callable[[str], object]
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UserInputError(
                "needs Ray, which is not installed",
                where="--engine ray",
                hint="Run pip install 'ray>=2.40'.",
            )
        self._folder = Path(tempfile.mkdtemp(prefix="dsat-", dir=folder_for_sockets()))
        socket = str(self._folder / "s")
        with tempfile.TemporaryFile() as errors:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "dsat.engines.ray.driver"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
            )
            try:
                found = self._reserve({"socket": socket, "address": address, **vars(request)}, say)
            except BaseException:
                self.end()
                raise
            if found is None:
                self.end()
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                why = (lines or ["it printed nothing"])[-1]
                raise EngineError(f"Ray's driver ended before anything was reserved: {why}")
        run = (sys.executable, "-m", "dsat.engines.ray.run", socket)
        self.text: str = found["text"]
        self.nodes = [
            Node(node["name"], node["address"], (*run, str(number)), node["is_here"])
            for number, node in enumerate(found["nodes"])
        ]

    def _reserve(
        self, request: Mapping[str, Any], say: Callable[[str], object]
    ) -> dict[str, Any] | None:
        """Return the driver's answer once it has reserved something; None if it has ended."""
        assert self._driver.stdin is not None and self._driver.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._driver.stdin.write(json.dumps(request).encode() + b"\n")
        while line := self._driver.stdout.readline():
            message: dict[str, Any] = json.loads(line)
            if message["event"] == "reserved":
                return message
            if message["event"] == "failed":
                raise EngineError(f"Ray: {message['reason']}")
            say(f"waiting for Ray to give {message['text']}")
        return None

    def end(self) -> None:
        """End the driver, which gives everything back; does nothing twice."""
        with self._driver:  # closes its pipes, and waits
            pass
        shutil.rmtree(self._folder, ignore_errors=True)
