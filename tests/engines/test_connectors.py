"""Whole connectors over GPU memory: stages, control processes, workers; the bytes that arrive, and where."""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from connector_support import eventually
from engine_host import pattern
from engine_rig import MB, GpuStage, Rig
from engine_stages import CONFIG, DELIVERIES, Stages, crc, deliveries, stages_of, used

from mori_mp.shared.errors import EngineUnavailable


@pytest.fixture(scope="module", params=DELIVERIES.values(), ids=DELIVERIES)
def shared_stages(
    request: pytest.FixtureRequest, stages_rig: Rig, blocks: Path
) -> Iterator[tuple[GpuStage, GpuStage]]:
    with stages_of(stages_rig, blocks) as stages:
        yield stages.pair(delivery=request.param)


def children(stage: GpuStage, role: str) -> list[psutil.Process]:
    """List the stage's control process or its workers."""
    found = []
    for child in psutil.Process(stage.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie is one, too
            if role in child.cmdline():
                found.append(child)
    return found


@pytest.mark.parametrize("size", [1, 4096, 100_001, 3 * MB])
@pytest.mark.parametrize("told", [True, False], ids=["metadata", "key alone"])
def test_a_gpu_tensor_arrives_on_the_receivers_gpu(
    shared_stages: tuple[GpuStage, GpuStage], size: int, told: bool
) -> None:
    sender, receiver = shared_stages
    key = f"tensor-{size}-{told}"
    sender("tensor", key, size, size)
    ok, put, metadata = sender("put", key, key)
    assert (ok, put, metadata["is_fast_path"]) == (True, size, True)
    found = receiver("get", key, metadata if told else None, 10.0)
    assert found == {"size": size, "digest": crc(size, size), "on_device": True}
    receiver("release", key)
    sender("collect")
    eventually(lambda: used(sender) == 0 and used(receiver) == 0, "slots free")


def test_complete_metadata_finds_a_gpu_payload_without_a_notice(stages: Stages) -> None:
    """A receiver that has never heard of the edge asks for a lease first, and is told where it lies."""
    sender, port = stages.make(0, role="sender", zmq_port=0, stage_id=0)
    sender("tensor", "x", 5, 70_000)
    _, _, metadata = sender("put", "k", "x")
    receiver, _ = stages.make(1, role="receiver", stage_id=1)
    assert metadata["source_port"] == port
    found = receiver("get_now", "k", metadata)
    assert found == {"size": 70_000, "digest": crc(5, 70_000), "on_device": True}


def test_host_payloads_never_touch_the_gpu_pools(shared_stages: tuple[GpuStage, GpuStage]) -> None:
    sender, receiver = shared_stages
    for size in (100, 300_000):
        _, _, metadata = sender("put_bytes", f"host-{size}", 3, size)
        assert used(sender) == 0
        found = receiver("get", f"host-{size}", metadata, 10.0)
        assert found == {"size": size, "digest": crc(3, size), "on_device": False}
        assert used(receiver) == 0
        receiver("release", f"host-{size}")


def test_a_strided_view_is_sent_in_order(shared_stages: tuple[GpuStage, GpuStage]) -> None:
    sender, receiver = shared_stages
    if sender.rig.holds:
        pytest.skip("torch makes the contiguous copy in memory that the emulated GPU does not have")
    sender("tensor", "strided", 8, 10_000)
    _, size, metadata = sender("put_view", "strided", "strided", 1, 3)
    expected = pattern(8, 10_000)[1::3]
    found = receiver("get", "strided", metadata, 10.0)
    assert found == {"size": size, "digest": zlib.crc32(expected), "on_device": True}
    receiver("release", "strided")


@pytest.mark.parametrize(("delivery", "wrote"), [("auto", False), ("landing", True)])
def test_who_moves_the_bytes(stages: Stages, delivery: str, wrote: bool) -> None:
    sender, receiver = stages.pair(delivery=delivery)
    sender("tensor", "x", 19, 50_000)
    _, _, metadata = sender("put", "k", "x")
    assert receiver("get", "k", metadata, 10.0)["digest"] == crc(19, 50_000)
    assert (sender("health")["sender"]["counters"]["landed"] == 1) is wrote
    assert (receiver("health")["receiver"]["counters"]["lease"] == 1) is not wrote


@deliveries
def test_a_worker_opens_the_gpu_pool_for_its_first_write(stages: Stages, delivery: str) -> None:
    """Not before, where receivers can read it: a GPU context takes memory."""
    if not stages.rig.holds:
        pytest.skip("only the memory of the emulated GPU shows in a process's maps")
    sender, receiver = stages.pair(delivery=delivery)

    def opened() -> bool:
        workers = children(sender, "worker")
        assert workers
        return any("memfd:hipemu" in region.path for worker in workers for region in worker.memory_maps())

    assert opened() is (delivery == "landing")
    sender("tensor", "x", 28, MB)
    for number in range(3):
        _, _, metadata = sender("put", f"k{number}", "x")
        assert receiver("get", f"k{number}", metadata, 10.0)["digest"] == crc(28, MB)
        receiver("release", f"k{number}")
    assert opened() is (delivery == "landing")
    other, _ = stages.make(1, role="receiver", stage_id=1, delivery="landing")
    _, _, metadata = sender("put", "k", "x")
    assert other("get", "k", metadata, 20.0)["digest"] == crc(28, MB)
    assert opened()


def test_more_puts_at_once_than_events(stages: Stages) -> None:
    sender, receiver = stages.pair()
    sender("tensor", "x", 7, 4096)
    metadata = {key: sender("put", key, "x")[2] for key in map(str, range(200))}
    for key, told in metadata.items():
        found = receiver("get", key, told, 10.0)
        assert found is not None
        assert found["digest"] == crc(7, 4096)
        receiver("release", key)


def test_cleanup_gives_the_slot_back(stages: Stages) -> None:
    sender, _ = stages.pair()
    sender("tensor", "x", 9, MB)
    sender("put", "k", "x")
    assert used(sender) == MB
    sender("cleanup", "k")
    eventually(lambda: used(sender) == 0, "slot free")


def test_a_full_pool_is_an_error_that_passes(stages: Stages) -> None:
    sender, receiver = stages.pair()
    sender("tensor", "x", 10, 5 * MB)
    _, _, metadata = sender("put", "first", "x")
    assert sender("put", "second", "x") == [False, 0, None]
    assert sender("health")["put_pool_exhausted"] == 1
    assert receiver("get", "first", metadata, 10.0)["digest"] == crc(10, 5 * MB)
    assert sender("put", "second", "x")[0]


def test_a_received_buffer_is_sent_on_without_a_copy(stages: Stages) -> None:
    first, port = stages.make(0, role="sender", zmq_port=0, stage_id=0)
    upstream = {"sender_host": "127.0.0.1", "sender_zmq_port": port, "from_stage": 0, "to_stage": 1}
    middle, onward = stages.make(1, role="dual", zmq_port=0, stage_id=1, **upstream)
    last, _ = stages.make(0, role="receiver", stage_id=2)
    first("tensor", "x", 11, MB)
    _, _, metadata = first("put", "k", "x")
    assert middle("get", "k", metadata, 10.0)["digest"] == crc(11, MB)
    _, _, metadata = middle("put_held", "k", "k", "1_2")
    assert metadata["source_port"] == onward
    assert used(middle) == MB
    middle("release", "k")
    assert last("get", "k", metadata, 10.0, "1_2") == {"size": MB, "digest": crc(11, MB), "on_device": True}


def test_a_receiver_without_a_gpu_pool_says_so(stages: Stages) -> None:
    sender, port = stages.make(0, role="sender", zmq_port=0, stage_id=0)
    host = {"memory_pool_device": "cpu", "backend_type": "shm"}
    receiver, _ = stages.make(1, role="receiver", stage_id=1, **host)
    sender("tensor", "x", 12, 4096)
    _, _, metadata = sender("put", "k", "x")
    assert metadata["source_port"] == port
    assert receiver("get_now", "k", metadata) is None
    health = receiver("health")
    assert health["receiver"]["counters"]["errors"] == 1
    assert "set memory_pool_device: cuda" in str(health["faults"])
    assert receiver("get_now", "k", metadata) is None  # and the payload is still there for one that can


@deliveries
@pytest.mark.parametrize("role", ["worker", "control"])
def test_a_killed_child_costs_no_payload(stages: Stages, role: str, delivery: str) -> None:
    sender, receiver = stages.pair(delivery=delivery)
    sender("tensor", "x", 13, 2 * MB)
    for number in range(3):
        if stages.rig.holds:
            sender.block["latency_us"] = 50_000
        _, _, metadata = sender("put", f"k{number}", "x")
        receiver.ask("get", f"k{number}", metadata, 20.0)
        for child in children(sender, role):
            os.kill(child.pid, signal.SIGKILL)
        assert receiver.answer() == {"size": 2 * MB, "digest": crc(13, 2 * MB), "on_device": True}
        receiver("release", f"k{number}")
        sender.block["latency_us"] = 0
        eventually(lambda: children(sender, role), "child back")


def test_a_stage_that_closes_leaves_nothing(stages: Stages) -> None:
    sender, receiver = stages.pair()
    sender("tensor", "x", 14, MB)
    _, _, metadata = sender("put", "k", "x")
    assert receiver("get", "k", metadata, 10.0)["digest"] == crc(14, MB)
    receiver("close")
    assert receiver("digest", "k") == crc(14, MB)  # a buffer in use outlives its connector
    receiver("release", "k")
    sender("close")
    for stage in (sender, receiver):
        eventually(lambda stage=stage: not psutil.Process(stage.pid).children(), "children gone")


@pytest.mark.parametrize("receiver_keeps", ["pool", "cpu"])
def test_gpu_tensors_in_objects_travel_by_themselves(stages: Stages, receiver_keeps: str) -> None:
    sender, port = stages.make(0, role="sender", zmq_port=0, stage_id=0, tensor_device="pool")
    receiver, _ = stages.make(1, role="receiver", stage_id=1, tensor_device=receiver_keeps)
    sender("tensor", "a", 15, 300_000)
    sender("tensor", "b", 16, 77)
    ok, size, metadata = sender("put_object", "k", ["a", "b"])
    assert metadata["source_port"] == port
    assert ok
    assert size < 1000  # without the tensors
    found = receiver("get", "k", metadata, 10.0)
    assert found["digests"] == [crc(15, 300_000), crc(16, 77)]
    assert found["rest"] == [[1, 2, 3], [0, 1, 2, 3, 4]]
    if not stages.rig.holds:  # a copy in memory that the emulated GPU does not have
        assert found["on_device"] == [receiver_keeps == "pool"] * 2
    sender("collect")
    eventually(lambda: used(sender) == used(receiver) == used(sender, "pool") == 0, "slots free")


def test_gpu_tensors_in_objects_come_back_on_the_host_by_default(stages: Stages) -> None:
    if stages.rig.holds:
        pytest.skip("torch does not know the emulated GPU's tensors from its own")
    sender, receiver = stages.pair()
    sender("tensor", "a", 17, 300_000)
    _, size, metadata = sender("put_object", "k", ["a"])
    assert size > 300_000
    assert used(sender) == 0
    found = receiver("get", "k", metadata, 10.0)
    assert found["digests"] == [crc(17, 300_000)]
    assert found["on_device"] == [False]


def test_cleanup_on_an_edge_takes_the_tensors_of_an_object_too(stages: Stages) -> None:
    sender, _ = stages.make(0, role="sender", zmq_port=0, stage_id=0, tensor_device="pool")
    sender("tensor", "a", 18, MB)
    sender("put_object", "k", ["a"])
    assert used(sender) == MB
    sender("cleanup", "k", "0", "1")
    eventually(lambda: used(sender) == used(sender, "pool") == 0, "slots free")


def test_gpus_are_told_apart_by_their_address_not_their_number(stages: Stages) -> None:
    """Each process sees one GPU, which is number 0 to it."""
    if stages.rig.devices[0] == stages.rig.devices[1]:
        pytest.skip("one GPU")
    variable = (
        "HIP_VISIBLE_DEVICES" if stages.rig.holds or "hip" in stages.rig.name else "CUDA_VISIBLE_DEVICES"
    )
    sender, receiver = (stages.bare(**{variable: str(device)}) for device in stages.rig.devices)
    settings = {**CONFIG, "backend_type": stages.rig.engine}
    sender("make", {**settings, "role": "sender", "zmq_port": 0, "stage_id": 0}, 0)
    receiver("make", {**settings, "role": "receiver", "stage_id": 1}, 0)
    sender("tensor", "x", 23, 200_000)
    _, _, metadata = sender("put", "k", "x")
    assert receiver("get", "k", metadata, 20.0)["digest"] == crc(23, 200_000)


def test_memory_that_cannot_be_exported_is_refused_with_the_cure(stages: Stages) -> None:
    if stages.rig.holds:
        stage = stages.bare()
        stage.block["fail_ipc_export"] = 1
    else:
        stage = stages.bare(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    settings = {**CONFIG, "backend_type": stages.rig.engine, "role": "sender", "zmq_port": 0, "stage_id": 0}
    with pytest.raises(EngineUnavailable, match="expandable_segments:False"):
        stage("make", settings, stages.rig.devices[0])
