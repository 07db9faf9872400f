"""Parts of nodes of a Ray cluster.

Ray's driver is a process of its own (`dsat.engines.ray.driver`): nothing of Ray's is in dsat's
process, and the driver's end is the end of hosts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dsat.engines.local.hosts import Host
from dsat.engines.places.base import Environment, place_option, with_machines
from dsat.engines.ray.choice import ResourceRequest
from dsat.errors import EngineError, UserInputError
from dsat.inputs.option import WORD, at_least
from dsat.values.files import folder_for_sockets

_log = logging.getLogger(__name__)
# The driver of a job that was submitted has it (ray 2.60, `JobSupervisor`).
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"


OPTIONS = (
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


def detect(environment: Environment) -> bool:
    """Return whether this is a job that was submitted to a cluster."""
    return _JOB_VARIABLE in environment.variables


@contextlib.contextmanager
def acquire(environment: Environment, given: Mapping[str, Any]) -> Iterator[list[Host]]:
    """Take everything that is free of a cluster, or the part of it that the user asks for."""
    request = ResourceRequest.of(given.get("nodes"), given.get("gpus_per_node"))
    address = given.get("ray_address")
    used = address or environment.variables.get("RAY_ADDRESS", "")
    if used.startswith("ray://"):
        raise UserInputError(
            f"{used} is for Ray Client, from outside of a cluster",
            where="--engine ray",
            hint="Start dsat on a node of it, or as a job: ray job submit -- python3 -m dsat ...",
        )
    with reserved(address, request, say=_log.info) as (nodes, text):
        _log.info("tuning on free parts of a Ray cluster, %s", text)
        yield with_machines(nodes)


@contextlib.contextmanager
def reserved(
    address: str | None, request: ResourceRequest, *, say: Callable[[str], object]
) -> Iterator[tuple[list[Host], str]]:
    """Reserve equal parts of nodes, until the context or this process ends.

    Args:
        address: of the cluster; None for the one that Ray finds by itself, or else this machine.
        request: resources to reserve.
        say: gets a line for people while it is waited for.

    Yields:
        The nodes, of which the one that this process runs on comes first, and a description of the
        resources for people.

    Raises:
        UserInputError: Ray is not installed.
        EngineError: the cluster is not reached, or gives nothing.
    """
    if importlib.util.find_spec("ray") is None:
        raise UserInputError(
            "needs Ray, which is not installed",
            where="--engine ray",
            hint="Run pip install 'ray>=2.40'.",
        )
    with (
        tempfile.TemporaryDirectory(
            prefix="dsat-", dir=folder_for_sockets(), ignore_cleanup_errors=True
        ) as folder,
        tempfile.TemporaryFile() as errors,
    ):
        socket = str(Path(folder) / "s")
        driver = subprocess.Popen(
            [sys.executable, "-m", "dsat.engines.ray.driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            start_new_session=True,
        )
        try:
            found = _answer(driver, {"socket": socket, "address": address, **vars(request)}, say)
            if found is None:
                driver.communicate()
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                why = (lines or ["it printed nothing"])[-1]
                raise EngineError(f"Ray's driver ended before anything was reserved: {why}")
            run = (sys.executable, "-m", "dsat.engines.ray.run", socket)
            nodes = [
                Host(prefix=(*run, str(number)), **node)
                for number, node in enumerate(found["nodes"])
            ]
            yield nodes, found["text"]
        finally:
            with driver:  # closes its pipes, and waits: its end gives everything back
                pass


def _answer(
    driver: subprocess.Popen[bytes], request: Mapping[str, Any], say: Callable[[str], object]
) -> dict[str, Any] | None:
    """Return the driver's answer once it has reserved something; None if it has ended."""
    assert driver.stdin is not None and driver.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        driver.stdin.write(json.dumps(request).encode() + b"\n")
    while line := driver.stdout.readline():
        message: dict[str, Any] = json.loads(line)
        if message["event"] == "reserved":
            return message
        if message["event"] == "failed":
            raise EngineError(f"Ray: {message['reason']}")
        say(f"waiting for Ray to give {message['text']}")
    return None
