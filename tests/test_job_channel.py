"""One job channel, both ends: order and nothing lost in a full buffer, long packets, garbage, death."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator

import pytest

from mori_mp.shared import messages
from mori_mp.shared.errors import WireError
from mori_mp.shared.messages import AddPeer, DropPeer, FromWorker, Job, JobDone, ToWorker, WorkerFailed
from mori_mp.shared.wire import MAX_REQUEST_BYTES
from mori_mp.workers.job_channel import JobChannel

Pair = tuple[JobChannel[FromWorker], JobChannel[ToWorker]]


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    pair = messages.socketpair()
    yield pair
    for end in pair:
        end.close()


@pytest.fixture
def pair(sockets: tuple[socket.socket, socket.socket]) -> Pair:
    """The control process's end and the worker's."""
    return JobChannel(sockets[0], messages.from_worker), JobChannel(sockets[1], messages.to_worker)


def all_of(channel: JobChannel[FromWorker] | JobChannel[ToWorker]) -> list[FromWorker | ToWorker]:
    heard: list[FromWorker | ToWorker] = []
    while (message := channel.receive()) is not None:
        heard.append(message)
    return heard


def test_messages_go_both_ways(pair: Pair) -> None:
    control, worker = pair
    control.send(Job(1, 2, [3], [4], [5]))
    worker.send(JobDone(1, "", 6))
    assert all_of(worker) == [Job(1, 2, [3], [4], [5])]
    assert all_of(control) == [JobDone(1, "", 6)]
    assert (control.gone, worker.gone) == (False, False)


def test_a_full_buffer_neither_blocks_nor_loses_nor_reorders(pair: Pair) -> None:
    control, worker = pair
    sent = [DropPeer(number) for number in range(20_000)]
    for message in sent[:-1]:
        control.send(message)
    assert 0 < control.backlog < len(sent)
    heard = all_of(worker)
    control.send(sent[-1])  # there is room again, but not for it yet
    heard += all_of(worker)
    while control.backlog:
        poller = select.poll()
        poller.register(control.fileno(), select.POLLOUT)
        assert poller.poll(0), "room, and the poll does not tell"
        control.flush()
        heard += all_of(worker)
    assert heard == sent


def test_the_largest_introduction_fits(pair: Pair) -> None:
    """All of a request is a descriptor."""
    control, worker = pair
    introduction = AddPeer(1 << 40, b"e" * MAX_REQUEST_BYTES, b"m" * MAX_REQUEST_BYTES, True)
    control.send(introduction)
    assert all_of(worker) == [introduction]


def test_what_is_too_long_is_refused_and_hurts_nothing_else(pair: Pair) -> None:
    control, worker = pair
    assert control.max_bytes == messages.MAX_PACKET_BYTES
    with pytest.raises(WireError, match=rf"AddPeer takes 2621\d\d bytes, over the {control.max_bytes} of"):
        control.send(AddPeer(1, b"", b"m" * control.max_bytes))
    control.send(DropPeer(2))
    assert all_of(worker) == [DropPeer(2)]


def test_the_limit_is_what_the_kernel_takes(sockets: tuple[socket.socket, socket.socket]) -> None:
    """A host may allow less of a buffer than was asked for."""
    sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    worker = JobChannel(sockets[1], messages.to_worker)
    spare = worker.max_bytes - len(messages.encode(WorkerFailed(1, "x" * 1000))) + 1000
    worker.send(WorkerFailed(1, "x" * spare))
    with pytest.raises(WireError, match="WorkerFailed takes"):
        worker.send(WorkerFailed(1, "x" * (spare + 1)))
    assert len(sockets[0].recv(messages.MAX_PACKET_BYTES)) == worker.max_bytes


def test_what_does_not_decode_is_logged_and_skipped(
    pair: Pair, sockets: tuple[socket.socket, socket.socket], caplog: pytest.LogCaptureFixture
) -> None:
    for garbage in (b"\xc1", messages.encode(JobDone(1, "", 0))):  # a worker takes no JobDone
        sockets[0].send(garbage)
    pair[0].send(DropPeer(1))
    assert all_of(pair[1]) == [DropPeer(1)]
    assert [record.message for record in caplog.records] == ["undecodable message on a job channel"] * 2


@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize("sends", [False, True])
def test_last_words_are_heard(pair: Pair, unread: bool, sends: bool) -> None:
    """Also where the end is a reset, because the dead had not read all, and a send has met it first."""
    control, worker = pair
    if unread:
        control.send(DropPeer(1))
    words = [JobDone(number, "", 0) for number in range(3)]
    for word in words:
        worker.send(word)
    worker.close()
    if sends:
        control.send(DropPeer(2))
        assert control.gone
    assert not control.ended
    assert all_of(control) == words
    assert control.ended
    assert control.gone
    control.send(DropPeer(3))  # lost, and no error
    assert control.backlog == 0
    assert control.receive() is None


def test_what_waits_for_one_that_dies_is_given_up(pair: Pair) -> None:
    control, worker = pair
    while control.backlog < 10:
        control.send(DropPeer(1))
    worker.close()
    control.flush()
    assert control.backlog == 0
    assert control.gone


def fill(worker: JobChannel[ToWorker]) -> int:
    """Have messages wait at the worker's end; returns how many it has sent in all."""
    sent = 0
    while worker.backlog < 1000:
        worker.send(JobDone(sent, "", 1))
        sent += 1
    return sent


def test_what_waits_when_an_end_is_closed_is_still_sent(pair: Pair) -> None:
    control, worker = pair
    sent = fill(worker)
    closing = threading.Thread(target=worker.close, args=(30.0,))
    closing.start()
    heard: list[FromWorker | ToWorker] = []
    poller = select.poll()
    poller.register(control.fileno(), select.POLLIN)
    while not control.ended:
        assert poller.poll(10_000)
        heard += all_of(control)
    closing.join()
    assert heard == [JobDone(number, "", 1) for number in range(sent)]


def test_nobody_holds_up_the_closing_of_an_end(pair: Pair) -> None:
    control, worker = pair
    sent = fill(worker)
    worker.close(0.05)
    assert len(all_of(control)) == sent - 1000
    assert control.ended
