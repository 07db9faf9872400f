"""HTTP/1.1 on loopback: authentication, faults, then the handler of the route."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from testing.master import client_api, task_api
from testing.master.errors import INVALID_ARGUMENT, ApiError
from testing.master.faults import Fault, Faults
from testing.master.requests import Answer, Master, Request, Stream, find

ROUTES = [*client_api.ROUTES, *task_api.ROUTES]


@dataclass(frozen=True)
class Seen:
    """A request and what became of it.

    Attributes:
        status: 0 for a connection that was dropped.
    """

    method: str
    path: str
    status: int
    user: str


class _Dropped(Exception):
    """The connection is to be closed without an answer."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, http: HttpServer) -> None:
        self.http = http
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may go away at any time."""


class HttpServer:
    """Serves a master; can go away and come back at the same port.

    Attributes:
        seen: All requests that were answered or dropped, oldest first.
    """

    def __init__(self, master: Master) -> None:
        self.master = master
        self.faults = Faults()
        self.seen: list[Seen] = []
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._server = _Server(0, self)
        self.port = int(self._server.server_address[1])
        self._serve()

    def stop(self) -> None:
        """Closes the port and drops all connections."""
        with self.master.changed:
            self.master.stopping = True
            self.master.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            open_ones = list(self._connections)
        for connection in open_ones:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def start(self) -> None:
        """Comes back, with everything as it was."""
        self.master.stopping = False
        self._server = _Server(self.port, self)
        self._serve()

    def note(self, seen: Seen) -> None:
        with self._lock:
            self.seen.append(seen)

    def opened(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)

    def closed(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)

    def _serve(self) -> None:
        # A short poll, for a quick shutdown.
        threading.Thread(
            target=self._server.serve_forever, args=(0.02,), name="master", daemon=True
        ).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Else headers and body go out as two packets, and the second waits for an acknowledgement.
    wbufsize = -1
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are kept in `HttpServer.seen`."""

    def setup(self) -> None:
        super().setup()
        self.server.http.opened(self.connection)

    def finish(self) -> None:
        self.server.http.closed(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _serve(self) -> None:
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        user = ""
        status = 0
        try:
            fault = self.server.http.faults.of(f"{self.command} {url.path}")
            self._before(fault)
            user, answer = self._answer(url.path, url.query, body)
            if fault is not None and fault.kind == "drop_answer":
                raise _Dropped
            status = 200
            self._send(answer)
        except ApiError as error:
            status = error.status
            self._send_json(error.body(), status)
        except _Dropped:
            self.close_connection = True
        except OSError:
            self.close_connection = True
            status = 0
        finally:
            self.server.http.note(Seen(self.command, url.path, status, user))

    def _before(self, fault: Fault | None) -> None:
        if fault is None:
            return
        time.sleep(fault.delay_s)
        if fault.kind == "drop":
            raise _Dropped
        if fault.kind == "status":
            raise _OnOrder(fault.status)

    def _answer(self, path: str, query: str, body: bytes) -> tuple[str, Answer]:
        master = self.server.http.master
        headers = {name.lower(): value for name, value in self.headers.items()}
        with master.changed:
            if master.stopping:
                raise _Dropped
            route, parts = find(ROUTES, self.command, path)
            user = master.accounts.user_of(headers) if route.needs_login else ""
            request = Request(
                method=self.command,
                path=path,
                params=parse_qs(query),
                body=_json(body),
                user=user,
                parts=parts,
            )
            answer = route.handler(master, request)
            master.drive()
            if master.stopping:
                raise _Dropped
        return user, answer

    def _send(self, answer: Answer) -> None:
        if isinstance(answer, Stream):
            self._send_stream(answer)
        else:
            self._send_json(answer, 200)

    def _send_json(self, body: Mapping[str, Any], status: int) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def _send_stream(self, stream: Stream) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for row in stream.rows:
            line = json.dumps(row).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()


class _OnOrder(ApiError):
    """A status that a fault asked for, as a proxy in front of the master would answer."""

    def __init__(self, status: int) -> None:
        super().__init__(INVALID_ARGUMENT, "on order")
        self._status = status

    @property
    def status(self) -> int:
        return self._status


def _json(body: bytes) -> dict[str, Any]:
    if not body:
        return {}
    value = json.loads(body)
    return value if isinstance(value, dict) else {}
