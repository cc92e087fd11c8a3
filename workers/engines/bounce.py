"""Host payloads for GPU memory: through a bounce buffer on the GPU, by the engine over that.

The in-tree class has one pool, and takes everything in it. So where that is GPU memory, a sender with both
pools must write what lies in its host pool there as well. Each worker has a buffer of its own for that, in
parts; a transfer takes one, and goes through it piece by piece. Between two mori-mp ends nothing takes this
way.

    host pool --copy, waited for--> [ part of the buffer ] --inner engine--> peer's GPU memory
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from mori_mp.shared.errors import TransferFailed
from mori_mp.shared.pool import Pool
from mori_mp.workers.engines.base import (
    Deferred,
    Engine,
    EngineFactory,
    LocalMemory,
    Ready,
    Transfer,
    check_bounds,
)
from mori_mp.workers.engines.gpu_runtime import GpuError, GpuRuntime

PART_BYTES = 1 << 20
PARTS = 4

_INNER_KNOWS = 1 << 62  # how many bytes a peer has; no offset on the wire goes further

_Piece = tuple[int, int, int]  # from offset, to offset, size; bytes


class _Piecewise:
    """A transfer through a part of the buffer; waits for one, if all are in use."""

    def __init__(self, engine: BounceEngine, peer: int, pieces: Iterator[_Piece], uid: int) -> None:
        self._engine = engine
        self._peer = peer
        self._pieces = pieces
        self._uid = uid
        self._part = -1
        self._under_way: Transfer | None = None

    def poll(self) -> bool:
        if self._part < 0 and not self._take_part():
            return False
        try:
            while self._under_way is None or self._under_way.poll():
                piece = next(self._pieces, None)
                if piece is None:
                    self._give_part()
                    return True
                self._under_way = self._engine.send(self._peer, self._part, piece, self._uid)
        except BaseException:
            self._give_part()
            raise
        return False

    def _take_part(self) -> bool:
        if self._engine.parts:
            self._part = self._engine.parts.popleft()
        return self._part >= 0

    def _give_part(self) -> None:
        part, self._part = self._part, -1
        if part >= 0:
            self._engine.parts.append(part)


class BounceEngine:
    """See the module's docstring. Raises EngineUnavailable, ConfigError."""

    depth = PARTS

    def __init__(
        self,
        pool: Pool,
        runtime: GpuRuntime,
        device: int,
        load: EngineFactory,
        name: str,
        options: dict[str, Any],
    ) -> None:
        """load makes the inner engine, by name and options, over GPU memory of runtime and device."""
        self.name = f"bounce+{name}"
        self._pool = pool
        self._runtime = runtime
        self._device = device
        with runtime.current(device):
            self._address = runtime.malloc(PARTS * PART_BYTES)
        try:
            self._inner: Engine = load(name, LocalMemory(self._address, PARTS * PART_BYTES, device), options)
        except BaseException:
            self._free()
            raise
        self.parts = deque(range(min(PARTS, self._inner.depth)))

    def add_peer(self, peer: int, engine_desc: bytes, mem_desc: bytes) -> None:
        self._inner.add_peer(peer, engine_desc, mem_desc)

    def drop_peer(self, peer: int) -> None:
        self._inner.drop_peer(peer)

    def submit(
        self,
        peer: int,
        local: list[int],
        remote: list[int],
        sizes: list[int],
        uid: int,
        after: Ready | None = None,
    ) -> Transfer:
        """Start a write from the host pool; the inner engine checks its remote bounds, piece by piece."""
        check_bounds(self._pool.size, _INNER_KNOWS, local, remote, sizes)
        if after is not None and not after.query():
            return Deferred(after, lambda: self.submit(peer, local, remote, sizes, uid))
        return _Piecewise(self, peer, _pieces(local, remote, sizes), uid)

    def send(self, peer: int, part: int, piece: _Piece, uid: int) -> Transfer:
        """Copy a piece into a part of the buffer, and start writing it. Raises TransferFailed."""
        here, there, size = piece
        at = part * PART_BYTES
        try:
            with self._runtime.current(self._device):
                self._runtime.memcpy(self._address + at, self._pool.address + here, size)
        except GpuError as exc:
            raise TransferFailed(f"copy into the bounce buffer: {exc}") from exc
        return self._inner.submit(peer, [at], [there], [size], uid)

    def close(self) -> None:
        self._inner.close()
        self._free()

    def _free(self) -> None:
        address, self._address = self._address, 0
        if address:
            with self._runtime.current(self._device):
                self._runtime.free(address)


def _pieces(local: list[int], remote: list[int], sizes: list[int]) -> Iterator[_Piece]:
    """Yield (from, to, size) of what fits into a part."""
    for here, there, size in zip(local, remote, sizes, strict=True):
        for done in range(0, size, PART_BYTES):
            yield here + done, there + done, min(PART_BYTES, size - done)
