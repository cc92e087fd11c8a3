"""The `xgmi`, `rdma` and `fabric` engines: real Mori behind our protocol, each known hazard of it closed off.

Mori asserts (and aborts) on lists of unequal length, writes past a registered region, and reads wild
addresses: so nothing reaches it that `check_bounds` has not passed, and one call carries one entry, since an
entry without a route leaves all later ones in state INIT for ever. INIT counts as a failure.

Mori routes and caches by engine key, and unmaps a peer's memory only when the backend goes: a peer that came
back under its old key would have its bytes written into its dead predecessor's memory, reported as success.
So every engine here has a key of its own that is never used twice, and over IPC-mapped memory (xgmi, fabric)
each peer gets an IOEngine of its own, which goes when the peer is dropped. RDMA maps nothing and pins much,
so all its peers share one, and a key is taken once at a time. A mapping outlives its process, so a success
counts only if the process is still there.

Completion is polled, by one thread, with calls that do not wait: `Wait()` in another thread would make them
block with the GIL held, and `WaitFor()` sleeps its whole time-out. A backend that is destroyed before its
last status has ended hangs, so the statuses of writes are kept until they have, whatever happens to the
Transfer objects, and what still runs at close() is left to the process's exit.

A failed write may have enqueued copies that still run. Its failure is told when the GPUs have settled, not
before.
"""

from __future__ import annotations

import ctypes
import logging
from contextlib import suppress
from typing import Any, NamedTuple

from mori_mp.shared.errors import EngineUnavailable, TransferFailed, WireError
from mori_mp.shared.pool import Pool
from mori_mp.workers.engines import gpu_runtime, mori_api
from mori_mp.workers.engines.base import (
    HOST,
    Deferred,
    LocalMemory,
    Passive,
    Ready,
    Transfer,
)
from mori_mp.workers.engines.gpu_pool import EXPORT_ADVICE
from mori_mp.workers.engines.gpu_runtime import GpuError
from mori_mp.workers.engines.liveness import PeerProcess
from mori_mp.workers.engines.polling import Link, PollingEngine, Write

logger = logging.getLogger(__name__)

_RDMA_DEPTH = 16
_LIBRARY = "libmori_"  # what a process with a Mori engine has mapped
_MAX_DESCRIPTOR_BYTES = 4096


class _Receiver(NamedTuple):
    """A peer as its two descriptors have it: Mori's objects, and what is checked of them."""

    engine: Any
    memory: Any
    key: str
    pid: int
    host: str
    memory_key: str
    size: int
    device: str
    location: Any
    ipc_handle: bytes


class _Lane:
    """An IOEngine with this worker's memory registered; the sessions of its links run on it."""

    def __init__(self, api: Any, backend: str, memory: LocalMemory, options: dict[str, Any]) -> None:
        self.io = mori_api.make_io_engine(api, backend, options)
        self.key: str = self.io.get_engine_desc().key
        self.local = _register(api, self.io, memory)

    def close(self) -> None:
        """Destroy the engine; every session on it must be gone and every status have ended."""
        self.local = None
        self.io = None


class _Link(Link):
    """A peer: the session to its memory."""

    def __init__(self, lane: _Lane, receiver: _Receiver, *, owns_lane: bool) -> None:
        super().__init__(receiver.size, PeerProcess.likely(receiver.pid, _LIBRARY))
        self.lane = lane
        self.key = receiver.key
        self._receiver = receiver
        self._owns_lane = owns_lane
        if not self.process.watched:
            logger.info("receiver %s: its process cannot be watched from here", self.key)
        try:
            lane.io.register_remote_engine(receiver.engine)
            self._session = self._open()
        except BaseException:
            self.process.close()
            raise

    def session(self) -> Any:
        """Return the session; a new one if the backend has given the old one up."""
        if not self._session.alive():
            self._session = self._open()
        return self._session

    def _open(self) -> Any:
        session = self.lane.io.create_session(self.lane.local, self._receiver.memory)
        if session is None:
            raise EngineUnavailable(
                f"Mori has no way to the memory of receiver {self.key} (process {self._receiver.pid} of "
                f"host {self._receiver.host}, device {self._receiver.device or 'none'}): its process has "
                f"gone, it is on another host, or no GPU fabric joins the devices"
            )
        return session

    def _release(self) -> None:
        self._session = None
        self.process.close()
        if self._owns_lane:
            self.lane.close()
        else:
            self.lane.io.deregister_remote_engine(self._receiver.engine)


