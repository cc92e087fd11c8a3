"""A connector's GPU pool: memory that the stage owns, its workers borrow and its senders write into.

The memory is one torch allocation. To send, `lend()` exports it with a ring of events, and `put()` enqueues
the copy of a payload on the caller's stream and an event behind it: nothing is waited for, and no call gives
up the GIL. The worker that writes the payload to its receiver waits for the event first. To receive,
`receive()` registers the memory with the engine's passive side, for as long as the pool lives.

A received buffer may still be read by kernels that are enqueued when its owner lets go of it. So its slot is
free only when an event has happened that is recorded on the owner's current stream at that moment. Kernels on
other streams are the owner's to wait for, as with any torch tensor.

    put():   [ tensor ] --copy--> [ slot ]  event ~ ~ ~> worker --write--> [ slot of another stage's pool ]

A receiver on this host may have posted a slot (`mori_mp.push`): then put() has the GPU go on from our slot to
that one, on a stream of the pool's own, so that the caller's stream is not held up by it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from mori_mp.accelerator import Accelerator
from mori_mp.lent_device import LentDevice
from mori_mp.shared.errors import EngineUnavailable
from mori_mp.shared.pool import BLOCK
from mori_mp.slots import Slots
from mori_mp.workers import engines
from mori_mp.workers.engines import gpu_runtime, mori_api
from mori_mp.workers.engines.base import LocalMemory, Passive
from mori_mp.workers.engines.gpu_pool import LentPool
from mori_mp.workers.engines.gpu_runtime import GpuError

logger = logging.getLogger(__name__)

EVENTS = 64
"""Puts whose copies may be under way at once without a wait for the oldest."""

_HALVES_BYTES = 128 << 20
"""From here on a push begins when half of the copy into the pool is done: what is smaller is done by then."""

_END_SECONDS = 0.5  # how long close() waits for copies, which take a millisecond unless they are held up
_LOOK_AGAIN_SECONDS = 0.001

_never_freed: list[tuple[torch.Tensor, Passive | None, LentPool | None]] = []
"""Memory of closed pools that others may still use, with its registration and events."""


class DevicePool:
    """See the module's docstring. Thread-safe; sizes and offsets in bytes.

    Raises EngineUnavailable when there is no such GPU or not that much memory on it.
    """

    def __init__(
        self,
        size: int,
        device: str,
        engine: str,
        options: dict[str, Any],
    ) -> None:
        self._accelerator = Accelerator()
        self.holds = self._accelerator.holds
        """Tells whether a tensor lies in GPU memory, this one's or another's."""
        self._engine = engine
        self._options = options
        self.number = number = self._accelerator.number(device)
        self.size = size // BLOCK * BLOCK
        try:
            self.tensor = self._accelerator.allocate(self.size, number)
        except torch.OutOfMemoryError as exc:
            raise EngineUnavailable(
                f"memory_pool_size={size} bytes do not fit on GPU {number}: {exc}. Lower memory_pool_size, "
                f"or leave the model less memory (gpu_memory_utilization)"
            ) from exc
        self.address = self.tensor.data_ptr()
        self.memory = LocalMemory(self.address, self.size, number)
        kind = "hip" if engine in mori_api.BACKENDS else ""
        self._waiting = gpu_runtime.load(kind)
        self._runtime = gpu_runtime.load(self._waiting.kind, self._waiting.path, keep_gil=True)
        self.slots = DeviceSlots(self)
        self._lent: LentPool | None = None
        self._passive: Passive | None = None
        self._push_stream = 0
        self._streams = [0] * EVENTS  # by event, the stream that it was recorded on
        self._pushed = -1, 0  # the event behind the last push, and the stream that its payload came on
        self._halfway = 0  # an event that no other process knows
        self._halfway_of = -1  # the event of the copy that it was recorded in the middle of
        self._next_event = 0
        self._lock = threading.Lock()

    def lend(self) -> bytes:
        """Export memory and events; returns the packed descriptor for workers. Raises EngineUnavailable."""
        with self._lock, self._runtime.current(self.number):
            if self._lent is None:
                self._lent = LentPool(self._runtime, self.memory, EVENTS)
            return self._lent.descriptor.pack()

    def receive(self) -> tuple[bytes, bytes]:
        """Let peers write into the pool; returns the packed engine and memory descriptors.

        Raises EngineUnavailable, ConfigError.
        """
        with self._lock, self._runtime.current(self.number):
            if self._passive is None:
                self._passive = engines.receive(self._engine, self.memory, self._options)
            return self._passive.engine_desc, self._passive.mem_desc

    # ---------------------------------------------------------------------------- sending
    def copy_in(self, offset: int, tensor: torch.Tensor) -> int:
        """Enqueue the copy of a dense GPU tensor to a slot; returns the number of the event behind it.

        It runs on the caller's current stream of the pool's GPU, after what fills the tensor on its own.
        Raises GpuError.
        """
        with self._lock, self._runtime.current(self.number):
            stream = self._accelerator.stream(self.number)
            foreign = self._accelerator.begin_reading(tensor, self.number)
            source, target, size = tensor.data_ptr(), self.address + offset, tensor.nbytes
            half = size // 2 if size >= _HALVES_BYTES else 0
            if half:
                self._runtime.memcpy_async(target, source, half, stream)
                self._halfway = self._halfway or self._runtime.event_create()
                self._halfway_of = -1  # also if what follows fails
                self._runtime.event_record(self._halfway, stream)
            self._runtime.memcpy_async(target + half, source + half, size - half, stream)
            if foreign:
                self._accelerator.end_reading(tensor, self.number)
            event = self._free_event()  # while the copy is under way
            self._record(event, stream)
            if half:
                self._halfway_of = event
            return event

    def mark(self) -> int:
        """Return an event behind what is now enqueued on the caller's current stream of the pool's GPU."""
        with self._lock, self._runtime.current(self.number):
            event = self._free_event()
            self._record(event, self._accelerator.stream(self.number))
            return event

    def push(self, offset: int, size: int, event: int, target: int) -> int | None:
        """Enqueue the copy of a slot, behind an event, to an address of a peer's pool.

        It runs on a stream of the pool's own. Returns the event behind it; None, with nothing enqueued, if
        there is no free event, or the last push still waits for another stream than this one's payload came
        on. Raises GpuError.
        """
        with self._lock, self._runtime.current(self.number):
            last, caller = self._pushed
            if last >= 0 and caller != self._streams[event] and not self.has_happened(last):
                return None  # it would wait for another stream's work
            ended = self._happened_event(but=event)
            if ended is None or self._lent is None:
                return None
            if not self._push_stream:
                self._push_stream = self._runtime.stream_create()
            stream, source, half = self._push_stream, self.address + offset, 0
            if self._halfway_of == event:
                half, self._halfway_of = size // 2, -1
                self._runtime.stream_wait_event(stream, self._halfway)
                self._runtime.memcpy_async(target, source, half, stream)
            self._runtime.stream_wait_event(stream, self._lent.events[event].handle)
            self._runtime.memcpy_async(target + half, source + half, size - half, stream)
            self._record(ended, stream)
            self._pushed = ended, self._streams[event]
            return ended

    def _record(self, event: int, stream: int) -> None:
        assert self._lent is not None
        if self._halfway_of == event:
            self._halfway_of = -1
        self._streams[event] = stream
        self._runtime.event_record(self._lent.events[event].handle, stream)

    def _free_event(self) -> int:
        """Return the number of an event whose last record has happened; the next in turn, as a rule.

        One that has not happened must not be recorded again: its payload would be written too early if the
        new record happened first.
        """
        number = self._happened_event()
        if number is None:
            assert self._lent is not None
            number = self._next_event
            self._next_event = (number + 1) % EVENTS
            self._waiting.event_synchronize(self._lent.events[number].handle)
        return number

    def _happened_event(self, but: int = -1) -> int | None:
        """As _free_event(), but None if all (but one) are still to happen."""
        lent = self._lent
        for step in range(EVENTS):
            number = (self._next_event + step) % EVENTS
            if number != but and (lent is None or not self._is_pending(lent.events[number].handle)):
                self._next_event = (number + 1) % EVENTS
                return number
        return None

    def has_happened(self, event: int) -> bool:
        """Tell whether the last record of an event has happened, well or badly; True once the pool is closed.

        An event that is recorded again later than it was named says so later, never too early.
        """
        lent = self._lent
        return lent is None or not self._is_pending(lent.events[event].handle)

    def _is_pending(self, event: int) -> bool:
        """Tell whether an event is still to happen; work before it that has failed runs no more."""
        try:
            return not self._runtime.event_query(event)
        except GpuError as exc:
            logger.error("GPU work has failed: %s", exc)
            return False

    # -------------------------------------------------------------------------- receiving
    def last_read(self) -> int:
        """Return a new event behind the caller's current stream; `happened()` ends it."""
        with self._runtime.current(self.number):
            event = self._runtime.event_create()
            self._runtime.event_record(event, self._accelerator.stream(self.number))
            return event

    def happened(self, event: int) -> bool:
        """Tell whether an event of `last_read()` has happened, well or badly, and destroy it if so."""
        if self._is_pending(event):
            return False
        with suppress(GpuError):  # a lost context has none
            self._runtime.event_destroy(event)
        return True

    def borrow(self, packed: bytes) -> LentDevice:
        """Map a peer's GPU pool, to copy from or to. Raises WireError, EngineUnavailable."""
        return LentDevice(packed, self._runtime, self._waiting, self.number)

    # -------------------------------------------------------------------------------- end
    def close(self, in_use: str) -> None:
        """Let go of everything; the memory goes with the last buffer on it. Idempotent.

        in_use: why others may still read or write the memory, which is then kept until this process ends; ""
        if they cannot.
        """
        with self._lock:
            if not hasattr(self, "tensor"):
                return
            if not in_use and not await_end(lambda: not all(map(self.has_happened, range(EVENTS)))):
                in_use = "a copy into it has not ended"
            if in_use:
                logger.warning("%d bytes of GPU memory are kept until exit: %s", self.size, in_use)
                _never_freed.append((self.tensor, self._passive, self._lent))
            else:
                with self._runtime.current(self.number):
                    if self._passive is not None:
                        self._passive.close()
                    if self._lent is not None:
                        self._lent.close()
                    if self._push_stream:
                        self._runtime.stream_destroy(self._push_stream)
                    if self._halfway:
                        self._runtime.event_destroy(self._halfway)
            self._passive, self._lent, self._push_stream = None, None, 0
            del self.tensor


