"""The switchboard: several threads, one token, finalizers; nobody sleeps on while their message is there."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from mori_mp.shared.errors import ConnectorClosed
from mori_mp.switchboard import Line, Switchboard

LONG = 30.0
SOON = 10.0  # far more than anything here takes, far less than LONG
MAX_BYTES = 1 << 16


class Peer:
    """A ROUTER that a line of the switchboard is connected to."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], board: Switchboard) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"
        self.heard: list[bytes] = []
        self.handler: Callable[[list[bytes]], None] = lambda frames: self.heard.extend(frames)
        self.line: Line = board.open(self.address, lambda frames: self.handler(frames), MAX_BYTES)
        self.line.post([b"hi"])
        self.identity, hi = self.recv()
        assert hi == b"hi"

    def recv(self) -> list[bytes]:
        assert self.socket.poll(SOON * 1000), "nothing came"
        return self.socket.recv_multipart()

    def send(self, body: bytes) -> None:
        self.socket.send_multipart([self.identity, body])

    def send_and_see_it_arrive(self, body: bytes) -> None:
        """Only while no other thread uses the board."""
        self.send(body)
        assert self.line.pollable.poll(SOON * 1000)


@pytest.fixture
def board() -> Iterator[Switchboard]:
    board = Switchboard()
    yield board
    board.close()


@pytest.fixture
def peers(board: Switchboard) -> Iterator[Callable[[], Peer]]:
    with zmq.Context() as context:
        made: list[Peer] = []

        def make() -> Peer:
            made.append(Peer(context, board))
            return made[-1]

        yield make
        for peer in made:
            peer.socket.close(0)


class Waiter:
    """A thread inside wait(). `looks` counts how often it has asked its predicate."""

    def __init__(self, board: Switchboard, ready: Callable[[], Any], seconds: float = LONG) -> None:
        self.looks = 0
        self.result: Any = "still waiting"
        self._ready = ready
        self._thread = threading.Thread(target=self._run, args=(board, seconds), daemon=True)
        self._thread.start()

    def _run(self, board: Switchboard, seconds: float) -> None:
        self.result = board.wait(self._look, time.monotonic() + seconds)

    def _look(self) -> Any:
        self.looks += 1
        return self._ready()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> Any:
        self._thread.join(SOON)
        assert not self._thread.is_alive(), "the thread was not woken"
        return self.result


def until(condition: Callable[[], bool]) -> None:
    """Give other threads time to get somewhere."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def leader(board: Switchboard, ready: Callable[[], Any]) -> Waiter:
    """A thread that holds the token and polls."""
    waiter = Waiter(board, ready)
    until(lambda: board._token.locked() and waiter.looks >= 2)
    return waiter


def follower(board: Switchboard, ready: Callable[[], Any]) -> Waiter:
    """A thread that waits for its turn beside the leader."""
    waiters = len(board._turns)
    waiter = Waiter(board, ready)
    until(lambda: waiter.looks >= 2 and len(board._turns) > waiters)
    return waiter


def heard(peer: Peer, body: bytes) -> Callable[[], bool | None]:
    return lambda: True if body in peer.heard else None


# -- one thread --------------------------------------------------------------------------------------


def test_a_post_is_sent_at_once(peers: Callable[[], Peer]) -> None:
    peer = peers()
    peer.line.post([b"", b"two frames"])
    assert peer.recv() == [peer.identity, b"", b"two frames"]


def test_posts_keep_their_order(peers: Callable[[], Peer]) -> None:
    peer = peers()
    for i in range(50):
        peer.line.post([b"%d" % i])
    assert [peer.recv()[1] for _ in range(50)] == [b"%d" % i for i in range(50)]


def test_wait_takes_what_comes(board: Switchboard, peers: Callable[[], Peer]) -> None:
    peer = peers()
    peer.send(b"answer")
    assert board.wait(heard(peer, b"answer"), time.monotonic() + LONG)


def test_pump_takes_what_has_come(board: Switchboard, peers: Callable[[], Peer]) -> None:
    peer = peers()
    peer.send_and_see_it_arrive(b"notice")
    assert board.pump()
    assert peer.heard == [b"notice"]


def test_wait_ends_at_its_deadline(board: Switchboard, peers: Callable[[], Peer]) -> None:
    peer = peers()
    peer.send_and_see_it_arrive(b"something else")
    deadline = time.monotonic() + 0.05
    assert board.wait(heard(peer, b"answer"), deadline) is None
    assert time.monotonic() >= deadline
    assert peer.heard == [b"something else"]


def test_what_is_there_already_is_returned_even_after_the_deadline(board: Switchboard) -> None:
    assert board.wait(lambda: 42, time.monotonic() - 1) == 42


def test_a_message_over_the_limit_does_not_come_through(
    board: Switchboard, peers: Callable[[], Peer]
) -> None:
    """ZMQ drops the connection for good then, which the line shows: it takes no more messages."""
    peer = peers()
    peer.send(b"x" * (MAX_BYTES + 1))

    def cut_off() -> bool | None:
        peer.line.post([b"are you there?"])
        return True if peer.line.blocked else None

    until(lambda: board.wait(cut_off, time.monotonic() + 0.01) is not None)
    assert peer.heard == []


# -- several threads ----------------------------------------------------------------------------------


def test_a_post_reaches_the_wire_while_another_thread_polls(
    board: Switchboard, peers: Callable[[], Peer]
) -> None:
    peer = peers()
    polling = leader(board, heard(peer, b"end"))
    peer.line.post([b"from elsewhere"])
    assert peer.recv()[1] == b"from elsewhere"
    assert polling.alive
    peer.send(b"end")
    assert polling.join()


def test_a_follower_gets_its_message_while_the_leader_goes_on_waiting(
    board: Switchboard, peers: Callable[[], Peer]
) -> None:
    peer = peers()
    polling = leader(board, heard(peer, b"end"))
    waiting = follower(board, heard(peer, b"mine"))
    peer.send(b"mine")
    assert waiting.join()
    assert polling.alive
    peer.send(b"end")
    assert polling.join()


def test_a_follower_takes_over_when_the_leader_leaves(board: Switchboard, peers: Callable[[], Peer]) -> None:
    peer = peers()
    polling = leader(board, heard(peer, b"first"))
    waiting = [follower(board, heard(peer, b"follower %d" % i)) for i in range(3)]
    peer.send(b"first")
    assert polling.join()
    for i in (1, 0, 2):
        peer.send(b"follower %d" % i)
        assert waiting[i].join()


def test_a_follower_is_woken_by_what_the_leader_takes_before_it_sleeps(
    board: Switchboard, peers: Callable[[], Peer]
) -> None:
    """The message is taken by the leader's first look; the follower had looked in vain just before."""
    peer = peers()
    waiting: list[Waiter] = []

    def handle(frames: list[bytes]) -> None:
        if frames == [b"mine"]:
            waiting.append(follower(board, heard(peer, b"mine")))
        peer.heard.extend(frames)

    peer.handler = handle
    peer.send_and_see_it_arrive(b"mine")
    polling = Waiter(board, heard(peer, b"end"))
    until(lambda: bool(waiting))
    assert waiting[0].join()
    assert polling.alive
    peer.send(b"end")
    assert polling.join()


