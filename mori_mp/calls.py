"""Counting the calls under way in a connector, so that close() takes nothing away under one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from mori_mp.shared import forks
from mori_mp.shared.errors import ConnectorClosed


class _Call:
    """Counts one call between enter and exit. A class, since a generator would cost more than the call."""

    __slots__ = ("_calls", "_what")

    def __init__(self, calls: Calls, what: str) -> None:
        self._calls = calls
        self._what = what

    def __enter__(self) -> None:
        self._calls.begin(self._what)

    def __exit__(self, *_: object) -> None:
        self._calls.end()


class Calls:
    """The calls under way. Thread-safe; a call may make others.

    counted() is for most; put() and get() use begin() and end(), which are three Python frames less.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._under_way = 0
        self._shut = False
        self._why = "closed"
        self._pid = os.getpid()
        forks.watch(self)
        self._last: Callable[[], None] | None = None

    def counted(self, what: str) -> _Call:
        """Count a call while it lasts. Entering raises ConnectorClosed after shut()."""
        return _Call(self, what)

    def begin(self, what: str) -> None:
        """Count a call, to be ended by end(). Raises ConnectorClosed after shut()."""
        with self._lock:
            if self._shut:
                self.check_open(what)
            self._under_way += 1

    def end(self) -> None:
        """End a call."""
        with self._lock:
            self._under_way -= 1
            if self._under_way or not self._shut:
                return
            self._changed.notify_all()
            last, self._last = self._last, None
        if last is not None:
            last()

    def check_open(self, what: str) -> None:
        """Raise ConnectorClosed after shut()."""
        if self._shut:
            raise ConnectorClosed(f"{what}(): the connector is {self._why}")

    def shut(self) -> bool:
        """Refuse calls from now on; False if they were refused already."""
        with self._lock:
            before, self._shut = self._shut, True
            return not before

    def leave_to_parent(self) -> None:
        """In a forked child: refuse calls, and close() too. For `mori_mp.shared.forks`."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        if not self._shut:
            self._shut = True
            self._why = f"that of process {self._pid}, which this one was forked from: make one here"

    def afterwards(self, action: Callable[[], None], wait: float) -> None:
        """Have an action when, after shut(), no call is under way any more.

        That is waited for, up to `wait` seconds; after that the last call to end acts.
        """
        with self._lock:
            if not self._changed.wait_for(lambda: self._under_way == 0, wait):
                self._last = action
                return
        action()
