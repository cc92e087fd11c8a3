"""Slots of the pool: shared owners, and letting go from anywhere."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from mori_mp.shared.pool import BLOCK, Pool
from mori_mp.slots import PoolExhausted, PoolSlots

BLOCKS = 8


@pytest.fixture
def slots() -> Iterator[PoolSlots]:
    pool = Pool.create(BLOCKS * BLOCK, "test")
    yield PoolSlots(pool)
    pool.close()


def used(slots: PoolSlots) -> int:
    return slots.stats()["used_bytes"]


def test_slots_do_not_overlap_and_come_back(slots: PoolSlots) -> None:
    offsets = [slots.alloc(BLOCK) for _ in range(BLOCKS)]
    assert sorted(offsets) == [n * BLOCK for n in range(BLOCKS)]
    with pytest.raises(PoolExhausted):
        slots.alloc(1)
    for offset in offsets:
        slots.give_back(offset)
    assert used(slots) == 0
    assert slots.alloc(BLOCKS * BLOCK) == 0


def test_a_host_pool_beside_a_gpu_pool_is_called_by_its_own_key(slots: PoolSlots) -> None:
    pool = Pool.create(BLOCKS * BLOCK, "test", device_bytes=BLOCK)
    for found, key in ((slots, "memory_pool_size"), (PoolSlots(pool), "host_pool_size")):
        with pytest.raises(PoolExhausted, match=f"Raise {key}"):
            found.alloc(BLOCKS * BLOCK + 1)
    pool.close()


def test_a_full_pool_looks_at_what_was_given_back_first(slots: PoolSlots) -> None:
    offset = slots.alloc(BLOCKS * BLOCK)
    slots.give_back(offset)
    assert slots.alloc(BLOCK) == 0


def test_a_shared_slot_is_free_when_the_last_owner_lets_go(slots: PoolSlots) -> None:
    offset = slots.alloc(100)
    slots.share(offset)
    slots.share(offset)
    for left in (2, 1):
        slots.give_back(offset)
        assert used(slots) == BLOCK, f"{left} owners are left"
    slots.give_back(offset)
    assert used(slots) == 0


def test_an_owner_that_joins_while_another_lets_go_keeps_the_slot(slots: PoolSlots) -> None:
    offset = slots.alloc(100)
    slots.give_back(offset)  # queued only
    slots.share(offset)
    assert used(slots) == BLOCK
    slots.give_back(offset)
    assert used(slots) == 0


def test_a_free_slot_cannot_be_shared(slots: PoolSlots) -> None:
    offset = slots.alloc(100)
    slots.give_back(offset)
    slots.collect()
    with pytest.raises(KeyError):
        slots.share(offset)


def test_a_finalizer_may_let_go_in_the_middle_of_an_allocation(slots: PoolSlots) -> None:
    class Owner:
        def __init__(self, offset: int) -> None:
            self.offset = offset
            self.itself = self

        def __del__(self) -> None:
            slots.give_back(self.offset)

    Owner(slots.alloc(100))
    with slots._lock:  # as in the middle of share() or collect()
        gc.collect()
    assert used(slots) == 0


def test_stats(slots: PoolSlots) -> None:
    slots.alloc(BLOCK + 1)
    assert slots.stats() == {
        "size": BLOCKS * BLOCK,
        "used_bytes": 2 * BLOCK,
        "free_bytes": (BLOCKS - 2) * BLOCK,
        "largest_free": (BLOCKS - 2) * BLOCK,
        "slots": 1,
    }


def test_threads_never_own_the_same_slot(slots: PoolSlots) -> None:
    owned: dict[int, int] = {}
    clashes: list[int] = []

    def work(name: int) -> None:
        for _ in range(300):
            try:
                offset = slots.alloc(BLOCK)
            except PoolExhausted:
                continue
            if owned.setdefault(offset, name) != name:
                clashes.append(offset)
            slots.share(offset)
            slots.give_back(offset)
            del owned[offset]
            slots.give_back(offset)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    assert used(slots) == 0
