"""Our connector at one end of an edge and vllm-omni's in-tree class, unmodified, at the other.

The in-tree class runs over a facade of Mori's Python API (tests/mori_facade) whose descriptors are those of
our shm engine, so that each side's engine writes into the other's pool. Every end is a process of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from connector_support import eventually, no_leaks, short_directory, state_of, stopped
from mixed_payloads import OBJECTS, PAYLOADS, RAW, expected
from mixed_support import Stage
from omni_support import Host

from mori_mp.pipeline.free_ports import PortBlock

MIXED = [("ours", "in-tree"), ("in-tree", "ours")]
each_way = pytest.mark.parametrize("kinds", MIXED, ids=lambda kinds: f"{kinds[0]} to {kinds[1]}")


@pytest.fixture(scope="module")
def new_stage(host: Host) -> Iterator[Callable[[], Stage]]:
    """Makes stage processes, and sees that nothing is left of them."""
    with short_directory() as folder, no_leaks(folder):
        yield lambda: Stage(folder)


@pytest.fixture(scope="module")
def ports() -> Iterator[PortBlock]:
    with PortBlock() as block:
        yield block


class Ends:
    """Sender and receiver of one edge."""

    def __init__(self, sender: Stage, receiver: Stage) -> None:
        self.sender = sender
        self.receiver = receiver


@pytest.fixture(scope="module")
def ends(new_stage: Callable[[], Stage], ports: PortBlock) -> Iterator[Callable[[tuple[str, str]], Ends]]:
    """The two ends of either kind, made once and shared by the tests that restart nothing."""
    made: dict[tuple[str, str], Ends] = {}

    def make(kinds: tuple[str, str]) -> Ends:
        if kinds not in made:
            pair = made[kinds] = Ends(new_stage(), new_stage())
            port = ports.base + len(made)
            pair.sender.sender(kinds[0], port)
            pair.receiver.receiver(kinds[1], port)
        return made[kinds]

    yield make
    for pair in made.values():
        pair.receiver.close()
        pair.sender.close()


@pytest.fixture
def stages(new_stage: Callable[[], Stage]) -> Iterator[Callable[[], Stage]]:
    """Stages that end with the test."""
    made: list[Stage] = []

    def make() -> Stage:
        made.append(new_stage())
        return made[-1]

    yield make
    for stage in made:
        stage.close()


# --------------------------------------------------------------------------- payloads
@pytest.mark.parametrize("payload", PAYLOADS)
@each_way
def test_payloads(ends: Callable[[Any], Ends], kinds: tuple[str, str], payload: str) -> None:
    pair = ends(kinds)
    if (kinds[0], payload) == ("in-tree", "0-dim tensor"):
        refused = pair.sender.ask("put", on="out", key=payload, payload=payload)
        assert refused == (False, 0, None), (
            "the in-tree class views the tensor as bytes, which needs a dimension"
        )
        return
    metadata = pair.sender.put(payload, payload)
    got = pair.receiver.get(payload, metadata, like=payload)
    assert got["size"] == metadata["data_size"]
    assert got["what"] == expected(payload)
    assert metadata["is_fast_path"] == (payload in RAW)
    assert got.get("as tensor", True)


@each_way
def test_an_empty_payload_is_refused(ends: Callable[[Any], Ends], kinds: tuple[str, str]) -> None:
    assert ends(kinds).sender.ask("put", on="out", key="e", payload="empty") == (False, 0, None)


def test_buffers_of_the_in_tree_class_are_handed_on(stages: Callable[[], Stage], ports: PortBlock) -> None:
    first, middle, last = stages(), stages(), stages()
    first.sender("ours", ports.base + 4)
    middle.receiver("in-tree", ports.base + 4)
    middle.make("ours", "out", role="sender", stage_id=1, zmq_port=ports.base + 5)
    last.make(
        "ours", "in", role="receiver", stage_id=2, sender_host="127.0.0.1", sender_zmq_port=ports.base + 5
    )
    metadata = first.put("k", "odd megabytes")
    forwarded = {"from": "in", "to": "out", "key": "k", "metadata": metadata}
    ok, size, onward = middle.ask("forward", **forwarded)
    assert (ok, size) == (True, metadata["data_size"])
    assert last.get("k", onward, edge=["1", "2"])["what"] == expected("odd megabytes")


# --------------------------------------------------------------------------- metadata
def _forms(metadata: dict[str, Any]) -> dict[str, Any]:
    where = {"source_host": metadata["source_host"], "source_port": metadata["source_port"]}
    return {
        "none": None,
        "put's": metadata,
        "with foreign keys": {**metadata, "shm": {"name": "x"}, "rank": 3},
        "host and port": where,
        "by key": {"form": metadata},
    }


@pytest.mark.parametrize("form", ["none", "put's", "with foreign keys", "host and port", "by key"])
@pytest.mark.parametrize("payload", ["bytes", "0-dim tensors"])
def test_metadata_forms_at_our_end(ends: Callable[[Any], Ends], form: str, payload: str) -> None:
    pair = ends(("in-tree", "ours"))
    metadata = _forms(pair.sender.put("form", payload))[form]
    assert pair.receiver.get("form", metadata)["what"] == expected(payload)


@pytest.mark.parametrize("form", ["none", "put's", "with foreign keys"])
@pytest.mark.parametrize("payload", ["bytes", "0-dim tensors"])
def test_metadata_forms_at_the_in_tree_end(ends: Callable[[Any], Ends], form: str, payload: str) -> None:
    pair = ends(("ours", "in-tree"))
    metadata = _forms(pair.sender.put("form", payload))[form]
    assert pair.receiver.get("form", metadata)["what"] == expected(payload)


# ----------------------------------------------------------------- misses and refusals
@each_way
def test_a_query_that_misses(ends: Callable[[Any], Ends], kinds: tuple[str, str]) -> None:
    pair = ends(kinds)
    assert pair.receiver.get("later") is None
    pair.sender.put("later", "struct")
    assert pair.receiver.get("later")["what"] == expected("struct")
    assert pair.receiver.get("later") is None, "a payload is delivered once"


def test_a_query_finds_what_was_put_before_it(ends: Callable[[Any], Ends]) -> None:
    pair = ends(("ours", "in-tree"))
    control = pair.sender.ask("health", on="out")["sender"]["control"]["pid"]
    for turn in range(3):
        with stopped(control):  # so that it finds both at once
            pair.sender.put(f"just {turn}", "struct")
            pair.receiver.tell("get", on="in", key=f"just {turn}")
            time.sleep(0.05)
        assert pair.receiver.answer()["what"] == expected("struct")


@each_way
def test_metadata_of_a_payload_that_is_gone(ends: Callable[[Any], Ends], kinds: tuple[str, str]) -> None:
    pair = ends(kinds)
    metadata = pair.sender.put("gone", "bytes")
    pair.sender.ask("cleanup", on="out", key="gone")
    assert pair.receiver.get("gone", metadata) is None
    assert pair.receiver.get("gone") is None


@pytest.mark.parametrize("wrong", [-1, 1, 4096])
@each_way
def test_a_wrong_length_is_refused(ends: Callable[[Any], Ends], kinds: tuple[str, str], wrong: int) -> None:
    pair = ends(kinds)
    metadata = pair.sender.put("length", "a page and a byte")
    lie = {**metadata, "data_size": metadata["data_size"] + wrong}
    assert pair.receiver.get("length", lie) is None
    assert pair.receiver.get("length", metadata)["what"] == expected("a page and a byte")


@each_way
def test_a_key_put_again_replaces_its_payload(ends: Callable[[Any], Ends], kinds: tuple[str, str]) -> None:
    pair = ends(kinds)
    pair.sender.put("again", "bytes")
    metadata = pair.sender.put("again", "odd megabytes")
    assert pair.receiver.get("again", metadata)["what"] == expected("odd megabytes")
    assert pair.receiver.get("again") is None


def test_our_end_waits_for_what_the_in_tree_class_puts_later(ends: Callable[[Any], Ends]) -> None:
    pair = ends(("in-tree", "ours"))
    pair.receiver.tell("get", on="in", key="awaited", seconds=20)
    pair.sender.put("awaited", "many small tensors")
    assert pair.receiver.answer()["what"] == expected("many small tensors")
    assert pair.receiver.get("never", seconds=0.1) is None


def test_two_in_tree_receivers_share_our_sender(
    ends: Callable[[Any], Ends], stages: Callable[[], Stage]
) -> None:
    pair = ends(("ours", "in-tree"))
    second = stages()
    names = list(OBJECTS)
    metadata = [pair.sender.put(f"n{i}", name) for i, name in enumerate(names)]
    second.receiver("in-tree", metadata[0]["source_port"])
    receivers = (pair.receiver, second)
    for i in range(0, len(names) - 1, 2):
        for j, receiver in enumerate(receivers):
            receiver.tell("get", on="in", key=f"n{i + j}", metadata=metadata[i + j])
        for j, receiver in enumerate(receivers):
            assert receiver.answer()["what"] == expected(names[i + j])


@each_way
def test_our_pool_is_whole_again(ends: Callable[[Any], Ends], kinds: tuple[str, str]) -> None:
    """Runs after the tests above, over the connectors that they used."""
    pair = ends(kinds)
    stage, on = (pair.sender, "out") if kinds[0] == "ours" else (pair.receiver, "in")
    for key in ("n12", "e"):
        pair.sender.ask("cleanup", on="out", key=key)
    eventually(lambda: stage.ask("health", on=on)["pool"]["used_bytes"] == 0, "pool whole again")


# --------------------------------------------------------------------------- restarts
@each_way
def test_a_restarted_sender_on_the_same_port(
    stages: Callable[[], Stage], ports: PortBlock, kinds: tuple[str, str]
) -> None:
    port = ports.base + 6
    old, receiver = stages(), stages()
    old.sender(kinds[0], port)
    receiver.receiver(kinds[1], port)
    old.put("before", "bytes")
    assert receiver.get("before", seconds=20) if kinds[1] == "ours" else receiver.get("before")
    lost = old.put("lost", "bytes")
    old.kill()
    eventually(lambda: _is_free(port), "the port is free again")
    new = stages()
    new.sender(kinds[0], port)
    metadata = new.put("after", "hidden states")
    assert receiver.get("after", metadata)["what"] == expected("hidden states")
    assert receiver.get("lost", lost) is None
    new.put("queried", "struct")
    assert receiver.get("queried")["what"] == expected("struct")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@each_way
def test_a_restarted_receiver(stages: Callable[[], Stage], ports: PortBlock, kinds: tuple[str, str]) -> None:
    port = ports.base + 7
    sender, old = stages(), stages()
    sender.sender(kinds[0], port)
    old.receiver(kinds[1], port)
    first = sender.put("first", "big tensor")
    assert old.get("first", first)["what"] == expected("big tensor")
    kept = sender.put("kept", "big tensor")
    old.kill()
    new = stages()
    new.receiver(kinds[1], port)
    assert new.get("kept", kept)["what"] == expected("big tensor")


@pytest.mark.parametrize("kinds", [("in-tree", "ours", "in-tree"), ("ours", "in-tree", "ours")], ids="-".join)
def test_a_sender_is_exchanged_for_the_other_kind_and_back(
    stages: Callable[[], Stage], ports: PortBlock, kinds: tuple[str, ...]
) -> None:
    port = ports.base + 8
    receivers = {kind: stages() for kind in ("ours", "in-tree")}
    for turn, kind in enumerate(kinds):
        eventually(lambda: _is_free(port), "the port is free")
        sender = stages()
        sender.sender(kind, port)
        if not turn:
            for name, stage in receivers.items():
                stage.receiver(name, port)
        for name, stage in receivers.items():
            key = f"{turn}-{name}"
            metadata = sender.put(key, "struct")
            assert stage.get(key, metadata)["what"] == expected("struct")
            sender.put(key, "bytes")
            waiting = {"seconds": 20} if name == "ours" else {}  # the in-tree class can only ask
            assert stage.get(key, **waiting)["what"] == expected("bytes")
        receivers["ours"].tell("get", on="in", key=f"{turn}-late", seconds=20)
        sender.put(f"{turn}-late", "images")
        assert receivers["ours"].answer()["what"] == expected("images")
        sender.kill()


@pytest.mark.parametrize("victim", ["control", "worker"])
def test_an_in_tree_receiver_outlives_our_processes(
    stages: Callable[[], Stage], ports: PortBlock, victim: str
) -> None:
    port = ports.base + 9
    sender, receiver = stages(), stages()
    sender.sender("ours", port)
    receiver.receiver("in-tree", port)
    first = sender.put("first", "bytes")
    assert receiver.get("first", first)["what"] == expected("bytes")
    kept = sender.put("kept", "hidden states")
    health = sender.ask("health", on="out")
    report = health["sender"]["control"] if victim == "control" else health["sender"]["workers"][0]
    os.kill(report["pid"], signal.SIGKILL)
    eventually(lambda: state_of(report["pid"]) == "", "killed")
    assert receiver.get("kept", kept)["what"] == expected("hidden states")
