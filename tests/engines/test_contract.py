"""What every transfer engine must do, run over every engine on every platform that this machine has."""

from __future__ import annotations

import random
import time
import zlib

import pytest
from engine_host import pattern
from engine_rig import MB, EngineHost, Rig

from mori_mp.shared.errors import EngineUnavailable, TransferFailed, WireError

Pair = tuple[EngineHost, EngineHost]
_SENT, _OLD = pattern(1, MB), pattern(0, MB)


def pair_of(rig: Rig, start) -> Pair:
    sender, receiver = start(rig), start(rig)
    sender.become_sender(MB)
    sender("add_peer", 1, *receiver.become_receiver(MB))
    return sender, receiver


def need_hold(rig: Rig) -> None:
    if not rig.holds:
        pytest.skip("copies cannot be held back here")


# ------------------------------------------------------------------------------------ writing
def test_bytes_land_where_they_should_and_nowhere_else(shared_pair: Pair) -> None:
    sender, receiver = shared_pair
    receiver("fill", 0)
    sender("write", 1, [100, 70_000, 5], [9_000, 0, 500_001], [1, 4096, 77_777])
    expected = bytearray(_OLD)
    expected[9_000:9_001] = _SENT[100:101]
    expected[0:4096] = _SENT[70_000:74_096]
    expected[500_001:577_778] = _SENT[5:77_782]
    assert receiver("peek", 0, MB) == bytes(expected)


def test_the_whole_memory_can_be_written(shared_pair: Pair) -> None:
    sender, receiver = shared_pair
    sender("write", 1, [0], [0], [MB])
    assert receiver("peek", 0, MB) == _SENT


def test_many_descriptors(shared_pair: Pair) -> None:
    sender, receiver = shared_pair
    receiver("fill", 0)
    places = list(range(0, MB, 512))
    random.Random(3).shuffle(places)
    local, remote, sizes = places[:700], places[700:1400], [1 + at % 511 for at in range(700)]
    sender("write", 1, local, remote, sizes)
    expected = bytearray(_OLD)
    for here, there, size in zip(local, remote, sizes, strict=True):
        expected[there : there + size] = _SENT[here : here + size]
    assert receiver("peek", 0, MB) == bytes(expected)


def test_adjacent_descriptors_are_one_range(shared_pair: Pair) -> None:
    sender, receiver = shared_pair
    receiver("fill", 0)
    local = [0, 4096, 8192, 9000, 9050, 70_000]
    remote = [4096, 8192, 12288, 0, 20_000, 20_050]  # the last three adjoin on one side only
    sender("write", 1, local, remote, [4096, 4096, 100, 50, 50, 50])
    expected = bytearray(_OLD)
    expected[4096:12388] = _SENT[0:8292]
    expected[0:50], expected[20_000:20_050] = _SENT[9000:9050], _SENT[9050:9100]
    expected[20_050:20_100] = _SENT[70_000:70_050]
    assert receiver("peek", 0, MB) == bytes(expected)


def test_memory_inside_a_larger_allocation(rig: Rig, start) -> None:
    sender, receiver = start(rig), start(rig)
    sender.become_sender(MB)
    sender("add_peer", 1, *receiver.become_receiver(MB, offset=12_288))
    sender("write", 1, [0], [0], [MB])
    assert receiver("peek", 0, MB) == _SENT


def test_several_transfers_in_flight(rig: Rig, start) -> None:
    sender, receiver = start(rig), start(rig)
    depth = sender.become_sender(MB)
    sender("add_peer", 1, *receiver.become_receiver(MB))
    step = MB // depth
    sender.block["hold"] = 1
    numbers = [sender("submit", 1, [at * step], [at * step], [step]) for at in range(depth)]
    if rig.holds:
        assert not any(sender("poll", number) for number in numbers)
        assert receiver("peek", 0, MB) == _OLD
        with pytest.raises(TransferFailed, match=f"{depth} transfers are under way"):
            sender("submit", 1, [0], [0], [1])
    sender.block["hold"] = 0
    for number in reversed(numbers):
        sender("finish", number)
    assert receiver("peek", 0, MB) == _SENT
    sender("write", 1, [0], [0], [1])  # there is room again


def test_a_transfer_that_has_ended_can_be_polled_again(shared_pair: Pair) -> None:
    sender, _ = shared_pair
    number = sender("submit", 1, [0], [0], [64])
    sender("finish", number)
    assert sender("poll", number)


def test_nothing_lands_after_a_transfer_has_ended(shared_pair: Pair) -> None:
    sender, receiver = shared_pair
    for seed in range(20):
        sender("write", 1, [0], [0], [MB])
        receiver("fill", seed)
        assert receiver("digests", [0], [MB]) == [zlib.crc32(pattern(seed, MB))]


