"""Thread-safe use of ZMQ sockets from whichever thread happens to call, without a thread of our own.

A receiving connector has no background thread: one would contend for the GIL with the scheduler, and each
hand-over costs a switch interval. Instead the callers of get() do the input and output. At most one of them
at a time, the one that holds the token, touches sockets: it sends what others have queued, takes what has
come and, if it has to wait, polls. The others wait on a condition and take over when it leaves.

    post()    queue a message; send it now if nobody holds the token, else wake who does
    pump()    take what has come, if nobody else is doing so
    wait()    do both until a predicate holds or a deadline passes

post() takes no lock that it could wait for, so a finalizer may call it in the middle of anything.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import zmq

from mori_mp.shared.errors import ConnectorClosed

logger = logging.getLogger(__name__)

_CLOSE_LINGER_MS = 200  # for what has been sent just before, such as the end of a lease

T = TypeVar("T")
Handler = Callable[[list[bytes]], None]


class Line:
    """One DEALER socket on a switchboard."""

    def __init__(self, board: Switchboard, socket: zmq.Socket[bytes], handler: Handler) -> None:
        self._board = board
        self.socket = socket
        self.handler = handler
        self.outgoing: deque[list[bytes]] = deque()
        self.blocked = False  # ZMQ took no more at the last try

    def post(self, frames: list[bytes]) -> None:
        """Queue a message of one or more frames and see to it that it is sent."""
        self.outgoing.append(frames)
        self._board.nudge()


class Switchboard:
    """All sockets of one receiving connector; see the module's docstring."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._token = threading.Lock()
        self._changed = threading.Condition()  # its RLock lets a finalizer notify
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lines: dict[zmq.Socket[bytes], Line] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._retired: deque[Line] = deque()
        self._closed = False

    @property
    def closed(self) -> bool:
        """True from the start of close() on; wait() no longer waits then."""
        return self._closed

    def open(self, address: str, handler: Handler, max_message_bytes: int) -> Line:
        """Connect a DEALER; handler gets each message's frames, on the thread that holds the token.

        Raises ConnectorClosed after close().
        """
        with self._hold():  # a socket made beside close() would have it wait for ever
            if self._closed:
                raise ConnectorClosed(f"no socket to {address}: the connector is closed")
            return self._open(address, handler, max_message_bytes)

    def _open(self, address: str, handler: Handler, max_message_bytes: int) -> Line:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        socket.setsockopt(zmq.SNDHWM, 10_000)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if address.startswith("tcp://["):
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.connect(address)
        except zmq.ZMQError:
            socket.close()
            raise
        line = Line(self, socket, handler)
        self._lines[socket] = line
        self._poller.register(socket, zmq.POLLIN)
        return line

    def retire(self, line: Line) -> None:
        """Close a line; may be called from its handler."""
        self._retired.append(line)
        self.nudge()

    # ------------------------------------------------------------------ input and output
    def nudge(self) -> None:
        """Have queued messages sent, by this thread or by the one that holds the token."""
        if not self.pump():
            self._wake()

    def _wake(self) -> None:
        """Wake the thread that polls."""
        fd = self._wake_fd
        if fd >= 0:
            with suppress(OSError):  # closed just now
                os.eventfd_write(fd, 1)

    def pump(self) -> bool:
        """Send what is queued and take what has come; False if another thread is at it."""
        worked = False
        while not self._closed and self._token.acquire(blocking=False):
            try:
                worked = True
                self._exchange()
            finally:
                self._token.release()
            self._hand_over()
            if not self._unsent():
                break
        return worked

    def wait(self, ready: Callable[[], T | None], deadline: float) -> T | None:
        """Return what ready() returns once it is not None, or None at deadline (monotonic seconds).

        ready() is called on this thread, also while it holds the token; it must not wait.
        """
        while True:
            if self._unsent():
                self.pump()
            result = ready()
            remaining = deadline - time.monotonic()
            if result is not None or remaining <= 0 or self._closed:
                return result
            if self._token.acquire(blocking=False):
                try:
                    self._exchange()
                    if ready() is None and not self._closed:
                        self._sleep(remaining)
                        self._exchange()
                finally:
                    self._token.release()
                self._hand_over()
            else:
                with self._changed:
                    if self._token.locked() and ready() is None:
                        self._changed.wait(remaining)

    def close(self) -> None:
        """Close every socket. A thread inside wait() returns at once."""
        self._closed = True
        self._wake()
        with self._hold():
            for line in self._lines.values():
                line.socket.close(_CLOSE_LINGER_MS)
            self._lines.clear()
            self._context.term()
            wake_fd, self._wake_fd = self._wake_fd, -1  # a buffer may be released later still
            if wake_fd >= 0:
                os.close(wake_fd)

    def _hold(self) -> _Held:
        return _Held(self)

    def _hand_over(self) -> None:
        """Wake the threads that wait: something may have come, and the token is free."""
        with self._changed:
            self._changed.notify_all()

    def _unsent(self) -> bool:
        """Tell whether a message was queued after the token's holder had last looked."""
        return any(line.outgoing and not line.blocked for line in self._all())

    def _all(self) -> list[Line]:
        return [] if self._closed else list(self._lines.values())

    def _exchange(self) -> None:
        for line in self._all():
            line.blocked = False
            while line.outgoing:
                try:
                    line.socket.send_multipart(line.outgoing[0], zmq.NOBLOCK)
                except zmq.Again:
                    line.blocked = True
                    break
                line.outgoing.popleft()
            while int(line.socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                try:
                    frames = line.socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                line.handler(frames)
        while self._retired:
            line = self._retired.popleft()
            if self._lines.pop(line.socket, None) is not None:
                self._poller.unregister(line.socket)
                line.socket.close()

    def _sleep(self, seconds: float) -> None:
        self._poller.poll(int(seconds * 1000) + 1)
        with suppress(BlockingIOError, OSError):
            os.eventfd_read(self._wake_fd)


class _Held:
    """The token, waited for; whoever polls is woken so that it lets go."""

    def __init__(self, board: Switchboard) -> None:
        self._board = board

    def __enter__(self) -> None:
        board = self._board
        while not board._token.acquire(blocking=False):
            board._wake()
            with board._changed:
                if board._token.locked():
                    board._changed.wait(0.05)  # the token may be taken again before we wake

    def __exit__(self, *exc: object) -> None:
        board = self._board
        board._token.release()
        with board._changed:
            board._changed.notify_all()