def test_a_post_made_while_a_socket_is_opened_is_sent(peers: Callable[[], Peer], board: Switchboard) -> None:
    """open() holds the token without polling, and the thread that posted does not wait for anything."""
    peer, second = peers(), peers()
    real_open = board._open

    def slow_open(*args: Any) -> Line:
        thread = threading.Thread(target=peer.line.post, args=([b"meanwhile"],))
        thread.start()
        thread.join(SOON)
        assert not thread.is_alive(), "post() waited"
        return real_open(*args)

    board._open = slow_open  # type: ignore[method-assign]
    board.open(second.address, lambda frames: None, MAX_BYTES)
    assert peer.recv()[1] == b"meanwhile"


def test_a_socket_is_opened_while_another_thread_polls(board: Switchboard, peers: Callable[[], Peer]) -> None:
    peer = peers()
    polling = leader(board, heard(peer, b"end"))
    second = peers()
    second.send(b"to the new one")
    waiting = Waiter(board, heard(second, b"to the new one"))
    assert waiting.join()
    peer.send(b"end")
    assert polling.join()


def test_many_threads_ask_and_each_gets_its_answer(board: Switchboard, peers: Callable[[], Peer]) -> None:
    """An echo peer; threads post, wait for their own answer, and post again."""
    peer, threads, rounds = peers(), 6, 40
    echoed = 0
    failures: list[str] = []

    def ask(name: int) -> None:
        for i in range(rounds):
            body = b"%d.%d" % (name, i)
            peer.line.post([body])
            if not board.wait(heard(peer, body), time.monotonic() + SOON):
                failures.append(body.decode())
                return

    asking = [threading.Thread(target=ask, args=(n,), daemon=True) for n in range(threads)]
    for thread in asking:
        thread.start()
    while echoed < threads * rounds and not failures:
        peer.send(peer.recv()[1])
        echoed += 1
    for thread in asking:
        thread.join(SOON)
    assert failures == []
    assert len(set(peer.heard)) == threads * rounds


