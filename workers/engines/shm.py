"""The `shm` engine: host memory of one machine, by mapping the peer's memfd and copying.

Memory descriptor: a packed `PoolDescriptor`. Engine descriptor: the pool's name and host, for messages only;
the mapping itself proves that the peer is reachable. A copy runs to its end inside submit(), so a transfer is
always complete by the time it is polled. A peer's mapping is dropped when its session ends; bytes it still
shows belong to whoever keeps the memfd open.
"""

from __future__ import annotations

import ctypes
from typing import Any

import msgspec

from mori_mp.shared.errors import EngineUnavailable, WireError
from mori_mp.shared.pool import Pool, PoolDescriptor, host_id
from mori_mp.workers.engines.base import (
    HOST,
    Deferred,
    LocalMemory,
    Passive,
    PeersEngine,
    Ready,
    Transfer,
)

NAME = "shm"

_memmove = ctypes.memmove  # releases the GIL, which matters in worker_mode thread only


class ShmEngineDescriptor(msgspec.Struct, array_like=True, frozen=True):
    key: str
    host_id: str


def is_ours(mem_desc: bytes) -> bool:
    """Tell whether a memory descriptor is one of this engine's."""
    try:
        PoolDescriptor.unpack(mem_desc)
    except WireError:
        return False
    return True


def make(name: str, memory: LocalMemory, options: dict[str, Any]) -> ShmEngine:
    """Make the engine of a worker. Raises EngineUnavailable."""
    if memory.device != HOST:
        raise EngineUnavailable(
            "shm moves host memory, and this pool is GPU memory; use another backend_type"
        )
    return ShmEngine(memory, options)


def receive(name: str, memory: Pool | LocalMemory, options: dict[str, Any]) -> Passive:
    """Describe a pool; nothing beyond the pool itself must stay alive. Raises EngineUnavailable."""
    if not isinstance(memory, Pool):
        raise EngineUnavailable("shm lets peers write into pools of mori_mp.shared.pool only")
    engine_desc = msgspec.msgpack.encode(ShmEngineDescriptor(memory.name, host_id()))
    return Passive(engine_desc, memory.descriptor().pack())


class _Copied:
    def poll(self) -> bool:
        return True


_COPIED = _Copied()


class ShmEngine(PeersEngine[Pool]):
    """Copies between mapped pools."""

    name = NAME
    depth = 1

    def __init__(self, memory: Pool | LocalMemory, options: dict[str, Any]) -> None:
        super().__init__(LocalMemory.of(memory))

    def add_peer(self, peer: int, engine_desc: bytes, mem_desc: bytes) -> None:
        self._peers[peer] = Pool.open_peer(PoolDescriptor.unpack(mem_desc))

    def submit(
        self,
        peer: int,
        local: list[int],
        remote: list[int],
        sizes: list[int],
        uid: int,
        after: Ready | None = None,
    ) -> Transfer:
        target = self._admit(peer, local, remote, sizes)
        if after is not None and not after.query():
            return Deferred(after, lambda: self.submit(peer, local, remote, sizes, uid))
        for here, there, size in zip(local, remote, sizes, strict=True):
            _memmove(target.address + there, self._memory.address + here, size)
        return _COPIED
