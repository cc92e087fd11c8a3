"""Roles, addresses, life cycle: what a connector is made from, where it listens, how it ends."""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from connector_support import DEFAULTS, KEY, MIB, Factory, Pair, assert_whole, eventually, pattern

from mori_mp import ManagedBuffer, MoriTransferEngineConnector
from mori_mp.shared.errors import (
    ConfigError,
    ConnectorClosed,
    EngineUnavailable,
    PoolUnbacked,
    SenderUnknown,
    StartupError,
)
from mori_mp.workers.supervisor import Supervisor

pytestmark = pytest.mark.xdist_group("connector_roles")


@pytest.fixture
def free_ports() -> list[int]:
    """Three neighbouring ports, of which the first two are bindable."""
    for _ in range(100):
        with socket.socket() as probe, socket.socket() as neighbour:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port > 65000:
                continue
            try:
                neighbour.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return [port, port + 1, port + 2]
    raise AssertionError("no two neighbouring ports are free")


# ------------------------------------------------------------------------------- roles
def test_sender_listens_from_construction_on(make_connector: Factory) -> None:
    sender = make_connector.sender(worker_mode="thread")
    assert sender.can_put
    assert sender.supports_raw_data
    assert sender.stage_id == 0
    info = sender.get_connection_info()
    assert info["host"] == "127.0.0.1"
    assert info["zmq_port"] == sender.zmq_port > 0
    assert info["can_put"] is True
    assert str(os.getpid()) in info["engine_key"]
    with socket.create_connection(("127.0.0.1", info["zmq_port"]), timeout=5):
        pass


def test_foreign_keys_of_the_configuration_are_kept(make_connector: Factory) -> None:
    config = {"codec_chunk_frames": 25, "codec_left_context_frames": 25}
    sender = make_connector.sender(worker_mode="thread", **config)
    assert sender.config["codec_chunk_frames"] == 25
    assert sender.config["codec_left_context_frames"] == 25
    assert sender.config["memory_pool_size"] == DEFAULTS["memory_pool_size"]


def test_receiver_that_is_not_to_start_ahead_has_no_children(make_connector: Factory) -> None:
    receiver = make_connector.receiver(1, prestart=False)
    assert receiver.heart is None
    assert receiver.get_connection_info()["can_put"] is True  # it would listen at 1 - 0 + 1
    assert receiver.zmq_port == 2


def test_receiver_starts_its_listener_ahead(make_connector: Factory, free_ports: list[int]) -> None:
    receiver = make_connector.receiver(free_ports[0], prestart=True)
    eventually(lambda: receiver.heart is not None, "listener up, though nothing was put")
    assert receiver.zmq_port == free_ports[1]
    assert receiver.put("1", "2", KEY, b"x")[0]


