"""A transfer worker with the shm engine, between a control process's channel and a receiver's pool."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mori_mp.shared import messages
from mori_mp.shared.errors import TransferFailed
from mori_mp.shared.messages import (
    AddPeer,
    DropPeer,
    Job,
    JobDone,
    PoolBacked,
    Stop,
    WorkerFailed,
    WorkerReady,
    WorkerSetup,
)
from mori_mp.shared.pool import BLOCK, Pool, PoolDescriptor, total_bytes
from mori_mp.workers.engines.shm import ShmEngine, receive
from mori_mp.workers.job_channel import JobChannel
from mori_mp.workers.transfer import TransferWorker

SOON = 10.0
SIZE = 16 * BLOCK


def setup(**changes: Any) -> WorkerSetup:
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(WorkerSetup):
        if field.required:
            fields[field.name] = {str: "", int: 0, bool: False}.get(field.type)
    fields |= {
        "path": [],
        "cpus": [],
        "engine_options": {},
        "engine": "shm",
        "identity": "0.1",
        "role": "worker",
    }
    return WorkerSetup(**{**fields, "jobs_fd": -1, "pool_size": SIZE, **changes})


class Control:
    """The control process's end, with the worker in a thread."""

    def __init__(self, pool: Pool, worker_setup: WorkerSetup) -> None:
        ours, theirs = messages.socketpair()
        self.socket = ours
        self.channel = JobChannel(ours, messages.from_worker)
        self._lifeline, self._cut = os.pipe()
        worker_setup = msgspec.structs.replace(worker_setup, jobs_fd=theirs.detach())
        worker = TransferWorker(worker_setup, pool, self._lifeline)
        self.thread = threading.Thread(target=worker.run, daemon=True)
        self.thread.start()
        self._next = 0

    def hears(self, kind: type) -> Any:
        poller = select.poll()
        poller.register(self.channel.fileno(), select.POLLIN)
        assert poller.poll(SOON * 1000), "the worker said nothing"
        message = self.channel.receive()
        assert isinstance(message, kind), message
        return message

    def says(self, *said: messages.ToWorker) -> None:
        for message in said:
            self.channel.send(message)
        assert self.channel.backlog == 0

    def writes(self, peer: int, *segments: tuple[int, int, int]) -> JobDone:
        """Have (local, remote, size) segments written; returns how that ended."""
        self._next += 1
        local, remote, sizes = (list(column) for column in zip(*segments, strict=True))
        self.says(Job(self._next, peer, local, remote, sizes))
        done: JobDone = self.hears(JobDone)
        assert done.write_id == self._next
        return done

    def end(self) -> None:
        """Cut the lifeline, which ends a worker whatever it is doing."""
        os.close(self._cut)
        self.ends()
        os.close(self._lifeline)
        self.channel.close()

    def ends(self) -> None:
        """Wait for the worker's end."""
        self.thread.join(SOON)
        assert not self.thread.is_alive()


