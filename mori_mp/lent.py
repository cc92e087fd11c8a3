"""A sender's pool, mapped here to read payloads in place: offered ones under a claim, others under a lease.

A sender knows the holder of a lease by its process, and grants a process its own lease again, since the first
reply may have been lost. So of several calls in one process that may read the same payload, whichever
connector they go through, one does: the first, and the end of its buffer is the end of the lease.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch

from mori_mp.managed import ManagedBuffer
from mori_mp.shared.claims import Claims
from mori_mp.shared.errors import WireError
from mori_mp.shared.pool import BLOCK, Pool

_MAX_READERS = 65_536


class _Reader:
    """The one call of this process that reads or has read a payload."""

    __slots__ = ("leased",)

    def __init__(self, leased: bool) -> None:
        self.leased = leased


_readers: OrderedDict[tuple[str, int], _Reader] = OrderedDict()  # by the pool's name and the generation


def _enter(pool: str, generation: int, leased: bool) -> _Reader | None:
    """Become the reader of a payload; None if we do, else the one that is."""
    ours = _Reader(leased)
    reader = _readers.setdefault((pool, generation), ours)  # one atomic step
    if len(_readers) > _MAX_READERS:
        _readers.popitem(last=False)
    return None if reader is ours else reader


class Claim(NamedTuple):
    """A claim on an offered payload. end: it has been read, for good; drop: it has not."""

    end: Callable[[], None]
    drop: Callable[[], None]


class LentPool:
    """A mapped pool with the buffers open on it; unmapped when retired and the last of them has ended.

    Threads and finalizers meet here without a lock: what must happen once hangs on one atomic step (an entry
    of a dict made or taken out, the only item of a list popped).
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tensor = torch.frombuffer(pool.view, dtype=torch.uint8)
        self._claims = Claims(pool.fd)
        self._open: dict[int, object] = {}  # by generation
        self._locking: dict[int, object] = {}  # by slot: the claim, or attempt at one, that has its lock
        self._retired = False
        self._mapped = [pool]

    def view(self, offset: int, size: int) -> memoryview:
        """Return the bytes of a payload, on which a buffer is open.

        Raises WireError when they lie outside the pool.
        """
        self._check(offset, size)
        return self._pool.view[offset : offset + size]

    def _check(self, offset: int, size: int) -> None:
        if size <= 0 or offset < 0 or offset + size > self._pool.size:
            raise WireError(f"lease of {size} bytes at {offset} of a pool of {self._pool.size} bytes")

    def lease(
        self, offset: int, size: int, generation: int, settle: Callable[[], None]
    ) -> ManagedBuffer | None:
        """Hold a payload until the buffer is released; then record it on the board and call settle().

        None if another call in this process holds the payload or has held it: the lease is that one's.
        Raises WireError when it lies outside the pool, or the pool is that of a stage that is gone.
        """
        self._check(offset, size)
        reader = _enter(self._pool.name, generation, leased=True)
        if reader is not None and reader.leased:
            return None
        if reader is not None or not self._reserve(generation):  # read under a claim: nobody needs this lease
            self._pool.board.release(offset // BLOCK, generation)
            settle()
            return None

        def release() -> None:
            self._pool.board.release(offset // BLOCK, generation)
            self._end(generation)
            settle()

        return ManagedBuffer(self._tensor, offset, size, release)

    def claim(
        self, offset: int, size: int, generation: int, settle: Callable[[], None]
    ) -> ManagedBuffer | None:
        """Claim an offered payload until the buffer is released; then call settle().

        None if it has gone meanwhile, or another call in this process reads it or has read it: the lock is
        one for all that use this mapping, so the first of two to let go would let go for both. Raises
        WireError as lease() does.
        """
        self._check(offset, size)
        claim = self._claim(offset // BLOCK, generation, settle)
        return None if claim is None else ManagedBuffer(self._tensor, offset, size, claim.end)

    def claim_device(
        self, offset: int, size: int, generation: int, settle: Callable[[], None]
    ) -> Claim | None:
        """Claim an offered payload of the GPU pool beside this one, for a copy of it.

        Offset and size are of that pool. None and errors as for claim().
        """
        if size <= 0 or offset < 0 or offset + size > self._pool.device_bytes:
            raise WireError(f"{size} bytes at {offset} of a GPU pool of {self._pool.device_bytes} bytes")
        return self._claim((self._pool.size + offset) // BLOCK, generation, settle)

    def _claim(self, slot: int, generation: int, settle: Callable[[], None]) -> Claim | None:
        if _enter(self._pool.name, generation, leased=False) is not None or not self._reserve(generation):
            return None
        ours = object()
        if self._locking.setdefault(slot, ours) is not ours:  # the lock is one for all of this mapping
            self._give_up(generation)
            return None
        if not self._claims.take(slot):
            del self._locking[slot]
            self._give_up(generation)
            return None

        def unlock() -> None:
            self._claims.drop(slot)
            del self._locking[slot]

        def end() -> None:
            unlock()
            self._end(generation)
            settle()

        def drop() -> None:
            unlock()
            self._give_up(generation)

        if self._pool.board.generation(slot) != generation:
            drop()
            return None
        return Claim(end, drop)

    def _give_up(self, generation: int) -> None:
        """Let this or another call of the process try again."""
        self._end(generation)
        _readers.pop((self._pool.name, generation), None)

    def retire(self) -> None:
        """No new buffers; unmap as soon as none is open."""
        self._retired = True
        self._unmap_unused()

    def _reserve(self, generation: int) -> bool:
        """Keep the pool mapped for a buffer on a payload; False if there is one on it already."""
        ours = object()
        if self._open.setdefault(generation, ours) is not ours:
            return False
        if self._retired:  # looked at after the entry is made: either we see it, or retire() sees the entry
            self._end(generation)
            raise WireError(f"the stage that lent pool {self._pool.name} is gone")
        return True

    def _end(self, generation: int) -> None:
        del self._open[generation]
        if self._retired:
            self._unmap_unused()

    def _unmap_unused(self) -> None:
        if self._open:
            return
        try:
            pool = self._mapped.pop()
        except IndexError:
            return
        del self._tensor
        pool.close()
