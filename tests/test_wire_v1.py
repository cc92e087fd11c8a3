"""Wire v1 against real processes: a bare REQ client at our sender, our receiver at a stand-in v1 sender."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from connector_support import (
    Background,
    Factory,
    assert_whole,
    counter,
    eventually,
    pattern,
    stopped,
    worker_pids,
)
from wire_peers import V1Client, V1Sender

from mori_mp import ManagedBuffer, MoriTransferEngineConnector
from mori_mp.shared import wire
from mori_mp.shared.errors import CorruptPayload
from mori_mp.shared.pool import PoolDescriptor

pytestmark = pytest.mark.xdist_group("wire_v1")

MakeV1 = Callable[[int], V1Client]


# ------------------------------------------------------------------------- our sender
@pytest.fixture(scope="module")
def shared_sender(module_factory: Factory) -> MoriTransferEngineConnector:
    return module_factory.sender(park_seconds=0.1)


@pytest.fixture
def client(shared_sender: MoriTransferEngineConnector, v1_client: MakeV1) -> V1Client:
    return v1_client(shared_sender.zmq_port or 0)


def put(sender: MoriTransferEngineConnector, key: str, data: object) -> None:
    assert sender.put("0", "1", key, data)[0]


def test_query_and_pull(shared_sender: MoriTransferEngineConnector, client: V1Client) -> None:
    assert client.query("a@0_1") is None
    put(shared_sender, "a", pattern(10_000))
    assert client.query("a@0_1") == {"request_id": "a@0_1", "data_size": 10_000, "is_fast_path": True}
    assert client.pull("a@0_1", 10_000, offset=8192) == b"trans_done"
    assert client.bytes_at(8192, 10_000) == pattern(10_000)
    assert client.bytes_at(0, 8192) == bytes(8192)
    assert client.bytes_at(18_192, 4096) == bytes(4096)
    assert client.query("a@0_1") is None  # delivered means removed
    assert_whole(shared_sender)


def test_query_of_an_object(shared_sender: MoriTransferEngineConnector, client: V1Client) -> None:
    put(shared_sender, "o", {"x": 1})
    answer = client.query("o@0_1")
    assert answer is not None
    assert answer["is_fast_path"] is False
    assert client.pull("o@0_1", answer["data_size"]) == b"trans_done"
    assert msgspec.msgpack.decode(client.bytes_at(0, answer["data_size"])) == {"x": 1}


@pytest.mark.parametrize("length", [0, 1, 4999, 5001, 1 << 40])
def test_wrong_length_is_refused_and_nothing_written(
    shared_sender: MoriTransferEngineConnector, client: V1Client, length: int
) -> None:
    put(shared_sender, "l", pattern(5000))
    assert client.pull("l@0_1", length) == b"trans_error"
    assert client.bytes_at(0, 1 << 20) == bytes(1 << 20)
    assert client.pull("l@0_1", 5000) == b"trans_done"  # it is still there
    assert client.bytes_at(0, 5000) == pattern(5000)


@pytest.mark.parametrize("offset", [-1, (1 << 20) - 4999, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_write_outside_the_receivers_memory_is_refused(
    shared_sender: MoriTransferEngineConnector, client: V1Client, offset: int
) -> None:
    put(shared_sender, "w", pattern(5000))
    assert client.pull("w@0_1", 5000, offset) == b"trans_error"
    assert client.bytes_at(0, 1 << 20) == bytes(1 << 20)
    assert client.pull("w@0_1", 5000, (1 << 20) - 5000) == b"trans_done"
    assert client.bytes_at((1 << 20) - 5000, 5000) == pattern(5000)


def test_pull_of_what_is_not_there_is_parked_then_refused(
    shared_sender: MoriTransferEngineConnector, client: V1Client
) -> None:
    began = time.monotonic()
    assert client.pull("never@0_1", 100) == b"trans_error"
    assert time.monotonic() - began >= 0.1
    assert client.query("never@0_1") is None


def test_pull_that_overtakes_its_put(make_connector: Factory, v1_client: MakeV1) -> None:
    sender = make_connector.sender(park_seconds=10.0, worker_mode="thread")
    client = v1_client(sender.zmq_port or 0)
    pulling = Background(lambda: client.pull("e@0_1", 3000))
    eventually(lambda: sender.health()["sender"]["parked"] == 1, "parked")
    put(sender, "e", pattern(3000))
    assert pulling.result() == b"trans_done"
    assert client.bytes_at(0, 3000) == pattern(3000)


UNDECODABLE = {
    "empty": b"",
    "text": b"hello",
    "no msgpack": b"\xc1\xc1",
    "query without a body": b"query_info",
    "query of a number": b"query_info" + msgspec.msgpack.encode({"request_id": 5}),
    "field missing": msgspec.msgpack.encode({"request_id": "k"}),
    "wrong type": msgspec.msgpack.encode(
        {
            "request_id": "k",
            "engine_desc_packed": b"",
            "mem_desc_packed": b"",
            "dst_offset": "zero",
            "length": 1,
        }
    ),
    "unknown version": b"mmp3" + msgspec.msgpack.encode(["hello", 1]),
    "unknown tag": b"mmp2" + msgspec.msgpack.encode(["goodbye", 1]),
    "long key": b"query_info" + msgspec.msgpack.encode({"request_id": "k" * 2000}),
    "deep": b"\x91" * 60_000,
}


@pytest.mark.parametrize("payload", UNDECODABLE.values(), ids=UNDECODABLE)
def test_undecodable_requests_are_answered(client: V1Client, payload: bytes) -> None:
    assert client.ask(payload) == b"trans_error"
    assert client.query("k@0_1") is None


@pytest.mark.parametrize(
    "descriptor",
    [b"", b"rubbish", msgspec.msgpack.encode(["mori-mp-pool-x", 4096, 1, 0, 1, "elsewhere"])],
    ids=["empty", "rubbish", "another host"],
)
def test_unusable_memory_descriptor_fails_the_pull_only(
    shared_sender: MoriTransferEngineConnector, client: V1Client, descriptor: bytes
) -> None:
    put(shared_sender, "m", pattern(100))
    assert client.pull("m@0_1", 100, mem_desc_packed=descriptor) == b"trans_error"
    assert client.pull("m@0_1", 100) == b"trans_done"


def test_descriptor_that_names_something_else_is_not_written_to(
    shared_sender: MoriTransferEngineConnector, client: V1Client, tmp_path: object
) -> None:
    """The name, size, seals and inode must be a pool's: a worker opens /proc/<pid>/fd/<fd> by request."""
    ours = PoolDescriptor.unpack(client.mem_desc)
    put(shared_sender, "v", pattern(100))
    with open(f"{tmp_path}/victim", "wb+") as victim:
        victim.write(b"untouched" * 1000)
        victim.flush()
        inode = os.fstat(victim.fileno()).st_ino
        for changes in (
            {"size": 8192, "fd": victim.fileno(), "inode": inode},
            {"size": 1 << 30},
            {"device_bytes": 1 << 30},
        ):
            forged = msgspec.structs.replace(ours, **changes)
            assert client.pull("v@0_1", 100, mem_desc_packed=forged.pack()) == b"trans_error"
        victim.seek(0)
        assert victim.read() == b"untouched" * 1000
    assert client.pull("v@0_1", 100) == b"trans_done"


