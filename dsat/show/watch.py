"""The server of `dsat watch`: the report of one run on the loopback interface, read-only."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import socket
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from dsat.errors import JournalError, UserInputError
from dsat.run.folder_lock import is_locked
from dsat.run.journal import FILE_NAME
from dsat.show import page, past_runs, progress, summary
from dsat.show.past_runs import PastRun
from dsat.show.view import RunView

LOOPBACK = "127.0.0.1"
_HOSTS = (LOOPBACK, "localhost")  # a request to another name may be DNS rebinding by a web page
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline' 'unsafe-eval'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_JSON, _TEXT, _HTML = "application/json", "text/plain; charset=utf-8", "text/html; charset=utf-8"


class Server(ThreadingHTTPServer):
    """Server of the page of one run.

    The path of the page is a secret, because every user of the machine can connect to the port.

    Args:
        folder: the run's folder.
        port: port to listen on; None for a free one.

    Raises:
        UserInputError: the server cannot listen on the port.
    """

    daemon_threads = True

    def __init__(self, folder: Path, port: int | None) -> None:
        try:
            super().__init__((LOOPBACK, port or 0), _Handler)
        except (OSError, OverflowError) as error:
            problem = getattr(error, "strerror", None) or str(error)
            where = f"a port of {LOOPBACK}" if port is None else f"--port {port}"
            raise UserInputError(problem, where=where) from None
        self.folder = folder
        self.path = f"/{secrets.token_urlsafe(16)}/"

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}{self.path}"

    def how_to_open(self) -> list[str]:
        """Return instructions to open the page, here and from another machine."""
        port = self.server_port
        return [
            f"Watch it at {self.url}",
            f"From another machine, first: ssh -L {port}:{LOOPBACK}:{port} {socket.gethostname()}",
        ]


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = 10.0  # seconds for a request to arrive

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the browser closed the page
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        if self.headers.get("Host", "").partition(":")[0] not in _HOSTS:
            self._send(400, _TEXT, "Unknown host.")
            return
        secret, _, page_name = path.rpartition("/")
        is_known = secrets.compare_digest(f"{secret}/".encode(), self.server.path.encode())
        try:
            if is_known and not page_name:
                past = _load(self.server.folder, _version(self.server.folder))
                self._send(200, _HTML, page.watch_html(RunView(past.run), str(past.folder)))
            elif is_known and page_name == "state":
                known = parse_qs(query).get("version", [""])[0]
                self._send(200, _JSON, json.dumps(_state(self.server.folder, known)))
            else:
                self._send(404, _TEXT, "There is no such page.")
        except (UserInputError, JournalError, OSError) as error:
            self._send(404, _TEXT, str(error))

    def _send(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode(errors="replace"))


def _state(folder: Path, known: str) -> dict[str, Any]:
    """Return the status line, and the report if it changed since the version `known`."""
    version = _version(folder)
    past = _load(folder, version)
    found = {"status": _status_line(past), "version": str(version)}
    if known == found["version"]:
        return found
    train_line = summary.read_train_line(past.folder)
    return {**found, **page.watch_parts(RunView(past.run), train_line)}


def _status_line(past: PastRun) -> str:
    first, *others = progress.describe_progress(past.run)
    if not past.is_running:
        return f"{first}; {past.state}"
    doing = [
        f"{t.name}: {progress.describe_activity(past.trials / t.name)}" for t in past.run.running
    ]
    return "; ".join([first, past.state, *others, *doing])


def _version(folder: Path) -> tuple[int, ...]:
    """Return a value that changes with the journal, the status file or the lock."""
    journal, status = (folder / FILE_NAME).stat(), folder / summary.STATUS_FILE
    written_ns = status.stat().st_mtime_ns if status.exists() else 0
    return journal.st_size, journal.st_mtime_ns, written_ns, is_locked(folder)


@functools.lru_cache(maxsize=1)
def _load(folder: Path, version: tuple[int, ...]) -> PastRun:
    return past_runs.load(folder)
