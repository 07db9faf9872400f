"""Parts of nodes of a Ray cluster that are reserved for trials."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import select
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dsat.engines.ray.choice import Wish
from dsat.errors import EngineError, UserInputError

_LOOK_EVERY_S = 0.1
_END_LIMIT_S = 30.0
# The driver of a job that was submitted has it (ray 2.60, `JobSupervisor`).
_JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"


def is_job(env: Mapping[str, str]) -> bool:
    """Whether environment variables are those of a job that was submitted to a Ray cluster."""
    return _JOB_VARIABLE in env


@dataclass(frozen=True)
class Node:
    """A node of which a part is reserved.

    Attributes:
        number: among all that were given.
        name: the host's own, made unique.
        address: by which Ray's own processes reach it.
        prefix: what goes before a command that is to run there, with our pipes.
        is_here: whether it is the one that this process runs on.
    """

    number: int
    name: str
    address: str
    prefix: tuple[str, ...]
    is_here: bool


class Reservation:
    """Equal parts of nodes, until this is ended or forgotten, or this process ends.

    Nodes that go are asked for again. It may grow, unless the user wants so many nodes.

    Args:
        address: of the cluster; None for the one that Ray finds by itself, or else this machine.
        wish: what of it.
        say: is told what is waited for.
        meanwhile: called now and then while it is waited for; what it raises ends that.

    Attributes:
        nodes: the nodes at first; the one that this process runs on comes first.
        ended: whether it is over.
        text: what of them is reserved, for people.

    Raises:
        UserInputError: Ray is not installed.
        EngineError: the cluster is not reached, or gives nothing.
    """

    def __init__(
        self,
        address: str | None,
        wish: Wish,
        *,
        say: Callable[[str], object],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UserInputError(
                "needs Ray, which is not installed",
                where="--engine ray",
                hint="pip install 'dsat[ray]'.",
            )
        folder = Path(tempfile.mkdtemp(prefix="dsat-"))
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "dsat.engines.ray.driver"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
            )
            self._end = weakref.finalize(self, _end, process, folder)
            request = {"socket": str(folder / "s"), "address": address, "nodes": wish.nodes}
            request |= {"slots": wish.slots, "kind": wish.kind}
            try:
                told = _reserved(process, request, say, meanwhile)
            except BaseException:
                self.end()
                raise
            if told is None:
                self.end()
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                why = (lines or ["it says nothing"])[-1]
                raise EngineError(f"Ray's driver ended before anything was reserved: {why}")
        self._process = process
        self._run = (sys.executable, "-m", "dsat.engines.ray.run", str(folder / "s"))
        self.ended = False
        self.text: str = told["text"]
        self.nodes = [self._node(node) for node in told["nodes"]]

    def _node(self, told: Mapping[str, Any]) -> Node:
        number = told["number"]
        prefix = (*self._run, str(number))
        return Node(number, told["name"], told["address"], prefix, told["is_here"])

    def grow(self, most: int) -> None:
        """Takes parts of nodes that come, or that others give back, up to so many in all."""
        self._ask({"most": most})

    def come(self) -> list[Node]:
        """Nodes of which a part is reserved as well since this was last asked; does not wait."""
        found = []
        out = self._process.stdout
        assert out is not None
        while not (self.ended or out.closed) and select.select([out], [], [], 0)[0]:
            line = out.readline()
            self.ended = not line
            if line:
                found.append(self._node(json.loads(line)["node"]))
        return found

    def give_back(self, node: Node) -> None:
        """Does without a node, where nothing runs any more, and without it if it comes again."""
        self._ask({"give_back": node.number})

    def _ask(self, request: Mapping[str, Any]) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):
            if not self.ended:
                stdin.write(json.dumps(request).encode() + b"\n")

    def end(self) -> None:
        """Gives back what is reserved, once the commands there have ended; does nothing twice."""
        self.ended = True
        self._end()


def _reserved(
    process: subprocess.Popen[bytes],
    request: Mapping[str, Any],
    say: Callable[[str], object],
    meanwhile: Callable[[], None],
) -> dict[str, Any] | None:
    """What the driver has reserved; None if it has ended."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
    while (line := _next_line(process.stdout, meanwhile)) is not None:
        told: dict[str, Any] = json.loads(line)
        if told["event"] == "reserved":
            return told
        if told["event"] == "failed":
            raise EngineError(f"Ray: {told['reason']}")
        say(f"waiting for Ray to give {told['text']}")
    return None


def _next_line(pipe: IO[bytes], meanwhile: Callable[[], None]) -> bytes | None:
    while not select.select([pipe], [], [], _LOOK_EVERY_S)[0]:
        meanwhile()
    return pipe.readline() or None  # unbuffered: no more than the line


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    try:
        process.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)
