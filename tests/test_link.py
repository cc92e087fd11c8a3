"""A receiver's link against a scripted sender: sessions, pulls, and the ends that come late or never."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from mori_mp import link as link_module
from mori_mp.link import Link, Peer, Us
from mori_mp.shared import lane, wire
from mori_mp.shared.errors import EngineUnavailable
from mori_mp.shared.pool import BLOCK, Pool
from mori_mp.switchboard import Switchboard

SOON = 10.0
KEY = "req_0_0@0_1"
HOST = "boot/ns"
US = Us("receiver0", HOST, b"our engine", b"our memory", True)
WELCOME = wire.Welcome(0, wire.VERSION, "stage0", 1, 0, HOST, "shm", b"")


class Sender:
    """A v2 sender that says what the test wants."""

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.identity = b""

    def frames(self) -> list[bytes]:
        assert self.socket.poll(SOON * 1000), "the link said nothing"
        self.identity, *frames = self.socket.recv_multipart()
        return frames

    def hears(self, kind: type) -> Any:
        """The next request, which must be of a kind. Audits come at any time and are passed over."""
        request = wire.decode_request(self.frames()[-1])
        while isinstance(request, wire.Audit) and kind is not wire.Audit:
            request = wire.decode_request(self.frames()[-1])
        assert isinstance(request, kind), request
        return request

    def hears_nothing(self) -> None:
        """Nothing but audits."""
        while self.socket.poll(50):
            request = wire.decode_request(self.frames()[-1])
            assert isinstance(request, wire.Audit), request

    def says(self, *notices: wire.Notice) -> None:
        for notice in notices:
            self.socket.send_multipart([self.identity, wire.encode(notice)])

    def welcomes(self, hello: wire.Hello, **changes: Any) -> None:
        self.says(msgspec.structs.replace(WELCOME, corr=hello.corr, **changes))

    def restart(self) -> None:
        """Come back at the same port, knowing nobody."""
        self.socket.close(0)
        self.socket = self._context.socket(zmq.ROUTER)
        deadline = time.monotonic() + SOON
        while True:
            try:
                self.socket.bind(f"tcp://127.0.0.1:{self.port}")
                return
            except zmq.ZMQError:
                assert time.monotonic() < deadline
                time.sleep(0.005)

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


@pytest.fixture
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.close()


@pytest.fixture
def board() -> Iterator[Switchboard]:
    board = Switchboard()
    yield board
    board.close()


class Changes:
    """Counts what the link calls a change."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture
def changes() -> Changes:
    return Changes()


@pytest.fixture
def link(board: Switchboard, sender: Sender, changes: Changes) -> Iterator[Link]:
    link = Link(board, "127.0.0.1", sender.port, US, changes)
    yield link
    link.close()


@pytest.fixture
def welcome_link(link: Link, sender: Sender) -> Link:
    """A link with a session."""
    link.subscribe("0_1")
    sender.welcomes(sender.hears(wire.Hello))
    assert link.await_peer(time.monotonic() + SOON) is Peer.V2
    return link


class Pulling:
    """A pull() in a thread of its own."""

    def __init__(self, link: Link, *, lease: bool = False, seconds: float = SOON, key: str = KEY) -> None:
        self.link = link
        self.message = link.new_pull(key, 100, 4096, lease)
        self.done: Any = "still waiting"
        self._seconds = seconds
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.done = self.link.pull(self.message, time.monotonic() + self._seconds)

    def join(self) -> Any:
        self._thread.join(SOON)
        assert not self._thread.is_alive()
        return self.done


def done_for(pull: wire.Pull, status: str = "", generation: int = 5) -> wire.Done:
    return wire.Done(pull.corr, status, "", generation, 100, True, 8192)


def settle_down(board: Switchboard, condition: Callable[[], Any]) -> None:
    """Take what comes until a condition holds."""
    assert board.wait(lambda: True if condition() else None, time.monotonic() + SOON)


class Waiting:
    """Has the switchboard take what comes until the sender hears something."""

    def __init__(self, board: Switchboard, sender: Sender) -> None:
        self._board, self._sender = board, sender

    def for_(self, kind: type) -> Any:
        settle_down(self._board, lambda: self._sender.socket.poll(1))
        return self._sender.hears(kind)


