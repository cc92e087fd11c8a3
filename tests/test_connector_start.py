"""`start: on_use`: two connectors from one specification, of which the host uses one."""

from __future__ import annotations

import socket
import time

import pytest
from connector_support import KEY, Factory, eventually

from mori_mp.shared.errors import StartupError

pytestmark = pytest.mark.xdist_group("connector_start")


@pytest.fixture
def port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_the_used_one_of_two_senders_listens(make_connector: Factory, port: int, mode: str) -> None:
    """As the host makes them: the runner's, which is never used, then the scheduler's."""
    unused, used = (
        make_connector.sender(start="on_use", zmq_port=port, worker_mode=mode)
        for _ in ("runner", "scheduler")
    )
    assert used.heart is None
    assert used.can_put
    assert used.get_connection_info()["zmq_port"] == port
    assert not listens(port)
    ok, size, metadata = used.put("0", "1", KEY, b"payload")
    assert (ok, size) == (True, 7)
    assert metadata is not None
    assert metadata["source_port"] == port
    receiver = make_connector.receiver(port)
    found = receiver.get_with_deadline("0", "1", KEY, metadata, deadline=time.monotonic() + 10)
    assert found is not None
    assert found[0].to_bytes() == b"payload"
    assert unused.heart is None
    assert unused.health()["status"] == "healthy"


def test_a_sending_thread_starts_it_ahead(make_connector: Factory, port: int) -> None:
    """The host's save thread calls reap_consumed() before there is anything to put."""
    sender = make_connector.sender(start="on_use", zmq_port=port, worker_mode="thread")
    sender.reap_consumed()
    sender.reap_consumed()
    eventually(lambda: sender.heart is not None and listens(port), "listening")
    assert sender.put("0", "1", KEY, b"payload")[0]


def test_a_port_that_is_taken_is_found_when_it_is_made(make_connector: Factory) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}.*change zmq_port"):
            make_connector.sender(start="on_use", zmq_port=port)


@pytest.mark.parametrize("start", ["at_once", "on_use"])
@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("no-such-host.invalid", "'no-such-host.invalid' does not resolve"),
        ("192.0.2.7", "is not an address of"),
    ],
)
def test_a_host_that_is_none_of_this_machine_is_blamed(
    start: str, host: str, said: str, make_connector: Factory
) -> None:
    with pytest.raises(StartupError, match=said) as caught:
        make_connector.sender(start=start, host=host, zmq_port=50999)
    assert "Another program" not in str(caught.value)


def test_an_interpreter_that_is_not_there_is_blamed(make_connector: Factory) -> None:
    with pytest.raises(
        StartupError, match=r"worker process: /nope/python: No such file.*worker_python"
    ) as caught:
        make_connector.sender(worker_python="/nope/python")
    text = str(caught.value)
    assert "cannot listen" not in text
    assert "control process of stage=0" in text


def test_a_port_that_was_taken_since_fails_the_put_only(make_connector: Factory, port: int) -> None:
    sender = make_connector.sender(start="on_use", zmq_port=port, worker_mode="thread")
    other = make_connector.sender(zmq_port=port, worker_mode="thread")
    with pytest.raises(StartupError, match=f"127.0.0.1:{port}"):
        sender.put("0", "1", KEY, b"payload")
    other.close()
    eventually(lambda: not listens(port), "the port is free")
    assert sender.put("0", "1", KEY, b"payload")[0]


def test_a_receiver_greets_with_its_first_get(make_connector: Factory) -> None:
    sender = make_connector.sender(worker_mode="thread")
    unused, used = (make_connector.receiver(sender, start="on_use") for _ in ("runner", "scheduler"))
    assert used.receiver.report()["senders"] == []
    sender.put("0", "1", KEY, b"payload")
    found = eventually(lambda: used.get("0", "1", KEY), "delivered")
    assert found[0].to_bytes() == b"payload"
    assert sender.health()["sender"]["sessions"] == 1
    assert unused.receiver.report()["senders"] == []


def test_a_receiver_that_waits_before_its_first_get(make_connector: Factory) -> None:
    """The host's runner asks for changes before it has asked for anything else."""
    sender = make_connector.sender(worker_mode="thread")
    receiver = make_connector.receiver(sender, start="on_use")
    generation = receiver.get_wakeup_generation()
    assert receiver.wait_for_change(generation, 0.01) is False
    sender.put("0", "1", KEY, b"payload")
    eventually(lambda: receiver.get("0", "1", KEY), "delivered")
