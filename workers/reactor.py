"""Who is called when a socket or descriptor is ready: the poll of a loop of one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

Handler = Callable[[], None]


class Reactor:
    """A source is a ZMQ socket or a file descriptor, and has one handler."""

    def __init__(self) -> None:
        self._handlers: dict[Any, Handler] = {}
        self._poller = zmq.Poller()
        self._forgotten: set[Any] = set()

    def __contains__(self, source: Any) -> bool:
        return source in self._handlers

    def on(self, source: Any, handler: Handler, events: int = zmq.POLLIN) -> None:
        """Call handler when one of the events is there; replaces what was registered for the source."""
        self._handlers[source] = handler
        self._poller.register(source, events)

    def watch(self, fd: int, handler: Handler, writable: bool) -> None:
        """Call handler when fd is readable; with `writable`, when it is writable instead."""
        self.on(fd, handler, zmq.POLLOUT if writable else zmq.POLLIN)

    def watch_both(self, fd: int, handler: Handler, writable: bool) -> None:
        """Call handler when fd is readable; with `writable`, also when it is writable."""
        self.on(fd, handler, zmq.POLLIN | zmq.POLLOUT if writable else zmq.POLLIN)

    def off(self, source: Any) -> None:
        """Forget a source, if it is known. To be called before it is closed."""
        if self._handlers.pop(source, None) is not None:
            self._poller.unregister(source)
            self._forgotten.add(source)

    def poll(self, deadline: float) -> None:
        """Wait for events until a time in monotonic seconds, and call the handlers of those that came."""
        timeout = deadline - time.monotonic()
        self._forgotten.clear()
        for source, _ in self._poller.poll(int(timeout * 1000) + 1 if timeout > 0 else 0):
            handler = self._handlers.get(source)
            # An earlier one may have closed it, and a new descriptor may have its number.
            if handler is not None and source not in self._forgotten:
                handler()