def give_up(link: Link, sender: Sender, **how: Any) -> tuple[wire.Pull, list[Any]]:
    """A pull that nobody answered in time, and what its late handler gets."""
    pulling = Pulling(link, seconds=0.02, **how)
    pull = sender.hears(wire.Pull)
    assert pulling.join() is None
    late: list[Any] = []
    link.abandon(pulling.message, late.append)
    assert sender.hears(wire.Abandon).pulls == [pull.corr]
    assert late == []
    return pull, late


# -- first contact -------------------------------------------------------------------------------------


def test_hello_says_who_we_are(link: Link, sender: Sender) -> None:
    link.subscribe("0_1")
    hello = sender.hears(wire.Hello)
    assert hello == wire.Hello(
        hello.corr,
        wire.VERSION,
        "receiver0",
        os.getpid(),
        HOST,
        b"our engine",
        b"our memory",
        ["0_1"],
        link_module.EAGER_CREDIT_BYTES,
        True,
    )


def test_another_edge_is_another_hello(welcome_link: Link, sender: Sender) -> None:
    welcome_link.subscribe("0_1")
    welcome_link.subscribe("0_2")
    assert sender.hears(wire.Hello).edges == ["0_1", "0_2"]
    sender.hears_nothing()


def test_a_welcome_makes_it_v2(link: Link, sender: Sender, changes: Changes) -> None:
    link.subscribe("0_1")
    sender.welcomes(sender.hears(wire.Hello), mem_desc=b"pool")
    assert link.await_peer(time.monotonic() + SOON) is Peer.V2
    assert link.can_lease
    assert changes.count == 1


def test_a_trans_error_makes_it_v1(link: Link, sender: Sender) -> None:
    link.subscribe("0_1")
    sender.frames()
    sender.socket.send_multipart([sender.identity, b"", wire.TRANS_ERROR])
    assert link.await_peer(time.monotonic() + SOON) is Peer.V1
    assert not link.can_lease


def test_silence_is_unknown(link: Link, sender: Sender) -> None:
    link.subscribe("0_1")
    assert link.await_peer(time.monotonic() + 0.02) is Peer.UNKNOWN


def test_silence_counts_from_the_first_question_without_an_answer(link: Link, sender: Sender) -> None:
    assert link.silent_seconds(time.monotonic() + 40) == 0.0
    link.subscribe("0_1")
    later = time.monotonic() + 40
    link.audit(later)
    assert link.silent_seconds(later) > 39
    sender.welcomes(sender.hears(wire.Hello))
    assert link.await_peer(time.monotonic() + SOON) is Peer.V2
    assert link.silent_seconds(later) == 0.0
    link.settle(consumed=1)  # wants no answer
    assert link.silent_seconds(later) == 0.0


# -- notices -------------------------------------------------------------------------------------------


def test_notices_go_to_the_mailbox(
    welcome_link: Link, sender: Sender, board: Switchboard, changes: Changes
) -> None:
    before = changes.count
    sender.says(wire.Ready(KEY, 5, 3, True, memoryview(b"abc")))
    settle_down(board, lambda: welcome_link.mailbox.get(KEY))
    sender.says(wire.Gone(KEY, 5, "expired"))
    settle_down(board, lambda: not welcome_link.mailbox.get(KEY))
    assert changes.count == before + 2


def test_a_payload_taken_before_is_settled_when_it_is_announced_again(
    welcome_link: Link, sender: Sender, board: Switchboard
) -> None:
    welcome_link.mailbox.mark_taken(5)
    sender.says(
        wire.Ready(KEY, 5, 3, True, memoryview(b"abc")), wire.Ready("next", 6, 1, True, memoryview(b""))
    )
    settle_down(board, lambda: welcome_link.mailbox.get("next"))
    assert sender.hears(wire.Settle) == wire.Settle([5], [], "stage0")
    assert welcome_link.mailbox.get(KEY) is None


