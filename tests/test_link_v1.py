"""Requests to an in-tree sender: one at a time, and late replies that free landing slots."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from mori_mp.link_v1 import V1Requests
from mori_mp.shared import wire
from mori_mp.shared.errors import ConnectorClosed
from mori_mp.switchboard import Switchboard

SOON = 10.0


class Sender:
    """A ROUTER that answers when the test says so."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def hears(self) -> tuple[bytes, bytes]:
        """The next request: (identity, payload), framed as a REQ would."""
        assert self.socket.poll(SOON * 1000), "no request came"
        identity, empty, payload = self.socket.recv_multipart()
        assert empty == b""
        return identity, payload

    def says(self, identity: bytes, reply: bytes) -> None:
        self.socket.send_multipart([identity, b"", reply])


@pytest.fixture
def sender() -> Iterator[Sender]:
    with zmq.Context() as context:
        sender = Sender(context)
        yield sender
        sender.socket.close(0)


@pytest.fixture
def board() -> Iterator[Switchboard]:
    board = Switchboard()
    yield board
    board.close()


class Unanswered:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def unanswered() -> Unanswered:
    return Unanswered()


@pytest.fixture
def v1(board: Switchboard, sender: Sender, unanswered: Unanswered) -> V1Requests:
    return V1Requests(board, sender.address, unanswered)


class Asking:
    """ask() in a thread of its own."""

    def __init__(self, v1: V1Requests, payload: bytes, seconds: float = SOON, **more: Any) -> None:
        self.reply: Any = "still waiting"

        def run() -> None:
            self.reply = v1.ask(payload, time.monotonic() + seconds, **more)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def join(self) -> Any:
        self._thread.join(SOON)
        assert not self._thread.is_alive()
        return self.reply


def settle_down(board: Switchboard, condition: Callable[[], Any]) -> None:
    assert board.wait(lambda: True if condition() else None, time.monotonic() + SOON)


def open_lines(board: Switchboard) -> int:
    return len(board._lines)


def test_a_request_gets_its_reply(v1: V1Requests, sender: Sender, unanswered: Unanswered) -> None:
    asking = Asking(v1, b"question")
    identity, payload = sender.hears()
    assert payload == b"question"
    sender.says(identity, wire.TRANS_DONE)
    assert asking.join() == wire.TRANS_DONE
    assert (v1.quarantined, unanswered.count) == (0, 0)


def test_requests_go_one_after_the_other_over_one_socket(
    v1: V1Requests, sender: Sender, board: Switchboard
) -> None:
    """Replies carry no correlation, so a second request must wait for the reply to the first."""
    first = Asking(v1, b"first")
    identity, _ = sender.hears()
    second = Asking(v1, b"second")
    assert not sender.socket.poll(50)
    sender.says(identity, b"one")
    assert first.join() == b"one"
    again, payload = sender.hears()
    assert (again, payload) == (identity, b"second")
    sender.says(again, b"two")
    assert second.join() == b"two"
    assert open_lines(board) == 1


def test_whoever_does_not_get_a_turn_in_time_has_sent_nothing(v1: V1Requests, sender: Sender) -> None:
    first = Asking(v1, b"first")
    identity, _ = sender.hears()
    ended: list[str] = []
    second = Asking(v1, b"second", 0.02, on_late_end=lambda: ended.append("second"))
    assert second.join() is None
    assert ended == ["second"]
    sender.says(identity, b"one")
    first.join()
    assert not sender.socket.poll(50)


def test_a_late_reply_ends_the_quarantine_and_answers_nobody_else(
    v1: V1Requests, sender: Sender, board: Switchboard, unanswered: Unanswered
) -> None:
    ended: list[str] = []
    first = Asking(v1, b"first", 0.02, on_late_end=lambda: ended.append("first"))
    late, _ = sender.hears()
    assert first.join() is None
    assert (v1.quarantined, unanswered.count, ended) == (1, 1, [])
    second = Asking(v1, b"second")
    fresh, _ = sender.hears()
    assert fresh != late
    sender.says(late, wire.TRANS_DONE)
    sender.says(fresh, b"mine")
    assert second.join() == b"mine"
    settle_down(board, lambda: ended)
    assert (ended, v1.quarantined) == (["first"], 0)
    settle_down(board, lambda: open_lines(board) == 1)


def test_a_reply_that_comes_while_its_request_is_given_up_is_not_lost(
    v1: V1Requests, sender: Sender, board: Switchboard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives after the last look and before anyone has noted that it would be late."""
    real_wait = board.wait
    ended: list[str] = []

    def wait(ready: Callable[[], Any], deadline: float) -> Any:
        assert real_wait(ready, deadline) is None
        identity, _ = sender.hears()
        sender.says(identity, wire.TRANS_DONE)
        real_wait(ready, time.monotonic() + SOON)
        return None

    monkeypatch.setattr(board, "wait", wait)
    assert v1.ask(b"first", time.monotonic() + 0.02, lambda: ended.append("first")) is None
    assert (ended, v1.quarantined) == (["first"], 0)


def test_unanswered_queries_leave_no_sockets_behind(
    v1: V1Requests, sender: Sender, board: Switchboard
) -> None:
    """A poll of a dead sender gives up one after the other; nothing of ours hangs on their late replies."""
    for _ in range(5):
        assert v1.ask(b"query", time.monotonic() + 0.005) is None
    board.pump()
    assert open_lines(board) == 0
    assert v1.quarantined == 0
    asking = Asking(v1, b"last")
    payload = b""
    while payload != b"last":
        identity, payload = sender.hears()
    sender.says(identity, b"reply")
    assert asking.join() == b"reply"


def test_close_ends_the_waiting(v1: V1Requests, sender: Sender, board: Switchboard) -> None:
    asking = Asking(v1, b"first")
    sender.hears()
    board.close()
    assert asking.join() is None
    with pytest.raises(ConnectorClosed):
        v1.ask(b"second", time.monotonic() + 1)
