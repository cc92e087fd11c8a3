"""get() in all its forms: what it is told, what it waits for, what ends it, what it leaves behind."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from connector_support import (
    KEY,
    MIB,
    Background,
    Factory,
    Pair,
    assert_whole,
    control_pid,
    counter,
    eventually,
    pattern,
    stopped,
    worker_pids,
)

from mori_mp.shared import messages

pytestmark = pytest.mark.xdist_group("connector_get")

WAYS = {
    "eager": {"eager_bytes": MIB},
    "lease": {"eager_bytes": 0, "delivery": "lease"},
    "landing": {"eager_bytes": 0, "delivery": "landing"},
}


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS)
def shared_pair(request: pytest.FixtureRequest, module_factory: Factory) -> Iterator[Pair]:
    """A pair for each delivery; its pools must be whole again when all its tests are over."""
    pair = module_factory.pair(worker_mode="thread", **request.param)
    yield pair
    pair.assert_whole()
    module_factory.close()


def sender_report(pair: Pair) -> dict[str, Any]:
    """What the control process says of itself."""
    report: dict[str, Any] = pair.sender.health()["sender"]
    return report


# ---------------------------------------------------------------------------- metadata
FORMS = {
    "none": lambda meta: None,
    "full": lambda meta: meta,
    "host and port": lambda meta: {k: meta[k] for k in ("source_host", "source_port")},
    "by key": lambda meta: {KEY: meta},
    "host and port by key": lambda meta: {KEY: {k: meta[k] for k in ("source_host", "source_port")}},
    "foreign keys": lambda meta: {"request_id": "r", "chunk": 3, "other": {"source_port": 1}},
    "foreign keys beside": lambda meta: {**meta, "block_ids": [1, 2]},
    "empty": lambda meta: {},
    "no mapping": lambda meta: "metadata",
    "too small": lambda meta: {**meta, "data_size": meta["data_size"] - 1},
    "too large": lambda meta: {**meta, "data_size": meta["data_size"] + 5000},
    "zero": lambda meta: {**meta, "data_size": 0},
    "wrong kind": lambda meta: {**meta, "is_fast_path": not meta["is_fast_path"]},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("payload", [pattern(6000), {"object": 1}], ids=["raw", "object"])
def test_every_form_of_metadata(shared_pair: Pair, form: Any, payload: Any) -> None:
    metadata = form(shared_pair.put(KEY, payload))
    got, _ = shared_pair.wait(KEY, metadata=metadata)
    if isinstance(payload, bytes):
        with got:
            assert got.to_bytes() == payload
    else:
        assert got == payload


def test_metadata_with_auto_host(make_connector: Factory) -> None:
    sender = make_connector.sender(host="auto", worker_mode="thread")
    receiver = make_connector("receiver", stage_id=1)
    metadata = Pair(sender, receiver).put(KEY, b"payload")
    metadata["source_host"] = "auto"
    assert Pair(sender, receiver).wait_bytes(KEY, metadata=metadata) == b"payload"


def test_metadata_overrides_the_configured_sender(make_connector: Factory) -> None:
    one, two = (make_connector.sender(worker_mode="thread") for _ in range(2))
    receiver = make_connector.receiver(one)
    metadata = Pair(two, receiver).put(KEY, b"from two")
    assert Pair(two, receiver).wait_bytes(KEY, metadata=metadata) == b"from two"


# ------------------------------------------------------------------------ now or later
def test_a_miss_returns_at_once(shared_pair: Pair) -> None:
    shared_pair.put("warm", b"x")
    shared_pair.wait_bytes("warm")
    misses = counter(shared_pair.receiver, "misses")
    began = time.monotonic()
    for number in range(200):
        assert shared_pair.get(f"nothing{number}") is None
    assert time.monotonic() - began < 2.0  # 200 round trips or waits would take longer
    assert counter(shared_pair.receiver, "misses") == misses + 200


@pytest.mark.parametrize("size", [(1 << 62) + 1, -5, "many", 1.5])
def test_impossible_sizes_in_metadata_are_ignored(shared_pair: Pair, size: Any) -> None:
    metadata = shared_pair.put(f"size {size}", b"payload")
    faults = shared_pair.receiver.health()["faults"]["counts"].get("get_failed", 0)
    wrong = {**metadata, "data_size": size}
    found = shared_pair.receiver.get_with_deadline(
        "0", "1", f"size {size}", wrong, deadline=time.monotonic() + 10
    )
    assert found is not None
    assert bytes(found[0].to_bytes()) == b"payload"
    found[0].release()
    assert shared_pair.receiver.health()["faults"]["counts"]["get_failed"] == faults + 1


def test_delivered_once(shared_pair: Pair) -> None:
    metadata = shared_pair.put(KEY, b"payload")
    assert shared_pair.wait_bytes(KEY) == b"payload"
    assert shared_pair.get(KEY) is None
    assert shared_pair.receiver.get_with_deadline("0", "1", KEY, deadline=time.monotonic() + 0.05) is None
    assert shared_pair.put(KEY, b"again") == {**metadata, "data_size": 5}
    assert shared_pair.wait_bytes(KEY) == b"again"


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_pull_that_overtakes_its_put_is_parked(make_connector: Factory, way: dict[str, Any]) -> None:
    pair = make_connector.pair(worker_mode="thread", park_seconds=20.0, **way)
    metadata = {
        "source_host": "127.0.0.1",
        "source_port": pair.sender.zmq_port,
        "data_size": 7000,
        "is_fast_path": True,
    }
    got = Background(lambda: pair.get("early", metadata))
    eventually(lambda: sender_report(pair)["parked"] == 1, "pull parked")
    assert not got.done
    pair.put("early", pattern(7000))
    buffer, _ = got.result()
    with buffer:
        assert buffer.to_bytes() == pattern(7000)
    pair.assert_whole()


def test_pull_is_not_parked_for_ever(make_connector: Factory) -> None:
    pair = make_connector.pair(worker_mode="thread", park_seconds=0.1)
    metadata = {
        "source_host": "127.0.0.1",
        "source_port": pair.sender.zmq_port,
        "data_size": 7000,
        "is_fast_path": True,
    }
    assert pair.get("never", metadata) is None
    assert sender_report(pair)["counters"]["refused"] == 1
    assert counter(pair.receiver, "misses") == 1
    pair.assert_whole()


def test_get_with_deadline_waits_for_the_put(shared_pair: Pair) -> None:
    got = Background(lambda: shared_pair.wait_bytes("later"))
    got.entered.wait()
    time.sleep(0.05)  # nothing to wait for: the getter must be left waiting
    assert not got.done
    shared_pair.put("later", pattern(5000))
    assert got.result() == pattern(5000)


@pytest.mark.parametrize("ahead", [0.3, 0.0, -5.0])
def test_deadline_passes(shared_pair: Pair, ahead: float) -> None:
    deadline = time.monotonic() + ahead
    assert shared_pair.receiver.get_with_deadline("0", "1", "never", deadline=deadline) is None
    assert deadline <= time.monotonic() < max(deadline, deadline - ahead) + 2.0


def test_what_is_here_already_is_delivered_after_the_deadline_too(make_connector: Factory) -> None:
    pair = make_connector.pair(worker_mode="thread", eager_bytes=MIB)
    pair.put(KEY, b"payload")
    eventually(lambda: pair.get("poll") is None and len(_link(pair).mailbox), "noticed")
    found = pair.receiver.get_with_deadline("0", "1", KEY, deadline=time.monotonic() - 1)
    assert found is not None


def _link(pair: Pair) -> Any:
    return next(iter(pair.receiver.receiver._links.values()))


def test_sender_that_starts_later(make_connector: Factory) -> None:
    """A receiver may be up first; nothing is lost and nothing hangs."""
    probe = make_connector.sender(worker_mode="thread")
    port = probe.zmq_port
    assert port is not None
    probe.close()
    receiver = make_connector.receiver(port)
    began = time.monotonic()
    assert receiver.get("0", "1", KEY) is None
    assert receiver.get("0", "1", KEY) is None
    assert time.monotonic() - began < 4.0
    assert counter(receiver, "unreached") == 2
    waiting = Background(lambda: receiver.get_with_deadline("0", "1", KEY, deadline=time.monotonic() + 20))
    sender = make_connector.sender(zmq_port=port, worker_mode="thread")
    Pair(sender, receiver).put(KEY, b"payload")
    assert waiting.result()[0].to_bytes() == b"payload"


def test_sender_that_is_replaced(make_connector: Factory) -> None:
    """A new stage on the same port: what the old one had is gone, what the new one puts comes."""
    pair = make_connector.pair(worker_mode="thread", eager_bytes=0)
    pair.put("old", pattern(5000, 1))
    pair.put("kept", pattern(5000, 2))
    held, _ = pair.wait("kept")
    port = pair.sender.zmq_port
    pair.sender.close()
    new = make_connector.sender(zmq_port=port, worker_mode="thread", eager_bytes=0)
    again = Pair(new, pair.receiver)
    again.put("new", pattern(5000, 3))
    assert again.wait_bytes("new") == pattern(5000, 3)
    assert again.get("old") is None
    with held:
        assert held.to_bytes() == pattern(5000, 2)
    again.assert_whole()


@pytest.mark.parametrize("way", ["lease", "landing"])
def test_interrupted_while_it_is_served(
    make_connector: Factory, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """What it asked for comes late, and goes to the next one."""
    pair = make_connector.pair(**WAYS[way])
    pair.put("first", pattern(5000, 1))
    assert pair.wait_bytes("first") == pattern(5000, 1)
    receiver = pair.receiver.receiver
    link, wait = next(iter(receiver._links.values())), receiver._board.wait

    def interrupted(ready: Callable[[], Any], deadline: float) -> Any:
        if link._pulls._under_way:
            raise KeyboardInterrupt
        return wait(ready, deadline)

    with stopped(control_pid(pair.sender)):
        metadata = pair.put(KEY, pattern(5000, 2))  # which is not offered before it is pulled
        with monkeypatch.context() as patch:
            patch.setattr(receiver._board, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pair.get(KEY, metadata)
    assert pair.wait_bytes(KEY) == pattern(5000, 2)
    pair.assert_whole()


# -------------------------------------------------------------------------- wake-ups
def test_wait_for_change(shared_pair: Pair) -> None:
    receiver = shared_pair.receiver
    receiver.get("0", "1", "wake")

    def quiet() -> bool:  # the first contact, if this is one, is a change too
        return receiver.wait_for_change(receiver.get_wakeup_generation(), 0.05) is False

    eventually(quiet, "first contact over")
    generation = receiver.get_wakeup_generation()
    waiting = Background(lambda: receiver.wait_for_change(generation, 20.0))
    shared_pair.put("wake", b"payload")
    assert waiting.result() is True
    assert receiver.get_wakeup_generation() > generation
    assert receiver.wait_for_change(generation, 0.0) is True
    assert shared_pair.wait_bytes("wake") == b"payload"


def test_no_wakeup_is_missed(shared_pair: Pair) -> None:
    """The host's loop: read the generation, try, wait for change. A put at any moment must end the wait."""
    receiver = shared_pair.receiver

    def loop(key: str) -> bytes:
        deadline = time.monotonic() + 20
        while True:
            generation = receiver.get_wakeup_generation()
            found = receiver.get("0", "1", key)
            if found is not None:
                with found[0] as buffer:
                    raw: bytes = buffer.to_bytes()
                return raw
            assert receiver.wait_for_change(generation, deadline - time.monotonic()), f"{key} never came"

    for number in range(30):
        getting = Background(lambda number=number: loop(f"w{number}"))
        shared_pair.put(f"w{number}", pattern(2000, number))
        assert getting.result() == pattern(2000, number)


