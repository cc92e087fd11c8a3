"""The bookkeeping behind the broker: jobs and workers, receivers' sessions, registered memory."""

from __future__ import annotations

from typing import Any

import pytest

from mori_mp.shared.messages import Job
from mori_mp.shared.wire import Hello
from mori_mp.workers import peers as peers_module
from mori_mp.workers import sessions as sessions_module
from mori_mp.workers.dispatch import Dispatcher
from mori_mp.workers.peers import IDLE_SECONDS, Peers
from mori_mp.workers.sessions import MAX_CREDIT_BYTES, Session, Sessions

MB = 1_000_000


def job(write_id: int, size: int = 100) -> Job:
    return Job(write_id, 1, [0], [0], [size])


def assigned(dispatcher: Dispatcher, now: float = 0.0) -> list[tuple[str, int]]:
    return [(name, job.write_id) for name, job in dispatcher.assign(now)]


# -- dispatcher ----------------------------------------------------------------------------------------


def test_jobs_wait_for_a_worker() -> None:
    dispatcher = Dispatcher()
    dispatcher.submit(job(1))
    assert assigned(dispatcher) == []
    assert (dispatcher.queued, dispatcher.under_way) == (1, 0)
    dispatcher.add_worker("a", 1)
    assert assigned(dispatcher) == [("a", 1)]
    assert (dispatcher.queued, dispatcher.under_way) == (0, 1)


def test_a_worker_has_no_more_jobs_than_its_depth() -> None:
    dispatcher = Dispatcher()
    dispatcher.add_worker("a", 2)
    for write_id in (1, 2, 3):
        dispatcher.submit(job(write_id))
    assert assigned(dispatcher) == [("a", 1), ("a", 2)]
    assert assigned(dispatcher) == []
    assert dispatcher.done(1)
    assert assigned(dispatcher) == [("a", 3)]


def test_the_worker_with_the_fewest_bytes_gets_the_next_job() -> None:
    dispatcher = Dispatcher()
    for name in ("a", "b"):
        dispatcher.add_worker(name, 8)
    dispatcher.submit(job(1, 1000 * MB))
    for write_id in range(2, 6):
        dispatcher.submit(job(write_id, MB))
    assert assigned(dispatcher) == [("a", 1), ("b", 2), ("b", 3), ("b", 4), ("b", 5)]
    dispatcher.done(1)
    dispatcher.submit(job(6, MB))
    assert assigned(dispatcher) == [("a", 6)]
    assert dispatcher.load() == {"a": 1, "b": 4}


def test_a_dead_workers_jobs_come_first_and_in_order() -> None:
    dispatcher = Dispatcher()
    dispatcher.add_worker("a", 2)
    for write_id in (1, 2, 3):
        dispatcher.submit(job(write_id))
    dispatcher.assign(0.0)
    assert dispatcher.remove_worker("a") == [1, 2]
    assert dispatcher.remove_worker("a") == []
    assert (dispatcher.queued, dispatcher.under_way) == (3, 0)
    dispatcher.add_worker("b", 8)
    assert assigned(dispatcher) == [("b", 1), ("b", 2), ("b", 3)]


def test_a_job_belongs_to_the_worker_that_has_it_now() -> None:
    dispatcher = Dispatcher()
    dispatcher.add_worker("a", 1)
    dispatcher.submit(job(1))
    assert dispatcher.owner(1) is None
    dispatcher.assign(0.0)
    assert dispatcher.owner(1) == "a"
    dispatcher.remove_worker("a")
    assert dispatcher.owner(1) is None
    dispatcher.add_worker("b", 1)
    dispatcher.assign(0.0)
    assert dispatcher.owner(1) == "b"
    assert dispatcher.done(1)
    assert dispatcher.owner(1) is None
    assert not dispatcher.done(1)


def test_overdue_jobs_have_more_time_the_larger_they_are() -> None:
    dispatcher = Dispatcher()
    dispatcher.add_worker("a", 8)
    dispatcher.submit(job(1, 99 * MB))
    dispatcher.submit(job(2, 250 * MB))
    dispatcher.assign(10.0)
    assert dispatcher.overdue(40.0, 30.0) == {}
    assert dispatcher.overdue(40.1, 30.0) == {"a": [1]}
    assert dispatcher.overdue(50.1, 30.0) == {"a": [1, 2]}


def test_the_queue_can_be_given_up() -> None:
    dispatcher = Dispatcher()
    dispatcher.submit(job(1))
    dispatcher.submit(job(2))
    assert [j.write_id for j in dispatcher.take_queued()] == [1, 2]
    assert dispatcher.queued == 0


# -- sessions ------------------------------------------------------------------------------------------


def hello(epoch: str = "e", **changes: Any) -> Hello:
    fields: dict[str, Any] = {"corr": 1, "version": 2, "epoch": epoch, "pid": 7, "host_id": "h"}
    fields |= {"engine_desc": b"", "mem_desc": b"", "edges": ["0_1"], "eager_credit": 100}
    return Hello(**{**fields, **changes})