def test_additional_fields_are_ignored(shared_sender: MoriTransferEngineConnector, client: V1Client) -> None:
    put(shared_sender, "f", pattern(100))
    assert client.pull("f@0_1", 100, tensor_parallel_rank=3) == b"trans_done"


def test_two_clients_pull_one_payload(shared_sender: MoriTransferEngineConnector, v1_client: MakeV1) -> None:
    one, two = v1_client(shared_sender.zmq_port or 0), v1_client(shared_sender.zmq_port or 0)
    for number in range(10):
        put(shared_sender, f"t{number}", pattern(5000, number))
        pulls = [Background(lambda c=c, n=number: c.pull(f"t{n}@0_1", 5000)) for c in (one, two)]
        replies = [pull.result() for pull in pulls]
        assert b"trans_done" in replies
        for client, reply in zip((one, two), replies, strict=True):
            if reply == b"trans_done":
                assert client.bytes_at(0, 5000) == pattern(5000, number)
    assert_whole(shared_sender)


# ------------------------------------------------------------------------ our receiver
@pytest.fixture
def v1_sender() -> Iterator[V1Sender]:
    sender = V1Sender()
    yield sender
    sender.close()


@pytest.fixture
def receiver(make_connector: Factory, v1_sender: V1Sender) -> MoriTransferEngineConnector:
    return make_connector.receiver(v1_sender.port, memory_pool_size=64 * 1024, query_timeout_seconds=5.0)


def wait(receiver: MoriTransferEngineConnector, key: str, seconds: float = 10.0) -> object:
    found = receiver.get_with_deadline("0", "1", key, deadline=time.monotonic() + seconds)
    return None if found is None else found[0]


