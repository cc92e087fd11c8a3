"""Posted slots and what becomes of them; both ends are real, their GPUs are not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from mori_mp import posted as module
from mori_mp import push
from mori_mp.device_pool import DeviceSlots
from mori_mp.lent_device import LentDevice
from mori_mp.posted import PostedSlots, room_for
from mori_mp.push import Push, Pusher
from mori_mp.shared.errors import WireError
from mori_mp.shared.pool import BLOCK, host_id
from mori_mp.shared.posts import POSTED, RECORDS, Posts, PostsDescriptor
from mori_mp.workers.engines import gpu_pool
from mori_mp.workers.engines.base import LocalMemory
from mori_mp.workers.engines.gpu_pool import GpuPoolDescriptor
from mori_mp.workers.engines.gpu_runtime import GpuError

POOL = 64 * BLOCK
EDGE = "0_1"


class FakePool:
    """A GPU pool without a GPU: its events are what the test says."""

    def __init__(self) -> None:
        self.size = POOL
        self.pending: set[int] = set()
        self.targets: list[int] = []
        self.event: int | None = 1  # behind the next push
        self.broken = False
        self.slots = DeviceSlots(self)  # type: ignore[arg-type]

    def lend(self) -> bytes:
        return GpuPoolDescriptor("cuda", "", "0", bytes(64), POOL, 0, POOL, [], 1, host_id()).pack()

    def has_happened(self, event: int) -> bool:
        return event not in self.pending

    def push(self, offset: int, size: int, event: int, target: int) -> int | None:
        self.targets.append(target)
        if self.broken:
            raise GpuError("cudaMemcpyAsync", 700, "an illegal memory access was encountered")
        return self.event

    def borrow(self, packed: bytes) -> FakeLent:
        GpuPoolDescriptor.unpack(packed)
        return FakeLent(self)


class FakeLent:
    """The other end's pool, mapped."""

    size = POOL
    address = 1 << 32

    def __init__(self, pool: FakePool) -> None:
        self.pool = pool
        self.gone = False
        self.retired = False

    def arrived(self, event: int, deadline: float) -> bool:
        return self.pool.has_happened(event) and not self.gone

    def watch(self, event: int) -> Callable[[], bool]:
        return lambda: self.gone or self.pool.has_happened(event)

    def retire(self) -> None:
        self.retired = True


class Pair:
    """A receiver's posts and the pusher of their sender."""

    def __init__(self) -> None:
        self.ours, self.theirs = FakePool(), FakePool()
        self.sender = FakeLent(self.theirs)
        self.posts = PostedSlots(self.ours, "place", self.sender, "s0", "test")  # type: ignore[arg-type]
        self.pusher = Pusher(self.theirs)  # type: ignore[arg-type]
        self.pusher.set_target(EDGE, self.posts.packed)

    def expect(self, *sizes: int) -> None:
        for size in sizes:
            self.posts.expect(size)
        self.posts.replenish()

    def begin(self, size: int) -> Push | None:
        return self.pusher.push(EDGE, 0, size, 0)

    def push(self, key: str, generation: int, size: int) -> Push | None:
        push = self.begin(size)
        if push is not None:
            self.pusher.fill(push, key, generation)
        return push

    def used(self) -> int:
        return self.ours.slots.stats()["used_bytes"]

    def posted(self) -> int:
        return self.ours.slots.stats()["posted_bytes"]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(push, "_kept", [])
    pair = Pair()
    yield pair
    pair.pusher.close()
    pair.theirs.pending.clear()
    pair.posts.retire()
    assert pair.posts.is_over
    assert (pair.used(), pair.posted()) == (0, 0)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 65536, 65537, 1_000_000, 64 << 20, (64 << 20) + 1])