@pytest.mark.parametrize("frames", [[b"\xc1"], [b"", b"what?"], [b""], [b"a", b"b", b"c"]])
def test_garbage_is_logged_and_forgotten(
    welcome_link: Link,
    sender: Sender,
    board: Switchboard,
    frames: list[bytes],
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender.socket.send_multipart([sender.identity, *frames])
    sender.says(wire.Ready(KEY, 5, 3, True, memoryview(b"abc")))
    settle_down(board, lambda: welcome_link.mailbox.get(KEY))
    assert welcome_link.peer is Peer.V2
    assert welcome_link.address in caplog.text


def test_a_link_recovers_from_a_message_beyond_all_bounds(
    welcome_link: Link, sender: Sender, board: Switchboard
) -> None:
    """ZMQ gives the connection up for good then."""
    sender.socket.send_multipart([sender.identity, bytes(wire.MAX_NOTICE_BYTES + 1)])
    now = time.monotonic()
    heard: list[Any] = []
    for _ in range(1000):
        now += 100.0  # long after the last one
        welcome_link.audit(now)
        board.wait(lambda: None, time.monotonic() + 0.01)
        while sender.socket.poll(0):
            heard.append(wire.decode_request(sender.frames()[-1]))
        if any(isinstance(request, wire.Hello) for request in heard):
            break
    hello = next(request for request in heard if isinstance(request, wire.Hello))
    sender.welcomes(hello)
    sender.says(wire.Ready(KEY, 5, 3, True, memoryview(b"abc")))
    settle_down(board, lambda: welcome_link.mailbox.get(KEY))


# -- pulls ---------------------------------------------------------------------------------------------


def test_a_pull_names_its_addressee_and_gets_its_answer(welcome_link: Link, sender: Sender) -> None:
    pulling = Pulling(welcome_link)
    pull = sender.hears(wire.Pull)
    assert pull == wire.Pull(pull.corr, KEY, 100, 4096, False, "stage0", 1)
    sender.says(done_for(pull))
    assert pulling.join() == done_for(pull)
    assert welcome_link.quarantined == 0


def test_answers_find_their_pulls_in_any_order(welcome_link: Link, sender: Sender) -> None:
    pulling = [Pulling(welcome_link, key=f"{i}@0_1") for i in range(4)]
    pulls = [sender.hears(wire.Pull) for _ in pulling]
    for pull in reversed(pulls):
        sender.says(done_for(pull, generation=int(pull.key[0])))
    assert [p.join().generation for p in pulling] == [0, 1, 2, 3]


def test_correlation_ids_are_unique_among_threads(welcome_link: Link, sender: Sender) -> None:
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda: seen.extend(welcome_link._corr() for _ in range(2000)))
        for _ in range(4)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(set(seen)) == len(seen) == 8000


def test_a_stranger_says_hello_and_repeats_the_pull(welcome_link: Link, sender: Sender) -> None:
    """Also when it is the same process as before: the connection may have been a new one."""
    pulling = Pulling(welcome_link)
    first = sender.hears(wire.Pull)
    sender.says(wire.Stranger(first.corr))
    sender.welcomes(sender.hears(wire.Hello))
    again = sender.hears(wire.Pull)
    assert again.corr != first.corr
    assert (again.key, again.length, again.dst_offset) == (first.key, first.length, first.dst_offset)
    sender.says(done_for(again))
    assert pulling.join() == done_for(again)


def test_a_pull_is_repeated_only_once(welcome_link: Link, sender: Sender) -> None:
    """Two writes into one slot: the second would still be coming when the first has been answered."""
    pulling = Pulling(welcome_link)
    first = sender.hears(wire.Pull)
    sender.says(wire.Stranger(first.corr))
    hello = sender.hears(wire.Hello)
    sender.welcomes(hello)
    again = sender.hears(wire.Pull)
    sender.welcomes(hello)
    sender.says(wire.Stranger(first.corr), wire.Stranger(0))
    if sender.socket.poll(100):
        sender.welcomes(sender.hears(wire.Hello))
    sender.hears_nothing()
    sender.says(done_for(again))
    assert pulling.join() == done_for(again)


def test_a_new_control_process_gets_the_pulls_its_predecessor_left(
    welcome_link: Link, sender: Sender, board: Switchboard
) -> None:
    pulling = Pulling(welcome_link)
    first = sender.hears(wire.Pull)
    sender.says(wire.Stranger(0))
    sender.welcomes(sender.hears(wire.Hello), incarnation=2)
    again = sender.hears(wire.Pull)
    assert (again.epoch, again.incarnation) == ("stage0", 2)
    sender.says(done_for(first, wire.FAILED))  # an echo of the dead
    sender.says(done_for(again))
    assert pulling.join() == done_for(again)


