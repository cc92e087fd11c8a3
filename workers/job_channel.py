"""One end of a job channel: the SOCK_SEQPACKET socketpair between a control process and one transfer worker.

Both ends are alike. Nothing here waits: what the kernel's buffer cannot take is kept, in order, until
`flush()` finds room, of which the owner's poll tells. The death of one end loses what was sent to it, and
nothing that it has sent.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections import deque
from typing import Generic, TypeVar

import msgspec

from mori_mp.shared import messages
from mori_mp.shared.errors import WireError
from mori_mp.shared.syscalls import PacketReader, try_send

logger = logging.getLogger(__name__)

_OVERHEAD_BYTES = 32  # of SO_SNDBUF, which a packet of an AF_UNIX socket cannot have

Heard = TypeVar("Heard")


class JobChannel(Generic[Heard]):
    """Sends any message of the job channel, hears those that its decoder knows. Owns its socket."""

    def __init__(self, end: socket.socket, decoder: msgspec.msgpack.Decoder[Heard]) -> None:
        self._socket = end
        self._fd = end.fileno()
        self._decoder = decoder
        self._reader = PacketReader(messages.MAX_PACKET_BYTES)
        self._backlog: deque[bytes] = deque()
        self._deaf = False
        self.ended = False
        buffer = end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        self.max_bytes = min(messages.MAX_PACKET_BYTES, buffer - _OVERHEAD_BYTES)

    def fileno(self) -> int:
        return self._fd

    @property
    def backlog(self) -> int:
        """Messages that wait for room."""
        return len(self._backlog)

    @property
    def gone(self) -> bool:
        """Whether the other end is known to be closed; with `ended`, all that it sent has been received."""
        return self.ended or self._deaf

    def send(self, message: messages.ToWorker | messages.FromWorker) -> None:
        """Send a message, or keep it behind those that wait.

        Raises WireError, with nothing sent, if it is longer than max_bytes.
        """
        packet = messages.encode(message)
        if len(packet) > self.max_bytes:
            raise WireError(
                f"{type(message).__name__} takes {len(packet)} bytes, over the {self.max_bytes} of a packet "
                f"between control process and worker"
            )
        if self._backlog or not self._try(packet):
            self._backlog.append(packet)

    def flush(self) -> None:
        """Send of what waits as much as there is room for."""
        while self._backlog and self._try(self._backlog[0]):
            self._backlog.popleft()

    def receive(self) -> Heard | None:
        """Return the next message; None when there is none for now, or, with `ended`, for good."""
        while not self.ended:
            packet = self._reader.try_recv(self._fd)
            if packet is None:
                return None
            if not packet:
                self.ended = True
                return None
            try:
                return self._decoder.decode(packet)
            except msgspec.DecodeError:
                logger.exception("undecodable message on a job channel")
        return None

    def close(self, linger: float = 0.0) -> None:
        """Close this end; what waits has so many seconds to be sent."""
        deadline = time.monotonic() + linger
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        while self._backlog and (left := deadline - time.monotonic()) > 0:
            poller.poll(left * 1000)
            self.flush()
        self._socket.close()

    def _try(self, packet: bytes) -> bool:
        try:
            return try_send(self._fd, packet)
        except (BrokenPipeError, ConnectionResetError):
            self._deaf = True
            return True  # nobody will miss it
