"""IOEngine over the shm engine: descriptors, registration and batched writes."""

from __future__ import annotations

import itertools
import threading

import torch

from mori import pinned
from mori.cpp import (
    BackendType,
    EngineDesc,
    IOEngineConfig,
    MemoryDesc,
    MemoryLocationType,
    PollCqMode,
    RdmaBackendConfig,
    StatusCode,
    TransferStatus,
    XgmiBackendConfig,
)
from mori_mp.shared.errors import EngineUnavailable, TransferFailed, WireError
from mori_mp.shared.pool import host_id
from mori_mp.workers.engines.shm import ShmEngine, ShmEngineDescriptor

__all__ = [
    "BackendType",
    "EngineDesc",
    "IOEngine",
    "IOEngineConfig",
    "MemoryDesc",
    "MemoryLocationType",
    "PollCqMode",
    "RdmaBackendConfig",
    "StatusCode",
    "XgmiBackendConfig",
]


class _Local:
    """A registered pool and the peers mapped to write into from it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.engine = ShmEngine(pinned.pool_of(tensor), {})
        self._peers: dict[bytes, int] = {}

    def peer(self, remote: MemoryDesc) -> int:
        packed = remote.pack()
        if packed not in self._peers:
            peer = len(self._peers)
            self.engine.add_peer(peer, b"", packed)
            self._peers[packed] = peer
        return self._peers[packed]


class IOEngine:
    """As Mori's: a peer that is gone fails the first write to it; later ones reach its orphaned memory."""

    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self._desc = EngineDesc(ShmEngineDescriptor(key, host_id()), config.host, config.port)
        self._lock = threading.Lock()
        self._uids = itertools.count(1)
        self._backends: set[BackendType] = set()
        self._remote_engines: set[str] = set()
        self._local: dict[str, _Local] = {}

    def get_engine_desc(self) -> EngineDesc:
        return self._desc

    def create_backend(self, backend: BackendType, config: object = None) -> None:
        self._backends.add(backend)

    def register_remote_engine(self, desc: EngineDesc) -> None:
        self._remote_engines.add(desc.key)

    def deregister_remote_engine(self, desc: EngineDesc) -> None:
        self._remote_engines.discard(desc.key)

    def register_torch_tensor(self, tensor: torch.Tensor) -> MemoryDesc:
        pool = pinned.pool_of(tensor)
        self._local[pool.name] = _Local(tensor)
        return MemoryDesc(pool.descriptor())

    def deregister_memory(self, desc: MemoryDesc) -> None:
        local = self._local.pop(desc.pool.name, None)
        if local is not None:
            local.engine.close()
            pinned.unpin(desc.pool.name)

    def allocate_transfer_uid(self) -> int:
        return next(self._uids)

    def batch_write(
        self,
        local: list[MemoryDesc],
        local_offsets: list[list[int]],
        remote: list[MemoryDesc],
        remote_offsets: list[list[int]],
        sizes: list[list[int]],
        uids: list[int],
    ) -> list[TransferStatus]:
        """Write each entry; one status an entry."""
        with self._lock:
            batch = zip(local, local_offsets, remote, remote_offsets, sizes, uids, strict=True)
            return [self._write(*entry) for entry in batch]

    def _write(
        self,
        local: MemoryDesc,
        local_offsets: list[int],
        remote: MemoryDesc,
        remote_offsets: list[int],
        sizes: list[int],
        uid: int,
    ) -> TransferStatus:
        mine = self._local.get(local.pool.name)
        if mine is None or not self._backends or not self._remote_engines:
            return TransferStatus(StatusCode.ERR_BAD_STATE, "No available backend found")
        try:
            transfer = mine.engine.submit(mine.peer(remote), local_offsets, remote_offsets, sizes, uid)
            assert transfer.poll()
        except EngineUnavailable as exc:
            return TransferStatus(StatusCode.ERR_BAD_STATE, str(exc))
        except (TransferFailed, WireError) as exc:
            return TransferStatus(StatusCode.ERR_INVALID_ARGS, str(exc))
        return TransferStatus(StatusCode.SUCCESS)
