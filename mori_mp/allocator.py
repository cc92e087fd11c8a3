"""The block allocator of a pool: it hands out byte offsets and never touches the memory behind them.

Theory of operation
    The pool is at all times tiled, without gap or overlap, by three kinds of blocks: *live* (handed out),
    *returned* (given back, not yet merged) and *free*. Every length is a multiple of the alignment.

    Segregated fit, one size class per distinct free length. ``_lengths`` holds those lengths in order,
    ``_by_length`` the free blocks of each. Distinct lengths add up to at most the pool, so a pool of N
    aligned units has fewer than sqrt(2 N) classes (at most 723 for 1 GiB of 4 KiB units, whatever the load
    does), and one binary search finds the best fit. Classes of power-of-two width with bitmaps (TLSF) were
    the alternative; they round, so they either refuse a request that would fit or walk a list to find the
    block. Exact classes do neither: ``alloc`` succeeds whenever the largest free block is large enough.

    Free blocks are known by both ends (``_end_of`` by start, ``_start_of`` by end), so a block that comes
    back finds both neighbours by hash and merges with them: two free blocks are never adjacent. Best fit
    leaves the large block at the top of the pool alone as long as any hole fits, and a request is cut from
    the low end of its block: together they keep the touched part of the pool small. Within a class the hole
    freed last is used first, its pages being the warmest.

Concurrency
    ``alloc`` and the properties take a lock. ``free`` takes none: it is two operations that the interpreter
    makes atomic, a ``dict.pop`` (which is also the double-free check) and a ``deque.append``; the next caller
    that holds the lock merges what was returned. A finalizer that the garbage collector runs in the
    middle of ``alloc`` can therefore free a block without waiting for a lock that its own thread holds, and a
    thread that frees never makes a thread in ``put`` wait.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections import deque

from mori_mp.shared.errors import AllocatorMisuse, PoolExhausted


class PoolAllocator:
    """Best-fit allocator over ``[0, size)`` bytes. Thread-safe.

    Args:
        size: bytes of the pool; what is left over beyond a multiple of ``alignment`` is not used.
        alignment: bytes, a power of two; every offset and every block length is a multiple of it. Offsets are
            relative to the pool, whose base address must itself be aligned for addresses to be.
        key: the configuration key that sets the pool's size, for error messages.

    Raises:
        ValueError: ``alignment`` is not a power of two, or the pool is smaller than one aligned block.
    """

    __slots__ = (
        "_alignment",
        "_by_length",
        "_end_of",
        "_key",
        "_lengths",
        "_live",
        "_lock",
        "_mask",
        "_returned",
        "_size",
        "_start_of",
        "_used",
    )

    def __init__(self, size: int, *, alignment: int = 4096, key: str = "memory_pool_size") -> None:
        if alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"alignment must be a power of two, got {alignment}")
        if size < alignment:
            raise ValueError(
                f"a pool of {size} bytes cannot hold one block of {alignment} bytes (the alignment)"
            )
        self._alignment = alignment
        self._mask = alignment - 1
        self._size = size & ~self._mask
        self._key = key
        self._lock = threading.Lock()
        self._live: dict[int, int] = {}  # start -> length
        self._returned: deque[tuple[int, int]] = deque()  # (start, length)
        self._used = 0  # bytes live or returned
        self._end_of: dict[int, int] = {}  # free: start -> end
        self._start_of: dict[int, int] = {}  # free: end -> start
        self._by_length: dict[int, dict[int, None]] = {}  # free: length -> starts, oldest first
        self._lengths: list[int] = []  # the keys of _by_length, ascending
        self._add_free(0, self._size)

    def alloc(self, size: int) -> int:
        """Take a block of at least ``size`` bytes and return its offset.

        Takes a lock, so it must not be called from a finalizer or a signal handler.

        Raises:
            ValueError: ``size`` is not positive.
            PoolExhausted: no free block is large enough.
        """
        if size <= 0:
            raise ValueError(f"cannot allocate {size} bytes: the size must be positive")
        need = (size + self._mask) & ~self._mask
        with self._lock:
            if self._returned:
                self._merge_returned()
            lengths = self._lengths
            index = bisect_left(lengths, need)
            if index == len(lengths):
                largest = lengths[-1] if lengths else 0
                raise PoolExhausted(size, self._size - self._used, largest, self._size, self._key)
            length = lengths[index]
            starts = self._by_length[length]
            start = starts.popitem()[0]
            if not starts:
                del self._by_length[length], lengths[index]
            end = self._end_of.pop(start)
            del self._start_of[end]
            if length > need:
                self._add_free(start + need, end)
            self._used += need
            self._live[start] = need
        return start

    def free(self, offset: int) -> int:
        """Give back the block at ``offset`` and return its length in bytes (the aligned size).

        Never waits: safe in finalizers, and from any thread.

        Raises:
            AllocatorMisuse: no live block starts at ``offset`` (never allocated, or freed before). Nothing
                has changed.
        """
        length = self._live.pop(offset, 0)
        if not length:
            raise AllocatorMisuse(
                f"free of offset {offset} in the pool of {self._key}={self._size}: no live block starts "
                f"there (freed twice, or never allocated)"
            )
        self._returned.append((offset, length))
        return length

    @property
    def size(self) -> int:
        """Usable bytes: the size given, rounded down to the alignment."""
        return self._size

    @property
    def alignment(self) -> int:
        """Bytes that every offset and block length is a multiple of."""
        return self._alignment

    @property
    def used_bytes(self) -> int:
        """Bytes of all live blocks, each rounded up to the alignment."""
        with self._lock:
            self._merge_returned()
            return self._used

    @property
    def free_bytes(self) -> int:
        """Bytes not in any live block; ``used_bytes + free_bytes == size``."""
        with self._lock:
            self._merge_returned()
            return self._size - self._used

    @property
    def largest_free(self) -> int:
        """Bytes of the largest free block: the largest request that would succeed now."""
        with self._lock:
            self._merge_returned()
            return self._lengths[-1] if self._lengths else 0

    @property
    def live_blocks(self) -> int:
        """How many blocks are allocated."""
        return len(self._live)

    def check(self) -> None:
        """Verify every internal invariant, in time linear in the number of blocks.

        For tests and diagnosis; no other thread may be inside ``free`` meanwhile.

        Raises:
            AssertionError: an invariant does not hold; the message says which.
        """
        with self._lock:
            self._merge_returned()
            live = [(start, start + length, True) for start, length in self._live.items()]
            free = [(start, end, False) for start, end in self._end_of.items()]
            position, previous_free = 0, False
            for start, end, is_live in sorted(live + free):
                _require(start == position, f"gap or overlap: block {start}-{end} follows {position}")
                _require(end > start, f"block {start}-{end} is empty")
                _require(not (start | end) & self._mask, f"block {start}-{end} is not aligned")
                _require(
                    is_live or not previous_free,
                    f"free block {start}-{end} was not merged with the one below",
                )
                position, previous_free = end, not is_live
            _require(position == self._size, f"blocks end at {position}, the pool at {self._size}")
            used = sum(self._live.values())
            _require(used == self._used, f"{used} bytes are live, {self._used} are accounted for")
            by_end = {end: start for start, end in self._end_of.items()}
            _require(by_end == self._start_of, "the two ends of the free blocks disagree")
            by_length: dict[int, set[int]] = {}
            for start, end in self._end_of.items():
                by_length.setdefault(end - start, set()).add(start)
            classes = {length: set(starts) for length, starts in self._by_length.items()}
            _require(by_length == classes, "the size classes do not hold the free blocks")
            _require(sorted(by_length) == self._lengths, "the order of the size classes is broken")

    def _merge_returned(self) -> None:
        """Turn returned blocks into free ones, merged with their neighbours. The lock is held."""
        returned = self._returned
        while returned:
            start, length = returned.popleft()
            self._used -= length
            end = start + length
            below = self._start_of.get(start)
            if below is not None:
                self._drop_free(below, start)
                start = below
            above = self._end_of.get(end)
            if above is not None:
                self._drop_free(end, above)
                end = above
            self._add_free(start, end)

    def _add_free(self, start: int, end: int) -> None:
        self._end_of[start] = end
        self._start_of[end] = start
        length = end - start
        starts = self._by_length.get(length)
        if starts is None:
            self._by_length[length] = {start: None}
            insort(self._lengths, length)
        else:
            starts[start] = None

    def _drop_free(self, start: int, end: int) -> None:
        del self._end_of[start], self._start_of[end]
        length = end - start
        starts = self._by_length[length]
        del starts[start]
        if not starts:
            del self._by_length[length], self._lengths[bisect_left(self._lengths, length)]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)
