"""The control process's end of its lanes: one SEQPACKET connection for each receiver on this host.

A lane carries the same v2 messages as the ROUTER, one packet each, over a Unix socket in the runtime
directory. A packet wakes its reader and nobody else, where ZMQ wakes an I/O thread on either side, and the
receiver can take it without giving up the GIL. Receivers that cannot reach the socket (another host, user or
mount namespace) stay with ZMQ.

Nothing here waits. What a lane cannot take now is kept in order, up to a bound; beyond that notices are
dropped, as the ROUTER drops them. End of file on a lane means that its receiver is gone.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mori_mp.shared import lane
from mori_mp.shared.syscalls import try_send

logger = logging.getLogger(__name__)

MAX_LANES = 1024
MAX_BACKLOG = 4096
_DRAIN = 256  # packets taken from one lane before others get their turn


class _Lane:
    __slots__ = ("backlog", "connection")

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.backlog: deque[bytes] = deque()


class Lanes:
    """All lanes of one control process.

    watch(fd, handler, writable) and unwatch(fd) register with the process's poll; message(identity, packet)
    takes what a receiver sends; gone(identity) hears of its end.
    """

    def __init__(
        self,
        path: Path,
        watch: Callable[[int, Callable[[], None], bool], None],
        unwatch: Callable[[int], None],
        message: Callable[[bytes, bytes], None],
        gone: Callable[[bytes], None],
    ) -> None:
        self._watch, self._unwatch = watch, unwatch
        self._message, self._gone = message, gone
        self._lanes: dict[bytes, _Lane] = {}
        self._serial = 0
        self.dropped = 0
        self._listener = lane.listen(path)
        watch(self._listener.fileno(), self._accept, False)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._lanes

    def __len__(self) -> int:
        return len(self._lanes)

    def send(self, identity: bytes, packet: bytes) -> bool:
        """Send or keep a packet; False if it is lost, because the backlog is full.

        What is for a receiver that is gone is not lost to anyone.
        """
        found = self._lanes.get(identity)
        if found is None:
            return True
        if not found.backlog:
            try:
                if try_send(found.connection.fileno(), packet):
                    return True
            except OSError:  # its end of file is being delivered to us, too
                return True
            self._watch(found.connection.fileno(), partial(self._ready, identity), True)
        if len(found.backlog) >= MAX_BACKLOG:
            self.dropped += 1
            return False
        found.backlog.append(packet)
        return True

    def close(self) -> None:
        """Close the listener and every lane."""
        self._unwatch(self._listener.fileno())
        self._listener.close()
        for identity in list(self._lanes):
            self._end(identity)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        if len(self._lanes) >= MAX_LANES:
            logger.warning("refused a lane: %d are open", MAX_LANES)
            connection.close()
            return
        lane.prepare(connection)
        self._serial += 1
        identity = lane.identity(self._serial)
        self._lanes[identity] = _Lane(connection)
        self._watch(connection.fileno(), partial(self._ready, identity), False)

    def _ready(self, identity: bytes) -> None:
        found = self._lanes.get(identity)
        if found is None:
            return
        if found.backlog:
            self._flush(identity, found)
        for _ in range(_DRAIN):
            try:
                packet = found.connection.recv(lane.MAX_REQUEST_PACKET)
            except BlockingIOError:
                return
            except ConnectionResetError:
                packet = b""
            if not packet:
                self._end(identity)
                self._gone(identity)
                return
            self._message(identity, packet)

    def _flush(self, identity: bytes, found: _Lane) -> None:
        fd = found.connection.fileno()
        try:
            while found.backlog and try_send(fd, found.backlog[0]):
                found.backlog.popleft()
        except OSError:
            found.backlog.clear()
        if not found.backlog:
            self._watch(fd, partial(self._ready, identity), False)

    def _end(self, identity: bytes) -> None:
        found = self._lanes.pop(identity)
        self._unwatch(found.connection.fileno())
        found.connection.close()
