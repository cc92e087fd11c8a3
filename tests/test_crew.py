"""The crew, with the test as its workers: what it tells them, takes from them, and makes of their end."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from mori_mp.shared import messages
from mori_mp.shared.messages import (
    AddPeer,
    ControlSetup,
    DropPeer,
    FromWorker,
    Job,
    JobDone,
    Stop,
    ToWorker,
    WorkerReady,
    WorkerSetup,
)
from mori_mp.shared.wire import MAX_REQUEST_BYTES
from mori_mp.workers.crew import Crew
from mori_mp.workers.dispatch import Dispatcher
from mori_mp.workers.job_channel import JobChannel
from mori_mp.workers.peers import Peers
from mori_mp.workers.reactor import Reactor

DEPTH = 64


class Played:
    """A worker: a RunningWorker for the crew, the other end of its channel for the test."""

    def __init__(self, setup: WorkerSetup) -> None:
        self.setup = setup
        self.pid = 1000 + setup.index
        self.socket = socket.socket(fileno=os.dup(setup.jobs_fd))
        self.channel = JobChannel(self.socket, messages.to_worker)
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)
        self.dead = self.killed = False
        self.last: list[ToWorker] = []

    def fileno(self) -> int:
        return self._ended

    def kill(self) -> None:
        self.killed = True

    def exit_status(self) -> int | None:
        return -9

    def reap(self, timeout: float) -> bool:
        """Read to the end, as a worker does that has been asked to go."""
        if not self.dead:
            self.last = self.hears()
            self.dead = Stop() in self.last or self.channel.ended or self.killed
        return self.dead

    def says(self, *said: FromWorker) -> None:
        for message in said:
            self.channel.send(message)

    def hears(self) -> list[ToWorker]:
        heard = []
        while (message := self.channel.receive()) is not None:
            heard.append(message)
        return heard

    def dies(self, *, told: bool = True) -> None:
        """End; told: its pidfd says so already."""
        self.channel.close()
        self.dead = True
        if told:
            os.eventfd_write(self._ended, 1)


class Shift:
    """A crew in a loop."""

    def __init__(self, workers: int = 1) -> None:
        values: dict[str, Any] = {"workers": workers, "restart_limit": 3, "job_timeout_seconds": 30.0}
        fields = {
            field.name: {str: "", int: 0, bool: False, float: 0.0, bytes: b""}.get(field.type)
            for field in msgspec.structs.fields(ControlSetup)
            if field.required
        }
        lists = {"path": [], "cpus": [], "worker_cpus": [], "engine_options": {}}
        self.dispatcher = Dispatcher()
        self.peers = Peers()
        self.workers: list[Played] = []
        self.heard: list[tuple[str, FromWorker]] = []
        self.calls = 0
        self.reactor = Reactor()
        setup = ControlSetup(**{**fields, **lists, **values})
        self.crew = Crew(setup, self.dispatcher, self.peers, self._launch)
        self.crew.open(self._watch, self.reactor.off, self._hear, pytest.fail)

    def _launch(self, setup: WorkerSetup) -> Played:
        self.workers.append(Played(setup))
        return self.workers[-1]

    def _watch(self, fd: int, handler: Callable[[], None], writable: bool) -> None:
        def counted() -> None:
            self.calls += 1
            handler()

        self.reactor.watch_both(fd, counted, writable)

    def _hear(self, identity: str, message: FromWorker) -> None:
        self.heard.append((identity, message))
        if isinstance(message, WorkerReady):
            assert self.crew.ready(identity, message)
        elif isinstance(message, JobDone) and self.dispatcher.owner(message.write_id) == identity:
            self.dispatcher.done(message.write_id)

    def turn(self) -> int:
        """Let the loop take one turn without waiting; returns how many handlers were called."""
        self.calls = 0
        self.reactor.poll(time.monotonic())
        return self.calls

    def ready(self, depth: int = DEPTH) -> Played:
        """Have the newest worker report for work."""
        worker = self.workers[-1]
        worker.says(WorkerReady(worker.setup.index, worker.pid, "", "shm", depth))
        self.turn()
        return worker

    def job(self, write_id: int, mem_desc: bytes = b"mem") -> int:
        """Queue a job; returns its peer."""
        peer = self.peers.hold(b"engine", mem_desc)
        assert peer is not None
        self.dispatcher.submit(Job(write_id, peer, [0], [0], [1]))
        return peer


@pytest.fixture
def make_shift() -> Iterator[Callable[..., Shift]]:
    made: list[Shift] = []

    def make(workers: int = 1) -> Shift:
        made.append(Shift(workers))
        return made[-1]

    yield make
    for shift in made:
        shift.crew.stop(0.0)
        for worker in shift.workers:
            worker.channel.close()
            os.close(worker.fileno())


@pytest.fixture
def shift(make_shift: Callable[..., Shift]) -> Shift:
    return make_shift()


def test_a_peer_is_introduced_once_ahead_of_its_first_job(shift: Shift) -> None:
    worker = shift.ready()
    first = [shift.job(1, b"a"), shift.job(2, b"b"), shift.job(3, b"a")]
    assert shift.crew.dispatch(0.0) == []
    assert [type(message) for message in worker.hears()] == [AddPeer, Job, AddPeer, Job, Job]
    assert (first[0], first[2]) == (1, 1)
    shift.peers.release(2)
    shift.crew.dispatch(0.0)
    assert worker.hears() == [DropPeer(2)]


def test_a_worker_that_does_not_read_holds_up_nobody_and_misses_nothing(shift: Shift) -> None:
    worker = shift.ready(depth=1000)
    expected: list[ToWorker] = []
    for number in range(1, 61):  # 3.6 MB: more than the buffer
        desc = number.to_bytes(4, "little") + bytes(60_000)
        peer = shift.job(number, desc)
        expected += [AddPeer(peer, b"engine", desc), Job(number, peer, [0], [0], [1])]
    assert shift.crew.dispatch(0.0) == []
    assert shift.turn() == 0  # it waits for room, and does not spin
    heard = worker.hears()
    assert 0 < len(heard) < len(expected)
    peer = shift.job(61, b"late")
    shift.crew.dispatch(0.0)  # behind those that wait
    expected += [AddPeer(peer, b"engine", b"late"), Job(61, peer, [0], [0], [1])]
    while len(heard) < len(expected):
        assert shift.turn() == 1
        heard += worker.hears()
    assert heard == expected
    shift.turn()
    assert shift.turn() == 0  # room alone wakes nobody any more


def test_a_request_of_any_size_can_be_introduced(shift: Shift) -> None:
    worker = shift.ready()
    shift.job(1, bytes(MAX_REQUEST_BYTES))
    assert shift.crew.dispatch(0.0) == []
    assert [type(message) for message in worker.hears()] == [AddPeer, Job]


def test_a_job_whose_peer_cannot_be_told_fails_alone(shift: Shift) -> None:
    worker = shift.ready()
    good = shift.job(1)
    shift.job(2, bytes(messages.MAX_PACKET_BYTES))
    shift.job(3, bytes(messages.MAX_PACKET_BYTES))
    shift.job(4)
    failed = shift.crew.dispatch(0.0)
    assert [write_id for write_id, _ in failed] == [2, 3]
    assert all("AddPeer takes" in error for _, error in failed)
    heard = worker.hears()
    assert [type(message) for message in heard] == [AddPeer, Job, Job]
    assert [message.peer for message in heard if isinstance(message, Job)] == [good, good]
    assert [shift.dispatcher.done(write_id) for write_id in (1, 2, 3, 4)] == [True] * 4


def test_undecodable_words_of_a_worker_are_skipped(shift: Shift, caplog: pytest.LogCaptureFixture) -> None:
    worker = shift.ready()
    worker.socket.send(b"\xc1")
    worker.says(JobDone(1, "", 0))
    shift.turn()
    assert shift.heard[-1] == ("0.1", JobDone(1, "", 0))
    assert "undecodable message" in caplog.text


@pytest.mark.parametrize("told", [True, False], ids=["exit and channel", "channel first"])
def test_last_words_of_a_dead_worker_count(shift: Shift, told: bool) -> None:
    """It has done its first job and not read its second one, so its end is a reset."""
    worker = shift.ready(depth=3)
    for write_id in (1, 2, 3):
        shift.job(write_id)
    shift.crew.dispatch(0.0)
    worker.channel.receive()
    worker.says(JobDone(1, "", 5))
    worker.dies(told=told)
    shift.turn()
    assert shift.heard[-1] == ("0.1", JobDone(1, "", 5))
    if not told:
        assert len(shift.workers) == 1
        assert shift.turn() == 0, "it spins at the end of the channel"
        os.eventfd_write(worker.fileno(), 1)
        shift.turn()
    successor = shift.ready()
    assert successor.setup.identity == "0.2"
    shift.crew.dispatch(0.0)
    heard = successor.hears()
    assert [type(message) for message in heard] == [AddPeer, Job, Job]
    assert [message.write_id for message in heard if isinstance(message, Job)] == [2, 3]


def test_what_a_dying_worker_is_told_is_told_to_its_successor(shift: Shift) -> None:
    worker = shift.ready()
    worker.dies(told=False)
    shift.turn()
    shift.job(1)
    assert shift.crew.dispatch(0.0) == []
    assert shift.turn() == 0
    os.eventfd_write(worker.fileno(), 1)
    shift.turn()
    successor = shift.ready()
    shift.crew.dispatch(0.0)
    assert [type(message) for message in successor.hears()] == [AddPeer, Job]


def test_a_worker_that_dies_with_much_unsaid_to_it_is_replaced(shift: Shift) -> None:
    worker = shift.ready()
    for number in range(1, 61):
        shift.job(number, number.to_bytes(4, "little") + bytes(60_000))
    shift.crew.dispatch(0.0)
    worker.dies()
    shift.turn()
    successor = shift.ready()
    shift.crew.dispatch(0.0)
    jobs: list[int] = []
    while len(jobs) < 60:
        heard = successor.hears()
        assert heard
        jobs += [message.write_id for message in heard if isinstance(message, Job)]
        shift.turn()
    assert jobs == list(range(1, 61))


def test_a_workers_channel_goes_to_it_alone(make_shift: Callable[..., Shift]) -> None:
    shift = make_shift(workers=2)
    first, second = shift.workers
    for end in (first.socket, second.socket):
        assert not end.get_inheritable()
    first.says(WorkerReady(0, first.pid, "", "shm"))
    second.says(WorkerReady(1, second.pid, "", "shm"))
    shift.turn()
    assert sorted(identity for identity, _ in shift.heard) == ["0.1", "1.1"]
    first.dies()  # nobody else holds this end open
    shift.turn()
    assert [worker.setup.identity for worker in shift.workers] == ["0.1", "1.1", "0.2"]


def test_workers_are_asked_to_end_or_find_their_channel_closed(make_shift: Callable[..., Shift]) -> None:
    shift = make_shift(workers=2)
    reading, choking = shift.workers
    for worker in shift.workers:
        worker.says(WorkerReady(worker.setup.index, worker.pid, "", "shm", 60))
    shift.turn()
    for number in range(1, 121):
        shift.job(number, number.to_bytes(4, "little") + bytes(60_000))
    shift.crew.dispatch(0.0)
    heard = 0
    while heard < 120:
        heard += len(reading.hears())
        shift.turn()
    shift.crew.stop(0.0)
    assert (reading.last, reading.killed) == ([Stop()], False)
    assert (Stop() in choking.last, choking.channel.ended, choking.killed) == (False, True, False)
