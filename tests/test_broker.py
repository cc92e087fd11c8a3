"""The broker as a pure object: whatever a stage, receivers and workers may say, in any order."""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mori_mp.shared import wire
from mori_mp.shared.claims import Claims
from mori_mp.shared.messages import Job, Publish
from mori_mp.shared.pool import BLOCK, Pool
from mori_mp.workers import broker as broker_module
from mori_mp.workers.broker import Broker, Limits
from mori_mp.workers.identity import Identity
from mori_mp.workers.landings import MAX_WRITES
from mori_mp.workers.parking import MAX_PARKED
from mori_mp.workers.sessions import MAX_CREDIT_BYTES

HOST = "boot/ns"
EPOCH = "stage0"
KEY = "req_0_0@0_1"
BLOCKS = 64
PARK = 2.0
TTL = 300.0
EAGER = 256
PAYLOAD = bytes(range(256)) * 4  # too large to travel eagerly
SMALL = b"a small payload"

RECEIVER, OTHER = b"\x00\x00\x00\x00\x01", b"\x00\x00\x00\x00\x02"


class Rig:
    """A broker over a pool of its own, with what it owes taken apart for the tests."""

    def __init__(self, *, incarnation: int = 1, lend: bool = True, pool: Pool | None = None) -> None:
        self.pool = pool if pool is not None else Pool.create(BLOCKS * BLOCK, "test")
        self.board = self.pool.board
        us = Identity(EPOCH, incarnation, 4711, HOST, "shm", b"pool descriptor", lend)
        limits = Limits(EAGER, TTL, PARK)
        self.untold: list[Publish] = []  # what the stage has sent and the broker not yet read
        self.broker = Broker(
            us, limits, self.board, self.read, Claims(self.pool.fd), catch_up=lambda: self.catch_up()
        )
        self.broker.landings.dispatcher.add_worker("w", 1000)
        self.generations = itertools.count(1)
        self.now = 100.0

    def read(self, offset: int, size: int) -> memoryview:
        return self.pool.view[offset : offset + size]

    # -- the stage
    def publish(self, key: str = KEY, data: bytes = PAYLOAD, generation: int = 0, **more: Any) -> Publish:
        generation = generation or next(self.generations)
        offset = (generation % BLOCKS) * BLOCK
        self.pool.view[offset : offset + len(data)] = data
        message = Publish(key, generation, offset, len(data), True, **more)
        self.broker.publish(message, self.now)
        return message

    def catch_up(self) -> None:
        while self.untold:
            self.broker.publish(self.untold.pop(0), self.now)

    def freed(self) -> list[int]:
        freed = list(self.broker.freed)
        self.broker.freed.clear()
        return freed

    # -- receivers
    def send(self, message: Any, identity: bytes = RECEIVER) -> list[Any]:
        payload = message if isinstance(message, bytes) else wire.encode(message)
        self.broker.request(identity, payload, self.now)
        return self.heard(identity)

    def hello(self, identity: bytes = RECEIVER, *, corr: int = 1, **more: Any) -> list[Any]:
        fields: dict[str, Any] = {
            "epoch": f"receiver {identity!r}",
            "pid": 1000 + identity[-1],
            "host_id": HOST,
            "engine_desc": b"engine",
            "mem_desc": b"memory " + identity,
            "edges": ["0_1"],
            "eager_credit": 1 << 20,
            "lease": True,
        }
        return self.send(wire.Hello(corr, wire.VERSION, **{**fields, **more}), identity)

    def heard(self, identity: bytes) -> list[Any]:
        """Everything owed to one socket: v2 notices decoded, v1 replies as they are. Empties the outbox."""
        mine = [frames for to, frames in self.broker.replies.outbox if to == identity]
        self.broker.replies.outbox[:] = [
            (to, frames) for to, frames in self.broker.replies.outbox if to != identity
        ]
        for frames in mine:
            assert len(frames) == 1 or (len(frames) == 2 and frames[0] == b"")
        return [wire.decode_notice(f[0]) if len(f) == 1 else f[1] for f in mine]

    # -- workers
    def jobs(self) -> list[Job]:
        return [job for _, job in self.broker.landings.dispatcher.assign(self.now)]

    def end(self, job: Job, error: str = "") -> None:
        self.broker.write_ended(job.write_id, error, self.now, "w")

    def counters(self) -> dict[str, int]:
        return self.broker.counters

    def entries(self) -> dict[str, int]:
        entries: dict[str, int] = self.broker.ledger.stats(self.now)["entries"]
        return entries


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.pool.close()


@pytest.fixture
def reader(rig: Rig) -> Iterator[Claims]:
    """The claims of a process that has opened the pool for itself."""
    fd = os.open(f"/proc/self/fd/{rig.pool.fd}", os.O_RDWR | os.O_CLOEXEC)
    yield Claims(fd)
    os.close(fd)


def only(items: list[Any], kind: type | None = None) -> Any:
    """The one item of a list, of a kind."""
    assert len(items) == 1, items
    assert kind is None or isinstance(items[0], kind), items
    return items[0]


def v1_pull(length: int = len(PAYLOAD), key: str = KEY, offset: int = 0) -> bytes:
    return wire.encode_v1(wire.PullRequest(key, b"engine", b"memory", offset, length))


def v1_query(key: str = KEY) -> bytes:
    return wire.encode_v1(wire.QueryRequest(key))


# -- v1 ----------------------------------------------------------------------------------------------


def test_v1_query_of_nothing(rig: Rig) -> None:
    assert rig.send(v1_query()) == [b"info_not_found"]


def test_v1_query_is_answered_with_the_size(rig: Rig) -> None:
    rig.publish()
    assert rig.send(v1_query()) == [
        msgspec.msgpack.encode({"request_id": KEY, "data_size": len(PAYLOAD), "is_fast_path": True})
    ]
    assert rig.freed() == []