# ------------------------------------------------------------------------- many threads
def test_many_threads_many_keys(shared_pair: Pair) -> None:
    """Each thread waits for its own keys, which are put in another order."""
    threads, keys = 6, 15
    failures: list[str] = []

    def receive(thread: int) -> None:
        for number in range(keys):
            key = f"t{thread}_{number}"
            if shared_pair.wait_bytes(key, 30) != pattern(3000, thread * 100 + number):
                failures.append(key)

    waiting = [Background(lambda thread=thread: receive(thread)) for thread in range(threads)]
    for number in reversed(range(keys)):
        for thread in range(threads):
            shared_pair.put(f"t{thread}_{number}", pattern(3000, thread * 100 + number))
    for one in waiting:
        one.result(40)
    assert not failures


@pytest.mark.parametrize("known", ["nothing", "metadata"])
def test_many_threads_one_key(shared_pair: Pair, known: str) -> None:
    """Exactly one thread gets a payload, and nobody lets go of its memory under it."""
    for number in range(10):
        key = f"race{number}"
        metadata = shared_pair.put(key, pattern(3000, number))
        start, won = threading.Barrier(3), threading.Event()

        def get(key: str = key, metadata: Any = metadata, start: Any = start, won: Any = won) -> Any:
            start.wait()
            give_up = time.monotonic() + 20
            while time.monotonic() < give_up:
                found = shared_pair.receiver.get_with_deadline(
                    "0", "1", key, metadata if known == "metadata" else None, deadline=time.monotonic() + 0.05
                )
                if found is not None or won.is_set():
                    won.set()
                    return found
            return None

        getters = [Background(get) for _ in range(3)]
        results = [found for one in getters if (found := one.result(30)) is not None]
        assert len(results) == 1, f"{key}: {len(results)} threads got it"
        with results[0][0] as buffer:
            # The slot is still this payload's, whatever the losers have told the sender.
            for other in range(3):
                shared_pair.put(f"{key}-{other}", pattern(3000, 7000 + other))
            assert buffer.to_bytes() == pattern(3000, number)
        for other in range(3):
            shared_pair.wait_bytes(f"{key}-{other}")


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_two_receivers_in_one_process(make_connector: Factory, way: dict[str, Any]) -> None:
    """They look alike to the sender, which knows readers by process; neither may end the other's hold."""
    pair = make_connector.pair(worker_mode="thread", memory_pool_size=64 * 1024, **way)
    second = Pair(pair.sender, make_connector.receiver(pair.sender, **way))
    for number in range(6):
        metadata = pair.put(KEY, pattern(5000, number))
        first, other = (pair, second) if number % 2 else (second, pair)
        buffer, _ = first.wait(KEY, metadata=metadata)
        deadline = time.monotonic() + 0.02
        found = other.receiver.get_with_deadline("0", "1", KEY, metadata, deadline=deadline)
        if found is not None:  # it had been asked for before the first one was done with it
            assert found[0].to_bytes() == pattern(5000, number)
            found[0].release()
            found = None
        for filler in range(5):
            assert pair.sender.put("0", "1", f"f{filler}", pattern(5000, 100 + filler))[0]
        assert buffer.to_bytes() == pattern(5000, number)
        buffer.release()
        for filler in range(5):
            pair.sender.cleanup(f"f{filler}")
        eventually(lambda: not (pair.sender.reap_consumed() or pair.sender.publisher.outstanding), "freed")
        assert_whole(pair.sender, pair.receiver, second.receiver)