class _Write(Write):
    """Mori's status of it."""

    link: _Link

    def __init__(self, engine: MoriEngine, link: _Link, status: Any) -> None:
        super().__init__(engine, link)
        self.status = status


class MoriEngine(PollingEngine[_Link, _Write]):
    """See the module's docstring. options: host, and the keys that `mori_api.backend_config` reads."""

    def __init__(self, name: str, memory: LocalMemory, options: dict[str, Any], api: Any = None) -> None:
        """api stands in for mori.io in tests. Raises EngineUnavailable or ConfigError."""
        if name != "rdma" and memory.device == HOST:
            raise EngineUnavailable(
                f"{name} moves GPU memory, and this pool is host memory; set memory_pool_device: cuda, or "
                f"backend_type: shm"
            )
        super().__init__(memory)
        self.name = name
        self._api = api or mori_api.load_api()
        self._options = options
        self.depth = _depth(self._api, name, options)
        # Made now, so that a missing device is known at the start; the first peer gets it.
        self._spare: _Lane | None = self._new_lane()

    def add_peer(self, peer: int, engine_desc: bytes, mem_desc: bytes) -> None:
        receiver = _unpack(self._api, engine_desc, mem_desc)
        self._check(receiver)
        for link in self._peers.values():  # whose mapping would let a dead process pass for a living one
            if (link.key, link.process.pid) == (receiver.key, receiver.pid) and link.process.gone():
                raise EngineUnavailable(f"receiver process {receiver.pid} has exited")
        self.drop_peer(peer)
        shared = self.name == "rdma"
        if shared and any(link.key == receiver.key for link in self._peers.values()):
            raise EngineUnavailable(
                f"receiver key {receiver.key} is in use by another peer, and Mori tells receivers apart by it"
            )
        lane = self._spare or self._new_lane()
        if not shared:
            self._spare = None
        if receiver.key == lane.key:
            raise WireError(f"receiver has this worker's own engine key {receiver.key}")
        try:
            self._peers[peer] = _Link(lane, receiver, owns_lane=not shared)
        except RuntimeError as exc:
            if isinstance(exc, EngineUnavailable):
                raise
            raise EngineUnavailable(f"Mori refuses receiver {receiver.key}: {exc}") from exc

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
        if after is not None and not after.query():
            return Deferred(after, lambda: self.submit(peer, local, remote, sizes, uid))
        try:
            status = link.session().batch_write(local, remote, sizes, uid)
        except (RuntimeError, TypeError) as exc:  # TypeError: pybind11 finds no overload for the arguments
            raise TransferFailed(f"Mori refuses a write to receiver {link.key}: {exc}") from exc
        return self._begun(_Write(self, link, status))

    def close(self) -> None:
        super().close()
        if self._writes:
            logger.error(
                "%d Mori write(s) have not ended; they are left to the process's exit", len(self._writes)
            )
            for write in self._writes:
                _make_immortal(write)
        if self._spare is not None:
            if self.name != "rdma" or not self._writes:
                self._spare.close()
            self._spare = None

    # ------------------------------------------------------------------------- inside
    def _has_ended(self, write: _Write) -> bool:
        status = write.status
        if status.InProgress():
            return False
        if not status.Succeeded():
            self._wait_for_gpus()
            # INIT, that is not even begun, is here too: Mori leaves a write it has given up in it.
            write.failure = TransferFailed(
                f"write to receiver {write.link.key} failed: {status.Code().name} {status.Message()}".rstrip()
            )
        write.status = None
        return True

    def _wait_for_gpus(self) -> None:
        """Wait until no copy of a failed write can still be reading the pool."""
        if self._memory.device == HOST:
            return
        with suppress(GpuError, EngineUnavailable):  # a lost context runs no copies any more
            runtime = gpu_runtime.load("hip")
            for device in range(runtime.device_count()):
                runtime.set_device(device)
                runtime.synchronize()

    def _new_lane(self) -> _Lane:
        return _Lane(self._api, self.name, self._memory, self._options)

    def _check(self, receiver: _Receiver) -> None:
        if receiver.memory_key != receiver.key or not receiver.key:
            raise WireError(f"memory of engine {receiver.memory_key!r} came with engine {receiver.key!r}")
        if not 0 < receiver.size < 1 << 48:
            raise WireError(f"receiver {receiver.key} describes memory of {receiver.size} bytes")
        if self.name == "rdma":
            return
        if receiver.location != self._api.MemoryLocationType.GPU:
            raise EngineUnavailable(
                f"receiver {receiver.key} has host memory, which {self.name} does not reach; set its "
                f"memory_pool_device: cuda"
            )
        if self.name == "xgmi" and not any(receiver.ipc_handle):
            raise EngineUnavailable(
                f"receiver {receiver.key} describes GPU memory without an IPC handle: it was registered "
                f"before its backend was made, or it is memory that was itself imported"
            )


