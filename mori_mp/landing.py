"""Where landing writes go: slots of the connector's host pool, or of its GPU pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from mori_mp.device_pool import DevicePool
from mori_mp.managed import ManagedBuffer
from mori_mp.slots import PoolSlots, Slots


class Delivery(NamedTuple):
    """A delivered payload: its bytes, and the buffer that holds them.

    view None: they are in GPU memory, only the buffer has them. buffer None: there is nothing to release.
    """

    view: memoryview | None
    buffer: ManagedBuffer | None

    @property
    def size(self) -> int:
        """Return the payload's bytes."""
        if self.view is not None:
            return len(self.view)
        assert self.buffer is not None
        return self.buffer.size

    def host_view(self) -> memoryview:
        """Return the bytes in host memory; those of a GPU are copied, which is waited for."""
        if self.view is not None:
            return self.view
        assert self.buffer is not None
        return memoryview(self.buffer.to_bytes())


class Place(Protocol):
    """A pool to land in. Offsets and sizes in bytes."""

    engine_desc: bytes
    mem_desc: bytes

    @property
    def slots(self) -> Slots: ...

    def landed(self, offset: int, size: int, then: Callable[[], None]) -> Delivery:
        """Take over a slot that a write has filled; then() is called after its release."""
        ...

    def holds(self, delivery: Delivery) -> bool:
        """Tell whether a delivery lies in a slot of this pool."""
        ...

    def close(self) -> None:
        """Drop our view of the pool; no get() is or will be under way."""
        ...


class HostPlace:
    """The host pool."""

    def __init__(self, slots: PoolSlots, engine_desc: bytes, mem_desc: bytes) -> None:
        self.slots = slots
        self.engine_desc = engine_desc
        self.mem_desc = mem_desc
        self._pool = slots.pool
        self._tensor = torch.frombuffer(slots.pool.view, dtype=torch.uint8)

    def landed(self, offset: int, size: int, then: Callable[[], None]) -> Delivery:
        def release() -> None:
            self.slots.give_back(offset)
            then()

        buffer = ManagedBuffer(self._tensor, offset, size, release)
        return Delivery(self._pool.view[offset : offset + size], buffer)

    def holds(self, delivery: Delivery) -> bool:
        return delivery.buffer is not None and delivery.buffer.pool_tensor is self._tensor

    def close(self) -> None:
        del self._tensor


class DevicePlace:
    """The GPU pool, made reachable for its peers."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self.slots: Slots = pool.slots
        self.engine_desc, self.mem_desc = pool.receive()

    def landed(self, offset: int, size: int, then: Callable[[], None]) -> Delivery:
        slots = self._pool.slots

        def release() -> None:
            slots.give_back_read(offset)
            then()

        return Delivery(None, ManagedBuffer(self._pool.tensor, offset, size, release))

    def holds(self, delivery: Delivery) -> bool:
        return delivery.buffer is not None and delivery.buffer.pool_tensor is self._pool.tensor

    def close(self) -> None:
        """The pool is the connector's to close."""


class Slot(NamedTuple):
    """A slot to land in."""

    place: Place
    offset: int
    size: int

    def landed(self, then: Callable[[], None] = lambda: None) -> Delivery:
        """Take it over, filled by a write; then() is called after its release, in finalizers too."""
        return self.place.landed(self.offset, self.size, then)

    def give_back(self) -> None:
        """Return it; nothing was or can be written into it."""
        self.place.slots.give_back(self.offset)
