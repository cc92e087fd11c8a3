"""The order in which other processes see what this one stores in shared memory.

x86 shows stores in the order in which they are made, and makes loads in order. Arm and others do neither:
where one word says that others are there to be read, a fence has to stand between them, at both ends. Words
that are guarded by a file lock or told of in a message need none: the kernel's own locks order them.
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable


def _fence() -> None:
    """What precedes a lock's release is before it, what follows an acquisition after (POSIX.1-2017, 4.12)."""
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def _nothing() -> None:
    """The processor keeps the order by itself."""


fence: Callable[[], None] = _nothing if platform.machine() in ("x86_64", "AMD64") else _fence
"""Keeps stores and loads before this call apart from those after it."""
