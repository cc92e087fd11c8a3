"""Thread-safe use of ZMQ sockets from whichever thread happens to call, without a thread of our own.

A receiving connector has no background thread: one would contend for the GIL with the scheduler, and each
hand-over costs a switch interval. Instead the callers of get() do the input and output. At most one of them
at a time, the one that holds the token, touches sockets: it sends what others have queued, takes what has
come and, if it has to wait, polls. The others wait for their turn: whenever something has come, and when the
token becomes free, all of them look again, and one takes over.

    post()    queue a message; send it now if nobody holds the token, else wake who does
    pump()    take what has come, if nobody else is doing so
    wait()    do both until a predicate holds or a deadline passes

post() takes no lock that it could wait for, so a finalizer may call it in the middle of anything, even of
this module. Hence no condition variable: a waiting thread hangs a locked lock of its own into `_turns`, looks
again, and then waits for that lock; a hand-over releases all of them, which needs no other lock.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import zmq

from mori_mp.shared import lane
from mori_mp.shared.errors import ConnectorClosed
from mori_mp.shared.syscalls import PacketReader, try_send

logger = logging.getLogger(__name__)

_CLOSE_LINGER_MS = 200  # for what has been sent just before, such as the end of a lease
_MAX_TAKEN = 4096  # messages taken from one socket before the caller's deadline is looked at again

T = TypeVar("T")
Handler = Callable[[list[bytes]], None]


class Line(ABC):
    """One connection on a switchboard. All but the posting is for the thread that holds the token."""

    def __init__(self, board: Switchboard, handler: Handler) -> None:
        self._board = board
        self.handler = handler
        self.outgoing: deque[list[bytes]] = deque()
        self.blocked = False  # it took no more at the last try

    def post(self, frames: list[bytes]) -> None:
        """Queue a message of one or more frames and see to it that it is sent."""
        self.outgoing.append(frames)
        self._board.nudge()

    def post_later(self, frames: list[bytes]) -> None:
        """Queue a message for whoever is next at the input and output of this switchboard."""
        self.outgoing.append(frames)

    def flush(self) -> None:
        """Send what is queued, as far as that goes without waiting."""
        self.blocked = False
        while self.outgoing and not self.blocked:
            if self._send(self.outgoing[0]):
                self.outgoing.popleft()
            else:
                self.blocked = True

    @property
    @abstractmethod
    def pollable(self) -> Any:
        """What to poll for messages."""

    @abstractmethod
    def _send(self, frames: list[bytes]) -> bool:
        """Send a message; False if there is no room for it now."""

    @abstractmethod
    def take(self) -> list[bytes] | None:
        """Return the frames of a message that has come; None if none has."""

    @abstractmethod
    def close(self, linger_ms: int = 0) -> None:
        """Close the connection."""


class DealerLine(Line):
    """A ZMQ DEALER socket: reaches any host, and reconnects by itself."""

    def __init__(self, board: Switchboard, socket: zmq.Socket[bytes], handler: Handler) -> None:
        super().__init__(board, handler)
        self._socket = socket

    @property
    def pollable(self) -> Any:
        return self._socket

    def _send(self, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def take(self) -> list[bytes] | None:
        if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:  # keeps the GIL, unlike recv
            return None
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def close(self, linger_ms: int = 0) -> None:
        self._socket.close(linger_ms)


class LaneLine(Line):
    """A lane (see shared.lane): one host, no ZMQ, keeps the GIL. Its end comes as a message of no frames."""

    def __init__(self, board: Switchboard, connection: socket.socket, handler: Handler) -> None:
        super().__init__(board, handler)
        self._connection = connection
        self._reader = PacketReader(lane.MAX_NOTICE_PACKET)
        self._ended = False

    @property
    def pollable(self) -> Any:
        return self._connection.fileno()

    def _send(self, frames: list[bytes]) -> bool:
        try:
            return try_send(self._connection.fileno(), frames[-1])
        except OSError:  # ended; take() will say so
            return True

    def take(self) -> list[bytes] | None:
        if self._ended:
            return None
        packet = self._reader.try_recv(self._connection.fileno())
        if packet:
            return [packet]
        if packet is None:
            return None
        self._ended = True
        self._board.retire(self)
        return []

    def close(self, linger_ms: int = 0) -> None:
        self._connection.close()


class Switchboard:
    """All sockets of one receiving connector; see the module's docstring."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._token = threading.Lock()
        self._turns: set[threading.Lock] = set()  # one locked lock for each thread that waits
        self._claims: deque[None] = deque()  # one for each thread that must have the token itself
        self._waking: deque[None] = deque()  # one for each thread that is about to write to _wake_fd
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._lines: dict[Any, Line] = {}  # by what is polled
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
            line = self._open(address, handler, max_message_bytes)
        if self._unsent():  # queued meanwhile by a thread that does not wait
            self.pump()
        return line

    def _open(self, address: str, handler: Handler, max_message_bytes: int) -> Line:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        dealer.setsockopt(zmq.SNDHWM, 10_000)
        dealer.setsockopt(zmq.RECONNECT_IVL, 50)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if address.startswith("tcp://["):
            dealer.setsockopt(zmq.IPV6, 1)
        try:
            dealer.connect(address)
        except zmq.ZMQError:
            dealer.close()
            raise
        return self._add(DealerLine(self, dealer, handler))

    def open_lane(self, path: str, handler: Handler) -> Line:
        """Connect a lane; only for handlers, that is, with the token. Raises OSError."""
        return self._add(LaneLine(self, lane.connect(path), handler))

    def _add(self, line: Line) -> Line:
        self._lines[line.pollable] = line
        self._poller.register(line.pollable, zmq.POLLIN)
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
        self._waking.append(None)  # keeps close() from closing what we write to
        try:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)
        finally:
            self._waking.pop()

    def send_queued(self) -> None:
        """Send what was posted for later, and call no handler; safe in a finalizer."""
        while self._unsent():
            if not self._take_token():
                self._wake()
                return
            try:
                for line in self._all():
                    line.flush()
            finally:
                self._token.release()
                self._hand_over()

    def pump(self) -> bool:
        """Send what is queued and take what has come; False if another thread is at it."""
        worked = False
        while not self._closed and self._take_token():
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
            if self._take_token():
                try:
                    if self._exchange():
                        self._hand_over()  # it may be what another thread waits for, and we may sleep now
                    if ready() is None and not self._closed:
                        self._sleep(remaining)
                        self._exchange()
                finally:
                    self._token.release()
                    self._hand_over()
            else:
                with self._turn() as turn:
                    if (self._claims or self._token.locked()) and ready() is None:
                        turn.acquire(timeout=remaining)

    def close(self) -> None:
        """Close every socket. A thread inside wait() returns at once."""
        self._closed = True
        self._wake()
        with self._hold():
            for line in self._lines.values():
                line.flush()
                line.close(_CLOSE_LINGER_MS)
            self._lines.clear()
            self._context.term()
            wake_fd, self._wake_fd = self._wake_fd, -1  # a buffer may be released later still
            while self._waking:
                time.sleep(0)  # a system call of another thread, which never waits
            if wake_fd >= 0:
                os.close(wake_fd)

    def _take_token(self) -> bool:
        """Take the token if it is free and nobody has a claim to it."""
        return not self._claims and self._token.acquire(blocking=False)

    @contextmanager
    def _hold(self) -> Iterator[None]:
        """Take the token, waiting for it; whoever polls is woken and lets go of it."""
        self._claims.append(None)
        try:
            while not self._token.acquire(blocking=False):
                with self._turn() as turn:
                    if self._token.locked():
                        self._wake()
                        turn.acquire()
            try:
                yield
            finally:
                self._token.release()
        finally:
            self._claims.pop()
            self._hand_over()

    @contextmanager
    def _turn(self) -> Iterator[threading.Lock]:
        """Yield a lock that the next hand-over from now on releases."""
        turn = threading.Lock()
        turn.acquire()
        self._turns.add(turn)
        try:
            yield turn
        finally:
            self._turns.remove(turn)

    def _hand_over(self) -> None:
        """Have all threads that wait look again: something may have come, or the token is free."""
        for turn in list(self._turns):
            with suppress(RuntimeError):  # another hand-over has released it
                turn.release()

    def _unsent(self) -> bool:
        """Tell whether a message was queued after the token's holder had last looked."""
        return any(line.outgoing and not line.blocked for line in self._all())

    def _all(self) -> list[Line]:
        return [] if self._closed else list(self._lines.values())

    def _exchange(self) -> bool:
        """Send and take what can be sent and taken now; tell whether anything came."""
        came = False
        for line in self._all():
            line.flush()
            for _ in range(_MAX_TAKEN):
                frames = line.take()
                if frames is None:
                    break
                came = True
                try:
                    line.handler(frames)
                except Exception:  # of one peer's message, on a thread that may wait for another peer
                    logger.exception("a message of %d frames could not be handled", len(frames))
        while self._retired:
            line = self._retired.popleft()
            if self._lines.pop(line.pollable, None) is not None:
                self._poller.unregister(line.pollable)
                line.close()
        return came

    def _sleep(self, seconds: float) -> None:
        self._poller.poll(int(seconds * 1000) + 1)
        with suppress(BlockingIOError, OSError):
            os.eventfd_read(self._wake_fd)
