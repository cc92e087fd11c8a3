"""A peer's GPU pool, mapped here: offered payloads are copied from it, and others pushed into it.

On one host this saves the way through the sender's processes. An offered payload is copied into our own pool
by our own GPU: nobody but the receiver has to wake up. The copy is waited for, and so is one that the sender
pushes, since the payload must be there on whichever stream it is used next. That takes some 10 microseconds
for a small payload, with the GIL kept, and no longer than KEEP_GIL_SECONDS for any: beyond that the wait
gives it up.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from mori_mp.shared.errors import EngineUnavailable, TransferFailed, WireError
from mori_mp.shared.pool import host_id
from mori_mp.workers.engines import gpu_pool
from mori_mp.workers.engines.gpu_pool import GpuPoolDescriptor, LentPool
from mori_mp.workers.engines.gpu_runtime import GpuError, GpuRuntime
from mori_mp.workers.engines.liveness import PeerProcess

logger = logging.getLogger(__name__)

KEEP_GIL_SECONDS = 0.001
_PAUSE_SECONDS = 0.0002


class StillCopying(TransferFailed):
    """A copy is not over by its deadline. over() tells when it is: until then both its ends are in use."""

    def __init__(self, size: int, over: Callable[[], bool]) -> None:
        super().__init__(f"a GPU copy of {size} bytes from the sender's pool is not over in time")
        self.over = over


class LentDevice:
    """A mapped GPU pool with its events. Thread-safe; sizes and offsets in bytes.

    Its process is watched for as long as this object lives: slots may wait for its end when it is not mapped
    any more.

    runtime keeps the GIL in its calls, waiting does not; device is our own GPU, which copies.
    """

    def __init__(self, packed: bytes, runtime: GpuRuntime, waiting: GpuRuntime, device: int) -> None:
        """Map the pool of a packed descriptor. Raises WireError, or EngineUnavailable if out of reach."""
        desc = GpuPoolDescriptor.unpack(packed)
        self._runtime, self._waiting, self._device = runtime, waiting, device
        self.size = desc.size
        self._handle = b""
        self._events: list[int] = []
        self._own: LentPool | None = None
        self._idle: deque[tuple[int, int]] = deque()  # (stream, event) for a copy
        self._users = 0
        self._retired = False
        self._sender = PeerProcess(desc.pid, -1)  # this process, unless it is found to be another one
        self._lock = threading.Lock()
        if desc.host_id != host_id():
            raise EngineUnavailable("it lies on another host or in another PID namespace")
        if desc.kind != runtime.kind:
            raise EngineUnavailable(f"it is {desc.kind} memory, and this stage has {runtime.kind}")
        if desc.pid == os.getpid():  # a process cannot import what it exported itself
            self._own = gpu_pool.lent_here(desc)
            self.address = self._own.memory.address
            if self.size > self._own.memory.size:
                raise WireError(f"it claims {self.size} bytes of a pool of {self._own.memory.size}")
            return
        self._sender = _open(desc.pid)
        try:
            with waiting.current(device):
                self._check_route(desc.bus_id)
                self._import(desc)
        except BaseException:
            self._sender.close()
            raise

    def _check_route(self, bus_id: str) -> None:
        other = self._waiting.device_by_bus_id(bus_id)
        if other not in (None, self._device) and not self._waiting.can_access_peer(self._device, other or 0):
            raise EngineUnavailable(
                f"GPU {self._device} cannot access GPU {bus_id} directly (no peer access)"
            )

    def _import(self, desc: GpuPoolDescriptor) -> None:
        waiting = self._waiting
        try:
            base = waiting.import_memory(desc.handle)
            self._handle = desc.handle
            self.address = base + desc.offset
            size = waiting.allocation(base)[1]
            if desc.allocation_size > size:
                raise WireError(f"it claims {desc.allocation_size} bytes of an allocation of {size}")
            for handle in desc.events:
                self._events.append(waiting.event_import(handle))
        except GpuError as exc:
            self._unmap()
            raise EngineUnavailable(f"it cannot be mapped: {exc}") from exc
        except BaseException:
            self._unmap()
            raise

    @property
    def gone(self) -> bool:
        """Tell whether the process that lends the pool has exited."""
        return self._sender.gone()

    def arrived(self, event: int, deadline: float) -> bool:
        """Wait for what the pool's process has enqueued before an event (-1: it is known to be over).

        False as for copy(). Raises WireError, TransferFailed.
        """
        if event < 0:
            return True
        events = self._known_events()
        if event >= len(events):
            raise WireError(f"a GPU pool of {len(events)} events has none with number {event}")
        if not self._begin():
            return False
        try:
            with self._runtime.current(self._device):
                happened = self._await(events[event], deadline)
            return happened and not self._sender.gone()
        except GpuError as exc:
            raise TransferFailed(f"GPU copy by the sender: {exc}") from exc
        finally:
            self._end()

    def watch(self, event: int) -> Callable[[], bool]:
        """Return what tells whether an event has happened, or its process has gone, which ends its copies.

        The pool stays mapped until it has said so once.
        """
        if event < 0:
            return lambda: True
        events = self._known_events()
        if event >= len(events) or not self._begin():
            return self._sender.gone
        watched, watching = events[event], [True]

        def over() -> bool:
            if watching and not self._sender.gone() and not self._has_happened(watched):
                return False
            with suppress(IndexError):  # another thread has found out, too
                watching.pop()
                self._end()
            return True

        return over

    def _known_events(self) -> list[int]:
        return self._events if self._own is None else [event.handle for event in self._own.events]

    def copy(self, offset: int, size: int, target: int, event: int, deadline: float) -> bool:
        """Copy a payload, behind an event of the pool (-1: none), to an address of our GPU, and wait for it.

        False if the event has not happened by deadline (monotonic seconds), or the pool is gone; what has
        been copied then means nothing. Raises WireError, TransferFailed, and StillCopying if it is not over
        by then.
        """
        events = self._known_events()
        if self._own is not None and not events:
            return False  # it is closed
        if not 0 <= offset < offset + size <= self.size or event >= len(events):
            raise WireError(
                f"{size} bytes at {offset} behind event {event} of a GPU pool of {self.size} bytes"
            )
        if not self._begin():
            return False
        late = False
        try:
            with self._runtime.current(self._device):
                if event >= 0 and not self._await(events[event], deadline):
                    return False
                self._copy(offset, size, target, deadline)
            return not self._sender.gone()  # a mapping outlives its owner, the bytes in it need not
        except StillCopying:
            late = True
            raise
        except GpuError as exc:
            raise TransferFailed(f"GPU copy from the sender's pool: {exc}") from exc
        finally:
            if not late:
                self._end()

    def _begin(self) -> bool:
        with self._lock:
            if not self._retired:
                self._users += 1
            return not self._retired

    def _end(self) -> None:
        with self._lock:
            self._users -= 1
            if self._retired and not self._users:
                self._unmap()

    def _await(self, event: int, deadline: float) -> bool:
        """Wait for an event; the runtime has no such wait with an end to it."""
        keep_until = time.monotonic() + KEEP_GIL_SECONDS
        while not self._runtime.event_query(event):
            now = time.monotonic()
            if now >= deadline:
                return False
            if now >= keep_until:
                time.sleep(_PAUSE_SECONDS)
        return True

    def _copy(self, offset: int, size: int, target: int, deadline: float) -> None:
        runtime = self._runtime
        try:
            stream, done = self._idle.popleft()
        except IndexError:
            stream, done = runtime.stream_create(), runtime.event_create()
        try:
            runtime.memcpy_async(target, self.address + offset, size, stream)
            runtime.event_record(done, stream)
            ended = self._await(done, deadline)
        except BaseException:  # a keyboard interrupt, too: what comes now takes both ends for unused
            with suppress(GpuError):  # a lost context runs no copies any more
                self._waiting.stream_synchronize(stream)
            self._idle.append((stream, done))
            raise
        if not ended:
            raise StillCopying(size, partial(self._has_ended, stream, done))
        self._idle.append((stream, done))

    def _has_ended(self, stream: int, done: int) -> bool:
        """Tell whether a copy that nobody waits for has ended; not to be asked again after that."""
        if not self._has_happened(done):
            return False
        self._idle.append((stream, done))
        self._end()
        return True

    def _has_happened(self, event: int) -> bool:
        """Tell whether an event has happened, well or badly."""
        try:
            with self._runtime.current(self._device):
                return self._runtime.event_query(event)
        except GpuError as exc:  # work before it has failed and runs no more
            logger.error("a GPU copy between a sender's pool and ours has failed: %s", exc)
            return True

    @property
    def busy(self) -> bool:
        """Tell whether a copy from or into this pool may still be under way."""
        return self._users > 0

    def retire(self) -> None:
        """No new copies; unmap when the last one has ended. Idempotent."""
        with self._lock:
            if not self._retired and not self._users:
                self._unmap()
            self._retired = True

    def _unmap(self) -> None:
        waiting = self._waiting
        handle, self._handle = self._handle, b""
        events, self._events = self._events, []
        with suppress(GpuError), waiting.current(self._device):  # a lost context has none of these
            while self._idle:
                stream, done = self._idle.popleft()
                waiting.stream_destroy(stream)
                waiting.event_destroy(done)
            if handle:
                for event in events:
                    waiting.event_destroy(event)
                waiting.release_memory(handle)


def _open(pid: int) -> PeerProcess:
    """Watch the process that lends its pool. Raises EngineUnavailable if there is none."""
    try:
        return PeerProcess(pid, os.pidfd_open(pid))
    except OSError as exc:
        raise EngineUnavailable(f"its process {pid} is out of reach: {exc}") from exc