def raw(buffer: object) -> bytes:
    assert isinstance(buffer, ManagedBuffer)
    with buffer:
        return buffer.to_bytes()


def test_receive_from_a_v1_sender(v1_sender: V1Sender, receiver: MoriTransferEngineConnector) -> None:
    assert receiver.get("0", "1", "a") is None
    v1_sender.payloads["a@0_1"] = pattern(9000), True
    found = receiver.get("0", "1", "a")
    assert found is not None
    assert found[1] == 9000
    assert raw(found[0]) == pattern(9000)
    v1_sender.payloads["o@0_1"] = msgspec.msgpack.encode({"x": [1, 2]}), False
    assert wait(receiver, "o") == {"x": [1, 2]}
    assert receiver.health()["receiver"]["senders"][0]["protocol"] == "v1"
    assert_whole(receiver)


def test_full_metadata_saves_the_query(v1_sender: V1Sender, receiver: MoriTransferEngineConnector) -> None:
    v1_sender.payloads["a@0_1"] = pattern(9000), True
    metadata = {
        "source_host": "127.0.0.1",
        "source_port": v1_sender.port,
        "data_size": 9000,
        "is_fast_path": True,
    }
    found = receiver.get("0", "1", "a", metadata)
    assert found is not None
    assert raw(found[0]) == pattern(9000)
    assert [kind for kind, _ in v1_sender.requests] == ["pull"]


def test_deadline_is_spent_asking_again(v1_sender: V1Sender, receiver: MoriTransferEngineConnector) -> None:
    waiting = Background(lambda: wait(receiver, "later"))
    eventually(lambda: len(v1_sender.requests) > 3, "asked several times")
    v1_sender.payloads["later@0_1"] = pattern(100), True
    assert raw(waiting.result()) == pattern(100)
    assert wait(receiver, "never", 0.1) is None


def test_refused_pull(
    v1_sender: V1Sender, receiver: MoriTransferEngineConnector, caplog: pytest.LogCaptureFixture
) -> None:
    v1_sender.payloads["a@0_1"] = pattern(9000), True
    v1_sender.failing.add("a@0_1")
    with caplog.at_level(logging.ERROR):
        assert receiver.get("0", "1", "a") is None
    assert "a@0_1" in caplog.text
    assert "trans_error" in caplog.text
    assert counter(receiver, "errors") == 1
    assert_whole(receiver)
    v1_sender.failing.clear()
    assert raw(wait(receiver, "a")) == pattern(9000)