@pytest.fixture
def pool() -> Iterator[Pool]:
    pool = Pool.create(SIZE, "sender")
    pool.view[:] = bytes(range(256)) * (SIZE // 256)
    yield pool
    pool.close()


@pytest.fixture
def target() -> Iterator[Pool]:
    pool = Pool.create(SIZE, "receiver")
    yield pool
    pool.close()


@pytest.fixture
def control(pool: Pool) -> Iterator[Control]:
    control = Control(pool, setup())
    assert control.hears(WorkerReady).engine == "shm"
    yield control
    control.end()


def peer_of(pool: Pool, number: int = 1) -> AddPeer:
    passive = receive("shm", pool, {})
    return AddPeer(number, passive.engine_desc, passive.mem_desc)


def test_bytes_land_where_they_should_and_nowhere_else(control: Control, pool: Pool, target: Pool) -> None:
    control.says(peer_of(target))
    assert control.writes(1, (BLOCK, 3 * BLOCK + 7, 100)).error == ""
    expected = bytearray(SIZE)
    expected[3 * BLOCK + 7 : 3 * BLOCK + 107] = pool.view[BLOCK : BLOCK + 100]
    assert bytes(target.view) == expected


def test_a_batch_is_one_write(control: Control, pool: Pool, target: Pool) -> None:
    control.says(peer_of(target))
    assert control.writes(1, (0, 5, 3), (10, SIZE - 2, 2)).error == ""
    assert bytes(target.view[5:8]) == bytes(pool.view[:3])
    assert bytes(target.view[SIZE - 2 :]) == bytes(pool.view[10:12])


OUTSIDE = [
    (0, SIZE - 1, 2),
    (0, SIZE, 1),
    (0, 1 << 62, 1),
    (SIZE - 1, 0, 2),
    (0, 0, SIZE + 1),
    (0, 0, 1 << 62),
    (0, -1, 1),
    (-1, 0, 1),
    (0, 0, 0),
    (0, 0, -5),
]


@pytest.mark.parametrize("segment", OUTSIDE)
@pytest.mark.parametrize("batch", [False, True])
def test_a_write_that_leaves_a_pool_touches_nothing(
    control: Control, target: Pool, segment: tuple[int, int, int], batch: bool
) -> None:
    neighbour = Pool.create(SIZE, "neighbour")
    control.says(peer_of(target), peer_of(neighbour, 2))
    segments = [(0, 0, 10), segment] if batch else [segment]
    assert "leaves the registered regions" in control.writes(1, *segments).error
    for untouched in (target, neighbour):
        assert bytes(untouched.view) == bytes(SIZE)
        assert os.pread(untouched.fd, total_bytes(SIZE), 0) == bytes(total_bytes(SIZE))
    assert control.writes(1, (0, 0, 10)).error == ""
    neighbour.close()


@pytest.mark.parametrize("segment", OUTSIDE)
def test_the_engine_itself_checks_bounds(pool: Pool, target: Pool, segment: tuple[int, int, int]) -> None:
    engine = ShmEngine(pool, {})
    passive = receive("shm", target, {})
    engine.add_peer(1, passive.engine_desc, passive.mem_desc)
    with pytest.raises(TransferFailed):
        engine.submit(1, [0, segment[0]], [0, segment[1]], [1, segment[2]], 1)
    with pytest.raises(TransferFailed, match="differ in number"):
        engine.submit(1, [0, 0], [0], [1], 1)
    assert bytes(target.view) == bytes(SIZE)
    engine.close()


def test_the_lease_board_behind_a_pool_is_out_of_bounds(control: Control, target: Pool) -> None:
    """A write just behind the payload bytes would forge leases."""
    control.says(peer_of(target))
    assert control.writes(1, (0, SIZE - 8, 16)).error != ""
    assert target.board.generation(0) == 0


def test_an_unknown_peer_is_an_error(control: Control) -> None:
    assert "not registered" in control.writes(9, (0, 0, 1)).error


def test_a_dropped_peer_is_unknown_and_can_come_back(control: Control, target: Pool) -> None:
    control.says(peer_of(target), DropPeer(1))
    assert "not registered" in control.writes(1, (0, 0, 1)).error
    control.says(peer_of(target))
    assert control.writes(1, (0, 0, 1)).error == ""


def altered(pool: Pool, **changes: Any) -> bytes:
    return msgspec.structs.replace(pool.descriptor(), **changes).pack()


BAD: dict[str, Callable[[Pool], bytes]] = {
    "empty": lambda pool: b"",
    "garbage": lambda pool: b"\xc1\x00garbage",
    "map": lambda pool: msgspec.msgpack.encode({"name": "x"}),
    "nested": lambda pool: b"\x91" * 60_000 + b"\xc0",
    "nested behind": lambda pool: b"\x97" + pool.descriptor().pack()[1:] + b"\x91" * 60_000 + b"\xc0",
    "no such process": lambda pool: altered(pool, pid=1 << 22),
    "pid beyond all": lambda pool: altered(pool, pid=(1 << 63) - 1),
    "no such descriptor": lambda pool: altered(pool, fd=1 << 30),
    "standard input": lambda pool: altered(pool, fd=0),
    "too large": lambda pool: altered(pool, size=1 << 50),
    "another inode": lambda pool: altered(pool, inode=1),
    "another host": lambda pool: altered(pool, host_id="elsewhere"),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_hostile_descriptors_fail_their_own_writes_only(
    control: Control, target: Pool, bad: Callable[[Pool], bytes]
) -> None:
    control.says(AddPeer(1, b"engine", bad(target)), peer_of(target, 2))
    assert control.writes(1, (0, 0, 10)).error != ""
    assert bytes(target.view) == bytes(SIZE)
    assert control.writes(2, (0, 0, 10)).error == ""
    control.says(DropPeer(1), peer_of(target, 1))
    assert control.writes(1, (0, 0, 10)).error == ""


def test_whatever_an_engine_makes_of_a_descriptor_does_not_end_the_worker(
    control: Control, target: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpack(data: bytes) -> PoolDescriptor:
        raise ZeroDivisionError("a bug in a backend")

    with monkeypatch.context() as patch:
        patch.setattr(PoolDescriptor, "unpack", unpack)
        control.says(peer_of(target))
        assert control.writes(1, (0, 0, 10)).error == "ZeroDivisionError: a bug in a backend"
    control.says(peer_of(target, 2))
    assert control.writes(2, (0, 0, 10)).error == ""


@given(engine_desc=st.binary(max_size=40), junk=st.binary(max_size=40), at=st.integers(0, 100))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_descriptors_never_end_the_worker(
    control: Control, target: Pool, engine_desc: bytes, junk: bytes, at: int
) -> None:
    packed = target.descriptor().pack()
    for desc in (junk, packed[:at] + junk + packed[at + len(junk) :]):
        control.says(AddPeer(7, engine_desc, desc))
        control.writes(7, (0, 0, 10))
        control.says(DropPeer(7))
    control.says(peer_of(target, 8))
    assert control.writes(8, (0, 0, 10)).error == ""
    control.says(DropPeer(8))


def test_garbage_from_the_control_socket_is_survived(control: Control, target: Pool) -> None:
    control.socket.send(b"\xc1")
    control.says(peer_of(target))
    assert control.writes(1, (0, 0, 10)).error == ""


def test_stop_ends_the_worker_after_its_work(pool: Pool, target: Pool) -> None:
    control = Control(pool, setup())
    control.hears(WorkerReady)
    control.says(peer_of(target), Job(1, 1, [0], [0], [SIZE]), Stop())
    assert control.hears(JobDone).error == ""
    control.ends()
    assert bytes(target.view) == bytes(pool.view)
    control.end()


def test_a_worker_whose_control_process_is_gone_ends(pool: Pool) -> None:
    """By the end of its channel, too: its lifeline may be late."""
    control = Control(pool, setup())
    control.hears(WorkerReady)
    control.channel.close()
    control.ends()
    control.end()


def test_a_worker_that_is_not_heard_any_more_ends(
    pool: Pool, target: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told by the failure of what it sends, before it comes to read the end of its channel."""
    polls = 0

    class Writing:
        def poll(self) -> bool:
            nonlocal polls
            polls += 1
            control.channel.close()
            return True

    control = Control(pool, setup())
    control.hears(WorkerReady)
    with monkeypatch.context() as patch:
        patch.setattr(ShmEngine, "submit", lambda self, *job: Writing())
        control.says(peer_of(target), Job(1, 1, [0], [0], [1]))
        control.ends()
    assert polls == 1
    control.end()


def test_a_worker_that_cannot_start_says_why_before_it_ends(pool: Pool) -> None:
    control = Control(pool, setup(engine="no such engine"))
    assert "no engine 'no such engine'" in control.hears(WorkerFailed).error
    control.ends()
    assert control.channel.receive() is None
    assert control.channel.ended
    control.end()


def test_an_error_that_quotes_all_that_a_receiver_sent_still_fits(
    control: Control, target: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unpack(data: bytes) -> PoolDescriptor:
        raise ZeroDivisionError(repr(bytes(messages.MAX_PACKET_BYTES)))

    with monkeypatch.context() as patch:
        patch.setattr(PoolDescriptor, "unpack", unpack)
        control.says(peer_of(target))
        error = control.writes(1, (0, 0, 10)).error
    assert error.startswith(r"ZeroDivisionError: b'\x00\x00")
    assert len(error) < 5000
    control.says(peer_of(target, 2))
    assert control.writes(2, (0, 0, 10)).error == ""


def test_what_a_worker_has_no_room_to_say_is_said_later_and_in_order(pool: Pool, target: Pool) -> None:
    control = Control(pool, setup())
    control.hears(WorkerReady)
    control.says(peer_of(target))
    total, sent = 20_000, 0
    poller = select.poll()
    poller.register(control.channel.fileno(), select.POLLOUT)
    while sent < total:  # nothing is read meanwhile
        assert poller.poll(SOON * 1000)
        while sent < total and not control.channel.backlog:
            sent += 1
            control.channel.send(Job(sent, 1, [0], [0], [1]))
        control.channel.flush()
    heard = [control.hears(JobDone).write_id for _ in range(total)]
    assert heard == list(range(1, total + 1))
    control.says(Job(total + 1, 1, [0], [0], [1]))
    assert control.hears(JobDone).write_id == total + 1
    control.end()


def test_a_worker_backs_the_whole_pool(pool: Pool) -> None:
    fresh = Pool.create(SIZE, "fresh")
    control = Control(fresh, setup(prefault=True))
    control.hears(WorkerReady)
    assert control.hears(PoolBacked).error == ""
    assert os.fstat(fresh.fd).st_blocks * 512 >= SIZE
    control.end()
    fresh.close()
