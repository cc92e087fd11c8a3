"""The stage's end of its hot channel to the control process: Publish and Withdraw out, Freed in.

No call here waits or gives up the GIL. What the kernel's buffer cannot take stays in a backlog, in order, and
goes out with the next call or when the supervisor sees room. The channel outlives control processes: after a
restart, `replace()` swaps the socket and sends the replay.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from mori_mp.shared import messages
from mori_mp.shared.messages import HotToControl
from mori_mp.shared.syscalls import PacketReader, try_send

_RECENT = 1 << 14


class HotChannel:
    """Thread-safe; see the module's docstring."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replaced = threading.Condition()
        self._replacements = 0
        self._socket: socket.socket | None = None
        self._fd = -1
        self._reader = PacketReader(messages.MAX_PACKET_BYTES)
        self._backlog: deque[bytes] = deque()
        self._recent: deque[int] = deque(maxlen=_RECENT)  # generations that drain() returned last

    def send(self, message: HotToControl) -> None:
        """Send in order; a message to a dead control process is lost, the replay repeats it."""
        packet = messages.encode(message)
        with self._lock:
            if self._backlog or not self._try(packet):
                self._backlog.append(packet)
                self._flush()

    def drain(self) -> list[int]:
        """Return the generations freed since the last call."""
        freed: list[int] = []
        with self._lock:
            if self._fd >= 0:
                self._read_freed(freed)
            self._recent.extend(freed)
            if self._backlog:
                self._flush()
        return freed

    @property
    def backlog(self) -> int:
        """Messages that wait for room."""
        return len(self._backlog)

    def wait(self, seconds: float) -> None:
        """Wait until memory has been freed or a new control process is there, at most so long."""
        fd, before, deadline = self._fd, self._replacements, time.monotonic() + seconds
        if fd >= 0:
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            if not any(event & select.POLLHUP for _, event in poller.poll(seconds * 1000)):
                return
        with self._replaced:
            self._replaced.wait_for(lambda: self._replacements != before, deadline - time.monotonic())

    def fileno(self) -> int:
        """Return the socket, to poll for freed memory; -1 when there is none."""
        return self._fd

    def replace(self, new: socket.socket, replay: Callable[[], Iterable[HotToControl]]) -> list[int]:
        """Switch to a new control process and tell it all that is published.

        replay() lists that. It is called while no message can be sent, so that a publication goes out either
        with the replay or after it; one that was recorded before it is sent cannot be lost. Returns the
        generations that the old one had freed in its last moments, which are not replayed; nor are those
        that drain() has returned to another thread, which may not have taken note of it yet.
        """
        freed: list[int] = []
        with self._lock:
            if self._fd >= 0:
                self._read_freed(freed)
            self._close_socket()
            self._socket, self._fd = new, new.fileno()
            gone = {*freed, *self._recent}
            self._backlog.clear()
            for message in replay():
                if not (isinstance(message, messages.Publish) and message.generation in gone):
                    self._backlog.append(messages.encode(message))
            self._flush()
        with self._replaced:
            self._replacements += 1
            self._replaced.notify_all()
        return freed

    def close(self) -> None:
        with self._lock:
            self._backlog.clear()
            self._close_socket()

    def _read_freed(self, freed: list[int]) -> None:
        while True:
            packet = self._reader.try_recv(self._fd)
            if not packet:
                return
            freed.extend(messages.hot_to_stage.decode(packet).generations)

    def _flush(self) -> None:
        while self._backlog and self._try(self._backlog[0]):
            self._backlog.popleft()

    def _try(self, packet: bytes) -> bool:
        if self._fd < 0:
            return False
        try:
            return try_send(self._fd, packet)
        except (BrokenPipeError, ConnectionResetError):
            return True  # the control process is dead; its successor gets the replay

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._fd = None, -1