def test_a_post_has_little_room_to_spare(size: int) -> None:
    room = room_for(size)
    assert size <= room
    assert room % BLOCK == 0
    assert room <= max(BLOCK, size * 9 // 8 + BLOCK)
    assert room_for(room) == room


def test_slots_follow_the_sizes_that_come(pair: Pair) -> None:
    pair.expect(5000)
    assert pair.posted() == 2 * BLOCK
    pair.expect(5000, 100)
    assert pair.posted() == 5 * BLOCK
    pair.expect(*[100] * 8)  # eight of another size have come since
    assert pair.posted() == 8 * BLOCK
    assert pair.used() == 0


def test_posts_take_half_of_the_pool_at_most(pair: Pair) -> None:
    pair.expect(*[POOL // 4] * 8)
    assert pair.posted() == POOL // 2


def test_what_does_not_fit_is_not_posted(pair: Pair) -> None:
    held = pair.ours.slots.alloc(POOL - BLOCK)
    pair.expect(100, 100)
    assert pair.posted() == BLOCK
    pair.ours.slots.give_back(held)


def test_it_is_out_when_every_slot_of_a_size_is_filled(pair: Pair) -> None:
    pair.expect(100, 100, 5000)
    assert not pair.posts.depleted
    for number in range(2):
        assert not pair.posts.is_out(100)
        pair.push(f"k{number}", 1 + number, 100)
    assert pair.posts.is_out(100)
    assert not pair.posts.is_out(5000)
    assert pair.posts.is_out(50_000)
    filled = pair.posts.claim("k0")
    assert filled is not None
    assert pair.posts.depleted
    pair.posts.replenish()
    assert not pair.posts.is_out(100)
    assert not pair.posts.depleted
    pair.posts.drop(filled)


def test_a_payload_goes_into_the_smallest_slot_that_fits(pair: Pair) -> None:
    pair.expect(3 * BLOCK, 2 * BLOCK, BLOCK)
    taken = pair.push("k", 1, BLOCK + 1)
    assert taken is not None
    filled = pair.posts.claim("k")
    assert filled is not None
    slot = pair.posts.take(filled)
    assert slot.size == BLOCK + 1
    assert pair.posted() == 4 * BLOCK
    pair.ours.slots.give_back(slot.offset)


@pytest.mark.parametrize("size", [POOL // 8 + 1, 100])
def test_a_slot_that_is_too_small_or_much_too_large_is_not_filled(pair: Pair, size: int) -> None:
    pair.expect(POOL // 8)
    assert pair.push("k", 1, size) is None
    assert pair.push("k", 1, POOL // 16) is not None


def test_a_slot_that_is_posted_again_with_less_room_meanwhile_is_not_overrun(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.expect(4 * BLOCK)
    find = Posts.fitting

    def find_and_lose(posts: Posts, size: int, below: int) -> int | None:
        found = find(posts, size, below)
        pair.posts.reclaim()
        pair.expect(*[BLOCK] * RECORDS)
        return found

    monkeypatch.setattr(Posts, "fitting", find_and_lose)
    assert pair.begin(4 * BLOCK) is None
    assert pair.theirs.targets == []
    assert pair.posted() == RECORDS * BLOCK


def test_a_taken_slot_is_the_takers(pair: Pair) -> None:
    pair.expect(100)
    pair.push("k", 7, 90)
    assert pair.posts.has("k")
    filled = pair.posts.claim("k")
    assert filled is not None
    assert (filled.generation, filled.size) == (7, 90)
    assert not pair.posts.has("k")
    assert pair.posts.claim("k") is None
    assert pair.posts.arrived(filled, 0.0)
    slot = pair.posts.take(filled)
    assert (slot.place, slot.size) == ("place", 90)
    assert pair.used() == BLOCK
    pair.ours.slots.give_back(slot.offset)


def test_a_claim_can_be_let_go_of(pair: Pair) -> None:
    pair.expect(100)
    pair.theirs.pending.add(1)
    pair.push("k", 7, 90)
    filled = pair.posts.claim("k")
    assert filled is not None
    assert not pair.posts.arrived(filled, 0.0)
    assert not pair.posts.let_go(filled)
    assert pair.posts.claim("k") == filled
    pair.sender.gone = True
    assert pair.posts.let_go(filled)  # for good
    assert not pair.posts.has("k")
    assert pair.used() == 0


def test_of_one_key_the_newest_is_found(pair: Pair) -> None:
    pair.expect(100, 100, 100)
    for generation in (5, 9, 7):
        pair.push("k", generation, 90)
    filled = pair.posts.claim("k")
    assert filled is not None
    assert filled.generation == 9
    pair.posts.drop(filled)


def test_a_withdrawn_payload_is_not_found_and_its_slot_serves_again(pair: Pair) -> None:
    pair.expect(100)
    pair.push("k", 7, 90)
    pair.pusher.withdraw([7])
    assert pair.posts.claim("k") is None
    assert pair.push("l", 8, 90) is None
    pair.posts.replenish()
    assert pair.push("l", 8, 90) is not None
    assert pair.posts.has("l")


def test_a_late_withdrawal_does_not_meet_the_next_payload_in_the_record(pair: Pair) -> None:
    pair.expect(100)
    pair.push("k", 7, 90)
    filled = pair.posts.claim("k")
    assert filled is not None
    pair.ours.slots.give_back(pair.posts.take(filled).offset)
    pair.posts.replenish()
    pair.push("l", 8, 90)
    pair.pusher.withdraw([8])
    pair.pusher.withdraw([7])
    assert not pair.posts.has("l")


def test_all_is_given_up_for_a_payload_that_needs_the_room(pair: Pair) -> None:
    pair.expect(*[POOL // 4] * 2)
    pair.push("k", 1, POOL // 4)
    pair.posts.reclaim()
    assert pair.ours.slots.alloc(POOL) == 0
    assert not pair.posts.has("k")
    pair.ours.slots.give_back(0)


def test_a_claimed_payload_is_not_given_up(pair: Pair) -> None:
    pair.expect(100)
    pair.push("k", 1, 90)
    filled = pair.posts.claim("k")
    assert filled is not None
    pair.posts.reclaim()
    slot = pair.posts.take(filled)
    assert pair.used() == BLOCK
    pair.ours.slots.give_back(slot.offset)


def test_a_claimed_payload_is_not_given_up_whatever_its_sender_makes_of_the_record(pair: Pair) -> None:
    pair.expect(100)
    pair.push("k", 1, 90)
    filled = pair.posts.claim("k")
    assert filled is not None
    pair.posts._posts._states[RECORD] = POSTED
    pair.posts.reclaim()
    other = pair.ours.slots.alloc(BLOCK)
    pair.posts.replenish()
    slot = pair.posts.take(filled)
    assert slot.offset == pair.theirs.targets[-1] - FakeLent.address != other
    for offset in (slot.offset, other):
        pair.ours.slots.give_back(offset)


def test_a_slot_that_a_sender_was_filling_when_it_died_is_taken_back(pair: Pair) -> None:
    pair.expect(100)
    assert pair.begin(90) is not None
    pair.posts.reclaim()
    assert pair.posted() == BLOCK
    pair.sender.gone = True
    pair.posts.reclaim()
    assert pair.posted() == 0
    assert pair.ours.slots.alloc(POOL) == 0
    pair.ours.slots.give_back(0)


def test_a_payload_that_is_claimed_at_the_end_is_waited_for(pair: Pair) -> None:
    pair.expect(100)
    pair.theirs.pending.add(1)
    pair.push("k", 1, 90)
    filled = pair.posts.claim("k")
    assert filled is not None
    pair.posts.retire()
    assert not pair.posts.is_over
    assert pair.posts.let_go(filled)
    assert not pair.posts.is_over
    pair.theirs.pending.clear()
    assert pair.posts.is_over


@pytest.mark.parametrize("end", ["copied", "sender gone"])
def test_a_slot_is_free_when_the_sender_is_done_with_it(pair: Pair, end: str) -> None:
    pair.expect(100)
    pair.theirs.pending.add(1)
    pair.push("k", 1, 90)
    pair.posts.reclaim()
    assert pair.used() == BLOCK
    if end == "copied":
        pair.theirs.pending.clear()
    else:
        pair.sender.gone = True
    assert pair.used() == 0


def test_a_slot_that_is_just_being_filled_at_the_end_is_waited_for(pair: Pair) -> None:
    pair.expect(100)
    first = pair.begin(90)
    assert first is not None
    pair.posts.retire()
    assert not pair.posts.is_over
    assert pair.used() == BLOCK
    pair.theirs.pending.add(1)
    pair.pusher.fill(first, "k", 1)
    assert pair.used() == BLOCK
    assert pair.posts.claim("k") is None
    pair.theirs.pending.clear()
    assert pair.posts.is_over
    assert pair.used() == 0


def test_without_a_free_event_nothing_is_pushed(pair: Pair) -> None:
    pair.expect(100)
    pair.theirs.event = None
    assert pair.push("k", 1, 90) is None
    pair.theirs.event = 2
    assert pair.push("k", 1, 90) is not None


def test_a_sender_that_lies_about_the_size_is_not_believed(pair: Pair) -> None:
    pair.expect(100)
    push = pair.begin(90)
    assert push is not None
    pair.pusher.fill(push._replace(size=POOL), "k", 1)
    assert pair.posts.claim("k") is None
    assert pair.used() == 0


def test_a_receiver_that_lies_about_the_offset_is_not_believed(pair: Pair) -> None:
    pair.expect(100)
    for offset in (POOL, POOL - BLOCK + 1, -BLOCK):
        pair.posts._posts._offsets[RECORD] = offset
        assert pair.begin(BLOCK) is None
    assert pair.theirs.targets == []
    pair.posts._posts._offsets[RECORD] = POOL - BLOCK
    assert pair.push("k", 1, BLOCK) is not None
    assert pair.theirs.targets == [FakeLent.address + POOL - BLOCK]


def test_a_failed_push_leaves_its_slot_to_the_end_of_the_process(pair: Pair) -> None:
    pair.expect(100)
    pair.theirs.broken = True
    with pytest.raises(GpuError):
        pair.begin(90)
    pair.posts.reclaim()
    assert pair.posted() == BLOCK
    assert pair.begin(90) is None
    pair.sender.gone = True
    pair.posts.retire()
    assert pair.used() == 0


def test_a_receiver_that_no_edge_leads_to_is_let_go_of_after_the_last_copy(pair: Pair) -> None:
    pair.expect(100)
    pair.theirs.pending.add(1)
    pair.push("k", 1, 90)
    target = pair.pusher._targets[EDGE]
    pair.pusher.set_target("0_2", pair.posts.packed)
    pair.pusher.set_target(EDGE, b"")
    assert pair.pusher._targets["0_2"] is target  # mapped once
    pair.pusher.set_target("0_2", b"")
    assert pair.begin(90) is None
    assert not target.memory.retired  # type: ignore[attr-defined]
    pair.theirs.pending.clear()
    pair.pusher.set_target("0_3", b"")
    assert target.memory.retired  # type: ignore[attr-defined]


def test_a_receiver_is_let_go_of_after_the_last_copy_in_whichever_order_they_are_told(pair: Pair) -> None:
    pair.expect(100, 100)
    pair.theirs.pending.update((1, 2))
    first = pair.begin(90)
    pair.theirs.event = 2
    second = pair.begin(90)
    assert first is not None
    assert second is not None
    target = first.target
    pair.pusher.fill(second, "l", 2)
    pair.pusher.fill(first, "k", 1)
    pair.theirs.pending.remove(1)
    pair.pusher.set_target(EDGE, b"")
    assert not target.memory.retired  # type: ignore[attr-defined]
    pair.theirs.pending.remove(2)
    pair.pusher.set_target(EDGE, b"")
    assert target.memory.retired  # type: ignore[attr-defined]


def test_a_receiver_that_has_left_is_not_kept_until_the_next_one_comes(pair: Pair) -> None:
    pair.expect(100)
    pair.theirs.pending.add(1)
    push = pair.push("k", 1, 90)
    assert push is not None
    pair.pusher.set_target(EDGE, b"")
    pair.pusher.withdraw([])
    assert not push.target.memory.retired  # type: ignore[attr-defined]
    pair.theirs.pending.clear()
    pair.pusher.withdraw([])
    assert push.target.memory.retired  # type: ignore[attr-defined]


def test_a_receiver_that_is_named_after_the_end_is_let_go_of(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    lent = FakeLent(pair.theirs)
    monkeypatch.setattr(pair.theirs, "borrow", lambda packed: lent)
    pair.pusher.close()
    pair.pusher.set_target("0_2", pair.posts.packed)
    assert lent.retired
    assert pair.pusher.push("0_2", 0, 90, 0) is None


@pytest.mark.parametrize("filled", ["before", "after"])
def test_a_receiver_that_is_no_more_alone_on_an_edge_does_not_find_what_was_pushed(
    pair: Pair, filled: str
) -> None:
    """Another one may take it; what was pushed for another edge stays."""
    pair.expect(100, 100)
    pair.pusher.set_target("0_2", pair.posts.packed)
    other = pair.pusher.push("0_2", 0, 90, 0)
    push = pair.begin(90)
    assert other is not None
    assert push is not None
    pair.pusher.fill(other, "other", 1)
    if filled == "before":
        pair.pusher.fill(push, "k", 2)
    pair.pusher.set_target(EDGE, b"")
    if filled == "after":
        pair.pusher.fill(push, "k", 2)
    assert not pair.posts.has("k")
    assert pair.posts.has("other")


def test_a_receiver_that_is_pushed_to_again_is_not_let_go_of(pair: Pair) -> None:
    """When the last copy of the first time ends, those of the second may be under way."""
    pair.expect(100, 100)
    pair.theirs.pending |= {1, 2}
    pair.push("k", 1, 90)
    pair.pusher.set_target(EDGE, b"")
    pair.pusher.set_target(EDGE, pair.posts.packed)
    pair.theirs.event = 2
    pair.push("l", 2, 90)
    pair.theirs.pending.discard(1)
    pair.pusher.withdraw([])
    filled = pair.posts.claim("l")
    assert filled is not None
    assert filled.event == 2
    pair.posts.drop(filled)


def test_what_cannot_be_mapped_is_told_and_not_pushed_to(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    pair.pusher.set_target("0_9", b"junk")
    assert "not pushed" in caplog.text
    assert pair.pusher.push("0_9", 0, 90, 0) is None


def test_a_receiver_that_lies_about_its_pool_is_not_pushed_to(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever it says, the thread that is told so must go on."""
    posts, pool = PostsDescriptor.unpack(pair.posts.packed), GpuPoolDescriptor.unpack(pair.ours.lend())
    lies = [
        msgspec.structs.replace(pool, pid=1 << 40).pack(),
        msgspec.structs.replace(pool, pid=-1).pack(),
        pair.ours.lend().replace(b"cuda", b"\xff" * 4),
        pool.pack()[:-1],
    ]
    for number, lie in enumerate(lies):
        caplog.clear()
        pair.pusher.set_target(f"0_{number}", msgspec.structs.replace(posts, gpu_pool=lie).pack())
        assert "not pushed" in caplog.text


def test_a_receiver_that_makes_our_own_pool_larger_than_it_is_is_not_believed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = GpuPoolDescriptor.unpack(pair.theirs.lend())
    ours: Any = SimpleNamespace(memory=LocalMemory(1 << 32, POOL, 0), events=[])
    monkeypatch.setitem(gpu_pool._lent, (pool.handle, pool.offset), ours)
    runtime: Any = SimpleNamespace(kind="cuda")
    here = msgspec.structs.replace(pool, pid=os.getpid())
    assert LentDevice(here.pack(), runtime, runtime, 0).address == 1 << 32
    lie = msgspec.structs.replace(here, size=2 * POOL, allocation_size=2 * POOL)
    with pytest.raises(WireError, match="claims"):
        LentDevice(lie.pack(), runtime, runtime, 0)


@pytest.mark.parametrize("over", [True, False])
def test_a_sender_that_closes_withdraws_what_it_pushed(pair: Pair, over: bool) -> None:
    pair.expect(100)
    pair.theirs.event = 3
    pair.push("k", 1, 90)
    if not over:
        pair.theirs.pending.add(3)
    pair.pusher.close()
    assert pair.begin(90) is None
    assert not pair.posts.has("k")
    filled = pair.posts._posts.filled(RECORD)
    assert filled is not None
    assert filled.event == (-1 if over else 3)  # its events are gone with it only when nothing needs them


def test_many_threads_claim_each_payload_once(pair: Pair) -> None:
    taken: list[Any] = []

    def get(key: str) -> None:
        filled = pair.posts.claim(key)
        if filled is not None:
            taken.append(pair.posts.take(filled))

    for turn in range(30):
        pair.expect(100)
        pair.push("k", 1 + turn, 90)
        threads = [threading.Thread(target=get, args=("k",)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1
        pair.ours.slots.give_back(taken.pop().offset)


RECORD = module.RECORDS - 1
"""The record that the first post is in."""
