"""A worker's engine over the stage's GPU pool, which is opened when it is first needed.

A process with a GPU context takes some 520 MiB of GPU memory, one that runs Mori's xgmi that of every GPU it
sees. Where both ends of an edge are on one host, receivers read the sender's GPU pool themselves, or have it
pushed into theirs, and a worker has nothing to write: it opens the pool when a receiver asks for a landing.
What can be found missing without a context (runtime, Mori, its configuration) is found at the start.
"""

from __future__ import annotations

import logging
from typing import Any

from mori_mp.shared.errors import TransferFailed
from mori_mp.workers import engines
from mori_mp.workers.engines.base import Engine, Ready, Transfer
from mori_mp.workers.engines.gpu_pool import BorrowedPool

logger = logging.getLogger(__name__)


class DeviceEngine:
    """See the module's docstring: an `Engine`, and the pool that it is over."""

    def __init__(self, name: str, gpu_pool: bytes, options: dict[str, Any]) -> None:
        """gpu_pool: the packed descriptor. Raises EngineUnavailable, ConfigError."""
        self.name = name
        self.depth = engines.check(name, options)
        self._packed = gpu_pool
        self._options = options
        self._pool: BorrowedPool | None = None
        self._engine: Engine | None = None

    @property
    def pool(self) -> BorrowedPool:
        """The stage's pool, imported on first use. Raises WireError, EngineUnavailable."""
        if self._pool is None:
            self._pool = BorrowedPool(self._packed)  # until this process exits
        return self._pool

    def open(self) -> Engine:
        """Import the pool and make the engine, once. Raises WireError, EngineUnavailable, ConfigError."""
        if self._engine is None:
            self._engine = engines.load(self.name, self.pool.memory, self._options)
            logger.debug("engine %s is up over the stage's GPU pool", self.name)
        return self._engine

    def event(self, number: int) -> Ready:
        """Return an event of the pool. Raises TransferFailed if it has none with this number."""
        events = self._pool.events if self._pool is not None else []
        if number >= len(events):
            raise TransferFailed(f"the pool has {len(events)} events, and none with number {number}")
        return events[number]

    def add_peer(self, peer: int, engine_desc: bytes, mem_desc: bytes) -> None:
        self.open().add_peer(peer, engine_desc, mem_desc)

    def drop_peer(self, peer: int) -> None:
        if self._engine is not None:
            self._engine.drop_peer(peer)

    def submit(
        self,
        peer: int,
        local: list[int],
        remote: list[int],
        sizes: list[int],
        uid: int,
        after: Ready | None = None,
    ) -> Transfer:
        return self.open().submit(peer, local, remote, sizes, uid, after)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