def check(name: str, options: dict[str, Any]) -> int:
    """Import Mori and fill its configuration; returns the engine's depth.

    Raises EngineUnavailable or ConfigError.
    """
    return _depth(mori_api.load_api(), name, options)


def _depth(api: Any, name: str, options: dict[str, Any]) -> int:
    config = mori_api.backend_config(api, name, options)
    return _RDMA_DEPTH if name == "rdma" else max(1, min(config.num_streams, config.num_events))


def make(name: str, memory: LocalMemory, options: dict[str, Any]) -> MoriEngine:
    """Make the engine of a worker. Raises EngineUnavailable or ConfigError."""
    return MoriEngine(name, memory, options)


def receive(name: str, memory: Pool | LocalMemory, options: dict[str, Any]) -> Passive:
    """Register a stage's pool in a passive engine of its process, which runs no Python when written to.

    Raises EngineUnavailable or ConfigError.
    """
    memory = LocalMemory.of(memory)
    if name != "rdma" and memory.device == HOST:
        raise EngineUnavailable(f"{name} reaches GPU memory only, and this pool is host memory")
    api = mori_api.load_api()
    io = mori_api.make_io_engine(api, name, options)
    registered = _register(api, io, memory)
    if name == "xgmi" and not any(registered.ipc_handle):
        raise EngineUnavailable(
            f"Mori cannot share this GPU memory with another process; memory that was itself imported is no "
            f"receiver's to share, and {EXPORT_ADVICE}"
        )
    held = [io]
    return Passive(io.get_engine_desc().pack(), registered.pack(), held.clear)


def _register(api: Any, io: Any, memory: LocalMemory) -> Any:
    """Register memory; after create_backend, or its handle would silently be all zero."""
    where = api.MemoryLocationType.CPU if memory.device == HOST else api.MemoryLocationType.GPU
    try:
        return io.register_memory(memory.address, memory.size, memory.device, where)
    except RuntimeError as exc:
        raise EngineUnavailable(f"Mori cannot register the pool of {memory.size} bytes: {exc}") from exc


def _unpack(api: Any, engine_desc: bytes, mem_desc: bytes) -> _Receiver:
    """Decode descriptors from the wire; attributes are read here, since their texts may not decode either."""
    sizes = f"{len(engine_desc)} and {len(mem_desc)} bytes"
    if max(len(engine_desc), len(mem_desc)) > _MAX_DESCRIPTOR_BYTES:
        raise WireError(f"descriptors of {sizes} are too long for Mori's")
    try:
        engine, memory = api.EngineDesc.unpack(engine_desc), api.MemoryDesc.unpack(mem_desc)
        return _Receiver(
            engine=engine,
            memory=memory,
            key=engine.key,
            pid=engine.pid,
            host=engine.hostname,
            memory_key=memory.engine_key,
            size=memory.size,
            device=memory.device_bus_id,
            location=memory.loc,
            ipc_handle=memory.ipc_handle,
        )
    except (RuntimeError, MemoryError, ValueError) as exc:
        raise WireError(f"undecodable Mori descriptors of {sizes}: {exc}") from None


def _make_immortal(one: object) -> None:
    """Keep an object, and all it holds, out of the interpreter's clean-up at exit, which would hang on it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