def test_a_receiver_of_whom_no_worker_can_be_told_fails_its_writes_only(
    make_connector: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A description of its memory that is too long for the job channel ends neither loop nor queue."""
    pair = make_connector.pair(worker_mode="thread", delivery="landing", eager_bytes=0)
    encode = messages.encode

    def swollen(message: Any) -> bytes:
        introduces = isinstance(message, messages.AddPeer)
        return encode(message) + bytes(messages.MAX_PACKET_BYTES if introduces else 0)

    pair.put("k", pattern(5000))
    with monkeypatch.context() as patch:
        patch.setattr(messages, "encode", swollen)
        deadline = time.monotonic() + 0.5
        assert pair.receiver.get_with_deadline("0", "1", "k", deadline=deadline) is None
        health = pair.sender.health()
    assert health["sender"]["counters"]["failed_writes"] >= 1
    faults = [fault["text"] for fault in health["faults"]["recent"] if fault["cause"] == "write_failed"]
    assert "the payload is kept for a retry: AddPeer takes" in faults[0]
    assert pair.wait_bytes("k") == pattern(5000)
    pair.assert_whole()


# ------------------------------------------------------------------------- abandon_get
def test_abandoned_get_is_forgotten(make_connector: Factory) -> None:
    pair = make_connector.pair(worker_mode="thread", delivery="landing", eager_bytes=0)
    deadline = time.monotonic() + 0.02
    assert pair.receiver.get_with_deadline("0", "1", "late", deadline=deadline) is None
    mailbox = _link(pair).mailbox
    assert "late@0_1" in mailbox._missed  # to be asked for with the next audit
    pair.receiver.abandon_get("late")
    assert "late@0_1" not in mailbox._missed
    pair.put("late", b"payload")  # it is not refused either, should the caller ask again
    assert pair.wait_bytes("late") == b"payload"


def test_abandon_get_of_something_unknown(shared_pair: Pair) -> None:
    shared_pair.receiver.abandon_get("never heard of")
    shared_pair.sender.abandon_get("nor here")


def test_abandon_get_after_success_changes_nothing(shared_pair: Pair) -> None:
    shared_pair.put("a", pattern(3000))
    buffer, _ = shared_pair.wait("a")
    shared_pair.receiver.abandon_get("a")
    with buffer:
        assert buffer.to_bytes() == pattern(3000)


# ------------------------------------------------------------------------------ cleanup
def test_cleanup_on_one_edge(shared_pair: Pair) -> None:
    sender = shared_pair.sender
    shared_pair.put("c", b"for 1")
    assert sender.put("0", "2", "c", b"for 2")[0]
    sender.cleanup("c", "0", "2")
    eventually(lambda: (sender.reap_consumed(), sender.publisher.outstanding == 1)[1], "one withdrawn")
    assert shared_pair.wait_bytes("c") == b"for 1"


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_cleanup_makes_a_payload_unavailable(make_connector: Factory, way: dict[str, Any]) -> None:
    pair = make_connector.pair(worker_mode="thread", **way)
    for key, arguments in {"a": ("a",), "b": ("b@0_1",), "c": ("c", "0", "1")}.items():
        metadata = pair.put(key, pattern(3000))
        eventually(lambda: pair.get("other") is None and len(_link(pair).mailbox), "noticed")
        pair.sender.cleanup(*arguments)
        pair.assert_whole()
        eventually(lambda: pair.get("other") is None and not len(_link(pair).mailbox), "notice withdrawn")
        assert pair.get(key) is None
        deadline = time.monotonic() + 0.05
        assert pair.receiver.get_with_deadline("0", "1", key, metadata, deadline=deadline) is None
    pair.assert_whole()


def test_cleanup_of_the_unknown_and_with_half_an_edge(shared_pair: Pair) -> None:
    shared_pair.sender.cleanup("never put")
    shared_pair.sender.cleanup("never put", "0", "1")
    shared_pair.receiver.cleanup("never put")
    with pytest.raises(ValueError, match="both"):
        shared_pair.sender.cleanup("k", "0")


def test_cleanup_while_leased(make_connector: Factory) -> None:
    pair = make_connector.pair(worker_mode="thread", eager_bytes=0, delivery="lease")
    pair.put(KEY, pattern(5000, 1))
    buffer, _ = pair.wait(KEY)
    pair.sender.cleanup(KEY)
    assert pair.get(KEY) is None
    for number in range(20):  # one of them would get the block, were it free
        pair.put(f"k{number}", pattern(5000, 100 + number))
    assert buffer.to_bytes() == pattern(5000, 1)
    buffer.release()
    for number in range(20):
        pair.wait_bytes(f"k{number}")
    pair.assert_whole()


def test_cleanup_while_landing(make_connector: Factory) -> None:
    """The write that is under way ends from its own memory; the receiver gets the payload."""
    pair = make_connector.pair(eager_bytes=0, delivery="landing")
    pair.put("warm", b"x")
    pair.wait_bytes("warm")
    with stopped(*worker_pids(pair.sender)):
        pair.put(KEY, pattern(5000, 1))
        getting = Background(lambda: pair.wait_bytes(KEY))
        eventually(lambda: sender_report(pair)["ledger"]["entries"]["in_flight"] == 1, "in flight")
        pair.sender.cleanup(KEY)
        eventually(lambda: sender_report(pair)["ledger"]["entries"]["draining"] == 1, "marked")
        pair.put(KEY, pattern(6000, 2))
        assert not getting.done
    assert getting.result() == pattern(5000, 1)
    assert pair.wait_bytes(KEY) == pattern(6000, 2)
    pair.assert_whole()


# ---------------------------------------------------------------------------------- TTL
@pytest.mark.parametrize("delivery", ["lease", "landing", "eager"])
def test_expired_payload(make_connector: Factory, delivery: str) -> None:
    config = WAYS[delivery]
    pair = make_connector.pair(worker_mode="thread", buffer_ttl_seconds=0.2, **config)
    metadata = pair.put(KEY, pattern(5000))
    pair.assert_whole()
    assert sender_report(pair)["ledger"]["counters"]["expired"] == 1
    assert pair.get(KEY) is None
    assert pair.get(KEY, metadata) is None
    pair.put(KEY, b"new")
    assert pair.wait_bytes(KEY) == b"new"


def test_ttl_does_not_end_a_lease(make_connector: Factory) -> None:
    pair = make_connector.pair(worker_mode="thread", eager_bytes=0, delivery="lease", buffer_ttl_seconds=0.2)
    pair.put(KEY, pattern(5000, 1))
    buffer, _ = pair.wait(KEY)
    pair.put("unread", pattern(5000, 2))
    pair.sender.publisher.collect()
    eventually(lambda: (pair.sender.reap_consumed(), pair.sender.publisher.outstanding == 1)[1], "expired")
    for number in range(20):
        pair.put(f"k{number}", pattern(5000, 100 + number))
    assert buffer.to_bytes() == pattern(5000, 1)
    buffer.release()
    pair.assert_whole()


# --------------------------------------------------------------------------- full pools
def test_put_waits_for_receivers_to_free_a_full_pool(make_connector: Factory) -> None:
    pair = make_connector.pair(
        worker_mode="thread", eager_bytes=0, delivery="lease", memory_pool_size=64 * 1024
    )
    for number in range(4):
        pair.put(f"k{number}", pattern(16 * 1024, number))
    buffer, _ = pair.wait("k2")
    putting = Background(lambda: pair.sender.put("0", "1", "k4", pattern(16 * 1024, 4)))
    putting.entered.wait()
    time.sleep(0.05)  # nothing to wait for: it must be left waiting
    assert not putting.done
    buffer.release()
    assert putting.result()[0] is True
    assert pair.wait_bytes("k4") == pattern(16 * 1024, 4)
    assert pair.sender.health()["put_pool_exhausted"] == 0


def test_put_waits_even_when_blocks_are_larger_than_their_payloads(make_connector: Factory) -> None:
    """16 payloads of 100 bytes fill 64 KiB, since each takes a block of 4096."""
    pair = make_connector.pair(worker_mode="thread", eager_bytes=0, memory_pool_size=64 * 1024)
    for number in range(16):
        pair.put(f"k{number}", pattern(100, number))
    buffer, _ = pair.wait("k0")
    putting = Background(lambda: pair.sender.put("0", "1", "more", pattern(4000)))
    putting.entered.wait()
    buffer.release()
    assert putting.result()[0] is True


def test_put_gives_up_on_a_pool_that_stays_full(
    make_connector: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    pair = make_connector.pair(worker_mode="thread", memory_pool_size=64 * 1024)
    pair.put("big", pattern(60 * 1024))
    with caplog.at_level(logging.ERROR):
        assert pair.sender.put("0", "1", "more", pattern(20 * 1024)) == (False, 0, None)
    assert "'more' (0 -> 1)" in caplog.text
    assert "pool exhausted" in caplog.text
    health = pair.sender.health()
    assert health["put_pool_exhausted"] == 1
    assert health["errors"] == 1
    pair.wait_bytes("big")
    assert pair.sender.put("0", "1", "more", pattern(20 * 1024))[0]


def test_put_that_can_never_fit_fails_at_once(make_connector: Factory) -> None:
    sender = make_connector.sender(worker_mode="thread", memory_pool_size=64 * 1024)
    began = time.monotonic()
    assert sender.put("0", "1", KEY, bytes(65 * 1024)) == (False, 0, None)
    assert time.monotonic() - began < 0.9
    assert sender.health()["put_pool_exhausted"] == 1


def test_receivers_pool_is_full(make_connector: Factory, caplog: pytest.LogCaptureFixture) -> None:
    """A payload that has no slot to land in stays at its sender until there is one."""
    pair = make_connector.pair(
        worker_mode="thread", delivery="landing", eager_bytes=0, receiver={"memory_pool_size": 16 * 1024}
    )
    pair.put("a", pattern(10_000, 1))
    pair.put("b", pattern(10_000, 2))
    buffer, _ = pair.wait("a")
    with caplog.at_level(logging.ERROR):
        eventually(lambda: pair.get("b") is None and counter(pair.receiver, "pool_exhausted"), "exhausted")
    assert "no slot to land in" in caplog.text
    assert pair.receiver.health()["errors"] >= 1
    deadline = time.monotonic() + 0.2
    assert pair.receiver.get_with_deadline("0", "1", "b", deadline=deadline) is None
    assert time.monotonic() >= deadline
    waiting = Background(lambda: pair.wait_bytes("b"))
    with buffer:
        assert buffer.to_bytes() == pattern(10_000, 1)
    assert waiting.result() == pattern(10_000, 2)
    pair.assert_whole()
