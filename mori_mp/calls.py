"""Counting the calls under way in a connector, so that close() takes nothing away under one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mori_mp.shared.errors import ConnectorClosed


class Calls:
    """The calls under way. Thread-safe; a call may make others."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0
        self._shut = False
        self._last: Callable[[], None] | None = None

    @contextmanager
    def counted(self, what: str) -> Iterator[None]:
        """Count a call while it lasts. Raises ConnectorClosed after shut()."""
        with self._changed:
            self.check_open(what)
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                if not self._under_way:
                    self._changed.notify_all()
                    last, self._last = self._last, None
                    if last is not None:
                        last()

    def check_open(self, what: str) -> None:
        """Raise ConnectorClosed after shut()."""
        if self._shut:
            raise ConnectorClosed(f"{what}(): the connector is closed")

    def shut(self) -> bool:
        """Refuse calls from now on; False if they were refused already."""
        if self._shut:
            return False
        with self._changed:
            before, self._shut = self._shut, True
            return not before

    def afterwards(self, action: Callable[[], None], wait: float) -> None:
        """Have an action when, after shut(), no call is under way any more.

        That is waited for, up to `wait` seconds; after that the last call to end acts.
        """
        with self._changed:
            if self._changed.wait_for(lambda: self._under_way == 0, wait):
                action()
            else:
                self._last = action