# ------------------------------------------------------------------------------------- bounds
@pytest.mark.parametrize(
    ("local", "remote", "sizes"),
    [
        ([0], [0], [8, 8]),
        ([0, 0], [0, 0], [8]),
        ([0], [0, 8], [8]),
        ([], [], []),
        ([0], [0], [0]),
        ([0], [0], [-1]),
        ([-8], [0], [8]),
        ([0], [-8], [8]),
        ([MB - 7], [0], [8]),
        ([0], [MB - 7], [8]),
        ([0], [0], [MB + 1]),
        ([1 << 40], [0], [8]),
        ([0], [(1 << 63) - 1], [8]),
        ([0, 0], [0, MB], [8, 8]),
    ],
)
def test_what_leaves_the_memory_is_refused(
    shared_pair: Pair, local: list[int], remote: list[int], sizes: list[int]
) -> None:
    sender, receiver = shared_pair
    receiver("fill", 0)
    with pytest.raises(TransferFailed, match=r"leaves the registered regions|differ in number"):
        sender("submit", 1, local, remote, sizes)
    assert receiver("peek", 0, MB) == _OLD


@pytest.mark.parametrize("field", ["local", "remote", "sizes"])
def test_huge_numbers_are_refused(shared_pair: Pair, field: str) -> None:
    with pytest.raises(TransferFailed, match="leaves the registered regions"):
        shared_pair[0]("submit_outside", 1, field, str(1 << 80))


# -------------------------------------------------------------------------------------- peers
def test_unknown_peer(shared_pair: Pair) -> None:
    with pytest.raises(TransferFailed, match="not registered"):
        shared_pair[0]("submit", 7, [0], [0], [1])


def test_a_dropped_peer_is_unknown_and_can_come_back(rig: Rig, start) -> None:
    sender, receiver = start(rig), start(rig)
    sender.become_sender(MB)
    descriptors = receiver.become_receiver(MB)
    for _ in range(3):
        sender("add_peer", 1, *descriptors)
        sender("write", 1, [0], [0], [MB])
        sender("drop_peer", 1)
        with pytest.raises(TransferFailed, match="not registered"):
            sender("submit", 1, [0], [0], [1])
    sender("drop_peer", 1)  # an unknown one is no error
    assert receiver("peek", 0, MB) == _SENT


