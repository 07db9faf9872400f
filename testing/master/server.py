"""HTTP/1.1 on loopback: authentication, injected faults, then the handler of the route."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qs, urlsplit

from testing.master import client_api, task_api
from testing.master.errors import INTERNAL, ApiError
from testing.master.requests import Answer, Master, Request, Stream, find

ROUTES = [*client_api.ROUTES, *task_api.ROUTES]


@dataclass(frozen=True)
class Seen:
    """A request and the HTTP status of its answer: 0 for a dropped connection."""

    method: str
    path: str
    status: int


@dataclass
class Fault:
    """A fault that befalls the next requests that match.

    Attributes:
        pattern: A regular expression, searched for in `METHOD /path`.
        kind: `status` answers without executing the request; `drop` closes the connection without
            executing it; `drop_answer` executes it and then closes the connection.
        times: Number of requests that fail; None for all.
        after: Number of matching requests that succeed first.
        every: After that, each `every`-th matching request fails, beginning with the first.
        also: Called before the connection is closed.
        hits: Number of requests that failed.
    """

    pattern: str
    kind: Literal["status", "drop", "drop_answer"] = "status"
    status: int = 503
    times: int | None = 1
    message: str = "injected"
    after: int = 0
    every: int = 1
    also: Callable[[], object] = field(default=lambda: None)
    hits: int = field(default=0, init=False)

    def befalls(self, request: str) -> bool:
        """Return whether a request fails, and count it."""
        if not re.search(self.pattern, request):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        self.after = self.every - 1
        if self.times is not None and self.hits >= self.times:
            return False
        self.hits += 1
        return True


class _Dropped(Exception):
    """Close the connection without an answer."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, http: HttpServer) -> None:
        self.http = http
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors: clients may disconnect at any time."""


class HttpServer:
    """Serves a master; can stop and restart at the same port.

    Attributes:
        faults: Faults in force; the first that matches a request applies.
        seen: All requests that were answered or dropped, oldest first.
    """

    def __init__(self, master: Master) -> None:
        self.master = master
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.connections: set[socket.socket] = set()
        self.lock = threading.Lock()
        self._server = _Server(0, self)
        self.port = int(self._server.server_address[1])
        self._serve()

    def stop(self) -> None:
        """Close the port and drop all connections."""
        with self.master.changed:
            self.master.stopping = True
            self.master.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        with self.lock:
            still_open = list(self.connections)
        for connection in still_open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def start(self) -> None:
        """Serve again after `stop`, with unchanged state."""
        self.master.stopping = False
        self._server = _Server(self.port, self)
        self._serve()

    def fault_of(self, request: str) -> Fault | None:
        with self.lock:
            return next((fault for fault in self.faults if fault.befalls(request)), None)

    def _serve(self) -> None:
        # A short polling interval makes the shutdown quick.
        threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="master", daemon=True
        ).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Otherwise headers and body are two packets, and the second waits for an acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: `HttpServer.seen` holds all requests."""

    def setup(self) -> None:
        super().setup()
        with self.server.http.lock:
            self.server.http.connections.add(self.connection)

    def finish(self) -> None:
        with self.server.http.lock:
            self.server.http.connections.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status = 0
        fault = self.server.http.fault_of(f"{self.command} {url.path}")
        try:
            if fault is not None and fault.kind == "drop":
                raise _Dropped
            if fault is not None and fault.kind == "status":
                raise ApiError(INTERNAL, fault.message, fault.status)
            answer = self._answer(url.path, url.query, body)
            if fault is not None:
                raise _Dropped
            status = 200
            self._send(answer)
        except ApiError as error:
            status = error.status
            self._send_json(error.body, status)
        except _Dropped:
            if fault is not None:
                fault.also()
            self.close_connection = True
        except OSError:
            self.close_connection = True
            status = 0
        finally:
            with self.server.http.lock:
                self.server.http.seen.append(Seen(self.command, url.path, status))

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _answer(self, path: str, query: str, body: bytes) -> Answer:
        master = self.server.http.master
        headers = {name.lower(): value for name, value in self.headers.items()}
        with master.changed:
            if master.stopping:
                raise _Dropped
            route, parts = find(ROUTES, self.command, path)
            user = master.accounts.user_of(headers) if route.needs_login else ""
            content = json.loads(body) if body else {}
            answer = route.handler(master, Request(parse_qs(query), content, user, parts))
            master.drive()
            if master.stopping:
                raise _Dropped
        return answer

    def _send(self, answer: Answer) -> None:
        if not isinstance(answer, Stream):
            self._send_json(answer, 200)
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for row in answer.rows:
            line = json.dumps(row).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()

    def _send_json(self, body: Mapping[str, Any], status: int) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()
