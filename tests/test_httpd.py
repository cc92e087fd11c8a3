"""The little HTTP server: answers scrapes, holds nothing open, waits for nobody."""

from __future__ import annotations

import select
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from connector_support import eventually

from mori_mp.workers import httpd
from mori_mp.workers.httpd import Answer, HttpServer

LARGE = b"x" * (8 << 20)  # beyond every socket buffer


class Loop:
    """A poll loop in a thread, as the control process has one."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[], None]] = {}
        self.poller = select.poll()
        self.held: list[Answer] = []
        self.turns = 0
        self.stop = False
        routes = {
            "/small": ("text/plain", lambda answer: answer(b"small\n")),
            "/large": ("text/plain", lambda answer: answer(LARGE)),
            "/later": ("text/plain", self.held.append),
            "/none": ("text/plain", lambda answer: answer(b"")),
        }
        self.server = HttpServer("127.0.0.1", 0, routes, self.watch, self.unwatch)
        self.thread = threading.Thread(target=self.run, name="test-loop")
        self.thread.start()

    def watch(self, fd: int, handler: Callable[[], None], writable: bool) -> None:
        self.handlers[fd] = handler
        self.poller.register(fd, select.POLLOUT if writable else select.POLLIN)

    def unwatch(self, fd: int) -> None:
        if self.handlers.pop(fd, None) is not None:
            self.poller.unregister(fd)

    def run(self) -> None:
        while not self.stop:
            for fd, _ in self.poller.poll(20):
                self.turns += 1
                handler = self.handlers.get(fd)
                if handler is not None:
                    handler()
            self.server.tick(time.monotonic())

    def close(self) -> None:
        self.stop = True
        self.thread.join(5)
        self.server.close()
        assert not self.handlers


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


def get(loop: Loop, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{loop.server.port}{path}", timeout=10) as answer:
        assert answer.headers["Content-Type"] == "text/plain"
        body: bytes = answer.read()
        return body


def connect(loop: Loop) -> socket.socket:
    return socket.create_connection(("127.0.0.1", loop.server.port), timeout=10)


@pytest.mark.parametrize(
    ("path", "body"), [("/small", b"small\n"), ("/small?x=1", b"small\n"), ("/large", LARGE)]
)
def test_a_path_is_answered(loop: Loop, path: str, body: bytes) -> None:
    assert get(loop, path) == body
    eventually(lambda: len(loop.handlers) == 1, "only the listener is left")


def test_an_answer_may_come_later(loop: Loop) -> None:
    with connect(loop) as client:
        client.sendall(b"GET /later HTTP/1.1\r\nHost: x\r\n\r\n")
        deadline = time.monotonic() + 5
        while not loop.held:
            assert time.monotonic() < deadline
            time.sleep(0.002)
        loop.held[0](b"at last")
        assert client.makefile("rb").read().endswith(b"\r\n\r\nat last")
    loop.held[0](b"again")  # to a connection that is gone: nothing happens


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /unknown HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /none HTTP/1.1\r\n\r\n", b"503"),
        (b"POST /small HTTP/1.1\r\n\r\n", b"405"),
        (b"\r\n\r\n", b"405"),
        (b"\xff\xfe\r\n\r\n", b"405"),
        (b"GET /small\n\n", b"200"),
        (b"x" * (httpd.MAX_REQUEST_BYTES + 1), b"431"),
    ],
)
def test_requests_of_all_kinds(loop: Loop, request_bytes: bytes, status: bytes) -> None:
    with connect(loop) as client:
        client.sendall(request_bytes)
        assert client.recv(4096).split()[1] == status


def test_silent_connections_are_closed_in_time_and_bounded(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(httpd, "CONNECTION_SECONDS", 0.3)
    clients = [connect(loop) for _ in range(httpd.MAX_CONNECTIONS)]
    with connect(loop) as one_more:
        assert one_more.recv(1) == b""
    for client in clients:
        with client:
            assert client.recv(1) == b""
    assert get(loop, "/small") == b"small\n"


def test_a_reader_that_does_not_read_costs_no_time(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(httpd, "CONNECTION_SECONDS", 0.5)
    with connect(loop) as client:
        client.sendall(b"GET /large HTTP/1.1\r\n\r\n" + b"more" * 100)
        client.shutdown(socket.SHUT_WR)
        assert get(loop, "/small") == b"small\n"
        turns = loop.turns
        deadline = time.monotonic() + 5
        while len(loop.handlers) > 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert loop.turns - turns < 50  # no busy loop meanwhile


def test_a_taken_port_is_an_error(loop: Loop) -> None:
    with pytest.raises(OSError, match="in use"):
        HttpServer("127.0.0.1", loop.server.port, {}, loop.watch, loop.unwatch)
