"""Whole connectors over GPU memory: stages, control processes, workers; the bytes that arrive, and where."""

from __future__ import annotations

import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from connector_support import Background, eventually, short_directory
from engine_host import pattern
from engine_rig import MB, EngineHost, GpuStage, Machine, Rig, get_rig, rig_names
from wire_peers import V1Client, V1Sender

from mori_mp import codec
from mori_mp.shared.errors import EngineUnavailable, StartupError

CONFIG: dict[str, Any] = {
    "host": "127.0.0.1",
    "memory_pool_size": 8 * MB,
    "host_pool_size": 4 * MB,
    "num_transfer_workers": 1,
    "prefault": False,
    "pin": "off",
    "restart_limit": 1000,
    "prestart": False,
}
DELIVERIES = {"offer": "auto", "landing": "landing"}
"""How a GPU payload comes: copied by its receiver from the sender's pool, or written by a worker."""

Starter = Callable[..., EngineHost]
_numbers = count()
deliveries = pytest.mark.parametrize("delivery", DELIVERIES.values(), ids=DELIVERIES)


def crc(seed: int, size: int) -> int:
    return zlib.crc32(pattern(seed, size))


class Stages:
    """Stage processes of one rig that end together."""

    def __init__(self, rig: Rig, blocks: Path, runtime: Path) -> None:
        self.rig = rig
        self._blocks = blocks
        self._runtime = runtime
        self._made: list[GpuStage] = []

    def bare(self, **environment: str) -> GpuStage:
        """Start a stage process without a connector yet."""
        stage = GpuStage(self.rig, self._blocks / f"stage-{next(_numbers)}", self._runtime, **environment)
        self._made.append(stage)
        return stage

    def make(self, device: int, **config: Any) -> tuple[GpuStage, int]:
        """Make a stage with its pool on the sender's (0) or the receiver's (1) device; returns its port."""
        stage = self.bare()
        settings = {**CONFIG, "backend_type": self.rig.engine, **config}
        return stage, stage("make", settings, self.rig.devices[device])

    def pair(self, **config: Any) -> tuple[GpuStage, GpuStage]:
        sender, port = self.make(0, role="sender", zmq_port=0, stage_id=0, **config)
        upstream = {"sender_host": "127.0.0.1", "sender_zmq_port": port}
        receiver, _ = self.make(
            1, role="receiver", stage_id=1, from_stage=0, to_stage=1, **upstream, **config
        )
        return sender, receiver

    def end(self) -> None:
        for stage in self._made:
            stage.end()


# Not the emulated xgmi: its wheel is for CPython 3.10, without torch, so no stage of it can receive. Not in
# one group, as engine tests are: stages are processes of their own, in which nothing is shared.
@pytest.fixture(scope="module", params=[name for name in rig_names() if name not in ("shm", "xgmi")])
def stages_rig(request: pytest.FixtureRequest, machine: Machine) -> Rig:
    return get_rig(machine, request.param)


@pytest.fixture
def stages(stages_rig: Rig, blocks: Path) -> Iterator[Stages]:
    with short_directory() as runtime:
        stages = Stages(stages_rig, blocks, runtime)
        yield stages
        stages.end()


@pytest.fixture
def held_stages(cuda_ipc_rig: Rig, blocks: Path) -> Iterator[Stages]:
    """Stages over the emulated runtime, which can hold copies back and have them fail."""
    with short_directory() as runtime:
        stages = Stages(cuda_ipc_rig, blocks, runtime)
        yield stages
        stages.end()


@pytest.fixture(scope="module", params=DELIVERIES.values(), ids=DELIVERIES)
def shared_stages(
    request: pytest.FixtureRequest, stages_rig: Rig, blocks: Path
) -> Iterator[tuple[GpuStage, GpuStage]]:
    with short_directory() as runtime:
        stages = Stages(stages_rig, blocks, runtime)
        yield stages.pair(delivery=request.param)
        stages.end()