def test_a_control_process_that_died_with_our_pull_is_found_out(
    welcome_link: Link, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_module, "AUDIT_SECONDS", 0.05)
    pulling = Pulling(welcome_link)
    sender.hears(wire.Pull)
    sender.restart()
    request = wire.decode_request(sender.frames()[-1])
    assert isinstance(request, (wire.Audit, wire.Abandon))
    sender.says(wire.Stranger(0))
    while not isinstance(request, wire.Hello):
        request = wire.decode_request(sender.frames()[-1])
    sender.welcomes(request, incarnation=2)
    while not isinstance(request, wire.Pull):
        request = wire.decode_request(sender.frames()[-1])
    sender.says(done_for(request))
    assert pulling.join() == done_for(request)


def test_a_new_stage_does_not_get_the_pulls_of_the_old_one(
    welcome_link: Link, sender: Sender, board: Switchboard
) -> None:
    """The old one's write may still be coming; only a new slot is safe from it."""
    welcome_link.mailbox.deliver(wire.Ready(KEY, 5, 3, True, memoryview(b"abc")))
    pulling = Pulling(welcome_link)
    sender.hears(wire.Pull)
    sender.says(wire.Stranger(0))
    sender.welcomes(sender.hears(wire.Hello), epoch="stage1", incarnation=1)
    assert pulling.join() is None
    sender.hears_nothing()
    assert welcome_link.mailbox.get(KEY) is None
    late: list[Any] = []
    welcome_link.abandon(pulling.message, late.append)
    assert (late, welcome_link.quarantined) == ([], 1)


def test_a_pull_ends_when_a_v1_sender_takes_over(welcome_link: Link, sender: Sender) -> None:
    pulling = Pulling(welcome_link)
    sender.hears(wire.Pull)
    sender.socket.send_multipart([sender.identity, b"", wire.TRANS_ERROR])
    assert pulling.join() is None
    assert welcome_link.is_v1()


def test_a_pull_ends_with_the_switchboard(welcome_link: Link, sender: Sender, board: Switchboard) -> None:
    pulling = Pulling(welcome_link)
    sender.hears(wire.Pull)
    board.close()
    assert pulling.join() is None


# -- pulls that were given up --------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["", wire.FAILED, wire.NOT_FOUND])
def test_a_late_answer_ends_the_quarantine(
    welcome_link: Link, sender: Sender, board: Switchboard, status: str
) -> None:
    pull, late = give_up(welcome_link, sender)
    assert welcome_link.quarantined == 1
    sender.says(done_for(pull, status), done_for(pull, status))
    settle_down(board, lambda: late)
    board.pump()
    assert late == [done_for(pull, status)]
    assert welcome_link.quarantined == 0


def test_an_answer_that_comes_while_its_pull_is_given_up_is_not_lost(
    welcome_link: Link, sender: Sender, board: Switchboard
) -> None:
    pulling = Pulling(welcome_link, seconds=0.02)
    pull = sender.hears(wire.Pull)
    assert pulling.join() is None
    sender.says(done_for(pull), wire.Ready("next", 6, 1, True, memoryview(b"")))
    settle_down(board, lambda: welcome_link.mailbox.get("next"))
    late: list[Any] = []
    welcome_link.abandon(pulling.message, late.append)
    assert late == [done_for(pull)]
    assert welcome_link.quarantined == 0


def test_a_new_control_process_frees_quarantined_slots(
    welcome_link: Link, sender: Sender, board: Switchboard
) -> None:
    """Every process of the old one is gone before there is a new one."""
    _, late = give_up(welcome_link, sender)
    sender.says(wire.Stranger(0))
    sender.welcomes(Waiting(board, sender).for_(wire.Hello), incarnation=2)
    settle_down(board, lambda: late)
    assert late == [None]
    assert welcome_link.quarantined == 0


def test_a_renewed_session_frees_nothing(welcome_link: Link, sender: Sender, board: Switchboard) -> None:
    pull, late = give_up(welcome_link, sender)
    sender.says(wire.Stranger(0))
    sender.welcomes(Waiting(board, sender).for_(wire.Hello))
    sender.says(wire.Ready(KEY, 5, 3, True, memoryview(b"abc")))
    settle_down(board, lambda: welcome_link.mailbox.get(KEY))
    assert (late, welcome_link.quarantined) == ([], 1)
    sender.says(done_for(pull))
    settle_down(board, lambda: late)


