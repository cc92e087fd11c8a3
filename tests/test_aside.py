"""Work beside a loop: results come back to the loop, in order, and nothing there waits for them."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mori_mp.workers.aside import MAX_WAITING, Aside


class Loop:
    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[], None]] = {}
        self.aside = Aside(
            lambda fd, handler, writable: self.handlers.update({fd: handler}), self.handlers.pop
        )
        self.results: list[tuple[bytes, int]] = []

    def take(self, result: bytes) -> None:
        self.results.append((result, threading.get_ident()))

    def turn(self, wanted: int) -> list[bytes]:
        """Serve until there are that many results."""
        deadline = time.monotonic() + 10
        while len(self.results) < wanted:
            assert time.monotonic() < deadline, self.results
            for fd in select.select(list(self.handlers), [], [], 0.1)[0]:
                self.handlers[fd]()
        assert {thread for _, thread in self.results} == {threading.get_ident()}
        return [result for result, _ in self.results]


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.aside.close(5.0)
    assert not made.handlers
    assert not [t for t in threading.enumerate() if t.name == "mori-mp-report"]


def test_results_come_back_in_order_in_the_loop(loop: Loop) -> None:
    for number in range(5):
        loop.aside.submit(lambda number=number: b"%d" % number, loop.take)  # type: ignore[misc]
    assert loop.turn(5) == [b"0", b"1", b"2", b"3", b"4"]


def test_work_that_fails_is_told_and_the_next_is_done(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    loop.aside.submit(lambda: b"%d" % (1 // 0), loop.take)
    loop.aside.submit(lambda: b"fine", loop.take)
    assert loop.turn(2) == [b"", b"fine"]
    assert "a report could not be made" in caplog.text


def test_too_much_work_is_refused_at_once(loop: Loop) -> None:
    go = threading.Event()
    for _ in range(MAX_WAITING):
        loop.aside.submit(lambda: b"x" if go.wait(10) else b"", loop.take)
    loop.aside.submit(lambda: b"never", loop.take)
    assert [result for result, _ in loop.results] == [b""]
    go.set()
    assert loop.turn(MAX_WAITING + 1).count(b"x") == MAX_WAITING


def test_nothing_runs_before_there_is_work(loop: Loop) -> None:
    assert not [t for t in threading.enumerate() if t.name == "mori-mp-report"]


def test_closing_does_not_wait_for_work_that_hangs() -> None:
    loop, go = Loop(), threading.Event()
    loop.aside.submit(lambda: b"x" if go.wait(10) else b"", loop.take)
    began = time.monotonic()
    loop.aside.close(0.05)
    assert time.monotonic() - began < 5
    go.set()
    for thread in threading.enumerate():
        if thread.name == "mori-mp-report":
            thread.join(5)
