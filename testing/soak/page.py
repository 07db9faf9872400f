"""Hostile clients of the page of `dsat watch`: it goes on answering, and complains of nothing.

The server may open 256 files, as by default on some systems.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import socket
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from dsat.app import watch
from testing.made_up_runs import Steady, write_run
from testing.soak import Tally, mutations

_FILES = 256
_ANSWERED_WITHIN_S = 20.0
_HALF = (b"", b"G", b"GET / HTTP/1.1\r\nA: ")
_PATHS: tuple[str, ...] = (
    "/",
    "/state",
    "/events",
    "/requests",
    "/runs/x/state",
    "/trials/../stdout.log",
    "//",
)
_PATHS += ("/trials/z1_gas1_tmbspg1/stdout.log", "/%00", "/%2e%2e/%2e%2e/etc/passwd", "/é", "*")
_METHODS = ("GET", "POST", "HEAD", "PUT", "OPTIONS", "DELETE", "TRACE", "PRI", "")
_BODIES: tuple[bytes, ...] = (
    *(b"", b"{}", b"[]", b"null", b"\xff" * 100, b"[" * 4000, b'{"a":' * 600, b"1" * 4000),
    *(b'{"kind": "stop"}', b'{"kind": "budget", "max_trials": 1e400}', b"x" * 100_000),
)


def attack(seed: int, count: int) -> Tally:
    """Ask a running run's page for nonsense; after each it answers a reader."""
    rng, tally = random.Random(seed), Tally()
    with _served() as (address, token):
        while tally.tried < count:
            name, harm = rng.choice(tuple(_HARMS.items()))
            with contextlib.ExitStack() as open_ones:
                said = harm(rng, address, token, open_ones)
                finding = f"{name}: {said!r}" if b" 500 " in said[:16] else ""
                finding = finding or _unanswered(address, token)
            tally.note(name, finding and f"{seed}/{tally.tried}: {finding}")
    return tally


@contextlib.contextmanager
def _served() -> Iterator[tuple[tuple[str, int], str]]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dsat-soak-"))) / "run"
        write_run(folder, Steady(), trials=12)
        resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, before[1]))
        try:
            page = stack.enter_context(watch.serving(folder))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        parts = urlsplit(str(page))
        assert parts.port
        yield (str(parts.hostname), parts.port), str(parts.query).partition("=")[2]


def _unanswered(address: tuple[str, int], token: str) -> str:
    """Return why a reader with the token is not answered, if so; a full server may ask to wait."""
    url, deadline = f"http://localhost:{address[1]}/state?token={token}", time.monotonic()
    deadline += _ANSWERED_WITHIN_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=_ANSWERED_WITHIN_S) as found:
                json.load(found)
            return ""
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                return f"a reader got {error!r}"
            time.sleep(0.1)


def _connected(address: tuple[str, int], open_ones: contextlib.ExitStack) -> socket.socket:
    return open_ones.enter_context(socket.create_connection(address, timeout=5))


def _asked(address: tuple[str, int], words: bytes, open_ones: contextlib.ExitStack) -> bytes:
    """Return the beginning of the answer to some bytes."""
    client = _connected(address, open_ones)
    client.settimeout(1.0)
    with contextlib.suppress(OSError):
        client.sendall(words)
        return client.recv(4096)
    return b""


def _half_open(
    rng: random.Random, address: tuple[str, int], token: str, open_ones: contextlib.ExitStack
) -> bytes:
    for _ in range(rng.randrange(50, 400)):
        with contextlib.suppress(OSError):
            _connected(address, open_ones).sendall(rng.choice(_HALF))
    return b""


def _bytes(
    rng: random.Random, address: tuple[str, int], token: str, open_ones: contextlib.ExitStack
) -> bytes:
    words = f"GET /state?token={token} HTTP/1.1\r\nHost: localhost\r\n\r\n"
    return _asked(address, mutations.of_text(rng, words), open_ones)


def _request(
    rng: random.Random, address: tuple[str, int], token: str, open_ones: contextlib.ExitStack
) -> bytes:
    body, known = rng.choice(_BODIES), rng.choice((token, token, "", "x", "é"))
    host = rng.choice(("localhost", "127.0.0.1", "elsewhere.example", ""))
    length = rng.choice((len(body), 0, -1, 10**12, "x"))
    head = f"{rng.choice(_METHODS)} {rng.choice(_PATHS)}?token={known} HTTP/1.1\r\n"
    head += f"Host: {host}\r\nAuthorization: Bearer {known}\r\nContent-Length: {length}\r\n\r\n"
    return _asked(address, head.encode() + body, open_ones)


_HARMS: dict[str, Callable[[random.Random, tuple[str, int], str, contextlib.ExitStack], bytes]] = {
    "half-open connections": _half_open,
    "damaged bytes": _bytes,
    "odd requests": _request,
}
