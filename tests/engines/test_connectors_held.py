"""Whole connectors over the emulated runtime, whose copies are late, fail, or outlive a pool."""

from __future__ import annotations

import ctypes
import signal
from typing import Any

from connector_support import eventually
from engine_rig import MB, GpuStage
from engine_stages import Stages, crc, deliveries, used


def begin_held_copy(receiver: GpuStage, metadata: dict[str, Any]) -> None:
    """Have a receiver get "k", and return when its GPU is asked to copy, which it does not yet."""
    receiver.block["hold"] = 1
    receiver.ask("get", "k", metadata, 30.0)
    eventually(lambda: receiver.block["copies"] > 0, "copy begun")


def give_up_in_the_copy(receiver: GpuStage, metadata: dict[str, Any]) -> None:
    """Have a receiver get "k", and give it up when its GPU has been asked to copy, which it does not yet."""
    receiver.block["hold"] = 1

    def given_up() -> bool:
        assert receiver("get", "k", metadata, 0.3) is None
        return receiver.block["copies"] > 0  # else it has not come so far in time

    eventually(given_up, "copy begun")


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


def test_a_copy_that_does_not_end_keeps_the_deadline_and_both_ends(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair()
    sender("tensor", "x", 24, MB)
    _, _, metadata = sender("put", "k", "x")
    give_up_in_the_copy(receiver, metadata)
    assert (used(sender), used(receiver)) == (MB, MB)
    receiver.block["hold"] = 0
    eventually(lambda: used(receiver) == 0, "slot free")
    assert receiver("get", "k", metadata, 10.0)["digest"] == crc(24, MB)
    receiver("release", "k")
    eventually(lambda: (sender("collect"), used(sender) == 0)[1], "settled")


def test_a_copy_is_over_before_an_interrupt_lets_go_of_its_slot(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair()
    sender("tensor", "x", 26, 50_000)
    sender("put", "k", "x")
    receiver.block["hold"] = 1
    receiver.ask("get_until_interrupted", "k", 50_000)
    eventually(lambda: receiver.block["copies"] > 0, "copy begun")
    # For its main thread: another one could take it long after the copy is over.
    assert ctypes.CDLL(None).tgkill(receiver.pid, receiver.pid, signal.SIGINT) == 0
    queries = -1

    def interrupted() -> bool:
        nonlocal queries
        before, queries = queries, receiver.block["event_queries"]
        return queries == before

    eventually(interrupted, "nobody asks any more whether the copy is over")
    receiver.block["hold"] = 0
    assert receiver.answer() == crc(26, 50_000)
    assert receiver("get", "k", None, 10.0)["digest"] == crc(26, 50_000)
    receiver("release", "k")
    eventually(lambda: (sender("collect"), used(sender) == used(receiver) == 0)[1], "slots free")


def test_a_receiver_that_closes_in_its_copy_keeps_its_memory(held_stages: Stages) -> None:
    sender, receiver = held_stages.pair()
    sender("tensor", "x", 25, MB)
    _, _, metadata = sender("put", "k", "x")
    give_up_in_the_copy(receiver, metadata)
    receiver("close")
    receiver("tensor", "mine", 71, 8 * MB)
    receiver.block["hold"] = 0
    receiver("tensor", "next", 72, MB)  # its copies run behind the late one
    assert receiver("digest_of", "mine") == crc(71, 8 * MB)


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

    def ledger() -> dict[str, dict[str, int]]:
        return dict(sender("health")["sender"]["ledger"])

    eventually(
        lambda: receiver("get", "k", None, 0.1) is None and ledger()["entries"]["published"] == 1,
        "it has the object, and waits for the tensor",
    )
    sender("cleanup", "k")
    eventually(lambda: ledger()["counters"]["withdrawn"] == 1, "withdrawn")
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
