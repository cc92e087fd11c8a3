"""Connectors over GPU memory with others at an end: the in-tree class, and workers of another interpreter."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from connector_support import Background, eventually
from engine_host import pattern
from engine_rig import MB, EngineHost, Rig
from engine_stages import CONFIG, Stages, crc, stages_of, used
from wire_peers import V1Client, V1Sender

from mori_mp import codec
from mori_mp.shared.errors import EngineUnavailable, StartupError

Starter = Callable[..., EngineHost]


# ------------------------------------------------------------------------------ the in-tree class
@pytest.mark.parametrize("size", [100, 3 * MB + 17])
def test_an_in_tree_receiver_gets_host_payloads_in_its_gpu_memory(
    stages: Stages, start: Starter, v1_client: Callable[[int], V1Client], size: int
) -> None:
    sender, port = stages.make(0, role="sender", zmq_port=0, stage_id=0)
    receiver = start(stages.rig)
    engine_desc, mem_desc = receiver.become_receiver(4 * MB)
    descriptors = {"engine_desc_packed": engine_desc, "mem_desc_packed": mem_desc}
    client = v1_client(port)
    for number in range(3):
        sender("put_bytes", f"k{number}", 25 + number, size)
        assert client.pull(f"k{number}@0_1", size, 4096 * number, **descriptors) == b"trans_done"
        assert receiver("peek", 4096 * number, size) == pattern(25 + number, size)
    sender("put_bytes", "k", 30, size)
    assert client.pull("k@0_1", size, 4 * MB - 50, **descriptors) == b"trans_error"  # outside its memory
    assert client.pull("k@0_1", size, 0, **descriptors) == b"trans_done"
    sender("collect")
    eventually(lambda: used(sender, "pool") == 0, "slots free")


def test_many_pulls_share_the_bounce_buffer(
    stages: Stages, start: Starter, v1_client: Callable[[int], V1Client]
) -> None:
    sender, port = stages.make(0, role="sender", zmq_port=0, stage_id=0, host_pool_size=32 * MB)
    receiver = start(stages.rig)
    engine_desc, mem_desc = receiver.become_receiver(16 * MB)
    descriptors = {"engine_desc_packed": engine_desc, "mem_desc_packed": mem_desc}
    size = 2 * MB - 1
    for number in range(8):
        sender("put_bytes", f"k{number}", 40 + number, size)
    clients = [v1_client(port) for _ in range(8)]
    pulls = [
        Background(lambda c=client, n=n: c.pull(f"k{n}@0_1", size, 2 * MB * n, **descriptors))
        for n, client in enumerate(clients)
    ]
    assert [pull.result() for pull in pulls] == [b"trans_done"] * 8
    for number in range(8):
        assert receiver("digests", [2 * MB * number], [size]) == [crc(40 + number, size)]


class InTreeGpuSender(V1Sender):
    """An in-tree sender whose pool is GPU memory, which an engine process has."""

    def __init__(self, engine: EngineHost) -> None:
        self._engine = engine
        self._numbers = count(1)
        super().__init__()

    def land(self, request: dict[str, Any], data: bytes) -> bool:
        peer = next(self._numbers)
        self._engine("add_peer", peer, request["engine_desc_packed"], request["mem_desc_packed"])
        self._engine("poke", 0, data)
        self._engine("write", peer, [0], [request["dst_offset"]], [len(data)])
        self._engine("drop_peer", peer)
        return True


def test_an_in_tree_sender_writes_everything_into_our_gpu_pool(stages: Stages, start: Starter) -> None:
    engine = start(stages.rig)
    engine.become_sender(MB)
    sender = InTreeGpuSender(engine)
    try:
        upstream = {"sender_host": "127.0.0.1", "sender_zmq_port": sender.port}
        receiver, _ = stages.make(1, role="receiver", stage_id=1, from_stage=0, to_stage=1, **upstream)
        sender.payloads["raw@0_1"] = pattern(50, 100_000), True
        found = receiver("get", "raw", None, 10.0)
        assert found == {"size": 100_000, "digest": crc(50, 100_000), "on_device": True}
        receiver("release", "raw")
        payload = {"numbers": [1], "host": torch.arange(3), "gpu": [torch.arange(256, dtype=torch.uint8)]}
        sender.payloads["object@0_1"] = codec.plan(payload).to_bytes(), False
        found = receiver("get", "object", None, 10.0)
        assert found["digests"] == [zlib.crc32(bytes(range(256)))]
        assert found["rest"] == [[1], [0, 1, 2]]
        eventually(lambda: used(receiver) == 0, "slots free")
    finally:
        sender.close()


# ------------------------------------------------------------------- workers of another interpreter
@pytest.fixture
def mori_stages(mori_rig: Rig, blocks: Path) -> Iterator[Stages]:
    with stages_of(mori_rig, blocks) as stages:
        yield stages


def test_workers_of_another_interpreter_have_the_mori_that_the_stage_lacks(
    mori_stages: Stages, start: Starter, v1_client: Callable[[int], V1Client]
) -> None:
    """A stage with torch and no Mori sends through workers with Mori and no torch, to a receiver of v1."""
    rig = mori_stages.rig
    sender, port = mori_stages.make(0, role="sender", zmq_port=0, stage_id=0, worker_python=rig.python)
    receiver = start(rig)
    engine_desc, mem_desc = receiver.become_receiver(MB)
    sender("tensor", "x", 24, 100_000)
    sender("put", "k", "x")
    client = v1_client(port)
    descriptors = {"engine_desc_packed": engine_desc, "mem_desc_packed": mem_desc}
    assert client.query("k@0_1") == {"request_id": "k@0_1", "data_size": 100_000, "is_fast_path": True}
    assert client.pull("k@0_1", 100_000, 4096, **descriptors) == b"trans_done"
    assert receiver("peek", 4096, 100_000) == pattern(24, 100_000)


def test_workers_of_an_interpreter_without_mori_say_what_is_missing(mori_stages: Stages) -> None:
    stage = mori_stages.bare()
    settings = {**CONFIG, "role": "sender", "zmq_port": 0, "stage_id": 0, "backend_type": "xgmi"}
    with pytest.raises(StartupError, match=r"Mori is not installed for .*pip install amd-mori"):
        stage("make", {**settings, "worker_python": sys.executable}, 0)


def test_a_stage_without_mori_cannot_receive_with_it(mori_stages: Stages) -> None:
    stage = mori_stages.bare()
    settings = {**CONFIG, "role": "receiver", "stage_id": 1, "backend_type": "xgmi"}
    with pytest.raises(EngineUnavailable, match="also in the interpreter of a stage that receives"):
        stage("make", {**settings, "worker_python": mori_stages.rig.python}, 0)