def await_end(under_way: Callable[[], bool]) -> bool:
    """Wait for GPU copies that nothing holds up; False if they go on. The runtime has no wait with an end."""
    deadline = time.monotonic() + _END_SECONDS
    while under_way():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_AGAIN_SECONDS)
    return True


class DeviceSlots(Slots):
    """The slots of a GPU pool; one that is given back is free when what uses it on the GPU has ended."""

    def __init__(self, pool: DevicePool) -> None:
        super().__init__(pool.size)
        self._pool = pool
        self.posted: dict[int, int] = {}  # by offset, the bytes of slots that are posted to senders

    def give_back_written(self, offset: int, event: int) -> None:
        """Remove an owner once put()'s copy into the slot, behind an event of the pool, has ended."""
        if event < 0 or self._pool.has_happened(event):
            self.give_back(offset)
        else:
            self.give_back_when(partial(self._pool.has_happened, event), offset)

    def give_back_read(self, offset: int) -> None:
        """Remove an owner once what is now enqueued on the caller's stream is done with the slot.

        Safe in a finalizer.
        """
        try:
            event = self._pool.last_read()
        except GpuError as exc:  # the context is lost: nothing reads any more, and nothing can be written
            logger.error("a GPU buffer cannot be ordered behind its readers: %s", exc)
            self.give_back(offset)
            return
        self.give_back_when(partial(self._pool.happened, event), offset)

    def stats(self) -> dict[str, int]:
        """As ever; slots that are posted count as free, since they are taken back when they are needed."""
        stats, posted = super().stats(), list(self.posted.values())
        stats["used_bytes"] -= sum(posted)
        stats["free_bytes"] += sum(posted)
        stats["slots"] -= len(posted)
        return {**stats, "posted_bytes": sum(posted)}
