"""The pool allocator: model-based state machine, fragmentation, concurrency, errors."""

from __future__ import annotations

import pickle
import random
import sys
import threading
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from interleave import run_with_intruder

from mori_mp import allocator as allocator_module
from mori_mp.allocator import PoolAllocator
from mori_mp.shared.errors import AllocatorMisuse, MoriMPError, PoolExhausted

UNIT = 4096


def state(allocator: PoolAllocator) -> tuple[int, int, int, int]:
    return (allocator.used_bytes, allocator.free_bytes, allocator.largest_free, allocator.live_blocks)


class AllocatorMachine(RuleBasedStateMachine):
    """Against a model that knows only which intervals are live."""

    @initialize(shift=st.sampled_from([0, 6, 12]), units=st.integers(1, 80), rest=st.integers(0, 1 << 12))
    def make(self, shift: int, units: int, rest: int) -> None:
        self.alignment = 1 << shift
        self.size = units * self.alignment
        self.allocator = PoolAllocator(self.size + rest % self.alignment, alignment=self.alignment)
        self.live: dict[int, int] = {}

    def largest_gap(self) -> int:
        largest, position = 0, 0
        for start, length in sorted(self.live.items()):
            largest, position = max(largest, start - position), start + length
        return max(largest, self.size - position)

    @rule(units=st.integers(0, 20), rest=st.integers(0, 1 << 12))
    def alloc(self, units: int, rest: int) -> None:
        size = units * self.alignment + rest % self.alignment
        assume(size)
        need = -(-size // self.alignment) * self.alignment
        gap = self.largest_gap()
        if need > gap:
            before = state(self.allocator)
            with pytest.raises(PoolExhausted) as caught:
                self.allocator.alloc(size)
            assert caught.value.requested == size
            assert caught.value.free == self.size - sum(self.live.values())
            assert caught.value.largest_free == gap
            assert state(self.allocator) == before
            return
        offset = self.allocator.alloc(size)
        assert offset % self.alignment == 0
        assert 0 <= offset <= self.size - need
        assert all(offset + need <= start or start + length <= offset for start, length in self.live.items())
        self.live[offset] = need

    @rule()
    def alloc_the_largest(self) -> None:
        gap = self.largest_gap()
        assume(gap)
        self.live[self.allocator.alloc(gap)] = gap

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.live)))
        assert self.allocator.free(offset) == self.live.pop(offset)

    @rule(offset=st.integers(-5000, 400_000))
    def free_a_stranger(self, offset: int) -> None:
        assume(offset not in self.live)
        before = state(self.allocator)
        with pytest.raises(AllocatorMisuse, match=str(offset)):
            self.allocator.free(offset)
        assert state(self.allocator) == before

    @rule()
    def free_everything(self) -> None:
        for offset in list(self.live):
            self.allocator.free(offset)
        self.live.clear()
        assert self.allocator.largest_free == self.size

    @rule()
    def check(self) -> None:
        # A rule, not an invariant: looking merges returned blocks, and runs without a look matter too.
        self.allocator.check()
        used = sum(self.live.values())
        assert state(self.allocator) == (used, self.size - used, self.largest_gap(), len(self.live))

    @invariant()
    def sizes_stay(self) -> None:
        assert (self.allocator.size, self.allocator.alignment) == (self.size, self.alignment)

    def teardown(self) -> None:
        if hasattr(self, "allocator"):
            self.free_everything()
            self.allocator.check()


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_lone_alloc_free_loop_reuses_one_offset() -> None:
    allocator = PoolAllocator(64 * UNIT)
    offsets = set()
    for size in (1, UNIT, 5 * UNIT, 64 * UNIT, 100):
        offset = allocator.alloc(size)
        offsets.add(offset)
        allocator.free(offset)
    assert offsets == {0}


def test_a_steady_load_keeps_to_the_low_part_of_the_pool() -> None:
    allocator = PoolAllocator(10_000 * UNIT)
    rng = random.Random(7)
    live: deque[int] = deque()
    top = 0
    for _ in range(3000):
        if len(live) == 50:
            allocator.free(live.popleft())
        size = rng.choice([1, 4, 9, 16]) * UNIT
        live.append(allocator.alloc(size))
        top = max(top, live[-1] + size)
    # 50 blocks of at most 16 units are never more than 800 units; the pool has 10000.
    assert top <= 800 * UNIT


def test_the_smallest_hole_that_fits_is_used() -> None:
    allocator = PoolAllocator(1000 * UNIT)
    holes = {}
    for units in (7, 3, 5, 9):
        holes[units] = allocator.alloc(units * UNIT)
        allocator.alloc(UNIT)  # a wall between the holes
    for offset in holes.values():
        allocator.free(offset)
    assert allocator.alloc(4 * UNIT) == holes[5]
    assert allocator.alloc(9 * UNIT) == holes[9]
    assert allocator.alloc(3 * UNIT) == holes[3]
    allocator.check()


