"""A GPU pool that a stage owns and its workers borrow.

The stage exports the allocation its pool lies in, and a ring of interprocess events, as one descriptor; each
worker imports both. Memory and events stay whole when a worker dies. The events order a worker's read behind
the stage's copy without anyone waiting: the stage records an event behind the copy that fills a buffer, and
names the event's number with the buffer; the worker hands it to its engine as `after`.

An event may be recorded again only once its last record has happened (query it): until then a worker may
still have to wait for it.

    stage                                      worker
    torch allocation, events                   the same, imported
    +--------[ pool: offset, size ]-----+ ipc  +--------[ LocalMemory ]----+
    | base                              | ---> | base                      |
    +-----------------------------------+      +---------------------------+
"""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec

from mori_mp.shared.errors import EngineUnavailable, WireError
from mori_mp.shared.pool import host_id
from mori_mp.shared.wire import MAX_PID
from mori_mp.workers.engines import gpu_runtime
from mori_mp.workers.engines.base import LocalMemory
from mori_mp.workers.engines.gpu_runtime import HANDLE_BYTES, GpuError, GpuRuntime

EXPORT_ADVICE = (
    "torch's expandable segments cannot be exported: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False "
    "(PYTORCH_HIP_ALLOC_CONF on ROCm) in the stage's environment"
)


class GpuPoolDescriptor(msgspec.Struct, array_like=True, frozen=True):
    """What a process of the same host needs to borrow a pool. Sizes and offsets in bytes.

    kind, library: the stage's GPU runtime; a worker must use the same. bus_id: the pool's GPU.
    """

    kind: str
    library: str
    bus_id: str
    handle: bytes
    allocation_size: int
    offset: int
    size: int
    events: list[bytes]
    pid: int
    host_id: str

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> GpuPoolDescriptor:
        """Decode a descriptor. Raises WireError."""
        try:
            desc = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
            raise WireError(f"undecodable GPU pool descriptor of {len(data)} bytes: {exc}") from None
        if (
            len(desc.handle) != HANDLE_BYTES
            or any(len(event) != HANDLE_BYTES for event in desc.events)
            or not 0 <= desc.offset < desc.offset + desc.size <= desc.allocation_size
            or not 0 < desc.pid <= MAX_PID
        ):
            raise WireError("impossible GPU pool descriptor: handles, sizes or process do not fit")
        return desc


_lent: dict[tuple[bytes, int], LentPool] = {}
"""This process's own pools, by handle and offset: workers that are its threads borrow them as they are."""


class Event:
    """A GPU event as something to wait for (`Ready`)."""

    def __init__(self, runtime: GpuRuntime, handle: int) -> None:
        self.runtime = runtime
        self.handle = handle

    def query(self) -> bool:
        return self.runtime.event_query(self.handle)


class LentPool:
    """The stage's end: memory that is exported, and the ring of events."""

    def __init__(self, runtime: GpuRuntime, memory: LocalMemory, events: int) -> None:
        base, allocation_size, handle = export_allocation(runtime, memory)
        runtime.set_device(memory.device)
        self._runtime = runtime
        self._place = handle, memory.address - base
        self.memory = memory
        self.events = [Event(runtime, runtime.event_create(interprocess=True)) for _ in range(events)]
        self.descriptor = GpuPoolDescriptor(
            kind=runtime.kind,
            library=runtime.path,
            bus_id=runtime.bus_id(memory.device),
            handle=handle,
            allocation_size=allocation_size,
            offset=memory.address - base,
            size=memory.size,
            events=[runtime.event_export(event.handle) for event in self.events],
            pid=os.getpid(),
            host_id=host_id(),
        )
        _lent[self._place] = self

    def close(self) -> None:
        """Destroy the events; the memory is the caller's. Idempotent."""
        _lent.pop(self._place, None)
        events, self.events = self.events, []
        for event in events:
            self._runtime.event_destroy(event.handle)


def lent_here(desc: GpuPoolDescriptor) -> LentPool:
    """Return the pool of this process that a descriptor is of. Raises EngineUnavailable if it is closed."""
    lent = _lent.get((desc.handle, desc.offset))
    if lent is None:
        raise EngineUnavailable("the stage's GPU pool has been closed")
    return lent


class BorrowedPool:
    """A worker's end: the stage's memory and events, imported."""

    def __init__(self, packed: bytes) -> None:
        """Import a pool. Raises WireError, or EngineUnavailable when it is out of reach."""
        desc = GpuPoolDescriptor.unpack(packed)
        if desc.host_id != host_id():
            raise EngineUnavailable(
                "a GPU pool can be borrowed on its own host and in its PID namespace only"
            )
        self.runtime = runtime = gpu_runtime.load(desc.kind, desc.library)
        device = runtime.device_by_bus_id(desc.bus_id)
        if device is None:
            raise EngineUnavailable(
                f"the pool's GPU {desc.bus_id} is not visible to this worker; check HIP_VISIBLE_DEVICES, "
                f"ROCR_VISIBLE_DEVICES and CUDA_VISIBLE_DEVICES"
            )
        self.events: list[Event] = []
        self._handle = b""
        if desc.pid == os.getpid():  # a process cannot import what it exported itself
            lent = lent_here(desc)
            self.memory, self.events = lent.memory, list(lent.events)
            return
        self._handle = desc.handle
        try:
            runtime.set_device(device)
            base = runtime.import_memory(desc.handle)
        except GpuError as exc:
            raise EngineUnavailable(f"the stage's GPU pool cannot be imported: {exc}") from exc
        self.memory = LocalMemory(base + desc.offset, desc.size, device)
        try:
            for handle in desc.events:
                self.events.append(Event(runtime, runtime.event_import(handle)))
        except GpuError as exc:
            self.close()
            raise EngineUnavailable(f"an event of the stage's GPU pool cannot be imported: {exc}") from exc

    def close(self) -> None:
        """Let go of memory and events; no engine may use them any more. Idempotent."""
        handle, self._handle = self._handle, b""
        if not handle:
            return
        events, self.events = self.events, []
        with suppress(GpuError):  # after a lost context nothing can be released, and the process ends
            for event in events:
                self.runtime.event_destroy(event.handle)
            self.runtime.release_memory(handle)


def export_allocation(runtime: GpuRuntime, memory: LocalMemory) -> tuple[int, int, bytes]:
    """Return base, size in bytes and IPC handle of the allocation that holds memory.

    Raises EngineUnavailable, with the setting to change, when the runtime cannot export it.
    """
    try:
        runtime.set_device(memory.device)
        base, size = runtime.allocation(memory.address)
        if memory.address + memory.size > base + size:
            raise EngineUnavailable(
                f"GPU memory of {memory.size} bytes at {memory.address:#x} spans several allocations and "
                f"cannot be shared with another process; {EXPORT_ADVICE}"
            )
        return base, size, runtime.export_memory(base)
    except GpuError as exc:
        if exc.context_lost:
            raise
        raise EngineUnavailable(
            f"GPU memory cannot be shared with another process: {exc}; {EXPORT_ADVICE}"
        ) from exc
