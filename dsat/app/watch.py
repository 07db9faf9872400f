"""The server of `dsat watch`: pages on this machine's loopback, for whoever has the token.

Needs starlette and uvicorn (`pip install 'dsat[watch]'`), which are imported when it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dsat.app import mailbox, past_runs
from dsat.engines.local.rank_process import PR_SET_PDEATHSIG, prctl
from dsat.errors import JournalError, UserInputError
from dsat.report import watch_page
from dsat.report.watch_page import Watched
from dsat.tuning.journal import FILE_NAME
from dsat.tuning.requests import Request as RunRequest
from dsat.tuning.requests import RequestKind
from dsat.values.codec import DecodeError

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOOPBACK = "127.0.0.1"
_HOSTS = [LOOPBACK, "localhost"]  # by other names a foreign page might reach it (DNS rebinding)
_EVERY_S, _LOOK_S = 1.0, 0.2
_FILES = ("stdout.log", "stderr.log", "ds_config.json")
_MOST_CONNECTIONS, _MOST_ACCEPTED_AT_ONCE = 100, 16  # together far below 256 open files
_REQUEST_WITHIN_S = 10.0
_MOST_OF_FILE, _MOST_OF_REQUEST = 4 * 2**20, 4096
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline' 'unsafe-eval'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass
class _Reader:
    """Reads a run again when its journal has grown."""

    folder: Path
    version: tuple[int, int] = (0, 0)
    past: past_runs.PastRun | None = None
    state: dict[str, Any] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> tuple[Watched, int]:
        """The run, and a number that changes with it."""
        with self.lock:
            found = (self.folder / FILE_NAME).stat()
            version = (found.st_size, found.st_mtime_ns)
            if self.past is None or version != self.version:
                self.past, self.version, self.state = past_runs.load(self.folder), version, {}
            goes_on = past_runs.is_locked(self.folder)
        state = past_runs.state_of(self.past.run, goes_on=goes_on)
        watched = Watched(self.folder, self.past.run, state, self.past.trials)
        # What is over may be told otherwise than what goes on.
        return watched, version[0] * 2 + goes_on

    def page_state(self, query: str) -> dict[str, Any]:
        """The parts of the page; made once for each state of the run."""
        watched, _ = self.read()
        with self.lock:
            if not self.state:
                self.state = watch_page.state(watched, query)
            return self.state


class Watcher:
    """The pages of one run, or of all runs in a folder.

    Args:
        folder: of the run, or of the runs.
        token: whoever knows it may look and ask.

    Attributes:
        ends: whether the server is about to end, so that nobody is told anything more.
    """

    def __init__(self, folder: Path, token: str) -> None:
        self.ends: Callable[[], bool] = lambda: False
        self._folder = folder
        self._token = token
        self._is_run = (folder / FILE_NAME).is_file()
        self._readers: dict[Path, _Reader] = {}

    def app(self) -> Starlette:
        """The application."""
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.routing import Route

        pages: list[tuple[str, Callable[[Request], Response]]] = [
            ("/", self._shell),
            ("/state", self._state),
            ("/trials/{trial}/{file}", self._file),
        ]
        prefix = "" if self._is_run else "/runs/{run}"
        routes = [Route(prefix + path, self._guarded(answer)) for path, answer in pages]
        routes.append(Route(f"{prefix}/events", self._events))
        routes.append(Route(f"{prefix}/requests", self._request, methods=["POST"]))
        if not self._is_run:
            routes.append(Route("/", self._guarded(self._list)))
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=_HOSTS, www_redirect=False)
        missing = dict.fromkeys((UserInputError, JournalError, FileNotFoundError), _missing)
        return Starlette(routes=routes, middleware=[hosts], exception_handlers=missing)

    # -- answers

    def _guarded(self, answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
        @functools.wraps(answer)
        def guarded(request: Request) -> Response:
            if not self._knows_token(request.query_params.get("token", "")):
                return _text("The address lacks the token that dsat printed.", 403)
            response = answer(request)
            response.headers.update(_HEADERS)
            return response

        return guarded

    def _shell(self, request: Request) -> Response:
        reader = self._reader(request)
        return _html(watch_page.shell(reader.read()[0]))

    def _state(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse(self._reader(request).page_state(self._query))

    def _list(self, request: Request) -> Response:
        found, unread = past_runs.load_all(self._folder)
        watched = [Watched(p.folder, p.run, p.state, p.trials) for p in found]
        return _html(watch_page.runs(watched, unread, self._folder, self._query))

    def _file(self, request: Request) -> Response:
        reader, name = self._reader(request), request.path_params["trial"]
        watched, _ = reader.read()
        known = any(trial.name == name for trial in watched.run.trials.values())
        if not known or request.path_params["file"] not in _FILES:
            return _text("There is no such file.", 404)
        with open(watched.trials / name / request.path_params["file"], "rb") as file:
            return _text(file.read(_MOST_OF_FILE).decode(errors="replace"), 200)

    async def _events(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        if not self._knows_token(request.query_params.get("token", "")):
            return _text("The address lacks the token that dsat printed.", 403)
        reader = self._reader(request)
        return StreamingResponse(
            self._told(reader, request), media_type="text/event-stream", headers=_HEADERS
        )

    async def _told(self, reader: _Reader, request: Request) -> AsyncIterator[str]:
        """Server-sent events, one a second (html.spec.whatwg.org, server-sent events)."""
        told_s = -math.inf
        while not self.ends() and not await request.is_disconnected():
            if time.monotonic() - told_s >= _EVERY_S:
                told_s = time.monotonic()
                with contextlib.suppress(OSError, JournalError):
                    watched, version = await asyncio.to_thread(reader.read)
                    yield f"data: {json.dumps(watch_page.now(watched, version))}\n\n"
            await asyncio.sleep(_LOOK_S)

    async def _request(self, request: Request) -> Response:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme != "Bearer" or not self._knows_token(token):
            return _told("Refused: only whoever has the token may ask for anything.", 403)
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > _MOST_OF_REQUEST:
                return _told("Refused: that is too long for a request.", 413)
        try:
            wanted = RunRequest.from_json(json.loads(body))
        except (ValueError, TypeError, RecursionError, DecodeError) as error:
            return _told(f"Refused: that is no request: {error}", 400)
        return await asyncio.to_thread(self._leave, self._reader(request), wanted)

    def _leave(self, reader: _Reader, wanted: RunRequest) -> Response:
        watched, _ = reader.read()
        run = watched.run
        assert run.plan is not None
        if not watched.goes_on:
            return _told("Refused: nobody works on this run; continue it with --resume.", 409)
        if wanted.kind is RequestKind.CANCEL:
            running = {trial.id: trial.name for trial in run.running}
            if wanted.trial_id not in running:
                return _told("Refused: that trial does not run.", 409)
            said = f"{running[wanted.trial_id]} will be canceled."
        elif wanted.kind is RequestKind.BUDGET:
            if wanted.max_trials is None or wanted.max_trials <= run.plan.max_trials:
                return _told(f"Refused: there may be {run.plan.max_trials} trials already.", 409)
            said = f"There may be {wanted.max_trials} trials."
        else:
            said = "No further trial will be started."
        mailbox.leave(reader.folder, wanted)
        return _told(said, 202)

    # -- helpers

    @property
    def _query(self) -> str:
        return f"?token={self._token}"

    def _knows_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())

    def _reader(self, request: Request) -> _Reader:
        folder = self._folder
        if not self._is_run:
            named = {path.name: path for path in past_runs.folders(folder)}
            if request.path_params["run"] not in named:
                raise UserInputError("is no run", where=request.path_params["run"])
            folder = named[request.path_params["run"]]
        return self._readers.setdefault(folder, _Reader(folder))


@dataclass(frozen=True)
class Page:
    """The address of a page.

    Attributes:
        url: to open, the token in it.
    """

    url: str

    @property
    def told(self) -> list[str]:
        """Return the address, from here and from another machine."""
        port = urlsplit(self.url).port
        return [
            f"Watch it at {self.url}",
            f"From another machine, first: ssh -L {port}:{LOOPBACK}:{port} {socket.gethostname()}",
        ]


@dataclass(frozen=True)
class Serving(Page):
    """A server that is ready."""

    _server: uvicorn.Server
    _socket: socket.socket

    def run(self) -> None:
        """Serves until Ctrl-C."""
        self._server.run(sockets=[self._socket])


def _check_packages() -> None:
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserInputError(
            f"needs packages that are not installed: {error}", hint="pip install 'dsat[watch]'"
        ) from None


def open_server(folder: Path, port: int | None = None) -> Serving:
    """Makes the server of a run, or of a folder with runs.

    Args:
        folder: of the run or the runs.
        port: by default any that is free.

    Raises:
        UserInputError: what it needs is not installed, or the port is taken.
    """
    _check_packages()
    import uvicorn

    token = secrets.token_urlsafe(24)
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((LOOPBACK, port or 0))
        listening.listen()  # so that nobody is refused before the server has begun
    except OSError as error:
        listening.close()
        raise UserInputError(str(error.strerror), where=f"--port {port}") from None
    watcher = Watcher(folder, token)
    config = uvicorn.Config(
        watcher.app(),
        http=_protocol(),
        backlog=_MOST_ACCEPTED_AT_ONCE,
        log_level="critical",  # clients' mistakes are theirs
        access_log=False,
        lifespan="off",
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=3,
    )
    url = f"http://{LOOPBACK}:{listening.getsockname()[1]}/?token={token}"
    server = uvicorn.Server(config)
    watcher.ends = lambda: server.should_exit
    return Serving(url, server, listening)


def _protocol() -> type[asyncio.Protocol]:
    """Make uvicorn's protocol for HTTP with limits on connections and on the time for a request."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Bounded(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > _MOST_CONNECTIONS:
                transport.abort()
            else:
                self.loop.call_later(_REQUEST_WITHIN_S, self._end_incomplete)

        def _end_incomplete(self) -> None:
            if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
                self.transport.abort()
            elif not self.transport.is_closing():
                self.loop.call_later(_REQUEST_WITHIN_S, self._end_incomplete)

    return Bounded


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Page]:
    """Serve a run while the block runs, in a process of its own: connections cost the search none.

    Raises:
        UserInputError: what it needs is not installed.
    """
    _check_packages()
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
            yield Page(json.loads("".join(lines))["url"])
        finally:
            server.terminate()


def _missing(request: Request, error: Exception) -> Response:
    return _text(str(error), 404)


def _html(text: str) -> Response:
    from starlette.responses import HTMLResponse

    return HTMLResponse(text)


def _text(text: str, status: int) -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(text, status, headers=_HEADERS)


def _told(message: str, status: int) -> Response:
    from starlette.responses import JSONResponse

    return JSONResponse({"message": message}, status, headers=_HEADERS)