def test_v1_pull_is_landed_then_done_then_freed(rig: Rig) -> None:
    message = rig.publish()
    assert rig.send(v1_pull(offset=3 * BLOCK)) == []
    job = only(rig.jobs())
    assert (job.local_offsets, job.remote_offsets, job.sizes) == (
        [message.offset],
        [3 * BLOCK],
        [len(PAYLOAD)],
    )
    assert rig.broker.landings.peers[job.peer].engine_desc == b"engine"
    assert rig.broker.landings.peers[job.peer].mem_desc == b"memory"
    assert rig.freed() == []
    rig.end(job)
    assert rig.heard(RECEIVER) == [b"trans_done"]
    assert rig.freed() == [message.generation]
    assert rig.send(v1_query()) == [b"info_not_found"]


@pytest.mark.parametrize("length", [len(PAYLOAD) - 1, len(PAYLOAD) + 1, 0])
def test_v1_pull_of_another_length_is_refused(rig: Rig, length: int) -> None:
    rig.publish()
    assert rig.send(v1_pull(length)) == [b"trans_error"]
    assert rig.jobs() == []
    assert rig.freed() == []
    rig.send(v1_pull())
    rig.end(only(rig.jobs()))
    assert rig.heard(RECEIVER) == [b"trans_done"]


def test_v1_failed_write_is_an_error_and_can_be_tried_again(rig: Rig) -> None:
    message = rig.publish()
    rig.send(v1_pull())
    rig.end(only(rig.jobs()), "link down")
    assert rig.heard(RECEIVER) == [b"trans_error"]
    assert rig.freed() == []
    rig.send(v1_pull())
    rig.end(only(rig.jobs()))
    assert rig.heard(RECEIVER) == [b"trans_done"]
    assert rig.freed() == [message.generation]


# -- parking -----------------------------------------------------------------------------------------


def test_a_pull_that_overtakes_its_publication_is_served_when_it_comes(rig: Rig) -> None:
    assert rig.send(v1_pull()) == []
    rig.now += PARK / 2
    rig.broker.unpark(rig.now)
    rig.publish()
    rig.end(only(rig.jobs()))
    assert rig.heard(RECEIVER) == [b"trans_done"]
    assert rig.broker.report(rig.now)["parked"] == 0


@pytest.mark.parametrize(("v2", "answer"), [(False, b"trans_error"), (True, wire.NOT_FOUND)])
def test_a_parked_pull_is_refused_when_its_time_is_over(rig: Rig, v2: bool, answer: Any) -> None:
    rig.hello()
    rig.send(wire.Pull(5, KEY, 10, 0, False) if v2 else v1_pull())
    assert rig.broker.next_deadline() == rig.now + PARK
    rig.broker.unpark(rig.now + PARK - 0.01)
    assert rig.heard(RECEIVER) == []
    rig.broker.unpark(rig.now + PARK)
    said = only(rig.heard(RECEIVER))
    assert (said.status if v2 else said) == answer
    assert rig.broker.next_deadline() is None
    assert rig.broker.report(rig.now)["parked"] == 0
    rig.publish()
    assert rig.jobs() == []


def test_parked_pulls_end_in_the_order_of_their_deadlines(rig: Rig) -> None:
    rig.hello()
    for corr, key in enumerate(["a@0_1", "b@0_1", "a@0_1"]):
        rig.send(wire.Pull(corr, key, 10, 0, False))
        rig.now += 0.5
    ended = []
    for _ in range(3):
        deadline = rig.broker.next_deadline()
        assert deadline is not None
        rig.broker.unpark(deadline)
        ended.append([done.corr for done in rig.heard(RECEIVER)])
    assert ended == [[0], [1], [2]]


def test_parking_does_not_start_anew_when_another_gets_the_payload(rig: Rig) -> None:
    rig.hello()
    rig.hello(OTHER)
    rig.send(wire.Pull(5, KEY, 0, 0, True))
    rig.send(wire.Pull(6, KEY, 0, 0, True), OTHER)
    rig.now += PARK / 2
    rig.publish()
    assert only(rig.heard(RECEIVER), wire.Done).status == ""
    assert rig.heard(OTHER) == []
    rig.now += PARK / 2
    rig.broker.unpark(rig.now)
    assert only(rig.heard(OTHER), wire.Done).status == wire.NOT_FOUND


def test_parking_is_bounded(rig: Rig) -> None:
    rig.hello()
    for corr in range(MAX_PARKED):
        assert rig.send(wire.Pull(corr, f"{corr}@0_1", 10, 0, False)) == []
    over = only(rig.send(wire.Pull(MAX_PARKED, "over@0_1", 10, 0, False)), wire.Done)
    assert over.status == wire.BUSY
    assert rig.send(v1_pull()) == [b"trans_error"]
    rig.broker.unpark(rig.now + PARK)
    assert len(rig.heard(RECEIVER)) == MAX_PARKED
    assert rig.send(v1_pull()) == []


# -- sessions and notices ------------------------------------------------------------------------------


def test_hello_is_welcomed_and_told_what_is_there(rig: Rig) -> None:
    message = rig.publish()
    rig.publish("elsewhere@0_2")
    welcome, ready = rig.hello(corr=9)
    assert welcome == wire.Welcome(9, wire.VERSION, EPOCH, 1, 4711, HOST, "shm", b"pool descriptor")
    assert ready == wire.Ready(KEY, message.generation, len(PAYLOAD), True, memoryview(b""), message.offset)


@pytest.mark.parametrize(
    "claims",
    [{"lease": False}, {"host_id": "another host"}, {"pid": 0}],
    ids=["unwanted", "remote", "no pid"],
)
def test_only_a_process_of_this_host_that_asks_gets_the_pool(rig: Rig, claims: dict[str, Any]) -> None:
    rig.publish()
    assert rig.hello(**claims)[0].mem_desc == b""
    done = only(rig.send(wire.Pull(2, KEY, len(PAYLOAD), 0, True)), wire.Done)
    assert done.status == wire.REFUSED
    assert rig.entries()["published"] == 1


