"""Lanes: the Unix sockets over which a sender and the receivers on its host exchange v2 messages.

SOCK_SEQPACKET keeps the borders of messages, so a packet is a message, without ZMQ's framing. The socket lies
in the sender's runtime directory, which only its user may enter.
"""

from __future__ import annotations

import socket
from pathlib import Path

from mori_mp.shared.wire import MAX_REQUEST_BYTES

MAX_REQUEST_PACKET = MAX_REQUEST_BYTES + 1  # one more, so that a longer one is seen to be too long
MAX_NOTICE_PACKET = 64 << 10  # fits the kernel's default socket buffer several times over
MAX_EAGER_PACKET = 32 << 10
_BUFFER_BYTES = 1 << 20


def listen(path: Path) -> socket.socket:
    """Listen for lanes at a path."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(str(path))
        listener.listen(64)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(path: str) -> socket.socket:
    """Open a lane. Raises OSError when there is none to be had."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.setblocking(False)  # a full backlog is an error, not a wait
        connection.connect(path)
        prepare(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def prepare(connection: socket.socket) -> None:
    """Set up one end of a lane."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)


def identity(serial: int) -> bytes:
    """Name a lane among the routing identities of a ROUTER, none of which has a zero byte and this length."""
    return b"\0lane%d" % serial


def is_lane(name: bytes) -> bool:
    """Tell a lane's name from a ZMQ routing identity."""
    return len(name) > 5 and name.startswith(b"\0lane")
