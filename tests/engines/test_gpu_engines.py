"""What engines over GPU memory must do besides the contract: borrowed pools, events, failing runtimes."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest
from engine_host import pattern
from engine_rig import MB, EngineHost, Rig

from mori_mp.shared.errors import EngineUnavailable, TransferFailed, WireError
from mori_mp.workers.engines.base import EngineBroken
from mori_mp.workers.engines.cuda_ipc import GpuMemoryDescriptor
from mori_mp.workers.engines.liveness import start_time

_SENT, _OLD = pattern(1, MB), pattern(0, MB)


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def borrowing_pair(rig: Rig, start, events: int = 4, offset: int = 0) -> tuple[EngineHost, EngineHost]:
    """Start a stage that lends its filled memory, and a worker with an engine over it."""
    stage, worker = start(rig), start(rig)
    stage.memory(MB, offset=offset)
    stage("fill", 1)
    worker("borrow", stage("lend", events))
    worker("load", rig.engine, rig.options)
    return stage, worker


# ------------------------------------------------------------------------------ borrowed pools
@pytest.mark.parametrize("offset", [0, 8192 + 512])
def test_a_worker_writes_from_the_pool_it_borrowed(gpu_rig: Rig, start, offset: int) -> None:
    _, worker = borrowing_pair(gpu_rig, start, offset=offset)
    receiver = start(gpu_rig)
    worker("add_peer", 1, *receiver.become_receiver(MB))
    worker("write", 1, [4096], [0], [MB - 4096])
    assert receiver("peek", 0, MB) == _SENT[4096:] + _OLD[MB - 4096 :]


def test_pools_are_whole_after_a_worker_was_killed_in_a_write(gpu_rig: Rig, start) -> None:
    stage, worker = borrowing_pair(gpu_rig, start)
    receiver = start(gpu_rig)
    descriptors = receiver.become_receiver(MB)
    worker("add_peer", 1, *descriptors)
    worker.block["hold"] = 1
    worker("submit", 1, [0], [0], [MB])
    worker.kill()
    assert stage("peek", 0, MB) == _SENT
    receiver("fill", 0)
    successor = start(gpu_rig)
    successor("borrow", stage("lend", 1))
    successor("load", gpu_rig.engine, gpu_rig.options)
    successor("add_peer", 1, *descriptors)
    successor("write", 1, [0], [0], [MB])
    assert receiver("peek", 0, MB) == _SENT


def test_a_borrowed_pool_is_given_back(emulated_rig: Rig, start) -> None:
    _, worker = borrowing_pair(emulated_rig, start)
    opened = worker.block["ipc_opened"]
    worker("close_engine")
    worker("give_back")
    worker("give_back")  # twice is fine
    assert worker.block["ipc_closed"] == opened
    assert worker.stop() == 0


def test_borrowed_memory_is_nobodys_to_receive_into(emulated_rig: Rig, start) -> None:
    stage, worker = start(emulated_rig), start(emulated_rig)
    stage.memory(MB)
    worker("borrow", stage("lend", 0))
    with pytest.raises(EngineUnavailable, match="expandable_segments:False"):
        worker("receive", emulated_rig.engine, emulated_rig.options)


def test_a_pool_of_a_stage_that_is_gone_cannot_be_borrowed(emulated_rig: Rig, start) -> None:
    stage, worker = start(emulated_rig), start(emulated_rig)
    stage.memory(MB)
    descriptor = stage("lend", 1)
    stage.kill()
    with pytest.raises(EngineUnavailable, match="cannot be imported: hipIpcOpenMemHandle failed"):
        worker("borrow", descriptor)


def test_a_pool_on_a_hidden_gpu_cannot_be_borrowed(emulated_rig: Rig, start) -> None:
    stage, worker = start(emulated_rig), start(emulated_rig, HIP_VISIBLE_DEVICES="1")
    stage.memory(MB, device=0)
    with pytest.raises(EngineUnavailable, match=r"0000:c1:00.0 is not visible .* HIP_VISIBLE_DEVICES"):
        worker("borrow", stage("lend", 1))


@pytest.mark.parametrize("descriptor", [b"", b"\xc1", b"\x9a" + b"\x00" * 10])
def test_nonsense_for_a_pool_descriptor(emulated_rig: Rig, start, descriptor: bytes) -> None:
    with pytest.raises(WireError):
        start(emulated_rig)("borrow", descriptor)


# -------------------------------------------------------------------------------------- events
def test_a_write_waits_for_the_event_behind_the_stages_copy(emulated_rig: Rig, start) -> None:
    stage, worker = borrowing_pair(emulated_rig, start)
    receiver = start(emulated_rig)
    worker("add_peer", 1, *receiver.become_receiver(MB))
    stage.block["hold"] = 1
    stage("put", 2, 4096, b"new" * 1000)
    waiting = worker("submit", 1, [4096], [0], [3000], 2)
    ready = worker("submit", 1, [0], [8192], [100], 1)  # an event that was never recorded holds up nothing
    worker("finish", ready)
    assert not worker("poll", waiting)
    assert receiver("peek", 0, MB) == _OLD[:8192] + _SENT[:100] + _OLD[8292:]
    stage.block["hold"] = 0
    worker("finish", waiting)
    assert receiver("peek", 0, 3000) == b"new" * 1000
    worker("write", 1, [4096], [0], [3000])
    assert worker("close_engine") < 2


def test_event_ordered_puts(gpu_rig: Rig, start) -> None:
    """Without holding anything back: what arrives is always the newest put."""
    stage, worker = borrowing_pair(gpu_rig, start)
    receiver = start(gpu_rig)
    worker("add_peer", 1, *receiver.become_receiver(MB))
    for number in range(40):
        data = pattern(number, 60_000)
        stage("put", number % 4, 65536 * (number % 4), data)
        ticket = worker("submit", 1, [65536 * (number % 4)], [0], [60_000], number % 4)
        worker("finish", ticket)
        assert receiver("peek", 0, 60_000) == data


def test_a_write_whose_event_never_comes_can_be_abandoned(emulated_rig: Rig, start) -> None:
    stage, worker = borrowing_pair(emulated_rig, start)
    receiver = start(emulated_rig)
    worker("add_peer", 1, *receiver.become_receiver(MB))
    stage.block["hold"] = 1
    stage("put", 0, 0, b"x" * 100)
    worker("submit", 1, [0], [0], [100], 0)
    stage.kill()  # nobody will ever record it
    worker("forget_transfers")
    assert worker("close_engine") < 3
    assert worker.stop() == 0
    assert receiver("peek", 0, MB) == _OLD


# ------------------------------------------------------------------------------------ failures
def test_a_copy_that_cannot_be_enqueued(emulated_rig: Rig, start) -> None:
    sender, receiver = start(emulated_rig), start(emulated_rig)
    sender.become_sender(MB)
    sender("add_peer", 1, *receiver.become_receiver(MB))
    sender.block["fail_copy"] = 1
    with pytest.raises(TransferFailed, match="invalid argument"):
        sender("write", 1, [0], [0], [MB])
    sender("write", 1, [0], [0], [MB])
    assert receiver("peek", 0, MB) == _SENT


def test_a_half_enqueued_write_fails_when_its_copies_have_ended_not_before(emulated_rig: Rig, start) -> None:
    sender, receiver = start(emulated_rig), start(emulated_rig)
    sender.become_sender(MB)
    sender("add_peer", 1, *receiver.become_receiver(MB))
    sender.block["hold"] = 1
    sender.block["fail_copy"] = 3
    number = sender("submit", 1, [0, 100, 9000], [0, 50_000, 90_000], [10, 20, 30])
    queries, waits = sender.block["event_queries"], sender.block["device_waits"]
    sender.ask("finish", number)
    until(lambda: sender.block["event_queries"] > queries + 50 or sender.block["device_waits"] > waits)
    assert receiver("peek", 0, MB) == _OLD
    sender.block["hold"] = 0
    with pytest.raises(TransferFailed, match="invalid argument"):
        sender.answer()
    expected = bytearray(_OLD)  # the two that were enqueued had landed when the failure was told
    expected[0:10], expected[50_000:50_020] = _SENT[0:10], _SENT[100:120]
    assert receiver("peek", 0, MB) == bytes(expected)
    sender("write", 1, [0], [0], [MB])


def test_a_fault_during_a_copy(emulated_rig: Rig, start) -> None:
    sender, receiver = start(emulated_rig), start(emulated_rig)
    sender.become_sender(MB)
    sender("add_peer", 1, *receiver.become_receiver(MB))
    sender.block["fail_event"] = 700
    broken = EngineBroken if emulated_rig.engine == "cuda_ipc" else TransferFailed
    with pytest.raises(broken, match="illegal memory access"):
        sender("write", 1, [0], [0], [MB])
    assert sender("close_engine") < 2
    assert sender.stop() == 0


def test_a_receiver_that_cannot_be_mapped(emulated_rig: Rig, start) -> None:
    sender, receiver = start(emulated_rig), start(emulated_rig)
    sender.become_sender(MB)
    descriptors = receiver.become_receiver(MB)
    sender.block["fail_ipc_open"] = 205
    with pytest.raises(EngineUnavailable, match=r"cannot be mapped|has no way"):
        sender("add_peer", 1, *descriptors)
    sender.block["fail_ipc_open"] = 0
    sender("add_peer", 1, *descriptors)
    sender("write", 1, [0], [0], [MB])
    assert receiver("peek", 0, MB) == _SENT


def test_memory_that_cannot_be_exported(emulated_rig: Rig, start) -> None:
    receiver = start(emulated_rig)
    receiver.memory(MB)
    receiver.block["fail_ipc_export"] = 1
    with pytest.raises(EngineUnavailable, match="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"):
        receiver("receive", emulated_rig.engine, emulated_rig.options)
    with pytest.raises(EngineUnavailable, match="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"):
        receiver("lend", 1)


def test_stages_that_see_one_gpu_each(emulated_rig: Rig, start) -> None:
    sender, receiver = start(emulated_rig), start(emulated_rig, HIP_VISIBLE_DEVICES="1")
    sender.become_sender(MB)
    receiver.memory(MB, device=0)  # its only one; the node's second
    receiver("fill", 0)
    sender("add_peer", 1, *receiver("receive", emulated_rig.engine, emulated_rig.options))
    sender("write", 1, [0], [0], [MB])
    assert receiver("peek", 0, MB) == _SENT


def test_an_engine_is_useless_in_a_forked_child(emulated_rig: Rig, start) -> None:
    sender, receiver = start(emulated_rig), start(emulated_rig)
    sender.become_sender(MB)
    sender("add_peer", 1, *receiver.become_receiver(MB))
    assert "does not survive fork()" in sender("submit_in_fork", 1)
    sender("write", 1, [0], [0], [MB])
    assert receiver("peek", 0, MB) == _SENT


def test_a_receiver_in_the_senders_own_process(emulated_rig: Rig, start) -> None:
    host = start(emulated_rig)
    host.become_sender(MB)
    host("add_peer", 1, *host("receive", emulated_rig.engine, emulated_rig.options))
    host("write", 1, [0], [MB // 2], [MB // 2])
    assert host("peek", 0, MB) == _SENT[: MB // 2] * 2


# ------------------------------------------------------------------------------ cuda_ipc alone
def test_gpus_without_a_way_between_them(cuda_ipc_rig: Rig, start) -> None:
    sender, receiver = start(cuda_ipc_rig), start(cuda_ipc_rig)
    sender.block["no_peer_access"] = 1
    sender.become_sender(MB)
    descriptors = receiver.become_receiver(MB)
    with pytest.raises(EngineUnavailable, match="no peer access"):
        sender("add_peer", 1, *descriptors)


def test_a_descriptor_that_claims_more_than_the_allocation(cuda_ipc_rig: Rig, start) -> None:
    sender, receiver = start(cuda_ipc_rig), start(cuda_ipc_rig)
    sender.become_sender(MB)
    engine_desc, mem_desc = receiver.become_receiver(MB)
    honest = GpuMemoryDescriptor.unpack(mem_desc)
    boastful = msgspec.structs.replace(honest, allocation_size=2 * MB, size=2 * MB)
    with pytest.raises(WireError, match="impossible memory descriptor"):
        sender("add_peer", 1, engine_desc, msgspec.msgpack.encode(boastful))
    assert sender.block["ipc_closed"] == sender.block["ipc_opened"]
    claims_to_be_us = msgspec.structs.replace(honest, pid=sender.pid, started=start_time(sender.pid))
    with pytest.raises(WireError, match="impossible memory descriptor"):
        sender("add_peer", 1, engine_desc, msgspec.msgpack.encode(claims_to_be_us))
    sender("add_peer", 1, engine_desc, mem_desc)


def test_descriptors_of_elsewhere(cuda_ipc_rig: Rig, start) -> None:
    sender, receiver = start(cuda_ipc_rig), start(cuda_ipc_rig)
    sender.become_sender(MB)
    engine_desc, mem_desc = receiver.become_receiver(MB)
    honest = GpuMemoryDescriptor.unpack(mem_desc)
    for field, value, said in (
        ("host_id", "elsewhere", "another host"),
        ("kind", "cuda", "cuda memory"),
        ("started", honest.started - 1, "new owner"),
    ):
        changed = msgspec.structs.replace(honest, **{field: value})
        with pytest.raises(EngineUnavailable, match=said):
            sender("add_peer", 1, engine_desc, msgspec.msgpack.encode(changed))
