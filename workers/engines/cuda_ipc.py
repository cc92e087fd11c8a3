"""The `cuda_ipc` engine: GPU memory of one host, by mapping the peer's allocation and copying into it.

Works with CUDA, and with ROCm where Mori is not installed. A receiver's memory descriptor is the IPC handle
of the allocation that holds its pool. A write is one asynchronous copy per run of adjacent segments on one
stream, and an event behind them; `poll()` asks the event. Of the streams the one with the fewest bytes under
way is taken, so that a large write does not hold up small ones. A write that must wait for an event of the
stage has its stream wait, not this process.

A mapping outlives the peer's process, so a success counts only if the process is still there. A write of
which only some copies could be enqueued fails when those have ended, not before: until then they read the
pool.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec

from mori_mp.shared.errors import EngineUnavailable, TransferFailed, WireError
from mori_mp.shared.pool import Pool, host_id
from mori_mp.workers.engines import gpu_runtime
from mori_mp.workers.engines.base import (
    HOST,
    Deferred,
    EngineBroken,
    LocalMemory,
    Passive,
    Ready,
    Transfer,
)
from mori_mp.workers.engines.gpu_pool import Event, export_allocation
from mori_mp.workers.engines.gpu_runtime import HANDLE_BYTES, GpuError, GpuRuntime
from mori_mp.workers.engines.liveness import PeerProcess, start_time
from mori_mp.workers.engines.polling import Link, PollingEngine, Write

logger = logging.getLogger(__name__)

NAME = "cuda_ipc"

DEFAULT_STREAMS = 8
DEFAULT_EVENTS = 64

_exported: dict[tuple[bytes, int], tuple[int, int]] = {}
"""Base and size in bytes of this process's own allocations, by handle and offset of the memory described."""


class CudaIpcEngineDescriptor(msgspec.Struct, array_like=True, frozen=True):
    key: str
    host_id: str


class GpuMemoryDescriptor(msgspec.Struct, array_like=True, frozen=True):
    """Memory descriptor of a GPU pool; offset and sizes in bytes.

    handle maps the allocation. started is the owner's start time in clock ticks, which tells it from a later
    process with its pid.
    """

    kind: str
    bus_id: str
    handle: bytes
    allocation_size: int
    offset: int
    size: int
    pid: int
    started: int
    host_id: str

    @classmethod
    def unpack(cls, data: bytes) -> GpuMemoryDescriptor:
        """Decode a descriptor from the wire. Raises WireError."""
        try:
            desc = msgspec.msgpack.decode(data, type=cls)
        except msgspec.DecodeError as exc:
            raise WireError(f"undecodable memory descriptor of {len(data)} bytes: {exc}") from None
        if (
            len(desc.handle) != HANDLE_BYTES
            or not 0 <= desc.offset < desc.offset + desc.size <= desc.allocation_size < 1 << 48
            or not 0 < desc.pid < 1 << 31
        ):
            raise WireError(f"impossible memory descriptor for {desc.size} bytes of GPU {desc.bus_id!r}")
        return desc


class _Link(Link):
    """A peer: where its memory lies in this process."""

    def __init__(self, runtime: GpuRuntime, desc: GpuMemoryDescriptor, process: PeerProcess) -> None:
        super().__init__(desc.size, process)
        self._runtime = runtime
        self._handle = b""
        if desc.pid == os.getpid():  # a process cannot import what it exported itself
            base, size = _exported.get((desc.handle, desc.offset), (0, 0))
        else:
            base = runtime.import_memory(desc.handle)
            self._handle = desc.handle
            size = runtime.allocation(base)[1]
        self.address = base + desc.offset
        if desc.allocation_size > size:
            self.close()
            raise WireError(
                f"impossible memory descriptor: {desc.allocation_size} bytes of an allocation of {size}"
            )

    def _release(self) -> None:
        self.process.close()
        if self._handle:
            handle, self._handle = self._handle, b""
            try:
                self._runtime.release_memory(handle)
            except GpuError as exc:
                logger.warning("memory of receiver process %d stays mapped: %s", self.process.pid, exc)