def test_a_pull_given_up_before_the_new_process_is_known_stays_out_of_use(
    welcome_link: Link, sender: Sender, board: Switchboard
) -> None:
    """It names the old process, so the new one refuses it; only then, or with the Welcome, is it over."""
    sender.restart()
    pulling = Pulling(welcome_link, seconds=0.02)
    assert pulling.join() is None
    late: list[Any] = []
    welcome_link.abandon(pulling.message, late.append)
    for _ in range(100):  # some of it is lost with the old connection
        welcome_link.audit(time.monotonic() + 100)
        if sender.socket.poll(20):
            break
    assert late == []
    request: Any = None
    while not isinstance(request, (wire.Pull, wire.Audit)):
        request = wire.decode_request(sender.frames()[-1])
    if isinstance(request, wire.Pull):
        assert (request.epoch, request.incarnation) == ("stage0", 1)
        sender.says(wire.Stranger(request.corr))
    else:
        sender.says(wire.Stranger(0))
        while not isinstance(request, wire.Hello):
            request = wire.decode_request(sender.frames()[-1])
        sender.welcomes(request, incarnation=2)
    settle_down(board, lambda: late)
    assert late == [None]


def test_a_refused_pull_that_was_given_up_is_over(
    welcome_link: Link, sender: Sender, board: Switchboard
) -> None:
    pull, late = give_up(welcome_link, sender)
    sender.says(wire.Stranger(pull.corr))
    settle_down(board, lambda: late)
    assert late == [None]


def test_a_lease_that_was_given_up_is_asked_for_again_from_the_new_process(
    welcome_link: Link, sender: Sender, board: Switchboard
) -> None:
    """The board may say that we hold it: without an answer nobody would ever release it."""
    first, late = give_up(welcome_link, sender, lease=True)
    sender.says(wire.Stranger(0))
    sender.welcomes(Waiting(board, sender).for_(wire.Hello), incarnation=2)
    again = Waiting(board, sender).for_(wire.Pull)
    assert (again.lease, again.key, again.incarnation) == (True, KEY, 2)
    assert again.corr != first.corr
    assert late == []
    sender.says(done_for(again))
    settle_down(board, lambda: late)
    assert late == [done_for(again)]


def test_a_lease_whose_grant_was_lost_is_asked_for_again(
    welcome_link: Link, sender: Sender, board: Switchboard
) -> None:
    pull, late = give_up(welcome_link, sender, lease=True)
    sender.says(done_for(pull, wire.LOST))
    again = Waiting(board, sender).for_(wire.Pull)
    assert (again.lease, again.key) == (True, KEY)
    sender.says(done_for(again))
    settle_down(board, lambda: late)
    assert late == [done_for(again)]


def test_unanswered_pulls_are_asked_about_again(
    welcome_link: Link, sender: Sender, board: Switchboard
) -> None:
    """The answer may have been lost with a connection."""
    pull, late = give_up(welcome_link, sender)
    welcome_link.audit(time.monotonic() + 5)
    sender.hears(wire.Audit)
    assert sender.hears(wire.Abandon).pulls == [pull.corr]
    sender.says(done_for(pull, wire.NOT_FOUND))
    settle_down(board, lambda: late)


@pytest.mark.parametrize("same_host", [True, False])
def test_a_sender_whose_processes_are_all_gone_frees_quarantined_slots(
    link: Link, sender: Sender, same_host: bool
) -> None:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    link.subscribe("0_1")
    hello = sender.hears(wire.Hello)
    sender.welcomes(hello, process_group=child.pid, host_id=HOST if same_host else "elsewhere")
    link.await_peer(time.monotonic() + SOON)
    _, late = give_up(link, sender)
    link.audit(time.monotonic() + 5)
    assert late == []
    child.communicate(b"\n")
    link.audit(time.monotonic() + 50)
    assert late == ([None] if same_host else [])


def test_only_a_pull_under_way_can_be_given_up(welcome_link: Link) -> None:
    with pytest.raises(ValueError, match="not under way"):
        welcome_link.abandon(welcome_link.new_pull(KEY, 1, 0, False), lambda done: None)


# -- settling ------------------------------------------------------------------------------------------


def test_settlements_name_their_stage(welcome_link: Link, sender: Sender) -> None:
    welcome_link.settle(consumed=5)
    welcome_link.settle(released=6)
    assert sender.hears(wire.Settle) == wire.Settle([5], [], "stage0")
    assert sender.hears(wire.Settle) == wire.Settle([], [6], "stage0")


# -- audits --------------------------------------------------------------------------------------------


