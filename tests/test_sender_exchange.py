"""A sender gives way to one that speaks the other protocol, as in a rolling upgrade and its way back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from connector_support import (
    KEY,
    Background,
    Factory,
    assert_whole,
    eventually,
    pattern,
    stopped,
    worker_pids,
)
from wire_peers import V1Sender

from mori_mp import MoriTransferEngineConnector
from mori_mp.pipeline.free_ports import PortBlock

MakeV1 = Callable[[int], V1Sender]


@pytest.fixture
def v1_sender() -> Iterator[MakeV1]:
    """Makes a v1 sender on a port as soon as that is free."""
    made: list[V1Sender] = []

    def make(port: int) -> V1Sender:
        def start() -> bool:
            try:
                made.append(V1Sender(port))
            except OSError:
                return False
            return True

        eventually(start, f"port {port} is free")
        return made[-1]

    yield make
    for sender in made:
        sender.close()


@pytest.fixture
def port() -> Iterator[int]:
    with PortBlock() as block:
        yield block.base


def _protocol(receiver: MoriTransferEngineConnector) -> str:
    return str(receiver.health()["receiver"]["senders"][0]["protocol"])


def _wait(receiver: MoriTransferEngineConnector, key: str = KEY, seconds: float = 15.0) -> bytes:
    found = receiver.get_with_deadline("0", "1", key, deadline=time.monotonic() + seconds)
    assert found is not None
    with found[0] as buffer:
        return bytes(buffer.to_bytes())


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "tcp"])
def test_from_v2_to_v1_and_back(make_connector: Factory, v1_sender: MakeV1, port: int, lane: bool) -> None:
    remote = {} if lane else {"delivery": "landing"}
    first = make_connector.sender(zmq_port=port, **remote)
    receiver = make_connector.receiver(port, **remote)
    first.put("0", "1", KEY, pattern(5000, 1))
    assert _wait(receiver) == pattern(5000, 1)
    assert _protocol(receiver) == "v2"
    first.close()
    second = v1_sender(port)
    second.payloads[f"{KEY}@0_1"] = (pattern(5000, 2), True)
    assert _wait(receiver) == pattern(5000, 2)
    assert _protocol(receiver) == "v1"
    second.close()
    third = make_connector.sender(zmq_port=port, **remote)
    third.put("0", "1", KEY, pattern(5000, 3))
    assert _wait(receiver) == pattern(5000, 3)
    assert_whole(receiver)


def test_a_get_that_waits_for_a_key_goes_on_with_v1(
    make_connector: Factory, v1_sender: MakeV1, port: int
) -> None:
    first = make_connector.sender(zmq_port=port)
    receiver = make_connector.receiver(port)
    first.put("0", "1", "other", b"x")
    assert _wait(receiver, "other") == b"x"
    waiting = Background(lambda: _wait(receiver))
    first.close()
    v1_sender(port).payloads[f"{KEY}@0_1"] = (pattern(100_000), True)
    assert waiting.result() == pattern(100_000)


def test_a_write_under_way_keeps_its_slot_from_the_successor(
    make_connector: Factory, v1_sender: MakeV1, port: int
) -> None:
    first = make_connector.sender(zmq_port=port, delivery="landing", eager_bytes=0)
    receiver = make_connector.receiver(port, delivery="landing")
    first.put("0", "1", KEY, pattern(300_000, 1))
    receiver.get("0", "1", "nothing")  # the session is there
    with stopped(*worker_pids(first)):
        waiting = Background(lambda: _wait(receiver, seconds=20.0))
        eventually(lambda: receiver.slots.stats()["used_bytes"] > 0, "a landing slot")
        first.close()
        v1_sender(port).payloads[f"{KEY}@0_1"] = (pattern(300_000, 2), True)
        assert waiting.result(30) == pattern(300_000, 2)

    def swept() -> bool:
        receiver.get("0", "1", "nothing")
        return bool(receiver.slots.stats()["used_bytes"] == 0)

    eventually(swept, "the slot is back, its writers being gone")
    assert_whole(receiver)
