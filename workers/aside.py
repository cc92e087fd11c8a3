"""Work that must not hold up a loop: done one at a time in a thread, its results handed back to the loop.

Rendering metrics takes milliseconds, a hundred times the work of a transfer. In a thread it shares the GIL
with the loop, which gets it back within the switch interval (the control process sets a short one). The
thread is started by the first piece of work and only ever sees what that piece was given.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

logger = logging.getLogger(__name__)

MAX_WAITING = 16

Work = Callable[[], bytes]
Done = Callable[[bytes], None]


class Aside:
    """See the module's docstring. watch(fd, handler, writable) and unwatch(fd) register with the loop."""

    def __init__(
        self, watch: Callable[[int, Callable[[], None], bool], None], unwatch: Callable[[int], None]
    ) -> None:
        self._unwatch = unwatch
        self._work: SimpleQueue[tuple[Work, Done] | None] = SimpleQueue()
        self._results: deque[tuple[Done, bytes]] = deque()
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        watch(self._wake, self._deliver, False)

    def submit(self, work: Work, done: Done) -> None:
        """Have done(result) called in the loop; b"" where the work failed or too much waits already."""
        if self._waiting >= MAX_WAITING:
            done(b"")
            return
        self._waiting += 1
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mori-mp-report", daemon=True)
            self._thread.start()
        self._work.put((work, done))

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, done = item
            try:
                result = work()
            except Exception:
                logger.exception("a report could not be made")
                result = b""
            self._results.append((done, result))
            os.eventfd_write(self._wake, 1)

    def _deliver(self) -> None:
        os.eventfd_read(self._wake)
        while self._results:
            done, result = self._results.popleft()
            self._waiting -= 1
            done(result)

    def close(self, timeout: float) -> None:
        """End the thread, waiting up to timeout seconds; what it still works on is dropped."""
        self._unwatch(self._wake)
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(timeout)
            if self._thread.is_alive():
                return  # it is a daemon, and needs the descriptor
        os.close(self._wake)