def test_listener_that_cannot_start_ahead_is_tried_again_by_put(
    make_connector: Factory, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        receiver = make_connector.receiver(port - 1, prestart=True, worker_mode="thread")
        eventually(lambda: str(port) in caplog.text, "warned")
        assert receiver.heart is None
    assert receiver.put("1", "2", KEY, b"x")[0]


def test_close_beside_a_listener_that_starts_ahead(make_connector: Factory, free_ports: list[int]) -> None:
    """Nothing may be left, at whichever point of the start close() comes (`leaks` checks)."""
    for delay in (0.0, 0.1, 0.3):
        receiver = make_connector.receiver(free_ports[0], prestart=True)
        time.sleep(delay)
        receiver.close()


def test_start_on_use(make_connector: Factory) -> None:
    """Two connectors of one specification: the one that is used listens, the other one never does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    unused, used = (make_connector.sender(zmq_port=port, start="on_use") for _ in range(2))
    assert unused.heart is used.heart is None
    assert used.zmq_port == port
    receiver = make_connector.receiver(port, start="on_use")
    assert not receiver.receiver.report()["senders"]
    metadata = Pair(used, receiver).put(KEY, b"payload")
    assert metadata["source_port"] == port
    assert Pair(used, receiver).wait_bytes(KEY) == b"payload"
    assert unused.heart is None


def test_start_on_use_finds_out_at_once_that_its_port_is_taken(make_connector: Factory) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=str(port)):
            make_connector.sender(zmq_port=port, start="on_use")


def test_receiver_that_cannot_tell_its_port_cannot_put(make_connector: Factory) -> None:
    receiver = make_connector("receiver", sender_host="127.0.0.1", sender_zmq_port=50051)
    assert not receiver.can_put
    assert receiver.zmq_port is None
    with pytest.raises(StartupError, match=r"outgoing: \{host, zmq_port\}"):
        receiver.put("1", "2", KEY, b"x")
    assert receiver.heart is None


def test_receiver_asked_to_put_listens_where_the_next_stage_looks(
    make_connector: Factory, free_ports: list[int]
) -> None:
    first, second, _ = free_ports
    sender = make_connector.sender(zmq_port=first, worker_mode="thread")
    middle = make_connector.receiver(sender, worker_mode="thread")
    assert sender.zmq_port == first
    ok, size, metadata = middle.put("1", "2", KEY, b"onward")
    assert (ok, size) == (True, 6)
    assert metadata == {
        "source_host": "127.0.0.1",
        "source_port": second,  # sender_zmq_port - from_stage + stage_id
        "data_size": 6,
        "is_fast_path": True,
    }
    last = make_connector(
        "receiver", stage_id=2, from_stage=1, to_stage=2, sender_host="127.0.0.1", sender_zmq_port=second
    )
    found = last.get_with_deadline("1", "2", KEY, deadline=time.monotonic() + 10)
    assert found is not None
    assert found[0].to_bytes() == b"onward"


def test_many_threads_asking_a_receiver_to_put_start_one_listener(
    make_connector: Factory, free_ports: list[int]
) -> None:
    middle = make_connector.receiver(free_ports[0], worker_mode="thread")
    hearts = set()
    barrier = threading.Barrier(4)

    def put(number: int) -> None:
        barrier.wait()
        assert middle.put("1", "2", f"k{number}", b"payload")[0]
        hearts.add(id(middle.heart))

    threads = [threading.Thread(target=put, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(hearts) == 1
    assert middle.health()["pool"]["published"] == 4


def test_dual_listens_and_receives(make_connector: Factory) -> None:
    upstream = make_connector.sender(worker_mode="thread")
    dual = make_connector(
        "dual",
        stage_id=1,
        sender_host="127.0.0.1",
        sender_zmq_port=upstream.zmq_port,
        worker_mode="thread",
    )
    assert dual.heart is not None
    assert dual.zmq_port != upstream.zmq_port
    upstream.put("0", "1", KEY, b"in")
    found = dual.get_with_deadline("0", "1", KEY, deadline=time.monotonic() + 10)
    assert found is not None
    assert found[0].to_bytes() == b"in"
    downstream = make_connector.receiver(dual.zmq_port or 0, stage_id=2, from_stage=1, to_stage=2)
    dual.put("1", "2", KEY, b"out")
    found = downstream.get_with_deadline("1", "2", KEY, deadline=time.monotonic() + 10)
    assert found is not None
    assert found[0].to_bytes() == b"out"


def test_explicit_outgoing_wins_over_the_arithmetic(make_connector: Factory, free_ports: list[int]) -> None:
    first, _, third = free_ports
    middle = make_connector.receiver(
        first, outgoing={"zmq_port": third, "from_stage": 1, "to_stage": 2}, worker_mode="thread"
    )
    assert middle.zmq_port == third
    _, _, metadata = middle.put("1", "2", KEY, b"x")
    assert metadata is not None
    assert metadata["source_port"] == third


def test_chain_of_three_stages_in_one_process(make_connector: Factory, free_ports: list[int]) -> None:
    """0 -> 1 -> 2 as the host makes them: sender, receiver, receiver; the payload is passed on in place."""
    first = free_ports[0]
    thinker = make_connector.sender(zmq_port=first, delivery="landing", eager_bytes=0)
    talker = make_connector.receiver(thinker, delivery="landing", eager_bytes=0)
    vocoder = make_connector.receiver(first + 1, stage_id=2, from_stage=1, to_stage=2, delivery="landing")
    for chunk in range(5):
        payload = pattern(10_000, chunk)
        assert thinker.put("0", "1", f"r_0_{chunk}", payload)[0]
        found = talker.get_with_deadline("0", "1", f"r_0_{chunk}", deadline=time.monotonic() + 10)
        assert found is not None
        with found[0] as buffer:
            assert talker.put("1", "2", f"r_1_{chunk}", buffer)[0]
        found = vocoder.get_with_deadline("1", "2", f"r_1_{chunk}", deadline=time.monotonic() + 10)
        assert found is not None
        with found[0] as buffer:
            assert buffer.to_bytes() == payload
    assert_whole(thinker, talker, vocoder)


# ---------------------------------------------------------------------------- addresses
def test_get_without_a_known_sender_is_an_error(make_connector: Factory) -> None:
    receiver = make_connector("receiver")
    with pytest.raises(SenderUnknown, match="update_sender_info"):
        receiver.get("0", "1", KEY)
    with pytest.raises(SenderUnknown, match=KEY):
        receiver.get_with_deadline("0", "1", KEY, {"data_size": 5}, deadline=time.monotonic() + 1)


@pytest.mark.parametrize("how", ["update_sender_info", "attributes"])
def test_sender_told_later(make_connector: Factory, how: str) -> None:
    sender = make_connector.sender(worker_mode="thread")
    receiver = make_connector("receiver", stage_id=1)
    sender.put("0", "1", KEY, b"payload")
    assert sender.zmq_port is not None
    if how == "attributes":  # what the KV manager does
        receiver.sender_host = "127.0.0.1"
        receiver.sender_zmq_port = sender.zmq_port
    else:
        receiver.update_sender_info("127.0.0.1", sender.zmq_port)
    assert Pair(sender, receiver).wait_bytes(KEY) == b"payload"


def test_sender_may_change(make_connector: Factory) -> None:
    one, two = (make_connector.sender(worker_mode="thread") for _ in range(2))
    receiver = make_connector.receiver(one)
    one.put("0", "1", "a", b"from one")
    two.put("0", "1", "b", b"from two")
    assert Pair(one, receiver).wait_bytes("a") == b"from one"
    receiver.update_sender_info("127.0.0.1", two.zmq_port or 0)
    assert Pair(two, receiver).wait_bytes("b") == b"from two"


def test_auto_host_of_both_ends_is_the_same_address(make_connector: Factory) -> None:
    sender = make_connector.sender(host="auto", worker_mode="thread")
    receiver = make_connector.receiver(sender, sender_host="auto")
    metadata = Pair(sender, receiver).put(KEY, b"payload")
    assert metadata["source_host"] not in ("auto", "", "0.0.0.0")
    assert Pair(sender, receiver).wait_bytes(KEY) == b"payload"


# --------------------------------------------------------------------- errors of set-up
@pytest.mark.parametrize("mode", ["process", "thread"])
def test_port_taken(make_connector: Factory, mode: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            StartupError, match=rf"127\.0\.0\.1:{port}.*Another program has this port; change zmq_port"
        ):
            make_connector.sender(zmq_port=port, worker_mode=mode)


def test_address_of_another_machine(make_connector: Factory) -> None:
    with pytest.raises(StartupError, match="not an address of this machine"):
        make_connector.sender(host="192.0.2.1", zmq_port=50999, worker_mode="thread")


def test_port_taken_when_a_receiver_is_asked_to_put(make_connector: Factory) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        receiver = make_connector.receiver(port - 1, worker_mode="thread")
        with pytest.raises(StartupError, match=str(port)):
            receiver.put("1", "2", KEY, b"x")
    ok, _, metadata = receiver.put("1", "2", KEY, b"x")  # the port is free now
    assert ok
    assert metadata is not None
    assert metadata["source_port"] == port


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"memory_pool_size": "lots"}, ConfigError),
        ({"backend_type": "rdma"}, EngineUnavailable),
        ({"memory_pool_size": 1 << 49}, PoolUnbacked),
        ({"worker_python": "/nonexistent/python"}, StartupError),
    ],
)
def test_refused_configuration_leaves_nothing_behind(
    make_connector: Factory, config: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        make_connector.sender(**config)


def test_interpreter_without_our_dependencies_is_named(make_connector: Factory, tmp_path: Any) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho cannot import msgspec >&2\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(StartupError, match="cannot import msgspec"):
        make_connector.sender(worker_python=str(python), restart_limit=0)


def test_failure_after_the_children_have_started_leaves_nothing_behind(
    make_connector: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    real = Supervisor.start

    def start_and_fail(self: Supervisor) -> None:
        real(self)
        started.append(self.pid)
        raise StartupError("told to fail")

    monkeypatch.setattr(Supervisor, "start", start_and_fail)
    with pytest.raises(StartupError, match="told to fail"):
        make_connector.sender()
    assert started
    assert not os.path.exists(f"/proc/{started[0]}")


# ------------------------------------------------------------------------- end of life
def test_closed_connector_says_so(make_connector: Factory) -> None:
    pair = make_connector.pair(worker_mode="thread")
    pair.put(KEY, b"payload")
    for end in (pair.sender, pair.receiver):
        end.close()
        end.close()
        assert end.health() == {"status": "unhealthy", "error": "Connector is closed"}
        for call in (
            lambda end=end: end.put("0", "1", KEY, b"x"),
            lambda end=end: end.get("0", "1", KEY),
            lambda end=end: end.get_with_deadline("0", "1", KEY, deadline=time.monotonic() + 5),
            end.get_wakeup_generation,
            lambda end=end: end.wait_for_change(0, 5.0),
        ):
            with pytest.raises(ConnectorClosed, match="closed"):
                call()
        end.cleanup(KEY)
        end.cleanup(KEY, "0", "1")
        end.reap_consumed()
        end.abandon_get(KEY)


def test_context_manager_closes_also_on_error(make_connector: Factory) -> None:
    with pytest.raises(ZeroDivisionError), make_connector.sender(worker_mode="thread") as sender:
        raise ZeroDivisionError
    assert sender.health()["status"] == "unhealthy"


def test_half_built_objects_can_be_closed_and_collected() -> None:
    bare = MoriTransferEngineConnector.__new__(MoriTransferEngineConnector)
    bare.close()
    bare.__del__()
    with pytest.raises(ConfigError):
        MoriTransferEngineConnector({"role": "nonsense"})
    del bare
    gc.collect()


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_collected_without_close(make_connector: Factory, mode: str) -> None:
    """A connector that is dropped, in a reference cycle, ends its children all the same."""
    connector = MoriTransferEngineConnector(
        {**DEFAULTS, "role": "sender", "zmq_port": 0, "worker_mode": mode}
    )
    gone = weakref.ref(connector)
    cycle: list[Any] = [connector]
    cycle.append(cycle)
    del connector, cycle
    gc.collect()
    eventually(lambda: gone() is None, "collected", 5)


def test_port_is_free_again_after_close(make_connector: Factory) -> None:
    sender = make_connector.sender(worker_mode="thread")
    port = sender.zmq_port
    sender.close()
    again = make_connector.sender(zmq_port=port, worker_mode="thread")
    assert again.zmq_port == port


def test_received_buffer_outlives_both_connectors(make_connector: Factory) -> None:
    payload = pattern(20_000)
    for delivery in ("lease", "landing"):
        pair = make_connector.pair(delivery=delivery, eager_bytes=0, worker_mode="thread")
        pair.put(KEY, payload)
        buffer, _ = pair.wait(KEY)
        view = buffer.tensor
        pair.sender.close()
        pair.receiver.close()
        assert buffer.to_bytes() == payload
        buffer.release()
        assert bytes(view.numpy()) == payload  # still mapped


def test_release_after_close_touches_no_other_file(make_connector: Factory) -> None:
    """A leased buffer that is released late tells its sender nothing; above all not through a reused fd."""
    pair = make_connector.pair(delivery="lease", eager_bytes=0, worker_mode="thread")
    pair.put(KEY, b"payload")
    buffer, _ = pair.wait(KEY)
    assert isinstance(buffer, ManagedBuffer)
    pair.receiver.close()
    pair.sender.close()
    with _files_on_every_low_descriptor() as files:
        buffer.release()
        for file in files:
            assert os.fstat(file).st_size == 0


class _files_on_every_low_descriptor:
    """Fills the gaps in the descriptor table with empty files."""

    def __enter__(self) -> list[int]:
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        self._files = []
        while not self._files or self._files[-1] < highest + 8:
            self._files.append(os.memfd_create("gap", os.MFD_CLOEXEC))
        return self._files

    def __exit__(self, *exc: object) -> None:
        for file in self._files:
            os.close(file)


def test_construction_and_close_repeated(make_connector: Factory, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            pair = make_connector.pair(worker_mode="thread")
            pair.put(KEY, b"payload")
            assert pair.wait_bytes(KEY) == b"payload"
            make_connector.close()
    assert not caplog.records


@pytest.fixture
def no_thread_died() -> Iterator[None]:
    """Any exception in a thread fails the test."""
    seen: list[Any] = []
    before, threading.excepthook = threading.excepthook, seen.append
    yield
    threading.excepthook = before
    assert not seen


@pytest.mark.usefixtures("no_thread_died")
def test_closed_while_a_get_makes_a_link(make_connector: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = make_connector.pair()
    links = pair.receiver.receiver._links
    link = next(iter(links.values()))
    close = link.close

    def close_beside_a_get() -> None:
        links["127.0.0.1", 1] = link
        close()

    monkeypatch.setattr(link, "close", close_beside_a_get)
    pair.receiver.close()
    assert pair.receiver.health()["status"] == "unhealthy"


def test_closed_by_many_threads_at_once(make_connector: Factory) -> None:
    sender = make_connector.sender(memory_pool_size=MIB)
    barrier = threading.Barrier(4)

    def close() -> None:
        barrier.wait()
        sender.close()

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
