"""What has reached a receiving connector: landing slots, deliveries that came late, and the hand-out.

However a payload comes (see `mori_mp.receiver`), it ends here: raw as its buffer, anything else decoded. And
whatever goes wrong on the way is counted and reported here, once, with key and sender.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from mori_mp import codec
from mori_mp.landing import Delivery, Place, Slot
from mori_mp.link import Link
from mori_mp.managed import ManagedBuffer
from mori_mp.shared.errors import CorruptPayload, EngineUnavailable, PoolExhausted
from mori_mp.shared.faults import Faults
from mori_mp.switchboard import Switchboard

logger = logging.getLogger(__name__)


class Timeouts(NamedTuple):
    """Seconds; a transfer gets 5 more for each 100 MB. late: how long what comes late is kept."""

    transfer: float
    query: float
    late: float


class Late(NamedTuple):
    """A delivery that came after its get() had given up, or an object whose GPU tensors have not all come.

    since: monotonic seconds. fetch gets the tensors, and has those that have come.
    """

    delivery: Delivery
    fast_path: bool
    how: str
    since: float
    fetch: Tensors | None = None


class Tensors(Protocol):
    """Gets the GPU tensors of an object that travel by themselves; a `codec.Fetch` with a deadline."""

    deadline: float | None

    def __call__(self, key: str, nbytes: int) -> torch.Tensor: ...


class Intake:
    """See the module's docstring. Thread-safe."""

    def __init__(
        self,
        host: Place,
        board: Switchboard,
        timeouts: Timeouts,
        decode_view: bool,
        faults: Faults,
        on_change: Callable[[], None],
    ) -> None:
        self.host = host
        self.device: Place | None = None
        self._board = board
        self.timeouts = timeouts
        self._decode_view = decode_view
        self._faults = faults
        self._on_change = on_change
        self.late: dict[str, Late] = {}
        """What has come late, by key."""
        self._quarantine: dict[Slot, Link] = {}
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)

    # ------------------------------------------------------------------- landing slots
    def slot(self, key: str, size: int, deadline: float | None, device: bool = False) -> Slot | None:
        """Find a slot to land in; one that is let go of until deadline is waited for.

        Raises EngineUnavailable when it is to be in GPU memory and there is no GPU pool.
        """
        place = self.device if device else self.host
        if place is None:
            raise EngineUnavailable(
                f"{key!r} lies in its sender's GPU memory, and this connector has no GPU pool to take it in; "
                f"set memory_pool_device: cuda here, or cpu at the sender"
            )
        slots = place.slots
        try:
            return Slot(place, slots.alloc(size), size)
        except PoolExhausted as full:
            exhausted = full
        slots.reclaim()  # rather all these than the payload that is asked for
        self._drop_before(time.monotonic(), place)
        told = False
        while True:
            try:
                return Slot(place, slots.alloc(size), size)
            except PoolExhausted:
                pass
            if not told:
                told = True
                self.counters["pool_exhausted"] += 1
                text = f"get of {key!r}: no slot to land in: {exhausted}"
                self._faults.report(logger, "pool_exhausted", text, key=key)
            now = time.monotonic()
            if deadline is None or now >= deadline or self._board.closed or size > slots.size:
                return None
            # Buffers are let go of by our own stage, in finalizers too, and nothing tells of it.
            self._board.wait(lambda: None, min(deadline, now + _LOOK_AGAIN_SECONDS))

    def quarantine(self, slot: Slot, link: Link) -> None:
        """Keep a landing slot whose get() gave up, until end_quarantine(): its write may still come."""
        self.counters["quarantined"] += 1
        self._quarantine[slot] = link

    def end_quarantine(self, slot: Slot) -> None:
        """The write into a landing slot has ended, or cannot come any more."""
        self._quarantine.pop(slot, None)

    def quarantined_bytes(self, link: Link) -> int:
        """Count the bytes of landing slots that wait for one sender's late writes."""
        return sum(slot.size for slot, held in list(self._quarantine.items()) if held is link)

    @property
    def late_device_writes(self) -> bool:
        """Tell whether a write into the GPU pool may still come."""
        return any(slot.place is self.device for slot in list(self._quarantine))

    # ----------------------------------------------------------------- late deliveries
    def take_late(self, key: str, deadline: float | None) -> tuple[Any, int] | None:
        """Hand out what came late for a key; deadline is that of the tensors it may still lack."""
        late = self.late.pop(key, None)
        if late is None:
            return None
        if late.fetch is not None:
            late.fetch.deadline = deadline
        return self.finish(key, late.fast_path, late.delivery, late.how, late.fetch)

    def keep_late(self, key: str, late: Late) -> None:
        """Keep a payload that came after its get() had given up: for the sender it is delivered.

        The next get() finds it. One that nobody asks for again goes after a while.
        """
        self.counters["late"] += 1
        self.late[key] = late
        self._on_change()

    def drop_late(self) -> None:
        """Let go of the payloads that came late and that nobody has asked for again for long."""
        self._drop_before(time.monotonic() - self.timeouts.late)

    def forget_late(self, key: str) -> None:
        """Let go of what came late for a key."""
        self.late.pop(key, None)

    def _drop_before(self, before: float, place: Place | None = None) -> None:
        """Let go of the payloads that came late, before a time (monotonic seconds); of one pool, if given."""
        for key, late in list(self.late.items()):
            if late.since <= before and (place is None or place.holds(late.delivery)):
                self.late.pop(key, None)

    # ----------------------------------------------------------------------- hand-out
    def finish(
        self, key: str, fast_path: bool, delivery: Delivery, how: str, fetch: Tensors | None = None
    ) -> tuple[Any, int] | None:
        """Hand out a delivered payload: raw as its buffer, anything else decoded.

        fetch gets the GPU tensors of an object that travel by themselves. None: one has not come. The object
        is kept for the next get() then, unless the tensor is gone, and the object with it.
        """
        size = delivery.size
        try:
            found = delivery.buffer if fast_path else self._decode(delivery, fetch)
        except codec.TensorMissing as missing:
            if missing.gone:
                self.counters["misses"] += 1
                _release(delivery)
            else:
                self.late[key] = Late(delivery, fast_path, how, time.monotonic(), fetch)
            return None
        except CorruptPayload as exc:
            _release(delivery)
            self._count(how, size)
            self.counters["corrupt"] += 1
            text = f"payload {key!r} ({size} bytes, {how}) does not decode: {exc}"
            self._faults.report(logger, "corrupt", text, key=key)
            raise CorruptPayload(text) from exc
        self._count(how, size)
        return found, size

    def _decode(self, delivery: Delivery, fetch: Tensors | None) -> Any:
        if not self._decode_view or delivery.buffer is None or delivery.view is None:
            found = codec.decode(delivery.host_view(), copy=True, fetch=fetch)
            _release(delivery)
            return found
        view, keep = _held_view(delivery.view, delivery.buffer)
        try:
            return codec.decode(view, copy=False, fetch=fetch)
        except codec.TensorMissing:
            keep()  # it is decoded again
            raise

    def _count(self, how: str, size: int) -> None:
        self.counters[how] += 1
        self.counters["gets"] += 1
        self.counters["bytes"] += size

    # ----------------------------------------------------------------------- failures
    def fault(self, cause: str, text: str, key: str, link: Link) -> None:
        """Report what went wrong with a get()."""
        self._faults.report(logger, cause, f"get of {key!r}: {text}", key=key, peer=link.address)

    def count_timeout(self, key: str, link: Link, what: str) -> None:
        """Count and report a get() that ran out of time."""
        self.counters["timeouts"] += 1
        self.fault("get_timeout", what, key, link)

    def until(self, deadline: float | None, size: int) -> float:
        """Return when a transfer of size bytes is given up (monotonic seconds).

        That is the caller's deadline; without one it gets as long as one of its size may take.
        """
        if deadline is not None:
            return deadline
        extra = min(5.0 * (size // 100_000_000), _MAX_EXTRA_SECONDS)
        return time.monotonic() + self.timeouts.transfer + extra

    def close(self) -> None:
        """Let go of what came late."""
        self.late.clear()

    def let_go_of_pool(self) -> None:
        """Drop our view of the connector's own pool; no get() is or will be under way."""
        self.host.close()


def standalone(data: memoryview) -> Delivery:
    """Wrap bytes that came inside a notice in memory of their own."""
    copy = bytearray(data)
    view = memoryview(copy)
    return Delivery(view, ManagedBuffer(torch.frombuffer(copy, dtype=torch.uint8), 0, len(copy), _no_slot))


def _release(delivery: Delivery) -> None:
    if delivery.buffer is not None:
        delivery.buffer.release()


def _held_view(view: memoryview, buffer: ManagedBuffer) -> tuple[memoryview, Callable[[], object]]:
    """Return a view whose last sub-view, in whichever tensor, releases the buffer when it dies.

    The second is what keeps it from doing so.
    """
    exporter = (ctypes.c_ubyte * len(view)).from_buffer(view)
    release = weakref.finalize(exporter, buffer.release)
    release.atexit = False
    return memoryview(exporter).cast("B"), release.detach


def _no_slot() -> None:
    """The buffer owns its memory; there is no slot to give back."""


_LOOK_AGAIN_SECONDS = 0.01
_MAX_EXTRA_SECONDS = 3600.0
_COUNTERS = (
    "gets",
    "bytes",
    "eager",
    "lease",
    "push",
    "landing",
    "misses",
    "unreached",
    "timeouts",
    "refused",
    "errors",
    "corrupt",
    "pool_exhausted",
    "quarantined",
    "late",
)