@pytest.mark.parametrize("answer", [b"\xc1", b"", msgspec.msgpack.encode({"request_id": "a@0_1"})])
def test_nonsense_from_the_sender(
    v1_sender: V1Sender, receiver: MoriTransferEngineConnector, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert receiver.get("0", "1", "warm") is None
    v1_sender.payloads["a@0_1"] = pattern(100), True
    real = v1_sender._reply
    monkeypatch.setattr(v1_sender, "_reply", lambda identity, _: real(identity, answer))
    assert receiver.get("0", "1", "a") is None
    assert counter(receiver, "errors") == 1
    monkeypatch.undo()
    assert raw(wait(receiver, "a")) == pattern(100)
    assert_whole(receiver)


def test_payload_that_does_not_decode(v1_sender: V1Sender, receiver: MoriTransferEngineConnector) -> None:
    """The receiver names key, size and delivery, gives the memory back, and goes on."""
    v1_sender.payloads["bad@0_1"] = b"\xc1 is never used in msgpack", False
    with pytest.raises(CorruptPayload, match=r"bad@0_1.*26 bytes, landing"):
        wait(receiver, "bad")
    assert counter(receiver, "corrupt") == 1
    v1_sender.payloads["good@0_1"] = msgspec.msgpack.encode({"x": 1}), False
    assert wait(receiver, "good") == {"x": 1}
    assert_whole(receiver)


def test_late_write_finds_its_slot_untouched(
    v1_sender: V1Sender, receiver: MoriTransferEngineConnector
) -> None:
    """The get gives up, the write comes later: until it has, nobody else may have that slot."""
    assert receiver.get("0", "1", "warm") is None
    v1_sender.held.set()
    v1_sender.payloads["slow@0_1"] = b"\xee" * 20_000, True
    assert wait(receiver, "slow", 0.2) is None
    assert counter(receiver, "quarantined") == 1
    assert receiver.health()["receiver"]["senders"][0]["quarantined"] == 1

    # The rest of the pool is handed out; the writes that come for it are held as well.
    others = [receiver.slots.alloc(20_000), receiver.slots.alloc(20_000)]
    for number, offset in enumerate(others):
        receiver.slots.pool.view[offset : offset + 20_000] = pattern(20_000, number)
    v1_sender.let_go()
    eventually(lambda: receiver.get("0", "1", "poll") is None and not _quarantined(receiver), "ended")
    for number, offset in enumerate(others):
        assert bytes(receiver.slots.pool.view[offset : offset + 20_000]) == pattern(20_000, number)
        receiver.slots.give_back(offset)
    assert_whole(receiver)
    v1_sender.payloads["next@0_1"] = pattern(500), True
    assert raw(wait(receiver, "next")) == pattern(500)


def _quarantined(receiver: MoriTransferEngineConnector) -> int:
    count: int = receiver.receiver.report()["senders"][0]["quarantined"]
    return count


def test_a_slow_request_does_not_hold_up_the_next(
    v1_sender: V1Sender, receiver: MoriTransferEngineConnector
) -> None:
    """A v1 reply carries no correlation id: the late one must not be taken for the next request's."""
    assert receiver.get("0", "1", "warm") is None
    v1_sender.held.set()
    v1_sender.payloads["slow@0_1"] = b"\xee" * 20_000, True
    v1_sender.payloads["quick@0_1"] = pattern(1000), True
    assert wait(receiver, "slow", 0.2) is None
    v1_sender.held.clear()
    assert raw(wait(receiver, "quick")) == pattern(1000)
    v1_sender.let_go()
    eventually(lambda: receiver.get("0", "1", "poll") is None and not _quarantined(receiver), "ended")
    assert_whole(receiver)


def test_many_threads_at_a_v1_sender(v1_sender: V1Sender, receiver: MoriTransferEngineConnector) -> None:
    getting = [Background(lambda n=n: raw(wait(receiver, f"k{n}", 20))) for n in range(6)]
    for number in range(6):
        v1_sender.payloads[f"k{number}@0_1"] = pattern(5000, number), True
    assert [one.result(30) for one in getting] == [pattern(5000, number) for number in range(6)]
    assert_whole(receiver)


def test_close_while_a_v1_request_is_out(v1_sender: V1Sender, receiver: MoriTransferEngineConnector) -> None:
    v1_sender.held.set()
    v1_sender.payloads["slow@0_1"] = pattern(1000), True
    waiting = Background(lambda: wait(receiver, "slow", 60))
    eventually(lambda: v1_sender.holding, "pull is out")
    began = time.monotonic()
    receiver.close()
    assert time.monotonic() - began < 5
    assert waiting.result(5) is None
    v1_sender.let_go()


def test_the_messages_are_those_of_the_in_tree_class() -> None:
    """Structs encode as maps with these very names; a change here breaks every in-tree peer."""
    pull = wire.PullRequest("k@0_1", b"e", b"m", 4096, 10)
    assert msgspec.msgpack.decode(wire.encode_v1(pull)) == {
        "request_id": "k@0_1",
        "engine_desc_packed": b"e",
        "mem_desc_packed": b"m",
        "dst_offset": 4096,
        "length": 10,
    }
    assert wire.encode_v1(wire.QueryRequest("k")) == b"query_info\x81\xaarequest_id\xa1k"
    assert (wire.TRANS_DONE, wire.TRANS_ERROR) == (b"trans_done", b"trans_error")
    assert wire.INFO_NOT_FOUND == b"info_not_found"


def test_worker_that_dies_in_a_v1_pull(make_connector: Factory, v1_client: MakeV1) -> None:
    """The job goes to its successor and the client, which knows nothing of it, gets its payload."""
    sender = make_connector.sender()
    client = v1_client(sender.zmq_port or 0)
    put(sender, "warm", b"x")
    assert client.pull("warm@0_1", 1) == b"trans_done"
    (worker,) = worker_pids(sender)
    with stopped(worker):
        put(sender, "k", pattern(5000))
        pulling = Background(lambda: client.pull("k@0_1", 5000))
        eventually(lambda: sender.health()["sender"]["jobs_under_way"] == 1, "job handed out")
        import os
        import signal

        os.kill(worker, signal.SIGKILL)
        assert pulling.result() == b"trans_done"
    assert client.bytes_at(0, 5000) == pattern(5000)
    assert_whole(sender)