class _Stream:
    __slots__ = ("bytes", "handle")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.bytes = 0


class _Write(Write):
    """Copies on a stream, and the event behind them."""

    def __init__(self, engine: CudaIpcEngine, link: _Link, stream: _Stream, event: int, size: int) -> None:
        super().__init__(engine, link)
        self.stream = stream
        self.event = event
        self.size = size


class CudaIpcEngine(PollingEngine[_Link, _Write]):
    """See the module's docstring. options: cuda_ipc_num_streams, cuda_ipc_num_events."""

    name = NAME

    def __init__(self, memory: LocalMemory, options: dict[str, Any]) -> None:
        if memory.device == HOST:
            raise EngineUnavailable(
                "cuda_ipc moves GPU memory, and this pool is host memory; set memory_pool_device: cuda, or "
                "backend_type: shm"
            )
        super().__init__(memory)
        self._runtime = runtime = gpu_runtime.load()
        try:
            runtime.set_device(memory.device)
            owner = runtime.pointer_device(memory.address)
            if owner != memory.device:
                raise EngineUnavailable(
                    f"the pool at {memory.address:#x} is not memory of {runtime.kind} device {memory.device} "
                    f"(the runtime says {'host memory' if owner is None else owner})"
                )
            self._bus_id = runtime.bus_id(memory.device)
            streams = int(options.get("cuda_ipc_num_streams", DEFAULT_STREAMS))
            self.depth = _depth(options)
            self._streams = [_Stream(runtime.stream_create()) for _ in range(streams)]
            self._events = [runtime.event_create() for _ in range(self.depth)]
        except GpuError as exc:
            raise EngineUnavailable(f"cuda_ipc cannot use GPU {memory.device}: {exc}") from exc

    def add_peer(self, peer: int, engine_desc: bytes, mem_desc: bytes) -> None:
        try:
            key = msgspec.msgpack.decode(engine_desc, type=CudaIpcEngineDescriptor).key
        except msgspec.DecodeError as exc:
            raise WireError(f"undecodable engine descriptor of {len(engine_desc)} bytes: {exc}") from None
        desc = GpuMemoryDescriptor.unpack(mem_desc)
        if desc.host_id != host_id():
            raise EngineUnavailable(
                f"receiver {key} is on another host or in another PID namespace, where cuda_ipc does not "
                f"reach. Use backend_type rdma between hosts."
            )
        if desc.kind != self._runtime.kind:
            raise EngineUnavailable(f"receiver {key} has {desc.kind} memory, this stage {self._runtime.kind}")
        self.drop_peer(peer)
        process = PeerProcess.exact(desc.pid, desc.started)
        try:
            self._check_route(key, desc.bus_id)
            self._peers[peer] = _Link(self._runtime, desc, process)
        except GpuError as exc:
            process.close()
            raise EngineUnavailable(
                f"memory of receiver {key} (process {desc.pid}, GPU {desc.bus_id}) cannot be mapped: {exc}"
            ) from exc
        except BaseException:
            process.close()
            raise

    def submit(
        self,
        peer: int,
        local: list[int],
        remote: list[int],
        sizes: list[int],
        uid: int,
        after: Ready | None = None,
    ) -> Transfer:
        link = self._admit(peer, local, remote, sizes)
        if after is not None and not isinstance(after, Event):
            return Deferred(after, lambda: self.submit(peer, local, remote, sizes, uid))
        return self._start(link, local, remote, sizes, after)

    def close(self) -> None:
        super().close()
        if self._writes:
            # Destroying a stream, an event or a mapping would wait for them without an end in sight.
            logger.error(
                "%d GPU copies have not ended; they are left to the process's exit", len(self._writes)
            )
            return
        streams, self._streams = self._streams, []
        events, self._events = self._events, []
        with suppress(GpuError):  # after a lost context nothing can be released
            for stream in streams:
                self._runtime.stream_destroy(stream.handle)
            for event in events:
                self._runtime.event_destroy(event)

    # ------------------------------------------------------------------------- inside
    def _has_ended(self, write: _Write) -> bool:
        try:
            if not self._runtime.event_query(write.event):
                return False
        except GpuError as exc:
            write.failure = _failure("GPU copy", exc)
        self._events.append(write.event)
        write.stream.bytes -= write.size
        return True

    def _start(
        self, link: _Link, local: list[int], remote: list[int], sizes: list[int], after: Event | None
    ) -> Transfer:
        stream = min(self._streams, key=lambda one: one.bytes)
        write = _Write(self, link, stream, self._events[-1], sum(sizes))
        runtime = self._runtime
        try:
            if after is not None and not after.query():
                runtime.stream_wait_event(stream.handle, after.handle)
            for here, there, size in _runs(local, remote, sizes):
                runtime.memcpy_async(link.address + there, self._memory.address + here, size, stream.handle)
        except GpuError as exc:
            write.failure = _failure("GPU copy", exc)
        try:
            runtime.event_record(write.event, stream.handle)
        except GpuError as exc:
            # Only a lost context refuses this, and then no copy runs any more.
            raise write.failure or _failure("GPU copy", exc) from exc
        self._events.pop()
        stream.bytes += write.size
        return self._begun(write)

    def _check_route(self, key: str, bus_id: str) -> None:
        """Raise EngineUnavailable where both GPUs are visible and the runtime says there is no way."""
        runtime, device = self._runtime, self._memory.device
        other = runtime.device_by_bus_id(bus_id)
        if other is not None and other != device and not runtime.can_access_peer(device, other):
            raise EngineUnavailable(
                f"GPU {self._bus_id} cannot access GPU {bus_id} of receiver {key} directly (no peer access); "
                f"use backend_type rdma, or GPUs that share NVLink, XGMI or a PCIe switch"
            )


