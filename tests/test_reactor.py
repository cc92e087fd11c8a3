"""The poll of a loop: an event reaches the handler that its source had when it came, or nobody."""

from __future__ import annotations

import os
import time

import pytest

from mori_mp.workers.reactor import Reactor


def test_an_event_of_a_closed_descriptor_is_not_that_of_its_successor() -> None:
    """Two ends of a dead child come in one poll; the first one's handler replaces the child."""
    reactor = Reactor()
    first, second = (os.eventfd(1, os.EFD_CLOEXEC) for _ in range(2))
    called: list[str] = []

    def replace() -> None:
        called.append("first")
        for fd in (first, second):
            reactor.off(fd)
            os.close(fd)
        successor = os.eventfd(0, os.EFD_CLOEXEC)
        os.dup2(successor, second, inheritable=False)
        if successor != second:
            os.close(successor)
        reactor.on(second, lambda: called.append("successor"))

    reactor.on(first, replace)
    reactor.on(second, lambda: pytest.fail("forgotten"))
    reactor.poll(time.monotonic())
    assert called == ["first"]
    reactor.poll(time.monotonic())
    assert called == ["first"]
    os.eventfd_write(second, 1)
    reactor.poll(time.monotonic())
    assert called == ["first", "successor"]
    os.close(second)
