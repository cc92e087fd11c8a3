"""A forked child of a stage holds on to nothing of its parent's connectors, and takes nothing away."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from connector_support import (
    Factory,
    StageProcess,
    control_pid,
    eventually,
    pattern,
    state_of,
)

from mori_mp.shared.errors import ConnectorClosed

SIZE = 200_000


def in_fork(action: Any) -> str:
    """Run something in a forked child; returns what it returned, or what it raised."""
    source, sink = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = str(action())
        except BaseException as exc:
            said = repr(exc)
        os.write(sink, said.encode())
        os._exit(0)
    os.close(sink)
    with os.fdopen(source) as text:
        said = text.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("delivery", ["auto", "landing"])
def test_what_a_child_lets_go_of_stays_the_parents(make_connector: Factory, delivery: str) -> None:
    pair = make_connector.pair(delivery=delivery, receiver={"delivery": delivery})
    metadata = pair.put("k", pattern(SIZE, 1))
    found = pair.get("k", metadata)
    assert found is not None
    control = control_pid(pair.sender)

    def let_go() -> str:
        found[0].release()
        for connector in (pair.receiver, pair.sender):
            connector.close()
        return "done"

    assert in_fork(let_go) == "done"
    assert pair.wait_bytes("next", metadata=pair.put("next", pattern(SIZE, 2))) == pattern(SIZE, 2)
    pair.sender.reap_consumed()
    assert control_pid(pair.sender) == control
    assert pair.sender.publisher.outstanding >= (delivery == "auto")  # lent all the while
    assert pair.sender.health()["control_restarts"] == 0
    assert found[0].to_bytes() == pattern(SIZE, 1)
    found[0].release()
    pair.assert_whole()


def test_calls_of_a_child_are_refused(make_connector: Factory) -> None:
    pair = make_connector.pair()

    def call() -> str:
        for method in (
            lambda: pair.sender.put("0", "1", "k", b"payload"),
            lambda: pair.receiver.get("0", "1", "k"),
            lambda: pair.receiver.get_with_deadline("0", "1", "k", deadline=time.monotonic() + 5),
        ):
            with pytest.raises(ConnectorClosed, match=f"that of process {os.getppid()}, which this one was"):
                method()
        return "refused"

    assert in_fork(call) == "refused"
    pair.put("k", b"payload")
    assert pair.wait_bytes("k") == b"payload"


def test_a_stage_that_dies_is_not_outlived_while_its_child_lives(make_stage: type[StageProcess]) -> None:
    stage = make_stage(role="sender", host="127.0.0.1", zmq_port=0, memory_pool_size=1 << 20)
    family = [process.pid for process in stage.family() if process.pid != stage.pid]
    child = stage.ask("fork")
    try:
        stage.kill()
        eventually(lambda: all(state_of(pid) in ("", "Z") for pid in family), "its processes gone")
        assert state_of(child) not in ("", "Z")
    finally:
        os.kill(child, signal.SIGKILL)
