"""Health documents as files: whole or not at all, bounded, and never waited for.

A dump is written beside its place and renamed over it. The control process has it written by a short-lived
thread, since a path may lie on a network file system that hangs; while one is being written, the next is
skipped and counted.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from mori_mp.shared.files import write_whole

logger = logging.getLogger(__name__)


class DumpFile:
    """The dump file of one connector; used by one thread. skipped: dumps that one before them held up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped = 0
        self._thread: threading.Thread | None = None
        self._failing = False

    def write(self, make: Callable[[], bytes]) -> None:
        """Make the text and write it, in this thread; a failure is logged once until it works again."""
        try:
            write_whole(self.path, make())
        except OSError as exc:
            if not self._failing:
                logger.error("health dump %s cannot be written: %s", self.path, exc)
            self._failing = True
        else:
            self._failing = False

    def write_aside(self, make: Callable[[], bytes]) -> bool:
        """The same in a thread of its own; False when the one before still hangs."""
        if self._thread is not None and self._thread.is_alive():
            self.skipped += 1
            return False
        self._thread = threading.Thread(target=self.write, args=(make,), name="mori-mp-dump", daemon=True)
        self._thread.start()
        return True

    def finish(self, timeout: float) -> None:
        """Give a dump that is being written up to timeout seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
