"""The control process's TCP socket: a flood of frames costs connections, not memory."""

from __future__ import annotations

import logging
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import zmq
from connector_support import MIB, eventually
from wire_peers import endless_message

from mori_mp.workers import front as fronts
from mori_mp.workers.front import Front


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.term()


@pytest.fixture
def make_front(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Callable[[bool], Front]]:
    made: list[Front] = []

    def make(guarded: bool) -> Front:
        made.append(Front(context, "127.0.0.1", guarded))
        return made[-1]

    yield make
    for front in made:
        front.close(0)


def exchange(front: Front, client: zmq.Socket[bytes]) -> None:
    """A message there and back; what was sent into a connection that has ended is sent again."""

    def arrived() -> int:
        client.send(b"question")
        return front.socket.poll(200)

    eventually(arrived, "message")
    identity, payload = front.socket.recv_multipart()
    assert payload == b"question"
    front.socket.send_multipart([identity, b"answer"])
    assert client.recv() == b"answer"


@pytest.fixture
def client(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[zmq.Socket[bytes]]:
    client = context.socket(zmq.DEALER)
    client.setsockopt(zmq.RCVTIMEO, 10_000)
    yield client
    client.close(0)


def test_a_free_port_and_a_given_one(make_front: Callable[[bool], Front], client: zmq.Socket[bytes]) -> None:
    front = make_front(True)
    front.bind(0)
    assert front.port > 0
    client.connect(f"tcp://127.0.0.1:{front.port}")
    exchange(front, client)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    again = make_front(True)
    again.bind(port)
    assert again.port == port
    other = make_front(True)
    with pytest.raises(zmq.ZMQError, match="in use"):
        other.bind(port)


def test_an_endless_message_ends_with_its_connection() -> None:
    """In a process of its own: memory that other tests have freed could hold the flood, and hide it."""
    child = multiprocessing.get_context("spawn").Process(target=_outlive_an_endless_message)
    child.start()
    child.join(60)
    try:
        assert child.exitcode == 0
    finally:
        child.kill()


def _outlive_an_endless_message() -> None:
    """Flood a guarded socket, replace it, and find it and its memory as before; runs in the child."""
    fronts.MAX_GROWTH_BYTES = 48 * MIB
    said: list[logging.LogRecord] = []
    fronts.logger.addFilter(lambda record: not said.append(record))
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVTIMEO, 10_000)
        front = Front(context, "127.0.0.1", guarded=True)
        front.bind(0)
        port = front.port
        client.connect(f"tcp://127.0.0.1:{port}")
        exchange(front, client)
        assert not front.must_replace()
        before = fronts.private_bytes()
        with endless_message(port, 64 * MIB) as attacker:
            eventually(front.must_replace, "growth noticed")
            assert not front.socket.poll(0)  # nothing to read: no code of ours could have seen it
            front.replace()
            assert front.port == port
            assert any(f"floods port {port}" in record.getMessage() for record in said)
            attacker.settimeout(10)
            with suppress(ConnectionError):
                while attacker.recv(4096):
                    pass
        exchange(front, client)  # it has connected again by itself
        eventually(
            lambda: not front.must_replace() and fronts.private_bytes() < before + 24 * MIB, "given back"
        )
        front.close(0)


def test_growth_that_is_not_ours_to_judge(
    make_front: Callable[[bool], Front], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In worker_mode thread the process is the stage's, which may grow as it likes."""
    monkeypatch.setattr(fronts, "MAX_GROWTH_BYTES", -(1 << 50))
    front = make_front(False)
    front.bind(0)
    assert not front.must_replace()
    judged = make_front(True)
    judged.bind(0)
    assert judged.must_replace()