def test_a_handler_that_fails_harms_nobody_else(
    board: Switchboard, peers: Callable[[], Peer], caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = peers(), peers()

    def fail(frames: list[bytes]) -> None:
        raise ValueError("no such message")

    bad.handler = fail
    polling = leader(board, heard(good, b"end"))
    waiting = follower(board, heard(good, b"mine"))
    bad.send(b"poison")
    good.send(b"mine")
    assert waiting.join()
    good.send(b"end")
    assert polling.join()
    assert "no such message" in caplog.text


def test_a_predicate_that_raises_lets_go_of_the_token(board: Switchboard, peers: Callable[[], Peer]) -> None:
    peer = peers()
    looks = 0

    def fail() -> None:
        nonlocal looks
        looks += 1
        if looks > 1:  # the second look is made with the token in hand
            until(lambda: bool(board._turns))
            raise KeyboardInterrupt

    waiting: list[Waiter] = []
    starter = threading.Timer(0, lambda: (until(board._token.locked), waiting.append(follower_of())))

    def follower_of() -> Waiter:
        return Waiter(board, heard(peer, b"mine"))

    starter.start()
    with pytest.raises(KeyboardInterrupt):
        board.wait(fail, time.monotonic() + LONG)
    starter.join(SOON)
    peer.send(b"mine")
    assert waiting[0].join()


# -- finalizers ---------------------------------------------------------------------------------------


class Owner:
    """Something that posts when its last reference goes, as a lease does."""

    def __init__(self, line: Line, body: bytes) -> None:
        weakref.finalize(self, line.post, [body])


@pytest.mark.parametrize("where", ["predicate", "handler"])
def test_a_finalizer_may_post_while_its_thread_holds_the_token(
    board: Switchboard, peers: Callable[[], Peer], where: str
) -> None:
    peer = peers()
    collected = False

    def collect_once() -> None:
        nonlocal collected
        if not collected and board._token.locked():
            collected = True
            Owner(peer.line, b"last words")

    def handle(frames: list[bytes]) -> None:
        if where == "handler":
            collect_once()
        peer.heard.extend(frames)

    def ready() -> bool | None:
        if where == "predicate":
            collect_once()
        return heard(peer, b"end")()

    peer.handler = handle
    peer.send(b"something")
    waiting = Waiter(board, ready)
    assert peer.recv()[1] == b"last words"
    assert waiting.alive
    peer.send(b"end")
    assert waiting.join()


def test_a_finalizer_may_post_while_its_thread_waits_for_its_turn(
    board: Switchboard, peers: Callable[[], Peer]
) -> None:
    peer = peers()
    polling = leader(board, heard(peer, b"end"))
    looks = 0

    def ready() -> bool | None:
        nonlocal looks
        looks += 1
        if looks == 2:
            Owner(peer.line, b"last words")
        return heard(peer, b"mine")()

    waiting = follower(board, ready)
    assert peer.recv()[1] == b"last words"
    peer.send(b"mine")
    assert waiting.join()
    peer.send(b"end")
    assert polling.join()


def test_a_finalizer_without_any_other_thread_sends(peers: Callable[[], Peer]) -> None:
    peer = peers()
    Owner(peer.line, b"last words")
    assert peer.recv()[1] == b"last words"


# -- the end ------------------------------------------------------------------------------------------


def test_a_retired_line_is_closed_and_the_others_live_on(
    board: Switchboard, peers: Callable[[], Peer]
) -> None:
    old, other = peers(), peers()
    old.handler = lambda frames: board.retire(old.line)
    old.send(b"farewell")
    other.send(b"mine")
    assert board.wait(heard(other, b"mine"), time.monotonic() + LONG)
    assert board.wait(lambda: True if old.line.pollable.closed else None, time.monotonic() + LONG)
    old.line.post([b"into the void"])
    other.line.post([b"still here"])
    assert other.recv()[1] == b"still here"


def test_close_wakes_whoever_waits(board: Switchboard, peers: Callable[[], Peer]) -> None:
    peer = peers()
    waiting = [leader(board, lambda: None), follower(board, lambda: None), follower(board, lambda: None)]
    board.close()
    assert [waiter.join() for waiter in waiting] == [None, None, None]
    assert peer.line.pollable.closed


def test_a_message_posted_just_before_close_still_goes_out(
    board: Switchboard, peers: Callable[[], Peer]
) -> None:
    peer = peers()
    peer.line.post([b"released"])
    board.close()
    assert peer.recv()[1] == b"released"


def test_after_close_everything_is_quiet(board: Switchboard, peers: Callable[[], Peer]) -> None:
    peer = peers()
    board.close()
    assert board.closed
    peer.line.post([b"too late"])
    board.retire(peer.line)
    assert not board.pump()
    assert board.wait(lambda: None, time.monotonic() + LONG) is None
    with pytest.raises(ConnectorClosed):
        board.open(peer.address, lambda frames: None, MAX_BYTES)
    board.close()


def test_close_from_several_threads_at_once(board: Switchboard, peers: Callable[[], Peer]) -> None:
    peers()
    waiting = leader(board, lambda: None)
    closing = [threading.Thread(target=board.close, daemon=True) for _ in range(4)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(SOON)
        assert not thread.is_alive()
    assert waiting.join() is None


def test_close_leaves_no_descriptor_behind() -> None:
    before = set(os.listdir("/proc/self/fd"))
    board = Switchboard()
    with zmq.Context() as context:
        peer = Peer(context, board)
        board.close()
        peer.socket.close(0)
    assert set(os.listdir("/proc/self/fd")) <= before
