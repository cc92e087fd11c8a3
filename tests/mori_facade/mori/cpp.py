"""The value types of the facade: configuration, descriptors, statuses."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from mori_mp.shared.pool import PoolDescriptor
from mori_mp.workers.engines.shm import ShmEngineDescriptor


class BackendType(enum.IntEnum):
    Unknown = 0
    XGMI = 1
    RDMA = 2


class MemoryLocationType(enum.IntEnum):
    Unknown = 0
    CPU = 1
    GPU = 2


class PollCqMode(enum.IntEnum):
    POLLING = 0
    EVENT = 1


class StatusCode(enum.IntEnum):
    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14


class TransferStatus:
    """The outcome of one write; the copy has ended before anybody sees it."""

    def __init__(self, code: StatusCode = StatusCode.INIT, message: str = "") -> None:
        self._code = code
        self._message = message

    def Code(self) -> StatusCode:
        return self._code

    def Message(self) -> str:
        return self._message

    def Init(self) -> bool:
        return self._code is StatusCode.INIT

    def InProgress(self) -> bool:
        return self._code is StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:
        return self._code is StatusCode.SUCCESS

    def Failed(self) -> bool:
        return self._code > StatusCode.IN_PROGRESS

    def Wait(self) -> None:
        """Nothing to wait for."""


class IOEngineConfig:
    def __init__(self, host: str = "", port: int = 0) -> None:
        self.host = host
        self.port = port


class RdmaBackendConfig:
    def __init__(
        self,
        qp_per_transfer: int = 1,
        post_batch_size: int = -1,
        num_worker_threads: int = -1,
        poll_cq_mode: PollCqMode = PollCqMode.POLLING,
        enable_notification: bool = True,
        **others: Any,
    ) -> None:
        self.qp_per_transfer = qp_per_transfer
        self.post_batch_size = post_batch_size
        self.num_worker_threads = num_worker_threads
        self.poll_cq_mode = poll_cq_mode
        self.enable_notification = enable_notification
        self.others = others


class XgmiBackendConfig:
    def __init__(self, num_streams: int = 64, num_events: int = 64) -> None:
        self.num_streams = num_streams
        self.num_events = num_events


class EngineDesc:
    """Who an engine is. On the wire it is our shm engine's descriptor, which has no host and port."""

    def __init__(self, packed: ShmEngineDescriptor, host: str = "", port: int = 0) -> None:
        self._packed = packed
        self.host = host
        self.port = port

    @property
    def key(self) -> str:
        return self._packed.key

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self._packed)

    @classmethod
    def unpack(cls, data: bytes) -> EngineDesc:
        return cls(msgspec.msgpack.decode(data, type=ShmEngineDescriptor))


class MemoryDesc:
    """One registered pool; size in bytes."""

    def __init__(self, pool: PoolDescriptor) -> None:
        self.pool = pool

    @property
    def size(self) -> int:
        return self.pool.size

    def pack(self) -> bytes:
        return self.pool.pack()

    @classmethod
    def unpack(cls, data: bytes) -> MemoryDesc:
        return cls(PoolDescriptor.unpack(data))
