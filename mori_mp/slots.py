"""Slots of a connector's own pool: allocated for payloads to send and for landing writes to receive.

One allocator for both directions, so that a received buffer can be published again without a copy. A slot may
then have several owners (the user's ManagedBuffer, a publication) and is free when the last lets go. Letting
go may happen in a finalizer, in the middle of anything, so it only appends to a queue; the next allocation
works the queue off.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from mori_mp.allocator import PoolAllocator
from mori_mp.shared.errors import PoolExhausted
from mori_mp.shared.pool import Pool


class Slots:
    """The slots of a pool of so many bytes. Thread-safe; offsets and sizes in bytes.

    key: the configuration key that sets its size.
    """

    def __init__(self, size: int, key: str = "memory_pool_size") -> None:
        self.size = size
        self._allocator = PoolAllocator(size, key=key)
        self._lock = threading.Lock()
        self._owners: dict[int, int] = {}
        self._returned: deque[int] = deque()
        self._in_use: deque[tuple[Callable[[], bool], int]] = deque()  # (whether that has ended, offset)
        self.reclaim: Callable[[], None] = lambda: None
        """Takes back slots that others may fill and have not, for who finds no room. Not for finalizers."""

    def alloc(self, size: int) -> int:
        """Return the offset of a new slot with one owner. Raises PoolExhausted."""
        if self._returned or self._in_use:
            self.collect()
        offset = self._allocator.alloc(size)
        self._owners[offset] = 1
        return offset

    def share(self, offset: int) -> None:
        """Add an owner to a slot."""
        with self._lock:
            self._owners[offset] += 1

    def give_back(self, offset: int) -> None:
        """Remove an owner; safe in a finalizer."""
        self._returned.append(offset)

    def give_back_when(self, ended: Callable[[], bool], offset: int) -> None:
        """Remove an owner once ended() says so, which is asked now and then and must not wait."""
        self._in_use.append((ended, offset))

    def collect(self) -> None:
        """Free the slots whose last owner has let go."""
        for _ in range(len(self._in_use)):
            try:
                ended, offset = self._in_use.popleft()
            except IndexError:
                break
            if ended():
                self.give_back(offset)
            else:
                self._in_use.append((ended, offset))
        while self._returned:
            try:
                offset = self._returned.popleft()
            except IndexError:
                return
            with self._lock:
                owners = self._owners[offset] - 1
                if owners:
                    self._owners[offset] = owners
                    continue
                del self._owners[offset]
            self._allocator.free(offset)

    def stats(self) -> dict[str, int]:
        """Describe the pool for health(): bytes, and the number of slots in use."""
        self.collect()
        allocator = self._allocator
        return {
            "size": allocator.size,
            "used_bytes": allocator.used_bytes,
            "free_bytes": allocator.free_bytes,
            "largest_free": allocator.largest_free,
            "slots": allocator.live_blocks,
        }


class PoolSlots(Slots):
    """The slots of a host pool."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool.size, "host_pool_size" if pool.device_bytes else "memory_pool_size")
        self.pool = pool


__all__ = ["PoolExhausted", "PoolSlots", "Slots"]