def test_a_settlement_calls_no_handler(welcome_link: Link, sender: Sender, board: Switchboard) -> None:
    """It may come from a finalizer, in the middle of anything."""
    sender.says(wire.Ready(KEY, 5, 3, True, memoryview(b"")))
    assert welcome_link._line.pollable.poll(1000 * SOON)
    welcome_link.settle(released=6)
    assert sender.hears(wire.Settle) == wire.Settle([], [6], "stage0")
    assert welcome_link.mailbox.get(KEY) is None
    settle_down(board, lambda: welcome_link.mailbox.get(KEY))


def test_audits_ask_for_what_was_missed_once_a_second(welcome_link: Link, sender: Sender) -> None:
    welcome_link.mailbox.get(KEY)
    now = time.monotonic()
    welcome_link.audit(now)
    welcome_link.audit(now + 0.5)
    welcome_link.audit(now + 1.0)
    assert sender.hears(wire.Audit).keys == [KEY]
    assert sender.hears(wire.Audit).keys == []
    sender.hears_nothing()


def test_audits_of_a_silent_sender_become_rare(
    welcome_link: Link, sender: Sender, board: Switchboard
) -> None:
    """Each one is queued for as long as the sender is away."""

    def audits(start: float) -> int:
        for second in range(60):
            welcome_link.audit(start + second)
        count = 0
        while sender.socket.poll(50):
            sender.hears(wire.Audit)
            count += 1
        return count

    now = time.monotonic()
    assert 8 <= audits(now) <= 11
    sender.says(wire.Ready(KEY, 5, 3, True, memoryview(b"abc")))
    settle_down(board, lambda: welcome_link.mailbox.get(KEY))
    assert audits(now + 100) >= 8