def test_checkerboard_refuses_what_does_not_fit_and_recovers_whole() -> None:
    units = 512
    allocator = PoolAllocator(units * UNIT)
    offsets = [allocator.alloc(UNIT) for _ in range(units)]
    assert offsets == [i * UNIT for i in range(units)]
    assert (allocator.free_bytes, allocator.largest_free) == (0, 0)
    for offset in offsets[::2]:
        allocator.free(offset)
    assert (allocator.free_bytes, allocator.largest_free) == (units // 2 * UNIT, UNIT)
    with pytest.raises(PoolExhausted) as caught:
        allocator.alloc(UNIT + 1)
    error = caught.value
    assert (error.requested, error.free, error.largest_free) == (UNIT + 1, units // 2 * UNIT, UNIT)
    assert sorted(allocator.alloc(1) for _ in range(units // 2)) == offsets[::2]

    shuffled = random.Random(3).sample(offsets, units)
    for offset in shuffled:
        assert allocator.free(offset) == UNIT
    assert allocator.largest_free == allocator.size
    assert allocator.alloc(allocator.size) == 0
    allocator.check()


def test_holes_of_every_size_are_all_found() -> None:
    # The most size classes a pool of this size can have at once: holes of 1, 2, 3, ... units.
    count = 60
    allocator = PoolAllocator((count * (count + 1) // 2 + count) * UNIT)
    holes = {}
    for units in random.Random(5).sample(range(1, count + 1), count):
        holes[units] = allocator.alloc(units * UNIT)
        allocator.alloc(UNIT)
    for offset in holes.values():
        allocator.free(offset)
    allocator.check()
    assert allocator.largest_free == count * UNIT
    for units in random.Random(6).sample(sorted(holes), count):
        assert allocator.alloc(units * UNIT) == holes[units]
    assert allocator.free_bytes == 0


@pytest.fixture
def eager_thread_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_thread_switches")
def test_threads_never_share_a_byte() -> None:
    units, workers, rounds = 256, 6, 500
    allocator = PoolAllocator(units * 64, alignment=64)
    owner = bytearray(units)
    handed_over: deque[tuple[int, int, int]] = deque()  # blocks that another thread checks and frees
    failures: list[str] = []
    start = threading.Barrier(workers)

    def take_back(offset: int, count: int, mark: int) -> None:
        span = slice(offset // 64, offset // 64 + count)
        if owner[span] != bytes([mark]) * count:
            failures.append(f"block at {offset} of thread {mark} was overwritten")
        owner[span] = bytes(count)
        allocator.free(offset)

    def work(mark: int) -> None:
        rng = random.Random(mark)
        start.wait()
        for _ in range(rounds):
            count = rng.randint(1, 24)
            try:
                offset = allocator.alloc(count * 64 - rng.randint(0, 63))
            except PoolExhausted:
                pass
            else:
                span = slice(offset // 64, offset // 64 + count)
                if any(owner[span]):
                    failures.append(f"thread {mark} was given {offset}, which is live")
                owner[span] = bytes([mark]) * count
                handed_over.append((offset, count, mark))
            if len(handed_over) > rng.randint(0, 12):
                try:
                    block = handed_over.popleft()
                except IndexError:
                    continue
                take_back(*block)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, workers + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for block in handed_over:
        take_back(*block)
    assert not failures
    assert allocator.live_blocks == 0
    assert allocator.largest_free == allocator.size
    allocator.check()


def test_of_two_racing_frees_exactly_one_wins() -> None:
    """A second free at every bytecode of the first."""

    def race(moment: int) -> int:
        allocator = PoolAllocator(16 * UNIT)
        offset = allocator.alloc(3 * UNIT)
        outcomes: list[int | None] = []

        def free() -> None:
            try:
                outcomes.append(allocator.free(offset))
            except AllocatorMisuse:
                outcomes.append(None)

        def intrude(position: int) -> None:
            if position == moment:
                free()

        _, bytecodes = run_with_intruder(free, allocator_module.__file__, intrude)
        assert sorted(outcomes, key=str)[:1] == [3 * UNIT], f"at bytecode {moment}: {outcomes}"
        assert outcomes.count(None) == len(outcomes) - 1
        assert allocator.largest_free == allocator.size
        allocator.check()
        return bytecodes

    bytecodes = race(-1)
    assert bytecodes > 5
    for moment in range(bytecodes):
        race(moment)


def test_a_finalizer_may_free_in_the_middle_of_any_operation() -> None:
    """A finalizer runs in whatever thread collects, possibly one inside alloc() that holds its lock."""
    allocator = PoolAllocator(4096 * UNIT)
    waiting = [allocator.alloc(UNIT) for _ in range(2000)]
    random.Random(11).shuffle(waiting)
    interrupted = 0

    def intrude(position: int) -> None:
        if waiting:
            allocator.free(waiting.pop())

    def operations() -> None:
        for _ in range(4):
            offset = allocator.alloc(3 * UNIT)
            assert allocator.used_bytes >= 3 * UNIT
            assert allocator.largest_free < allocator.size
            allocator.free(offset)

    def work() -> None:
        nonlocal interrupted
        _, interrupted = run_with_intruder(operations, allocator_module.__file__, intrude)

    # A daemon thread, so that a deadlock fails this test and does not hang the run.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive(), "free() waited for a lock that its own thread held"
    assert interrupted > 500
    for offset in waiting:
        allocator.free(offset)
    allocator.check()
    assert allocator.largest_free == allocator.size


@pytest.mark.parametrize("size", [0, -1, -UNIT])
def test_sizes_that_are_not_positive_are_refused(size: int) -> None:
    allocator = PoolAllocator(4 * UNIT)
    with pytest.raises(ValueError, match=str(size)):
        allocator.alloc(size)
    assert state(allocator) == (0, 4 * UNIT, 4 * UNIT, 0)


def test_double_free_and_inner_offsets_are_misuse_and_change_nothing() -> None:
    allocator = PoolAllocator(16 * UNIT)
    kept, freed = allocator.alloc(2 * UNIT), allocator.alloc(2 * UNIT)
    allocator.free(freed)
    before = state(allocator)
    for offset in (freed, kept + UNIT, kept + 1, -UNIT, 16 * UNIT):
        with pytest.raises(AllocatorMisuse, match=f"offset {offset} ") as caught:
            allocator.free(offset)
        assert isinstance(caught.value, (RuntimeError, MoriMPError))
    assert state(allocator) == before
    allocator.check()
    assert allocator.free(kept) == 2 * UNIT


def test_exhaustion_tells_the_operator_what_to_do() -> None:
    allocator = PoolAllocator(4 * UNIT)
    allocator.alloc(3 * UNIT)
    with pytest.raises(MemoryError, match="memory_pool_size") as caught:
        allocator.alloc(UNIT + 1)
    message = str(caught.value)
    assert "release" in message
    assert str(UNIT + 1) in message
    assert str(UNIT) in message
    with pytest.raises(PoolExhausted):
        allocator.alloc(1 << 80)


def test_a_request_beyond_the_whole_pool_fails_on_an_empty_pool() -> None:
    allocator = PoolAllocator(4 * UNIT + 100)
    with pytest.raises(PoolExhausted) as caught:
        allocator.alloc(4 * UNIT + 1)
    assert caught.value.largest_free == 4 * UNIT
    assert allocator.alloc(4 * UNIT) == 0


def test_what_can_never_fit_is_no_matter_of_consumers() -> None:
    allocator = PoolAllocator(4 * UNIT, key="host_pool_size")
    with pytest.raises(PoolExhausted) as caught:
        allocator.alloc(4 * UNIT + 1)
    assert (
        str(caught.value)
        == "a payload of 16385 bytes does not fit host_pool_size=16384. Raise host_pool_size."
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(("size", "usable"), [(UNIT, UNIT), (2 * UNIT - 1, UNIT), (10 * UNIT + 5, 10 * UNIT)])
def test_the_usable_size_is_rounded_down(size: int, usable: int) -> None:
    allocator = PoolAllocator(size)
    assert allocator.alignment == UNIT
    assert allocator.size == allocator.free_bytes == allocator.largest_free == usable


@pytest.mark.parametrize("alignment", [0, -1, 3, 4095, -4096])
def test_the_alignment_must_be_a_power_of_two(alignment: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        PoolAllocator(1 << 20, alignment=alignment)


@pytest.mark.parametrize("size", [0, -5, UNIT - 1])
def test_a_pool_smaller_than_one_block_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=str(size)):
        PoolAllocator(size)


def test_check_notices_broken_books() -> None:
    def fresh() -> PoolAllocator:
        allocator = PoolAllocator(16 * UNIT)
        keep = [allocator.alloc(UNIT) for _ in range(4)]
        allocator.free(keep[1])
        allocator.check()
        return allocator

    def lose_live(a: PoolAllocator) -> None:
        del a._live[0]

    def overlap(a: PoolAllocator) -> None:
        a._live[0] = 2 * UNIT

    def miscount(a: PoolAllocator) -> None:
        a._used += UNIT

    def forget_end(a: PoolAllocator) -> None:
        del a._start_of[2 * UNIT]

    def forget_class(a: PoolAllocator) -> None:
        a._lengths.pop()

    def misfile(a: PoolAllocator) -> None:
        a._by_length[12 * UNIT].clear()

    def split_hole(a: PoolAllocator) -> None:
        a._drop_free(4 * UNIT, 16 * UNIT)
        a._add_free(4 * UNIT, 8 * UNIT)
        a._add_free(8 * UNIT, 16 * UNIT)

    for damage in (lose_live, overlap, miscount, forget_end, forget_class, misfile, split_hole):
        allocator = fresh()
        damage(allocator)
        with pytest.raises(AssertionError):
            allocator.check()
