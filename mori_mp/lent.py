"""A sender's pool, mapped here to read payloads in place (lease delivery)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mori_mp.managed import ManagedBuffer
from mori_mp.shared.errors import WireError
from mori_mp.shared.pool import BLOCK, Pool


class LentPool:
    """A mapped pool with the leases open on it; unmapped when retired and the last lease has ended."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._tensor = torch.frombuffer(pool.view, dtype=torch.uint8)
        self._open: set[int] = set()
        self._retired = False

    def view(self, offset: int, size: int) -> memoryview:
        """Return the bytes of a payload. Raises WireError when they lie outside the pool."""
        if size <= 0 or offset < 0 or offset + size > self._pool.size:
            raise WireError(f"lease of {size} bytes at {offset} of a pool of {self._pool.size} bytes")
        return self._pool.view[offset : offset + size]

    def lease(self, offset: int, size: int, generation: int, settle: Callable[[], None]) -> ManagedBuffer:
        """Hold a payload until the buffer is released; then record it on the board and call settle()."""
        self.view(offset, size)
        self._open.add(generation)

        def release() -> None:
            self._pool.board.release(offset // BLOCK, generation)
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