def test_an_unknown_sender_is_greeted_again(
    link: Link, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    link.subscribe("0_1")
    sender.hears(wire.Hello)
    link.audit(time.monotonic() + 1)
    sender.hears_nothing()
    monkeypatch.setattr(link_module, "AUDIT_SECONDS", 0.0)
    link.audit(time.monotonic() + 1)
    sender.hears(wire.Hello)


# -- lanes ---------------------------------------------------------------------------------------------


class LaneEnd:
    """The sender's end of a lane."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.listener = lane.listen(path)
        self.listener.settimeout(SOON)

    def accept(self) -> None:
        self.connection, _ = self.listener.accept()
        self.connection.settimeout(SOON)

    def takes_over(self, link: Link, sender: Sender) -> None:
        """Have a link's session move here, as its sender offers."""
        link.subscribe("0_1")
        sender.welcomes(sender.hears(wire.Hello), lane=str(self.path))
        link.await_peer(time.monotonic() + SOON)
        self.accept()
        hello = self.hears(wire.Hello)
        self.says(msgspec.structs.replace(WELCOME, corr=hello.corr, lane=str(self.path)))

    def hears(self, kind: type) -> Any:
        request = wire.decode_request(self.connection.recv(lane.MAX_REQUEST_PACKET))
        assert isinstance(request, kind), request
        return request

    def says(self, notice: wire.Notice) -> None:
        self.connection.send(wire.encode(notice))

    def close(self) -> None:
        self.listener.close()
        if hasattr(self, "connection"):
            self.connection.close()


@pytest.fixture
def lane_end(tmp_path: Path) -> Iterator[LaneEnd]:
    end = LaneEnd(tmp_path / "lane")
    yield end
    end.close()


def test_the_session_moves_to_the_lane(
    link: Link, sender: Sender, board: Switchboard, lane_end: LaneEnd
) -> None:
    lane_end.takes_over(link, sender)
    pulling = Pulling(link)
    pull = lane_end.hears(wire.Pull)
    lane_end.says(done_for(pull))
    assert pulling.join() == done_for(pull)
    sender.hears_nothing()


def test_the_session_moves_back_when_the_lane_ends(
    link: Link, sender: Sender, board: Switchboard, lane_end: LaneEnd, tmp_path: Path
) -> None:
    lane_end.takes_over(link, sender)
    pulling = Pulling(link)
    lane_end.hears(wire.Pull)
    lane_end.connection.close()
    hello = sender.hears(wire.Hello)
    second = LaneEnd(tmp_path / "lane2")
    sender.welcomes(hello, incarnation=2, lane=str(second.path))
    second.accept()
    second.hears(wire.Hello)
    again = second.hears(wire.Pull)
    assert again.incarnation == 2
    second.says(done_for(again))
    assert pulling.join() == done_for(again)
    second.close()


def test_what_was_settled_on_a_lane_that_ends_is_settled_again(
    link: Link, sender: Sender, board: Switchboard, lane_end: LaneEnd
) -> None:
    lane_end.takes_over(link, sender)
    link.mailbox.take_unannounced(KEY, 5)
    link.post_later(link.settlement(5))
    lane_end.connection.close()
    sender.welcomes(Waiting(board, sender).for_(wire.Hello), lane=str(lane_end.path))
    sender.says(wire.Ready(KEY, 5, 3, True, memoryview(b"")))
    assert Waiting(board, sender).for_(wire.Settle) == wire.Settle([5], [], "stage0")


def test_a_lane_that_is_refused_is_not_tried_over_and_over(
    link: Link, sender: Sender, board: Switchboard, lane_end: LaneEnd
) -> None:
    link.subscribe("0_1")
    hello = sender.hears(wire.Hello)
    sender.welcomes(hello, lane=str(lane_end.path))
    link.await_peer(time.monotonic() + SOON)
    lane_end.accept()
    lane_end.connection.close()
    hello = Waiting(board, sender).for_(wire.Hello)
    sender.welcomes(hello, lane=str(lane_end.path))
    sender.says(wire.Ready(KEY, 5, 3, True, memoryview(b"abc")))
    settle_down(board, lambda: link.mailbox.get(KEY))
    lane_end.listener.settimeout(0.05)
    with pytest.raises(TimeoutError):
        lane_end.accept()
    pulling = Pulling(link)
    sender.says(done_for(sender.hears(wire.Pull)))
    assert pulling.join().status == ""


def test_without_the_lane_it_goes_on_over_tcp(link: Link, sender: Sender, tmp_path: Path) -> None:
    link.subscribe("0_1")
    sender.welcomes(sender.hears(wire.Hello), lane=str(tmp_path / "nothing"))
    link.await_peer(time.monotonic() + SOON)
    pulling = Pulling(link)
    sender.says(done_for(sender.hears(wire.Pull)))
    assert pulling.join().status == ""


def test_a_pull_that_was_on_its_way_over_tcp_is_repeated_over_the_lane(
    link: Link, sender: Sender, lane_end: LaneEnd
) -> None:
    """The sender knows us by the lane only, and calls the old socket a stranger's."""
    link.subscribe("0_1")
    hello = sender.hears(wire.Hello)
    sender.welcomes(hello)
    link.await_peer(time.monotonic() + SOON)
    pulling = Pulling(link)
    first = sender.hears(wire.Pull)
    sender.welcomes(hello, incarnation=1, lane=str(lane_end.path))
    sender.says(wire.Stranger(first.corr))
    sender.welcomes(sender.hears(wire.Hello))
    sender.says(done_for(sender.hears(wire.Pull)))
    assert pulling.join().status == ""


# -- leases --------------------------------------------------------------------------------------------


@pytest.fixture
def pools() -> Iterator[list[Pool]]:
    pools = [Pool.create(4 * BLOCK, f"sender{i}") for i in range(2)]
    yield pools
    for pool in pools:
        pool.close()


def test_the_lent_pool_is_that_of_the_stage_that_is_there_now(
    link: Link, sender: Sender, board: Switchboard, pools: list[Pool]
) -> None:
    link.subscribe("0_1")
    for number, pool in enumerate(pools):
        pool.view[:5] = b"pool%d" % number
        hello = Waiting(board, sender).for_(wire.Hello)
        sender.welcomes(hello, epoch=f"stage{number}", mem_desc=pool.descriptor().pack())
        settle_down(board, lambda n=number: link.welcome is not None and link.welcome.epoch == f"stage{n}")
        lent = link.memory.pool()
        assert bytes(lent.view(0, 5)) == b"pool%d" % number
        assert link.memory.pool() is lent
        sender.says(wire.Stranger(0))


def test_no_pool_is_lent_after_the_end(link: Link, sender: Sender, pools: list[Pool]) -> None:
    link.subscribe("0_1")
    sender.welcomes(sender.hears(wire.Hello), mem_desc=pools[0].descriptor().pack())
    link.await_peer(time.monotonic() + SOON)
    link.memory.pool()
    link.close()
    with pytest.raises(EngineUnavailable):
        link.memory.pool()