def test_a_session_is_found_by_socket_edge_and_process() -> None:
    sessions = Sessions()
    session, ended = sessions.hello(b"i", hello(edges=["0_1", "0_2"]))
    assert ended == []
    assert sessions.get(b"i") is session
    assert sessions.get(b"other") is None
    assert sessions.on_edge("0_2") == [session]
    assert sessions.on_edge("0_3") == []
    assert sessions.of_process(7, "h") == [session]
    assert sessions.of_process(7, "elsewhere") == []


@pytest.mark.parametrize(("identity", "epoch"), [(b"new", "e"), (b"i", "other"), (b"i", "e")])
def test_a_hello_replaces_the_session_of_its_socket_and_of_its_epoch(identity: bytes, epoch: str) -> None:
    sessions = Sessions()
    old, _ = sessions.hello(b"i", hello())
    new, ended = sessions.hello(identity, hello(epoch))
    assert ended == [old]
    assert list(sessions) == [new]
    assert sessions.get(identity) is new


def test_a_hello_may_replace_two_sessions() -> None:
    sessions = Sessions()
    first, _ = sessions.hello(b"i", hello("e"))
    second, _ = sessions.hello(b"j", hello("f"))
    _, ended = sessions.hello(b"j", hello("e"))
    assert set(map(id, ended)) == {id(first), id(second)}
    assert len(sessions) == 1


def test_the_longest_idle_session_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_SESSIONS", 3)
    sessions = Sessions()
    made = [sessions.hello(b"%d" % i, hello(str(i)))[0] for i in range(3)]
    sessions.get(b"0")
    _, ended = sessions.hello(b"3", hello("3"))
    assert ended == [made[1]]
    assert len(sessions) == 3
    assert sessions.get(b"0") is made[0]


def test_a_dropped_session_is_gone() -> None:
    sessions = Sessions()
    session, _ = sessions.hello(b"i", hello())
    assert sessions.drop(b"i") is session
    assert sessions.drop(b"i") is None
    assert sessions.hello(b"i", hello())[1] == []


def test_credit_is_taken_and_given_back_once() -> None:
    session = Session(b"i", hello(eager_credit=100))
    assert session.take_credit(1, 60)
    assert not session.take_credit(1, 60)  # it has those bytes already
    assert not session.take_credit(2, 41)
    assert session.take_credit(3, 40)
    session.give_credit(1)
    session.give_credit(1)
    session.give_credit(99)
    assert session.credit == 60


def test_credit_has_a_limit_and_survives_a_new_hello() -> None:
    sessions = Sessions()
    session, _ = sessions.hello(b"i", hello(eager_credit=1 << 60))
    assert session.credit == MAX_CREDIT_BYTES
    session.take_credit(1, 1000)
    again, _ = sessions.hello(b"i", hello(eager_credit=1 << 60))
    assert again.credit == MAX_CREDIT_BYTES - 1000
    assert not again.take_credit(1, 1000)
    reconnected, _ = sessions.hello(b"j", hello(eager_credit=1 << 60))  # what was sent may be lost
    assert reconnected.take_credit(1, 1000)


# -- peers ---------------------------------------------------------------------------------------------


def test_the_same_memory_is_the_same_peer() -> None:
    peers = Peers()
    first = peers.lookup(b"engine", b"memory")
    assert peers.lookup(b"engine", b"memory") == first
    assert peers.lookup(b"engine", b"other") != first
    assert first is not None
    assert (peers[first].engine_desc, peers[first].mem_desc) == (b"engine", b"memory")


def test_a_held_peer_stays_until_it_is_released() -> None:
    peers = Peers()
    peer = peers.hold(b"e", b"m")
    assert peers.hold(b"e", b"m") == peer
    assert peer is not None
    peers.forget_idle(1e9)
    peers.release(peer)
    assert peers.forgotten == []
    peers.release(peer)
    assert peers.forgotten == [peer]
    assert len(peers) == 0


def test_a_peer_is_not_forgotten_under_a_write() -> None:
    peers = Peers()
    peer = peers.hold(b"e", b"m")
    assert peer is not None
    peers.begin(peer)
    peers.release(peer)
    peers.forget_idle(1e9)
    assert len(peers) == 1
    peers.end(peer, 50.0)
    peers.forget_idle(50.0 + IDLE_SECONDS)
    assert len(peers) == 1
    peers.forget_idle(50.1 + IDLE_SECONDS)
    assert peers.forgotten == [peer]


def test_a_forgotten_peer_comes_back_under_another_id() -> None:
    peers = Peers()
    first = peers.hold(b"e", b"m")
    assert first is not None
    peers.release(first)
    assert peers.hold(b"e", b"m") != first


def test_peers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "MAX_PEERS", 2)
    peers = Peers()
    assert peers.lookup(b"e", b"1") is not None
    assert peers.lookup(b"e", b"2") is not None
    assert peers.lookup(b"e", b"3") is None
    assert peers.hold(b"e", b"3") is None
    assert peers.lookup(b"e", b"1") is not None
    peers.forget_idle(1e9)
    assert peers.lookup(b"e", b"3") is not None