def test_a_sender_that_does_not_lend_does_not(rig: Rig) -> None:
    stingy = Rig(lend=False, pool=rig.pool)
    stingy.publish()
    welcome, ready = stingy.hello()
    assert (welcome.mem_desc, ready.offset) == (b"", -1)
    assert only(stingy.send(wire.Pull(2, KEY, 1, 0, True))).status == wire.REFUSED


def test_publication_is_announced_on_its_edge_only(rig: Rig) -> None:
    rig.hello()
    rig.hello(OTHER, edges=["0_2"])
    rig.heard(RECEIVER)
    rig.heard(OTHER)
    message = rig.publish()
    ready = only(rig.heard(RECEIVER), wire.Ready)
    assert (ready.key, ready.generation, ready.size, len(ready.data)) == (
        KEY,
        message.generation,
        len(PAYLOAD),
        0,
    )
    assert rig.heard(OTHER) == []


@pytest.mark.parametrize(
    "request_",
    [wire.Pull(3, KEY, 1, 0, False), wire.Audit(3, [KEY]), wire.Settle([1], []), wire.Abandon([3])],
    ids=lambda r: type(r).__name__,
)
def test_without_a_session_one_is_a_stranger(rig: Rig, request_: Any) -> None:
    rig.publish()
    stranger = only(rig.send(request_), wire.Stranger)
    assert stranger.corr == getattr(request_, "corr", 0)
    assert rig.jobs() == []
    assert rig.entries()["published"] == 1


def test_a_session_ends_with_its_socket(rig: Rig) -> None:
    rig.hello()
    rig.broker.unreachable(RECEIVER)
    assert isinstance(only(rig.send(wire.Audit(3, []))), wire.Stranger)
    rig.publish()
    assert rig.heard(RECEIVER) == []


def test_a_receiver_with_a_new_socket_replaces_its_session(rig: Rig) -> None:
    rig.hello(epoch="same")
    rig.hello(OTHER, epoch="same")
    rig.publish()
    assert rig.heard(RECEIVER) == []
    only(rig.heard(OTHER), wire.Ready)
    assert rig.broker.report(rig.now)["sessions"] == 1


def test_a_receiver_with_a_new_socket_gets_the_answers_it_still_waits_for(rig: Rig) -> None:
    rig.hello(epoch="same")
    message = rig.publish()
    rig.send(wire.Pull(5, KEY, len(PAYLOAD), 0, False))
    rig.send(wire.Pull(6, "later@0_1", len(PAYLOAD), 0, False))
    job = only(rig.jobs())
    rig.hello(OTHER, epoch="same")
    rig.end(job)
    rig.publish("later@0_1")
    rig.end(only(rig.jobs()))
    assert rig.heard(RECEIVER) == []
    dones = [n for n in rig.heard(OTHER) if isinstance(n, wire.Done)]
    assert [(d.corr, d.status) for d in dones] == [(5, ""), (6, "")]
    assert message.generation in rig.freed()


def test_hello_again_keeps_registered_memory(rig: Rig) -> None:
    """Registering a pool costs more than a small write; a new subscription must not do it again."""
    rig.publish()
    rig.hello()
    rig.send(wire.Pull(5, KEY, len(PAYLOAD), 0, False))
    first = only(rig.jobs())
    rig.end(first)
    rig.hello(edges=["0_1", "0_2"])
    rig.publish()
    rig.send(wire.Pull(6, KEY, len(PAYLOAD), 0, False))
    assert only(rig.jobs()).peer == first.peer
    assert rig.broker.landings.peers.forgotten == []


def test_memory_of_a_session_that_ended_is_forgotten(rig: Rig) -> None:
    rig.publish()
    rig.hello()
    rig.send(wire.Pull(5, KEY, len(PAYLOAD), 0, False))
    job = only(rig.jobs())
    rig.broker.unreachable(RECEIVER)
    assert rig.broker.landings.peers.forgotten == []  # the write still needs it
    rig.end(job)
    rig.now += 1000
    rig.broker.tick(rig.now)
    assert rig.broker.landings.peers.forgotten == [job.peer]


# -- eager ---------------------------------------------------------------------------------------------


def test_a_small_payload_rides_in_its_notice_until_it_is_consumed(rig: Rig) -> None:
    rig.hello()
    rig.heard(RECEIVER)
    message = rig.publish(data=SMALL)
    ready = only(rig.heard(RECEIVER), wire.Ready)
    assert bytes(ready.data) == SMALL
    assert rig.freed() == []
    assert rig.send(wire.Settle([message.generation], [], EPOCH)) == []
    assert rig.freed() == [message.generation]
    assert rig.counters()["eager"] == 1
    assert rig.broker.ledger.counters["delivered_eager"] == 1


def test_eager_notices_are_bounded_by_credit(rig: Rig) -> None:
    rig.hello(eager_credit=2 * len(SMALL))
    rig.heard(RECEIVER)
    published = [rig.publish(f"{i}@0_1", SMALL) for i in range(3)]
    assert [len(r.data) for r in rig.heard(RECEIVER)] == [len(SMALL), len(SMALL), 0]
    rig.send(wire.Settle([published[0].generation], []))
    rig.publish("3@0_1", SMALL)
    assert [len(r.data) for r in rig.heard(RECEIVER)] == [len(SMALL)]


def test_credit_comes_back_when_the_payload_ends_otherwise(rig: Rig) -> None:
    rig.hello(eager_credit=len(SMALL))
    rig.heard(RECEIVER)
    message = rig.publish("a@0_1", SMALL)
    rig.broker.withdraw([message.generation], rig.now)
    rig.publish("b@0_1", SMALL)
    kinds = [(type(n), len(getattr(n, "data", b""))) for n in rig.heard(RECEIVER)]
    assert kinds == [(wire.Ready, len(SMALL)), (wire.Gone, 0), (wire.Ready, len(SMALL))]


