"""The socket that a control process shows to the world: a ROUTER, with a guard on the memory behind it.

ZMQ bounds the size of each frame and the number of whole messages that wait to be read. It does not bound a
message that never ends: its frames pile up inside the library, where no option and no code of ours sees them.
What can be seen is that the process grows. So now and then its private memory is looked at, and when it has
grown by more than MAX_GROWTH_BYTES the socket is replaced by a new one at the same address. That ends all
connections and frees what they held; receivers connect again and renew their sessions by themselves.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import time

import zmq

from mori_mp.shared import wire

logger = logging.getLogger(__name__)

MAX_GROWTH_BYTES = 512 << 20
_SEND_QUEUE = 10_000  # messages to one receiver
_REBIND_SECONDS = 2.0
_PAGE_BYTES = os.sysconf("SC_PAGESIZE")
_libc = ctypes.CDLL(None)


class Front:
    """See the module's docstring. guarded: the process's memory is ours alone to judge (no thread mode)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: str, guarded: bool) -> None:
        self._context = context
        self._address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        self._guarded = guarded
        self._normal_bytes = 0
        self._replaced = False
        self.port = 0
        self.socket = self._make()

    def bind(self, port: int) -> None:
        """Listen on a port, 0 for a free one. Raises zmq.ZMQError."""
        if port:
            self.socket.bind(f"{self._address}:{port}")
            self.port = port
        else:
            self.port = self.socket.bind_to_random_port(self._address)
        self._normal_bytes = private_bytes()

    def must_replace(self) -> bool:
        """Tell whether the process has grown too much since it was last in order."""
        if not self._guarded:
            return False
        if self._replaced:
            self._replaced = False
            if hasattr(_libc, "malloc_trim"):
                _libc.malloc_trim(0)  # else what was freed stays ours, and looks like growth
            self._normal_bytes = private_bytes()
        return private_bytes() - self._normal_bytes > MAX_GROWTH_BYTES

    def replace(self) -> None:
        """Put a new socket in the place of the old one. Raises zmq.ZMQError if its port is not free again."""
        logger.error(
            "this control process has grown by over %d MiB: someone floods port %d. All connections are "
            "closed; receivers connect again by themselves.",
            MAX_GROWTH_BYTES >> 20,
            self.port,
        )
        self.socket.close(0)
        self.socket = self._make()
        self._replaced = True
        deadline = time.monotonic() + _REBIND_SECONDS
        while True:
            try:
                self.socket.bind(f"{self._address}:{self.port}")
                return
            except zmq.ZMQError as exc:
                if exc.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                    raise
                time.sleep(0.005)  # ZMQ closes the old socket on a thread of its own

    def close(self, linger_ms: int) -> None:
        self.socket.close(linger_ms)

    def _make(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.MAXMSGSIZE, wire.MAX_REQUEST_BYTES)
        router.setsockopt(zmq.SNDHWM, _SEND_QUEUE)
        if self._address.startswith("tcp://["):
            router.setsockopt(zmq.IPV6, 1)
        return router


def private_bytes() -> int:
    """Return the resident memory that is this process's alone: heap and stacks, not the pool."""
    with open("/proc/self/statm") as statm:
        _, resident, shared, *_ = statm.read().split()
    return (int(resident) - int(shared)) * _PAGE_BYTES
