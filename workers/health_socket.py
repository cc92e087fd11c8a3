"""How a control process tells its state to tools outside its stage: connect to health.sock, read to its end.

The socket takes no input. A connection is accepted, given one JSON document and closed, all without waiting,
so there is nothing that a client could send, hold open or make grow. The document is made at most every
REFRESH_SECONDS, however many ask. `socat - UNIX-CONNECT:.../health.sock` shows it to a human.

It lies in the runtime directory, which only its user may enter, and answers while the stage itself is stuck.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 0.05
MAX_REPORT_BYTES = 128 << 10  # well below the kernel's default socket buffer, so one send takes it whole
_BACKLOG = 16
_AT_ONCE = 4  # connections served before the other sockets get their turn


class HealthSocket:
    """A listening socket for the control loop's poller; report() returns the document, at once.

    Raises OSError when the path cannot be bound.
    """

    def __init__(self, path: str, report: Callable[[], bytes]) -> None:
        self._path = path
        self._report = report
        self._document = b""
        self._fresh_until = 0.0
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)  # of the control process before this one, which is gone
            self._listener.bind(path)
            self._listener.listen(_BACKLOG)
        except BaseException:
            self._listener.close()
            raise

    def fileno(self) -> int:
        """Readable when somebody asks."""
        return self._listener.fileno()

    @property
    def fresh(self) -> bool:
        """Whether the document that was told last is still good enough."""
        return time.monotonic() < self._fresh_until

    def serve(self) -> bool:
        """Answer who has connected. False when the socket is of no use any more."""
        for _ in range(_AT_ONCE):
            try:
                client, _address = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError, InterruptedError):
                return True
            except OSError as exc:
                logger.error("no health reports at %s any more: %s", self._path, exc)
                return False
            with client:
                client.setblocking(False)
                try:
                    client.send(self._current())
                except OSError as exc:  # gone again, or it asked with a tiny buffer
                    logger.debug("health report not delivered: %s", exc)
        return True

    def _current(self) -> bytes:
        if not self.fresh:
            self._document = self._report()
            self._fresh_until = time.monotonic() + REFRESH_SECONDS
        return self._document

    def close(self) -> None:
        """Stop listening and take the path away."""
        self._listener.close()
        with suppress(OSError):
            os.unlink(self._path)