def test_two_receivers_on_an_edge_get_no_eager_copies(rig: Rig) -> None:
    rig.hello()
    rig.hello(OTHER)
    rig.publish(data=SMALL)
    for identity in (RECEIVER, OTHER):
        assert len([n for n in rig.heard(identity) if isinstance(n, wire.Ready)][-1].data) == 0


def test_asking_again_does_not_send_the_bytes_again(rig: Rig) -> None:
    """Else one small request over and over would have the sender fill its memory with notices."""
    rig.hello()
    rig.publish(data=SMALL)
    assert len(rig.heard(RECEIVER)[-1].data) == len(SMALL)
    for again in (rig.send(wire.Audit(4, [KEY])), rig.hello()):
        ready = next(n for n in again if isinstance(n, wire.Ready))
        assert (ready.key, len(ready.data)) == (KEY, 0)


def test_credit_is_not_what_a_receiver_may_wish_for(rig: Rig) -> None:
    rig.hello(eager_credit=1 << 62)
    session = rig.broker.sessions.get(RECEIVER)
    assert session is not None
    assert session.credit == MAX_CREDIT_BYTES


# -- offers --------------------------------------------------------------------------------------------


def test_a_large_payload_is_offered_where_it_lies(rig: Rig) -> None:
    rig.hello()
    rig.heard(RECEIVER)
    message = rig.publish()
    assert only(rig.heard(RECEIVER), wire.Ready).offset == message.offset
    assert rig.board.generation(message.offset // BLOCK) == message.generation
    rig.send(wire.Settle([message.generation], [], EPOCH))
    assert rig.freed() == [message.generation]
    assert rig.board.generation(message.offset // BLOCK) == 0
    counters = rig.broker.ledger.counters
    assert (counters["delivered_lease"], counters["delivered_eager"]) == (1, 0)


@pytest.mark.parametrize("end", ["consumed", "withdrawn", "expired", "replaced", "landed"])
def test_an_offered_payload_is_not_freed_under_its_reader(rig: Rig, reader: Claims, end: str) -> None:
    rig.hello()
    message = rig.publish()
    slot = message.offset // BLOCK
    assert reader.take(slot)
    if end == "consumed":
        rig.send(wire.Settle([message.generation], [], EPOCH))
    elif end == "withdrawn":
        rig.broker.withdraw([message.generation], rig.now)
    elif end == "expired":
        rig.now += TTL
        rig.broker.tick(rig.now)
    elif end == "replaced":
        rig.publish()
    else:
        rig.send(v1_pull(), OTHER)
        rig.end(only(rig.jobs()))
    rig.broker.tick(rig.now)
    assert rig.freed() == []
    reader.drop(slot)
    rig.broker.tick(rig.now)
    assert rig.freed() == [message.generation]
    assert reader.take(slot)  # nobody keeps it locked
    assert rig.board.generation(slot) != message.generation


def test_a_claim_made_under_the_predecessor_holds(rig: Rig, reader: Claims) -> None:
    rig.hello()
    message = rig.publish()
    assert reader.take(message.offset // BLOCK)
    new = successor(rig)
    new.broker.publish(msgspec.structs.replace(message, replayed=True), new.now)
    new.broker.withdraw([message.generation], new.now)
    assert new.freed() == []
    reader.drop(message.offset // BLOCK)
    new.broker.tick(new.now)
    assert new.freed() == [message.generation]


# -- audit ---------------------------------------------------------------------------------------------


def test_audit_repeats_notices_then_ends(rig: Rig) -> None:
    rig.hello()
    rig.publish()
    rig.heard(RECEIVER)
    ready, done = rig.send(wire.Audit(4, [KEY, "missing@0_1"]))
    assert (type(ready), ready.key) == (wire.Ready, KEY)
    assert done == wire.Done(4, "", "", 0, 0, False, 0)


# -- landing, v2 ---------------------------------------------------------------------------------------


def test_v2_pull_is_landed(rig: Rig) -> None:
    rig.hello()
    message = rig.publish()
    rig.heard(RECEIVER)
    rig.send(wire.Pull(5, KEY, len(PAYLOAD), 2 * BLOCK, False))
    job = only(rig.jobs())
    assert job.remote_offsets == [2 * BLOCK]
    assert rig.broker.landings.peers[job.peer].mem_desc == b"memory " + RECEIVER
    rig.end(job)
    done = only(rig.heard(RECEIVER), wire.Done)
    assert (done.corr, done.status, done.generation, done.size) == (5, "", message.generation, len(PAYLOAD))
    assert rig.freed() == [message.generation]


def test_v2_pull_of_another_length_is_refused(rig: Rig) -> None:
    rig.hello()
    rig.publish()
    rig.heard(RECEIVER)
    done = only(rig.send(wire.Pull(5, KEY, 1, 0, False)), wire.Done)
    assert (done.status, done.size) == (wire.LENGTH, len(PAYLOAD))
    assert rig.jobs() == []


def test_a_receiver_without_memory_cannot_be_landed_on(rig: Rig) -> None:
    rig.hello(mem_desc=b"")
    rig.publish()
    rig.heard(RECEIVER)
    assert only(rig.send(wire.Pull(5, KEY, len(PAYLOAD), 0, False))).status == wire.REFUSED


def test_v2_failed_write_is_announced_again(rig: Rig) -> None:
    rig.hello()
    message = rig.publish()
    rig.heard(RECEIVER)
    rig.send(wire.Pull(5, KEY, len(PAYLOAD), 0, False))
    rig.end(only(rig.jobs()), "peer memory is gone")
    done, ready = rig.heard(RECEIVER)
    assert (done.status, done.message) == (wire.FAILED, "peer memory is gone")
    assert (type(ready), ready.generation) == (wire.Ready, message.generation)
    assert rig.counters()["failed_writes"] == 1


def test_withdrawn_during_its_write_is_freed_only_at_its_end(rig: Rig) -> None:
    rig.hello()
    message = rig.publish()
    rig.send(wire.Pull(5, KEY, len(PAYLOAD), 0, False))
    job = only(rig.jobs())
    rig.heard(RECEIVER)
    rig.broker.withdraw([message.generation], rig.now)
    assert rig.freed() == []
    assert only(rig.heard(RECEIVER), wire.Gone).reason == "withdrawn"
    rig.send(wire.Pull(6, KEY, len(PAYLOAD), 0, False))  # nobody else gets it: this one is parked
    assert rig.jobs() == []
    rig.end(job)
    assert rig.freed() == [message.generation]
    assert only(rig.heard(RECEIVER), wire.Done).corr == 5


def test_a_failed_write_of_a_withdrawn_payload_frees_it_too(rig: Rig) -> None:
    message = rig.publish()
    rig.send(v1_pull())
    rig.broker.withdraw([message.generation], rig.now)
    rig.end(only(rig.jobs()), "no")
    assert rig.freed() == [message.generation]
    assert rig.heard(RECEIVER) == [b"trans_error"]


def test_a_pull_of_a_lent_payload_waits_for_it_to_come_back(rig: Rig) -> None:
    """The holder itself may not have it written either: one way of reading at a time."""
    rig.hello()
    message = rig.publish()
    rig.heard(RECEIVER)
    only(rig.send(wire.Pull(5, KEY, 0, 0, True)), wire.Done)
    for pull in (wire.Pull(6, KEY, len(PAYLOAD), 0, False), v1_pull()):
        assert rig.send(pull) == []
    assert rig.jobs() == []
    rig.send(wire.Settle([], [message.generation]))
    assert rig.freed() == [message.generation]
    rig.broker.unpark(rig.now + PARK)
    refused = rig.heard(RECEIVER)
    assert (refused[0].status, refused[1]) == (wire.NOT_FOUND, b"trans_error")


def test_writes_of_one_payload_are_bounded(rig: Rig) -> None:
    message = rig.publish()
    for _ in range(MAX_WRITES):
        assert rig.send(v1_pull()) == []
    assert rig.send(v1_pull()) == [b"trans_error"]
    jobs = rig.jobs()
    assert len(jobs) == MAX_WRITES
    for job in jobs:
        assert rig.freed() == []
        rig.end(job)
    assert rig.freed() == [message.generation]


def test_an_unknown_write_ending_means_nothing(rig: Rig) -> None:
    rig.publish()
    rig.broker.write_ended(99, "", rig.now)
    assert rig.entries()["published"] == 1


def test_the_last_words_of_a_dead_worker_do_not_end_the_write_of_its_successor(rig: Rig) -> None:
    """Its job went to another worker, whose write is under way: nobody may be told yet that it has ended."""
    message = rig.publish()
    rig.send(v1_pull())
    job = only(rig.jobs())
    rig.broker.landings.dispatcher.remove_worker("w")
    rig.broker.write_ended(job.write_id, "", rig.now, "w")  # read after its exit, before it is assigned
    assert (rig.heard(RECEIVER), rig.freed()) == ([], [])
    rig.broker.landings.dispatcher.add_worker("w2", 1)
    assert rig.jobs() == [job]
    rig.broker.write_ended(job.write_id, "", rig.now, "w")  # and after
    assert (rig.heard(RECEIVER), rig.freed()) == ([], [])
    rig.broker.write_ended(job.write_id, "", rig.now, "w2")
    assert rig.heard(RECEIVER) == [b"trans_done"]
    assert rig.freed() == [message.generation]


def test_a_write_that_is_given_up_over_a_new_socket_is_answered_when_it_ends(rig: Rig) -> None:
    """Else the receiver would hand out the slot while the write is under way."""
    rig.hello(epoch="same")
    rig.publish()
    rig.send(wire.Pull(5, KEY, len(PAYLOAD), 0, False))
    rig.broker.unreachable(RECEIVER)
    rig.hello(OTHER, epoch="same")
    rig.heard(OTHER)
    assert rig.send(wire.Abandon([5]), OTHER) == []
    rig.end(only(rig.jobs()))
    assert only(rig.heard(OTHER), wire.Done).corr == 5


# -- pulls that were given up --------------------------------------------------------------------------


def test_a_parked_pull_that_is_given_up_is_answered_and_not_served(rig: Rig) -> None:
    rig.hello()
    rig.heard(RECEIVER)
    rig.send(wire.Pull(5, KEY, len(PAYLOAD), 0, False))
    rig.send(wire.Pull(6, KEY, len(PAYLOAD), 0, False))
    done = only(rig.send(wire.Abandon([5])), wire.Done)
    assert (done.corr, done.status) == (5, wire.NOT_FOUND)
    assert rig.broker.report(rig.now)["parked"] == 1
    rig.publish()
    rig.end(only(rig.jobs()))
    assert only([n for n in rig.heard(RECEIVER) if isinstance(n, wire.Done)]).corr == 6


def test_a_write_that_is_given_up_is_answered_when_it_ends(rig: Rig) -> None:
    rig.hello()
    rig.publish()
    rig.heard(RECEIVER)
    rig.send(wire.Pull(5, KEY, len(PAYLOAD), 0, False))
    assert rig.send(wire.Abandon([5])) == []
    rig.end(only(rig.jobs()))
    assert only(rig.heard(RECEIVER), wire.Done).corr == 5


def test_a_pull_whose_answer_was_lost_is_answered_again(rig: Rig) -> None:
    rig.hello()
    rig.heard(RECEIVER)
    done = only(rig.send(wire.Abandon([77])), wire.Done)
    assert (done.corr, done.status) == (77, wire.LOST)


def test_nobody_can_give_up_the_pull_of_another(rig: Rig) -> None:
    rig.hello()
    rig.hello(OTHER)
    rig.heard(RECEIVER)
    rig.send(wire.Pull(5, KEY, len(PAYLOAD), 0, False))
    rig.send(wire.Abandon([5]), OTHER)
    rig.publish()
    rig.end(only(rig.jobs()))
    assert only([n for n in rig.heard(RECEIVER) if isinstance(n, wire.Done)]).status == ""


@pytest.mark.parametrize(("epoch", "incarnation"), [(EPOCH, 2), ("another stage", 1)])
def test_a_pull_meant_for_another_process_is_not_served(rig: Rig, epoch: str, incarnation: int) -> None:
    """Its receiver may have given it up when that process died, and have handed out the slot again."""
    rig.hello()
    rig.publish()
    rig.heard(RECEIVER)
    pull = wire.Pull(5, KEY, len(PAYLOAD), 0, False, epoch, incarnation)
    assert rig.send(pull) == [wire.Stranger(5)]
    assert rig.jobs() == []
    assert rig.send(msgspec.structs.replace(pull, epoch=EPOCH, incarnation=1)) == []
    assert len(rig.jobs()) == 1


def test_a_pushed_payload_may_be_settled_before_it_is_heard_of(rig: Rig) -> None:
    """The receiver needs no message to find it, so its answer may be read before the publication."""
    rig.hello()
    rig.untold.append(Publish(KEY, 7, 0, len(PAYLOAD), True, pushed=True))
    rig.send(wire.Settle([7], [], EPOCH))
    assert rig.freed() == [7]
    assert rig.entries()["published"] == 0
    assert rig.counters()["pushed"] == 1


def test_a_payload_may_be_settled_long_before_it_is_published(rig: Rig) -> None:
    """Its receiver has taken it where it was pushed, and the stage's word of it waits for room."""
    rig.hello()
    rig.send(wire.Settle([7], [], EPOCH))
    assert rig.freed() == []
    rig.publish(generation=7, pushed=True)
    assert rig.freed() == [7]
    assert rig.entries()["published"] == 0


def test_of_what_is_settled_too_early_the_newest_is_remembered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "MAX_AHEAD", 2)
    rig.hello()
    rig.send(wire.Settle([7, 8, 9], [], EPOCH))
    for generation in (7, 8, 9):
        rig.publish(f"{generation}@0_1", generation=generation)
    assert rig.freed() == [8, 9]


def test_settlements_of_another_stage_mean_nothing(rig: Rig) -> None:
    """Generations are counted anew by each stage: 1 of the one that died is not our 1."""
    rig.hello()
    message = rig.publish()
    rig.send(wire.Settle([message.generation], [message.generation], "another stage"))
    assert rig.freed() == []
    assert rig.entries()["published"] == 1
    assert rig.counters()["stale_settles"] == 1


# -- leases --------------------------------------------------------------------------------------------


def lend(rig: Rig, identity: bytes = RECEIVER, corr: int = 5) -> wire.Done:
    done: wire.Done = only(rig.send(wire.Pull(corr, KEY, len(PAYLOAD), 0, True), identity), wire.Done)
    return done


def test_a_lease_is_on_the_board_before_its_answer(rig: Rig) -> None:
    rig.hello()
    message = rig.publish()
    rig.heard(RECEIVER)
    done = lend(rig)
    assert (done.status, done.offset, done.size) == ("", message.offset, len(PAYLOAD))
    assert rig.board.lessee(message.offset // BLOCK, message.generation) == 1001
    assert rig.broker.watch == {1001}
    assert rig.freed() == []


@pytest.mark.parametrize("how", ["settled", "on the board", "holder died"])
def test_a_lease_ends(rig: Rig, how: str) -> None:
    rig.hello()
    message = rig.publish()
    rig.heard(RECEIVER)
    lend(rig)
    rig.broker.tick(rig.now)
    assert rig.freed() == []
    if how == "settled":
        rig.send(wire.Settle([], [message.generation], EPOCH))
    elif how == "on the board":  # the message was lost with a control process
        rig.board.release(message.offset // BLOCK, message.generation)
        rig.broker.tick(rig.now)
    else:
        rig.broker.holder_gone(1001, rig.now)
        assert isinstance(only(rig.send(wire.Audit(9, []))), wire.Stranger)
    assert rig.freed() == [message.generation]


def test_a_lease_is_granted_again_to_its_holder_only(rig: Rig) -> None:
    rig.hello()
    rig.hello(OTHER)
    message = rig.publish()
    rig.heard(RECEIVER)
    rig.heard(OTHER)
    assert lend(rig).status == ""
    assert (lend(rig, corr=6).status, lend(rig, corr=7).generation) == ("", message.generation)
    assert rig.send(wire.Pull(8, KEY, 0, 0, True), OTHER) == []  # as if it were not there
    rig.send(wire.Settle([], [message.generation]), OTHER)  # a release by anyone else is void
    assert rig.freed() == []
    rig.send(wire.Settle([], [message.generation]))
    assert rig.freed() == [message.generation]


def test_a_lease_is_refused_while_the_payload_is_being_written(rig: Rig) -> None:
    rig.hello()
    rig.publish()
    rig.heard(RECEIVER)
    rig.send(v1_pull(), OTHER)
    done = lend(rig)
    assert done.status == wire.BUSY
    rig.end(only(rig.jobs()), "failed")
    only(rig.heard(RECEIVER), wire.Ready)
    assert lend(rig, corr=6).status == ""


@pytest.mark.parametrize("end", ["withdraw", "expire", "replace"])
def test_a_lent_payload_outlives_its_end(rig: Rig, end: str) -> None:
    rig.hello()
    message = rig.publish()
    lend_done = [n for n in rig.send(wire.Pull(5, KEY, 0, 0, True)) if isinstance(n, wire.Done)]
    assert lend_done[0].status == ""
    if end == "withdraw":
        rig.broker.withdraw([message.generation], rig.now)
    elif end == "expire":
        rig.now += TTL
        rig.broker.tick(rig.now)
    else:
        rig.publish()
    assert rig.freed() == []
    rig.send(wire.Settle([], [message.generation]))
    assert rig.freed() == [message.generation]


# -- replay --------------------------------------------------------------------------------------------


def successor(rig: Rig) -> Rig:
    """A new control process over the same pool."""
    new = Rig(incarnation=2, pool=rig.pool)
    new.now = rig.now
    return new


def test_replay_restores_a_lease(rig: Rig) -> None:
    rig.hello()
    message = rig.publish()
    rig.heard(RECEIVER)
    lend(rig)
    new = successor(rig)
    new.broker.publish(msgspec.structs.replace(message, replayed=True), new.now)
    assert new.broker.watch == {1001}
    new.hello(OTHER)
    assert [type(n) for n in new.hello()] == [wire.Welcome]  # nothing is there for anyone
    assert new.send(wire.Pull(1, KEY, 0, 0, True), OTHER) == []
    assert lend(new).status == ""
    new.send(wire.Settle([], [message.generation], EPOCH))
    assert new.freed() == [message.generation]


def test_replay_of_a_lease_that_ended_in_between_frees(rig: Rig) -> None:
    rig.hello()
    message = rig.publish()
    rig.heard(RECEIVER)
    lend(rig)
    rig.board.release(message.offset // BLOCK, message.generation)
    new = successor(rig)
    new.hello()
    new.broker.publish(msgspec.structs.replace(message, replayed=True), new.now)
    assert new.freed() == [message.generation]
    assert [n for n in new.heard(RECEIVER) if isinstance(n, wire.Ready)] == []


def test_replay_frees_what_a_delivered_payload_had_replaced(rig: Rig) -> None:
    """Both generations of a key are told again; neither may be forgotten."""
    rig.hello()
    old = rig.publish()
    new_one = rig.publish()
    rig.heard(RECEIVER)
    lend(rig)
    rig.board.release(new_one.offset // BLOCK, new_one.generation)
    new = successor(rig)
    for message in (old, new_one):
        new.broker.publish(msgspec.structs.replace(message, replayed=True), new.now)
    assert sorted(new.freed()) == [old.generation, new_one.generation]


def test_replay_of_an_idle_payload_is_announced(rig: Rig) -> None:
    message = rig.publish()
    new = successor(rig)
    new.hello()
    new.broker.publish(msgspec.structs.replace(message, replayed=True), new.now)
    assert new.heard(RECEIVER)[-1].generation == message.generation


def test_a_board_record_of_an_older_generation_means_nothing(rig: Rig) -> None:
    rig.hello()
    message = rig.publish()
    rig.heard(RECEIVER)
    lend(rig)
    new = successor(rig)
    later = Publish(KEY, message.generation + BLOCKS, message.offset, message.size, True, True)
    new.broker.publish(later, new.now)
    assert new.entries()["published"] == 1
    assert new.freed() == []


# -- the end of payloads -------------------------------------------------------------------------------


def test_a_payload_expires(rig: Rig) -> None:
    rig.hello()
    message = rig.publish()
    rig.heard(RECEIVER)
    rig.broker.tick(rig.now + TTL - 1)
    assert rig.freed() == []
    rig.broker.tick(rig.now + TTL)
    assert rig.freed() == [message.generation]
    assert only(rig.heard(RECEIVER), wire.Gone).reason == "expired"


def test_a_replaced_payload_is_gone_before_the_new_one_is_ready(rig: Rig) -> None:
    rig.hello()
    old = rig.publish()
    rig.heard(RECEIVER)
    new = rig.publish()
    gone, ready = rig.heard(RECEIVER)
    assert (type(gone), gone.generation, gone.reason) == (wire.Gone, old.generation, "replaced")
    assert (type(ready), ready.generation) == (wire.Ready, new.generation)
    assert rig.freed() == [old.generation]


def test_replaced_during_its_write_finishes_from_its_own_memory(rig: Rig) -> None:
    old = rig.publish()
    rig.send(v1_pull())
    new = rig.publish()
    job = only(rig.jobs())
    assert job.local_offsets == [old.offset]
    assert rig.freed() == []
    rig.end(job)
    assert rig.freed() == [old.generation]
    rig.send(v1_pull())
    assert only(rig.jobs()).local_offsets == [new.offset]


# -- bad requests (I6) -------------------------------------------------------------------------------


def test_bad_requests_are_answered_and_counted(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for count in range(1, 31):
        assert rig.send(b"\xc1 no msgpack") == [b"trans_error"]
        assert rig.counters()["bad_requests"] == count
    assert 0 < len(caplog.records) < 30  # a flood of them must not become a flood of lines


def test_a_pid_that_no_kernel_gives_out_is_a_bad_request(rig: Rig) -> None:
    """The lease board has 32 bits for it, and it will be watched."""
    assert rig.hello(pid=1 << 32) == [b"trans_error"]


VALID = [
    wire.encode(wire.Hello(1, 2, "e", 1001, HOST, b"engine", b"memory", ["0_1"], 1 << 20, True)),
    wire.encode(wire.Pull(5, KEY, len(PAYLOAD), BLOCK, False)),
    wire.encode(wire.Pull(6, KEY, len(PAYLOAD), 0, True, EPOCH, 1)),
    wire.encode(wire.Audit(7, [KEY])),
    wire.encode(wire.Settle([1], [2], EPOCH)),
    wire.encode(wire.Abandon([5])),
    v1_query(),
    v1_pull(),
]


def snapshot(rig: Rig) -> Any:
    stats = rig.broker.ledger.stats(rig.now)
    return stats["entries"], stats["bytes"], stats["writes"], zlib.crc32(rig.pool.view)


@given(
    st.lists(st.tuples(st.sampled_from(VALID), st.integers(0, 1 << 16), st.binary(max_size=6)), max_size=8)
)
@settings(max_examples=80, deadline=None)
def test_garbage_neither_raises_nor_touches_the_ledger(damages: list[tuple[bytes, int, bytes]]) -> None:
    """What does not decode changes nothing; what does is a request like any other, and must not raise."""
    rig = Rig()
    rig.hello()
    rig.publish()
    rig.publish("small@0_1", SMALL)
    try_all(rig, damages)
    rig.pool.close()


def try_all(rig: Rig, damages: list[tuple[bytes, int, bytes]]) -> None:
    for valid, at, junk in damages:
        at %= len(valid)
        payload = valid[:at] + junk + valid[at + len(junk) :]
        before = snapshot(rig)
        try:
            wire.decode_request(payload)
        except wire.WireError:
            assert rig.send(payload, OTHER)[-1] == b"trans_error"
            assert rig.send(payload)[-1] == b"trans_error"
            assert snapshot(rig) == before
        else:
            rig.send(payload, OTHER)
            rig.send(payload)
        rig.broker.tick(rig.now)
        for job in rig.jobs():
            rig.end(job, "no such memory")


KEYS = st.sampled_from([KEY, "small@0_1", "b@0_2", "missing@0_1", "", "@"])
SMALL_INTS = st.integers(0, 6)
EDGES = st.lists(st.sampled_from(["0_1", "0_2", ""]), max_size=3)
IDENTITIES = st.sampled_from([b"i1", b"i2", b"i3"])
REQUESTS = st.one_of(
    st.builds(
        wire.Hello,
        corr=SMALL_INTS,
        version=SMALL_INTS,
        epoch=st.sampled_from(["", "e1", "e2"]),
        pid=st.sampled_from([0, 1, 2, wire.MAX_PID]),
        host_id=st.sampled_from([HOST, ""]),
        engine_desc=st.binary(max_size=3),
        mem_desc=st.binary(max_size=3),
        edges=EDGES,
        eager_credit=st.sampled_from([0, 20, 1 << 62]),
        lease=st.booleans(),
    ),
    st.builds(
        wire.Pull,
        corr=SMALL_INTS,
        key=KEYS,
        length=st.sampled_from([0, len(PAYLOAD), len(SMALL), 1 << 62]),
        dst_offset=st.sampled_from([0, 1, 1 << 62]),
        lease=st.booleans(),
        epoch=st.sampled_from(["", EPOCH]),
        incarnation=st.sampled_from([0, 1, 2]),
    ),
    st.builds(wire.Audit, corr=SMALL_INTS, keys=st.lists(KEYS, max_size=4)),
    st.builds(
        wire.Settle,
        consumed=st.lists(st.integers(-1, 12), max_size=3),
        released=st.lists(st.integers(-1, 12), max_size=3),
        epoch=st.sampled_from(["", EPOCH, "other"]),
    ),
    st.builds(wire.Abandon, pulls=st.lists(SMALL_INTS, max_size=4)),
    st.builds(
        wire.PullRequest,
        request_id=KEYS,
        engine_desc_packed=st.binary(max_size=2),
        mem_desc_packed=st.binary(max_size=2),
        dst_offset=SMALL_INTS,
        length=st.sampled_from([len(PAYLOAD), len(SMALL)]),
    ),
    st.builds(wire.QueryRequest, request_id=KEYS),
)
EVENTS = st.one_of(
    st.tuples(st.just("request"), IDENTITIES, REQUESTS),
    st.tuples(st.just("publish"), KEYS, st.sampled_from([PAYLOAD, SMALL])),
    st.tuples(st.just("withdraw"), st.integers(0, 12)),
    st.tuples(st.just("work"), st.booleans()),
    st.tuples(st.just("unreachable"), IDENTITIES),
    st.tuples(st.just("holder_gone"), st.sampled_from([1, 2, wire.MAX_PID])),
    st.tuples(st.just("tick"), st.sampled_from([0.125, PARK, 70.0, TTL])),
)


@given(st.lists(EVENTS, max_size=40))
@settings(max_examples=120, deadline=None)
def test_any_sequence_of_well_formed_events_is_survived_and_frees_everything_once(
    events: list[tuple[Any, ...]],
) -> None:
    rig = Rig()
    published: list[int] = []
    freed: list[int] = []
    for event in events:
        match event:
            case ("request", identity, request):
                v1 = isinstance(request, (wire.PullRequest, wire.QueryRequest))
                rig.send(wire.encode_v1(request) if v1 else wire.encode(request), identity)
            case ("publish", key, data):
                published.append(rig.publish(key, data).generation)  # each has a slot of its own
            case ("withdraw", generation):
                rig.broker.withdraw([generation], rig.now)
            case ("work", ok):
                for job in rig.jobs():
                    rig.end(job, "" if ok else "failed")
            case ("unreachable", identity):
                rig.broker.unreachable(identity)
            case ("holder_gone", pid):
                rig.broker.holder_gone(pid, rig.now)
            case ("tick", seconds):
                rig.now += seconds
                rig.broker.tick(rig.now)
        freed += rig.freed()
        under_way = {write.entry.generation for write in rig.broker.landings.writes.values()}
        assert not under_way & set(freed), "freed under a write"
    # When all work ends, every holder dies and the TTL has passed, every publication has come back once.
    for job in rig.jobs():
        rig.end(job)
    for pid in (1, 2, wire.MAX_PID):
        rig.broker.holder_gone(pid, rig.now)
    rig.now += TTL + 1
    rig.broker.tick(rig.now)
    freed += rig.freed()
    for job in rig.jobs():  # of pulls that were parked
        rig.end(job)
    freed += rig.freed()
    assert sorted(freed) == published
    rig.broker.tick(rig.now + 2 * PARK)
    report = rig.broker.report(rig.now)
    assert (report["parked"], report["jobs_queued"], report["jobs_under_way"]) == (0, 0, 0)
    for identity in (b"i1", b"i2", b"i3"):
        rig.broker.unreachable(identity)
    rig.broker.tick(rig.now + 1000)
    assert len(rig.broker.landings.peers) == 0
    rig.pool.close()
