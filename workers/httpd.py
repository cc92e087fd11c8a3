"""Just enough HTTP to be scraped: GET of a few paths, answered from within the control loop.

What a body costs is its route's affair, which may take its time and answer later. Everything is bounded, and
nothing waits: a connection has CONNECTION_SECONDS for its request and its answer, at most MAX_CONNECTIONS are
open, a request has at most MAX_REQUEST_BYTES.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 8
MAX_REQUEST_BYTES = 8 << 10
CONNECTION_SECONDS = 3.0

Watch = Callable[[int, Callable[[], None], bool], None]
"""watch(fd, handler, writable): call handler when fd is readable, or writable."""
Answer = Callable[[bytes], None]
Route = Callable[[Answer], None]
"""Makes a body, now or later, and hands it to the answer; b"" answers 503."""


class _Connection:
    __slots__ = ("deadline", "out", "request", "socket")

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self.socket = connection
        self.deadline = deadline
        self.request = b""
        self.out = b""


class HttpServer:
    """Listens on a TCP port; watch and unwatch register descriptors with the caller's loop.

    Raises OSError when the port cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        routes: dict[str, tuple[str, Route]],
        watch: Watch,
        unwatch: Callable[[int], None],
    ) -> None:
        """routes: path -> (content type, how to make its body)."""
        self._routes = routes
        self._watch, self._unwatch = watch, unwatch
        self._connections: dict[int, _Connection] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind((host, port))
            self._listener.listen(MAX_CONNECTIONS)
        except BaseException:
            self._listener.close()
            raise
        self.port = int(self._listener.getsockname()[1])
        watch(self._listener.fileno(), self._accept, False)

    def tick(self, now: float) -> None:
        """Close what has had its time; call it about once a second."""
        for fd, connection in list(self._connections.items()):
            if now >= connection.deadline:
                self._drop(fd)

    def close(self) -> None:
        """Close everything."""
        for fd in list(self._connections):
            self._drop(fd)
        self._unwatch(self._listener.fileno())
        self._listener.close()

    # ---------------------------------------------------------------------------- inside
    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as exc:
            logger.debug("no connection to accept: %s", exc)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            connection.close()
            return
        connection.setblocking(False)
        fd = connection.fileno()
        self._connections[fd] = _Connection(connection, time.monotonic() + CONNECTION_SECONDS)
        self._watch(fd, lambda: self._read(fd), False)

    def _read(self, fd: int) -> None:
        connection = self._connections[fd]
        try:
            data = connection.socket.recv(MAX_REQUEST_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        connection.request += data
        if not data:
            self._drop(fd)
        elif b"\r\n\r\n" in connection.request or b"\n\n" in connection.request:
            self._unwatch(fd)
            self._route(fd, connection)
        elif len(connection.request) > MAX_REQUEST_BYTES:
            self._unwatch(fd)
            self._answer(fd, connection, 431, "text/plain", b"the request is too long\n")

    def _route(self, fd: int, connection: _Connection) -> None:
        words = connection.request.split(b"\n", 1)[0].split()
        if len(words) < 2 or words[0] != b"GET":
            self._answer(fd, connection, 405, "text/plain", b"only GET\n")
            return
        path = words[1].partition(b"?")[0].decode("latin-1")
        route = self._routes.get(path)
        if route is None:
            known = ", ".join(self._routes)
            self._answer(fd, connection, 404, "text/plain", f"there is {known}\n".encode())
            return
        kind, make = route

        def answer(body: bytes) -> None:
            if self._connections.get(fd) is connection:  # it may have timed out meanwhile
                self._answer(fd, connection, 200 if body else 503, kind, body)

        make(answer)

    def _answer(self, fd: int, connection: _Connection, status: int, kind: str, body: bytes) -> None:
        head = (
            f"HTTP/1.0 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        connection.out = head.encode() + body
        self._write(fd, watched=False)

    def _write(self, fd: int, watched: bool = True) -> None:
        connection = self._connections[fd]
        try:
            sent = connection.socket.send(connection.out)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._drop(fd)
            return
        connection.out = connection.out[sent:]
        if not connection.out:
            self._drop(fd)
        elif not watched:
            self._watch(fd, lambda: self._write(fd), True)

    def _drop(self, fd: int) -> None:
        connection = self._connections.pop(fd)
        self._unwatch(fd)
        connection.socket.close()


_REASONS = {
    200: "OK",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}
