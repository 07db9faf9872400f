"""The server of `dsat watch`: pages on the loopback interface, for holders of the token."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from dsat.app import mailbox, past_runs
from dsat.engines.agent.rank_process import PR_SET_PDEATHSIG, prctl
from dsat.errors import JournalError, UserInputError
from dsat.report import watch_page
from dsat.report.progress import STATUS_FILE
from dsat.report.watch_page import Watched
from dsat.run.journal import FILE_NAME
from dsat.run.requests import Request, RequestKind
from dsat.tuning.folder_lock import is_locked
from dsat.values.codec import DecodeError

LOOPBACK = "127.0.0.1"
_HOSTS = (LOOPBACK, "localhost")  # by other names a foreign page might reach it (DNS rebinding)
_EVERY_S = 1.0
_MOST_CONNECTIONS = 100
_FILES = ("stdout.log", "stderr.log", "ds_config.json")
_MOST_OF_FILE, _MOST_OF_REQUEST = 4 * 2**20, 4096
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline' 'unsafe-eval'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_JSON, _TEXT, _HTML = "application/json", "text/plain; charset=utf-8", "text/html; charset=utf-8"


class Server(socketserver.ThreadingTCPServer):
    """The pages of one run, or of all runs in a folder.

    Attributes:
        token: secret that every request must carry.

    Raises:
        UserInputError: the port is taken.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = _MOST_CONNECTIONS

    def __init__(self, folder: Path, port: int | None) -> None:
        try:
            super().__init__((LOOPBACK, port or 0), _Handler)
        except (OSError, OverflowError) as error:
            problem = getattr(error, "strerror", None) or str(error)
            raise UserInputError(problem, where=f"--port {port}") from None
        self.folder = folder
        self.token = secrets.token_urlsafe(24)

    @property
    def url(self) -> str:
        """Address of the first page, with the token."""
        return f"http://{LOOPBACK}:{self.server_address[1]}/?token={self.token}"

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Refuse a connection beyond those that a few open pages need: each has a thread."""
        return threading.active_count() <= _MOST_CONNECTIONS

    def knows(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.token.encode())


class _Handler(BaseHTTPRequestHandler):
    """Answers of a server to one client."""

    server: Server
    timeout = 10.0  # for a request to arrive

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client has gone
            super().handle()

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if not self._is_from_here():
            self._send(400, _TEXT, "Unknown host.")
        elif not self.server.knows(parse_qs(url.query).get("token", [""])[0]):
            self._send(403, _TEXT, "The address lacks the token that dsat printed.")
        else:
            try:
                self._show(url)
            except (UserInputError, JournalError, FileNotFoundError, PermissionError) as error:
                self._send(404, _TEXT, str(error))

    def do_POST(self) -> None:
        if not self._is_from_here():
            self._send(400, _TEXT, "Unknown host.")
            return
        try:
            status, message = self._request()
        except (UserInputError, JournalError, FileNotFoundError, PermissionError) as error:
            status, message = 404, str(error)
        self._send(status, _JSON, json.dumps({"message": message}))

    def _is_from_here(self) -> bool:
        return self.headers.get("Host", "").partition(":")[0] in _HOSTS

    def _send(self, status: int, kind: str, text: str) -> None:
        self._send_head(status, kind)
        self.wfile.write(text.encode(errors="replace"))

    def _send_head(self, status: int, kind: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()

    def _parts(self, url: SplitResult) -> tuple[Path | None, list[str]]:
        """Return the folder of a run, and the parts of a path below it; None for the list."""
        folder, parts = self.server.folder, [unquote(part) for part in url.path.split("/") if part]
        if (folder / FILE_NAME).is_file():
            return folder, parts
        if not parts:
            return None, parts
        named = {path.name: path for path in past_runs.folders(folder)}
        name = "/".join(parts[1:2])
        if parts[0] != "runs" or name not in named:
            raise UserInputError("is no run", where=name)
        return named[name], parts[2:]

    def _show(self, url: SplitResult) -> None:
        query = f"?token={self.server.token}"
        folder, parts = self._parts(url)
        if folder is None:
            found, unread = past_runs.load_all(self.server.folder)
            watched = [Watched(p.folder, p.run, p.state, p.trials) for p in found]
            self._send(200, _HTML, watch_page.runs(watched, unread, self.server.folder, query))
            return
        match parts:
            case []:
                self._send(200, _HTML, watch_page.shell(_watched(folder, _version(folder))))
            case ["state"]:
                state = watch_page.state(_watched(folder, _version(folder)), query)
                self._send(200, _JSON, json.dumps(state))
            case ["events"]:
                self._send_events(folder)
            case ["trials", trial, name] if name in _FILES:
                self._send_file(_watched(folder, _version(folder)), trial, name)
            case _:
                self._send(404, _TEXT, "There is no such page.")

    def _send_file(self, watched: Watched, trial: str, name: str) -> None:
        if all(known.name != trial for known in watched.run.trials.values()):
            raise UserInputError("is no trial of this run", where=trial)
        with open(watched.trials / trial / name, "rb") as file:
            self._send(200, _TEXT, file.read(_MOST_OF_FILE).decode(errors="replace"))

    def _send_events(self, folder: Path) -> None:
        """Send the status every second (html.spec.whatwg.org, server-sent events)."""
        _watched(folder, _version(folder))
        self._send_head(200, "text/event-stream")
        while True:
            with contextlib.suppress(FileNotFoundError, JournalError):
                version = _version(folder)
                told = watch_page.now(_watched(folder, version), str(version))
                self.wfile.write(f"data: {json.dumps(told)}\n\n".encode())
            time.sleep(_EVERY_S)

    def _request(self) -> tuple[int, str]:
        """Leave a request for the process that works on the run; return a status and a message."""
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or not self.server.knows(token):
            return 403, "Refused: the token in the address is missing or wrong."
        folder, parts = self._parts(urlsplit(self.path))
        if folder is None or parts != ["requests"]:
            return 404, "There is no such page."
        try:
            length = int(self.headers.get("Content-Length", ""))
            if length > _MOST_OF_REQUEST:
                return 413, "Refused: that is too long for a request."
            wanted = Request.from_json(json.loads(self.rfile.read(length)))
        except (ValueError, TypeError, RecursionError, DecodeError) as error:
            return 400, f"Refused: that is no request: {error}"
        return _leave(folder, wanted)


def _leave(folder: Path, wanted: Request) -> tuple[int, str]:
    watched = _watched(folder, _version(folder))
    run = watched.run
    if not watched.goes_on:
        return 409, "Refused: this run is not active; continue it with --resume."
    message = "No further trial will be started."
    if wanted.kind is RequestKind.CANCEL:
        running = {trial.id: trial.name for trial in run.running}
        if wanted.trial_id not in running:
            return 409, "Refused: that trial does not run."
        message = f"{running[wanted.trial_id]} will be canceled."
    elif wanted.kind is RequestKind.BUDGET:
        if wanted.max_trials is None or wanted.max_trials <= run.plan.max_trials:
            return 409, f"Refused: there may be {run.plan.max_trials} trials already."
        message = f"There may be {wanted.max_trials} trials."
    mailbox.leave(folder, wanted)
    return 202, message


def _version(folder: Path) -> tuple[int, ...]:
    """Return what changes with a run: its journal, its status, its state, its trials' place."""
    found, status = (folder / FILE_NAME).stat(), folder / STATUS_FILE
    written_ns = status.stat().st_mtime_ns if status.exists() else 0
    place = (folder / "trials").is_dir()
    return found.st_size, found.st_mtime_ns, written_ns, is_locked(folder), place


@functools.lru_cache(maxsize=8)  # a journal is read again when it has grown
def _watched(folder: Path, version: tuple[int, ...]) -> Watched:
    past = past_runs.load(folder)
    return Watched(past.folder, past.run, past.state, past.trials)


def where(url: str) -> list[str]:
    """Return the address of a page for people, from here and from another machine."""
    port = urlsplit(url).port
    return [
        f"Watch it at {url}",
        f"From another machine, first: ssh -L {port}:{LOOPBACK}:{port} {socket.gethostname()}",
    ]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve a run while the block runs; give the address.

    A process of its own serves it, so that connections cost the search nothing.
    """
    command = [sys.executable, "-m", "dsat", "watch", str(folder), "--json"]
    end_with_this = functools.partial(prctl, PR_SET_PDEATHSIG, signal.SIGTERM)
    with subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for the search, which ends the page
        preexec_fn=end_with_this,
    ) as server:
        try:
            assert server.stdout is not None
            lines = [server.stdout.readline() for _ in range(3)]
            yield json.loads("".join(lines))["url"]
            time.sleep(2 * _EVERY_S)  # open pages still learn that the run is over
        finally:
            server.terminate()
