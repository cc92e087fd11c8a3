"""Where landing writes go: slots of the connector's host pool, or of its GPU pool."""

from __future__ import annotations

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

    def landed(self, offset: int, size: int) -> Delivery:
        """Take over a slot that a write has filled."""
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

    def landed(self, offset: int, size: int) -> Delivery:
        buffer = ManagedBuffer(self._tensor, offset, size, lambda: self.slots.give_back(offset))
        return Delivery(self._pool.view[offset : offset + size], buffer)

    def close(self) -> None:
        del self._tensor


class DevicePlace:
    """The GPU pool, made reachable for its peers."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self.slots: Slots = pool.slots
        self.engine_desc, self.mem_desc = pool.receive()

    def landed(self, offset: int, size: int) -> Delivery:
        slots = self._pool.slots
        return Delivery(
            None, ManagedBuffer(self._pool.tensor, offset, size, lambda: slots.give_back_read(offset))
        )

    def close(self) -> None:
        """The pool is the connector's to close."""


class Slot(NamedTuple):
    """A slot to land in."""

    place: Place
    offset: int
    size: int

    def landed(self) -> Delivery:
        """Take it over, filled by a write."""
        return self.place.landed(self.offset, self.size)

    def give_back(self) -> None:
        """Return it; nothing was or can be written into it."""
        self.place.slots.give_back(self.offset)