def children(stage: GpuStage, role: str) -> list[psutil.Process]:
    """List the stage's control process or its workers."""
    found = []
    for child in psutil.Process(stage.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # a zombie is one, too
            if role in child.cmdline():
                found.append(child)
    return found


def used(stage: GpuStage, pool: str = "device_pool") -> int:
    return int(stage("health")[pool]["used_bytes"])


def begin_held_copy(receiver: GpuStage, metadata: dict[str, Any]) -> None:
    """Have a receiver get "k", and return when its GPU is asked to copy, which it does not yet."""
    receiver.block["hold"] = 1
    receiver.ask("get", "k", metadata, 30.0)
    eventually(lambda: receiver.block["copies"] > 0, "copy begun")


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


@deliveries
def test_a_payload_is_read_after_its_copy(held_stages: Stages, delivery: str) -> None:
    """put() waits for nothing; whoever reads the pool waits for the event."""
    sender, receiver = held_stages.pair(delivery=delivery)
    sender("tensor", "x", 6, 50_000)
    sender.block["hold"] = 1
    _, _, metadata = sender("put", "k", "x")
    assert receiver("get", "k", metadata, 0.3) is None
    sender.block["hold"] = 0
    found = receiver("get", "k", metadata, 10.0)
    assert found == {"size": 50_000, "digest": crc(6, 50_000), "on_device": True}


@pytest.mark.parametrize(("delivery", "wrote"), [("auto", False), ("landing", True)])
def test_who_moves_the_bytes(stages: Stages, delivery: str, wrote: bool) -> None:
    sender, receiver = stages.pair(delivery=delivery)
    sender("tensor", "x", 19, 50_000)
    _, _, metadata = sender("put", "k", "x")
    assert receiver("get", "k", metadata, 10.0)["digest"] == crc(19, 50_000)
    assert (sender("health")["sender"]["counters"]["landed"] == 1) is wrote
    assert (receiver("health")["receiver"]["counters"]["lease"] == 1) is not wrote


def test_a_copy_under_way_keeps_its_source(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair()
    sender("tensor", "x", 20, MB)
    _, _, metadata = sender("put", "k", "x")
    begin_held_copy(receiver, metadata)
    sender("cleanup", "k")
    eventually(lambda: sender("health")["sender"]["claimed"] == 1, "kept for the claim")
    assert used(sender) == MB
    receiver.block["hold"] = 0
    assert receiver.answer()["digest"] == crc(20, MB)
    eventually(lambda: used(sender) == 0, "slot free")


def test_a_receiver_killed_in_its_copy_takes_nothing_along(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair()
    sender("tensor", "x", 21, MB)
    _, _, metadata = sender("put", "k", "x")
    begin_held_copy(receiver, metadata)
    receiver.end()
    successor, _ = held_stages.make(1, role="receiver", stage_id=1)
    assert successor("get", "k", metadata, 20.0)["digest"] == crc(21, MB)
    eventually(lambda: used(sender) == 0, "slot free")


def test_a_released_slot_waits_for_its_readers(held_stages: Stages) -> None:
    """What reads a buffer may still be enqueued when its owner lets go of it."""
    sender, receiver = held_stages.pair()
    sender("tensor", "x", 22, MB)
    _, _, metadata = sender("put", "k", "x")
    assert receiver("get", "k", metadata, 10.0)["digest"] == crc(22, MB)
    receiver.block["hold"] = 1
    receiver("read_later", "k")
    receiver("release", "k")
    assert used(receiver) == MB
    receiver.block["hold"] = 0
    eventually(lambda: used(receiver) == 0, "slot free")


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


# ------------------------------------------------------------- copies that are late, fail, or outlive a pool
def test_a_withdrawn_slot_waits_for_its_copy(held_stages: Stages) -> None:
    """put()'s own copy is still to land in it."""
    sender, _ = held_stages.pair()
    sender("tensor", "x", 60, MB)
    sender.block["hold"] = 1
    sender("put", "k", "x")
    sender("cleanup", "k")
    eventually(lambda: sender("health")["sender"]["ledger"]["counters"]["withdrawn"] == 1, "withdrawn")
    eventually(lambda: sender("health")["pool"]["published"] == 0, "freed by the control process")
    assert used(sender) == MB
    sender.block["hold"] = 0
    eventually(lambda: used(sender) == 0, "slot free")


def test_a_closed_pool_is_read_by_nobody(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair()
    sender("tensor", "x", 61, MB)
    for key in ("first", "second"):
        sender("put", key, "x")
    assert receiver("get", "first", None, 10.0)["digest"] == crc(61, MB)  # the pool is mapped now
    eventually(lambda: receiver("health")["queues"]["ready_notices"] == 1, "second announced")
    sender("close")
    assert receiver("get", "second", None, 0.5) is None


def test_a_pool_that_is_closed_under_a_copy_stays(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair()
    sender("tensor", "x", 62, MB)
    _, _, metadata = sender("put", "k", "x")
    begin_held_copy(receiver, metadata)
    sender("close")
    sender("reuse_memory", 8 * MB)
    receiver.block["hold"] = 0
    assert receiver.answer()["digest"] == crc(62, MB)


def test_an_object_waits_for_its_tensors_over_several_gets(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair(tensor_device="pool")
    sender("tensor", "a", 63, 100_000)
    sender.block["hold"] = 1
    sender("put_object", "k", ["a"])
    assert receiver("get", "k", None, 0.3) is None
    assert receiver("get", "k", None, 0.1) is None
    sender.block["hold"] = 0
    assert receiver("get", "k", None, 10.0)["digests"] == [crc(63, 100_000)]
    sender("collect")
    eventually(lambda: used(sender) == used(receiver) == used(sender, "pool") == 0, "slots free")


def test_an_object_waits_for_room_for_its_tensors(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair(tensor_device="pool")
    for name, seed, size in (("large", 64, 6 * MB), ("a", 65, MB), ("b", 66, 3 * MB)):
        sender("tensor", name, seed, size)
    sender("put", "large", "large")
    assert receiver("get", "large", None, 10.0)["size"] == 6 * MB
    sender("collect")
    eventually(lambda: used(sender) == 0, "slots free")
    sender("put_object", "k", ["a", "b"])  # the first has room, the second has not
    assert receiver("get", "k", None, 0.3) is None
    receiver("release", "large")
    assert receiver("get", "k", None, 10.0)["digests"] == [crc(65, MB), crc(66, 3 * MB)]


def test_a_failed_write_of_a_tensor_costs_no_object(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair(tensor_device="pool", delivery="landing")
    sender("tensor", "a", 67, MB)
    sender("put_object", "k", ["a"])
    sender.block["fail_copy"] = 1
    assert receiver("get", "k", None, 10.0)["digests"] == [crc(67, MB)]


def test_an_object_put_again_replaces_its_tensors_too(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair(tensor_device="pool")
    sender("tensor", "a", 68, MB)
    for _ in range(20):  # in a pool of 8 MiB
        assert sender("put_object", "k", ["a"])[0]
    eventually(lambda: used(sender) == MB, "replaced tensors gone")
    assert receiver("get", "k", None, 10.0)["digests"] == [crc(68, MB)]


def test_an_object_whose_tensors_are_gone_is_a_miss(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair(tensor_device="pool")
    sender("tensor", "a", 69, MB)
    sender.block["hold"] = 1
    sender("put_object", "k", ["a"])
    assert receiver("get", "k", None, 0.3) is None  # it has the object now, and waits for the tensor
    sender("cleanup", "k")
    eventually(lambda: sender("health")["sender"]["ledger"]["counters"]["withdrawn"] == 1, "withdrawn")
    sender.block["hold"] = 0
    assert receiver("get", "k", None, 1.0) is None
    assert receiver("health")["receiver"]["counters"]["corrupt"] == 0


def test_a_payload_that_cannot_be_had_is_not_asked_for_without_pause(held_stages: Stages) -> None:
    sender, port = held_stages.make(0, role="sender", zmq_port=0, stage_id=0)
    upstream = {"sender_host": "127.0.0.1", "sender_zmq_port": port, "from_stage": 0, "to_stage": 1}
    receiver, _ = held_stages.make(1, role="receiver", stage_id=1, memory_pool_size=MB, **upstream)
    sender("tensor", "x", 70, 2 * MB)
    sender("put", "k", "x")
    assert receiver("get", "k", None, 1.5) is None
    assert 1 <= receiver("health")["receiver"]["counters"]["pool_exhausted"] < 100


def test_a_worker_tries_again_to_reach_a_receiver(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair(delivery="landing")
    sender("tensor", "x", 71, MB)
    sender.block["fail_ipc_open"] = 1
    sender("put", "k", "x")
    assert receiver("get", "k", None, 0.5) is None
    assert sender("health")["sender"]["counters"]["failed_writes"] < 100
    sender.block["fail_ipc_open"] = 0
    assert receiver("get", "k", None, 10.0)["digest"] == crc(71, MB)


def test_a_failed_event_costs_no_slot(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair()
    sender("tensor", "x", 72, MB)
    sender("put", "k", "x")
    assert receiver("get", "k", None, 10.0)["digest"] == crc(72, MB)
    receiver.block["hold"] = 1
    receiver("read_later", "k")
    receiver("release", "k")
    receiver.block["fail_event"] = 1
    receiver.block["hold"] = 0
    eventually(lambda: used(receiver) == 0, "slot free")


def test_a_put_that_the_gpu_refuses_is_told_and_costs_nothing(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair()
    sender("tensor", "x", 73, MB)
    sender.block["fail_copy"] = 1
    assert sender("put", "k", "x") == [False, 0, None]
    health = sender("health")
    assert (health["errors"], health["faults"]["counts"]) == (1, {"gpu_failed": 1})
    eventually(lambda: used(sender) == 0, "slot free")
    assert sender("put", "k", "x")[0]
    assert receiver("get", "k", None, 10.0)["digest"] == crc(73, MB)


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
    with short_directory() as runtime:
        stages = Stages(mori_rig, blocks, runtime)
        yield stages
        stages.end()


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
