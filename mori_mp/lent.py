"""A sender's pool, mapped here to read payloads in place: offered ones under a claim, others under a lease.

A sender knows the holder of a lease by its process, and grants a process its own lease again, since the first
reply may have been lost. So of several calls in one process that are granted the same payload, whichever
connector they go through, one may read it, and the end of its buffer is the end of the lease.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch

from mori_mp.mailbox import claim
from mori_mp.managed import ManagedBuffer
from mori_mp.shared.claims import Claims
from mori_mp.shared.errors import WireError
from mori_mp.shared.pool import BLOCK, Pool

_MAX_CLAIMS = 65_536
_claims: OrderedDict[tuple[str, int], object] = OrderedDict()  # pool's name, generation


class LentPool:
    """A mapped pool with the leases open on it; unmapped when retired and the last lease has ended."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tensor = torch.frombuffer(pool.view, dtype=torch.uint8)
        self._claims = Claims(pool.fd)
        self._open: set[int] = set()
        self._retired = False

    def view(self, offset: int, size: int) -> memoryview:
        """Return the bytes of a payload. Raises WireError when they lie outside the pool."""
        if size <= 0 or offset < 0 or offset + size > self._pool.size:
            raise WireError(f"lease of {size} bytes at {offset} of a pool of {self._pool.size} bytes")
        return self._pool.view[offset : offset + size]

    def lease(
        self, offset: int, size: int, generation: int, settle: Callable[[], None]
    ) -> ManagedBuffer | None:
        """Hold a payload until the buffer is released; then record it on the board and call settle().

        None if another call in this process holds the payload or has held it: the lease is that one's.
        """
        self.view(offset, size)
        if not claim(_claims, (self._pool.name, generation), _MAX_CLAIMS):
            return None
        self._open.add(generation)

        def release() -> None:
            self._pool.board.release(offset // BLOCK, generation)
            self._open.discard(generation)
            if self._retired:
                self._unmap()
            settle()

        return ManagedBuffer(self._tensor, offset, size, release)

    def claim(
        self, offset: int, size: int, generation: int, settle: Callable[[], None]
    ) -> ManagedBuffer | None:
        """Claim an offered payload until the buffer is released; then call settle().

        None if it has gone meanwhile. Raises WireError when it lies outside the pool.
        """
        self.view(offset, size)
        slot = offset // BLOCK
        if not self._claims.take(slot):
            return None
        if self._pool.board.generation(slot) != generation:
            self._claims.drop(slot)
            return None
        self._open.add(generation)

        def release() -> None:
            self._claims.drop(slot)
            self._open.discard(generation)
            if self._retired:
                self._unmap()
            settle()

        return ManagedBuffer(self._tensor, offset, size, release)

    def retire(self) -> None:
        """No new leases; unmap as soon as none is open."""
        self._retired = True
        self._unmap()

    def _unmap(self) -> None:
        if not self._open and self._pool.fd >= 0:
            del self._tensor
            self._pool.close()