def check(name: str, options: dict[str, Any]) -> int:
    """Load the GPU's runtime; returns the engine's depth. Raises EngineUnavailable."""
    gpu_runtime.load()
    return _depth(options)


def _depth(options: dict[str, Any]) -> int:
    return int(options.get("cuda_ipc_num_events", DEFAULT_EVENTS))


def make(name: str, memory: LocalMemory, options: dict[str, Any]) -> CudaIpcEngine:
    """Make the engine of a worker. Raises EngineUnavailable."""
    return CudaIpcEngine(memory, options)


def receive(name: str, memory: Pool | LocalMemory, options: dict[str, Any]) -> Passive:
    """Describe a stage's GPU memory to its peers. Raises EngineUnavailable."""
    memory = LocalMemory.of(memory)
    if memory.device == HOST:
        raise EngineUnavailable("cuda_ipc shares GPU memory, and this pool is host memory")
    runtime = gpu_runtime.load()
    base, allocation_size, handle = export_allocation(runtime, memory)
    place = handle, memory.address - base
    _exported[place] = base, allocation_size
    desc = GpuMemoryDescriptor(
        kind=runtime.kind,
        bus_id=runtime.bus_id(memory.device),
        handle=handle,
        allocation_size=allocation_size,
        offset=memory.address - base,
        size=memory.size,
        pid=os.getpid(),
        started=start_time(os.getpid()),
        host_id=host_id(),
    )
    key = f"{NAME}-{secrets.token_hex(8)}-{os.getpid()}"
    engine_desc = msgspec.msgpack.encode(CudaIpcEngineDescriptor(key, host_id()))
    return Passive(engine_desc, msgspec.msgpack.encode(desc), lambda: _withdraw(place))


def _withdraw(place: tuple[bytes, int]) -> None:
    _exported.pop(place, None)


def _runs(local: list[int], remote: list[int], sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the segments, adjacent ones joined."""
    here, there, length = local[0], remote[0], 0
    for next_here, next_there, size in zip(local, remote, sizes, strict=True):
        if next_here == here + length and next_there == there + length:
            length += size
            continue
        yield here, there, length
        here, there, length = next_here, next_there, size
    yield here, there, length


def _failure(what: str, error: GpuError) -> TransferFailed:
    if error.context_lost:
        return EngineBroken(f"{what} failed, and this worker's GPU context with it: {error}")
    return TransferFailed(f"{what} failed: {error}")