def test_several_peers(rig: Rig, start) -> None:
    sender, first, second = start(rig), start(rig), start(rig)
    sender.become_sender(MB)
    sender("add_peer", 1, *first.become_receiver(MB))
    sender("add_peer", 2, *second.become_receiver(MB))
    sender("write", 1, [0], [0], [MB // 2])
    sender("write", 2, [0], [MB // 2], [MB // 2])
    assert first("peek", 0, MB) == _SENT[: MB // 2] + _OLD[MB // 2 :]
    assert second("peek", 0, MB) == _OLD[: MB // 2] + _SENT[: MB // 2]


def test_damaged_descriptors_are_refused(shared_pair: Pair) -> None:
    sender, receiver = shared_pair
    outcomes = sender("add_garbage", *receiver("receive", sender.rig.engine, sender.rig.options), 150, 5)
    assert set(outcomes) <= {"WireError", "EngineUnavailable", "added"}
    assert outcomes["WireError"] > 50
    assert outcomes.get("added", 0) < 50  # those that the damage happened to spare
    sender("write", 1, [0], [0], [MB])
    assert receiver("peek", 0, MB) == _SENT


@pytest.mark.parametrize("descriptors", [(b"", b""), (b"\xc1" * 40, b"\xff" * 300), (b"{}", b"\x90")])
def test_nonsense_for_a_descriptor(shared_pair: Pair, descriptors: tuple[bytes, bytes]) -> None:
    with pytest.raises(WireError):
        shared_pair[0]("add_peer", 3, *descriptors)


def test_a_peer_that_died_before_it_was_added(rig: Rig, start) -> None:
    sender, receiver = start(rig), start(rig)
    sender.become_sender(MB)
    descriptors = receiver.become_receiver(MB)
    receiver.kill()
    with pytest.raises(EngineUnavailable):
        sender("add_peer", 1, *descriptors)


def test_a_write_to_a_dead_peer_fails(rig: Rig, start) -> None:
    if not rig.watches:
        pytest.skip("the memory is whole for as long as anyone maps it, so a write to it is no failure")
    sender, receiver = pair_of(rig, start)
    other = start(rig)
    sender("add_peer", 2, *other.become_receiver(MB))
    sender("write", 1, [0], [0], [MB])
    receiver.kill()
    with pytest.raises(TransferFailed, match="has exited"):
        sender("write", 1, [0], [0], [MB])
    sender("write", 2, [0], [0], [MB])
    assert other("peek", 0, MB) == _SENT


def test_a_dead_peer_is_not_added_again(rig: Rig, start) -> None:
    if not rig.watches:
        pytest.skip("the memory is whole for as long as anyone maps it")
    sender, receiver = start(rig), start(rig)
    sender.become_sender(MB)
    descriptors = receiver.become_receiver(MB)
    sender("add_peer", 1, *descriptors)
    receiver.kill()
    with pytest.raises(EngineUnavailable):
        sender("add_peer", 2, *descriptors)  # while the first one's mapping is still there
    sender("drop_peer", 1)
    with pytest.raises(EngineUnavailable):
        sender("add_peer", 2, *descriptors)


def test_a_write_under_which_the_peer_dies_fails(rig: Rig, start) -> None:
    need_hold(rig)
    sender, receiver = pair_of(rig, start)
    sender.block["hold"] = 1
    number = sender("submit", 1, [0], [0], [MB])
    receiver.kill()
    sender.block["hold"] = 0
    with pytest.raises(TransferFailed, match="has exited"):
        sender("finish", number)
    with pytest.raises(TransferFailed, match="has exited"):
        sender("poll", number)


def test_a_peer_that_came_back(rig: Rig, start) -> None:
    sender, receiver = pair_of(rig, start)
    sender("write", 1, [0], [0], [MB])
    receiver.kill()
    again = start(rig)
    sender("add_peer", 1, *again.become_receiver(MB))
    sender("write", 1, [0], [0], [4096])
    assert again("peek", 0, MB) == _SENT[:4096] + _OLD[4096:]


# ---------------------------------------------------------------------------------- lifetimes
def test_dropping_a_peer_releases_its_memory(rig: Rig, start) -> None:
    if not rig.on_gpu or not rig.holds:
        pytest.skip("there are no counters here")
    sender, receiver = pair_of(rig, start)
    opened = sender.block["ipc_opened"]
    assert opened > sender.block["ipc_closed"]
    sender("write", 1, [0], [0], [64])
    sender("drop_peer", 1)
    assert sender.block["ipc_closed"] == sender.block["ipc_opened"]
    sender("add_peer", 1, *receiver("receive", rig.engine, rig.options))
    sender("write", 1, [0], [0], [64])


def test_a_peer_dropped_under_a_write_is_kept_until_it_has_ended(rig: Rig, start) -> None:
    need_hold(rig)
    sender, receiver = pair_of(rig, start)
    sender.block["hold"] = 1
    number = sender("submit", 1, [0], [0], [MB])
    sender("drop_peer", 1)
    assert not sender("poll", number)
    assert sender.block["ipc_closed"] == 0
    sender.block["hold"] = 0
    sender("finish", number)
    assert sender.block["ipc_closed"] == sender.block["ipc_opened"]
    assert receiver("peek", 0, MB) == _SENT


def test_forgotten_transfers_end_and_make_room(rig: Rig, start) -> None:
    sender, receiver = start(rig), start(rig)
    depth = sender.become_sender(MB)
    sender("add_peer", 1, *receiver.become_receiver(MB))
    for _ in range(3):
        sender.block["hold"] = 1
        for _ in range(depth):
            sender("submit", 1, [0], [0], [4096])
        sender("forget_transfers")
        sender.block["hold"] = 0
        deadline = time.monotonic() + 10
        while True:
            try:
                sender("submit", 1, [0], [0], [1])
                break
            except TransferFailed:
                assert time.monotonic() < deadline
    sender("drop_peer", 1)


def test_close_ends_everything(rig: Rig, start) -> None:
    sender, _ = pair_of(rig, start)
    sender("write", 1, [0], [0], [MB])
    sender("submit", 1, [0], [0], [MB])
    assert sender("close_engine") < 2
    if rig.holds:
        assert sender.block["ipc_closed"] == sender.block["ipc_opened"] > 0
        assert sender.block["streams_gone"] == sender.block["streams_made"]
    assert sender.stop() == 0


def test_close_waits_for_writes_that_end(rig: Rig, start) -> None:
    need_hold(rig)
    sender, receiver = pair_of(rig, start)
    sender.block["hold"] = 1
    sender("submit", 1, [0], [0], [MB])
    sender("forget_transfers")
    queries = sender.block["event_queries"]
    sender.ask("close_engine")
    deadline = time.monotonic() + 10
    while sender.block["event_queries"] < queries + 10:  # it is waiting
        assert time.monotonic() < deadline
    sender.block["hold"] = 0
    assert sender.answer() < 2
    assert sender.block["ipc_closed"] == sender.block["ipc_opened"]
    assert receiver("peek", 0, MB) == _SENT


def test_close_waits_for_no_write_for_long(rig: Rig, start) -> None:
    need_hold(rig)
    sender, receiver = pair_of(rig, start)
    sender.block["hold"] = 1
    sender("submit", 1, [0], [0], [MB])
    sender("forget_transfers")
    assert sender("close_engine") < 3
    assert receiver("peek", 0, MB) == _OLD
    assert sender.stop() == 0  # it exits, the write still held


# ------------------------------------------------------------------------------------- memory
def test_memory_of_the_wrong_kind_is_refused(rig: Rig, start) -> None:
    with pytest.raises(EngineUnavailable, match="memory"):
        start(rig)("load_over_wrong_memory", rig.engine)
