"""The receiver's end of posts (`mori_mp.shared.posts`): slots of our GPU pool that one sender may fill.

What is posted follows what comes: slots for the sizes of the last payloads of that sender. All posts together
take no more than half of the pool, and are taken back when a get() or put() finds no room. A payload
in a posted slot is a copy of one that the sender still has, so it may be dropped at any time; its slot is
free when the sender's GPU is done with it.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial

import msgspec

from mori_mp.device_pool import DevicePool
from mori_mp.landing import Place, Slot
from mori_mp.lent_device import LentDevice
from mori_mp.shared.errors import PoolExhausted
from mori_mp.shared.pool import BLOCK
from mori_mp.shared.posts import FILLED, POSTED, RECORDS, Filled, Posts
from mori_mp.workers.engines.gpu_pool import GpuPoolDescriptor


def room_for(size: int) -> int:
    """Return how many bytes to post for payloads of about a size: up to an eighth more, in whole blocks."""
    step = max(BLOCK, 1 << max(0, (size - 1).bit_length() - 4))
    return -(-size // step) * step


class PostedSlots:
    """The slots that are posted to one sender. Thread-safe, but not for finalizers. Sizes in bytes."""

    def __init__(self, pool: DevicePool, place: Place, sender: LentDevice, epoch: str, label: str) -> None:
        """sender: the GPU pool of the stage of an epoch, whose events tell of its copies.

        label: names the board's file.
        """
        self._slots = pool.slots
        self._place = place
        self._sender = sender
        self._posts = Posts.create(label)
        memory = msgspec.structs.replace(GpuPoolDescriptor.unpack(pool.lend()), events=[])
        self.packed = self._posts.descriptor(memory.pack(), epoch).pack()
        self._ours: dict[int, tuple[int, int]] = {}  # by record: offset and room
        self._claimed: set[int] = set()  # records in the hands of a get()
        self._leaving: dict[int, Callable[[], bool]] = {}  # by offset: whether the sender is done with it
        self._rooms: deque[int] = deque(maxlen=RECORDS)  # for the last payloads
        self._lock = threading.Lock()
        self._retired = False
        self.depleted = False
        """Whether payloads have come since the last replenish()."""

    # ----------------------------------------------------------------------------- get
    def has(self, key: str) -> bool:
        """Tell whether a payload has come in a posted slot."""
        return self._find(key) is not None

    def _find(self, key: str) -> Filled | None:
        """Return the newest payload under a key that no get() has in its hands."""
        posts, name, best = self._posts, key.encode(), None
        for record, state in enumerate(posts.states()):
            if state != FILLED or record in self._claimed or not posts.holds(record, name):
                continue
            filled = posts.filled(record)
            if filled is None or record not in self._ours or posts.is_withdrawn(filled):
                continue
            if best is None or filled.generation > best.generation:
                best = filled
        return best

    def claim(self, key: str) -> Filled | None:
        """Take a payload into a get()'s hands; None if there is none. Its copy may still be under way."""
        with self._lock:
            filled = None if self._retired else self._find(key)
            if filled is None:
                return None
            if not 0 < filled.size <= self._ours[filled.record][1]:  # not by a sender of ours
                self._drop(filled)
                return None
            self._claimed.add(filled.record)
            self.expect(filled.size)
            return filled

    def arrived(self, filled: Filled, deadline: float) -> bool:
        """Wait for the copy of a claimed payload, until a time in monotonic seconds.

        Raises WireError, TransferFailed.
        """
        return self._sender.arrived(filled.event, deadline)

    def take(self, filled: Filled) -> Slot:
        """Take over the slot of a claimed payload whose copy has ended."""
        with self._lock:
            offset = self._free(filled.record)
            self._close_if_done()
            return Slot(self._place, offset, filled.size)

    def let_go(self, filled: Filled) -> bool:
        """Leave a claimed payload for another get(); True if there is to be none, as its sender is gone."""
        with self._lock:
            over = self._retired or self._sender.gone
            if over:
                self._drop(filled)
            else:
                self._claimed.discard(filled.record)
            return over

    def drop(self, filled: Filled) -> None:
        """Let a claimed payload go; its slot is free when the copy into it has ended."""
        with self._lock:
            self._drop(filled)

    # ---------------------------------------------------------------------------- post
    def expect(self, size: int) -> None:
        """Note that a payload of this size has come."""
        self._rooms.append(room_for(size))
        self.depleted = True

    def is_out(self, size: int) -> bool:
        """Tell whether no slot is posted for payloads like this one."""
        room, states = room_for(size), self._posts.states()
        for record, (_, has) in list(self._ours.items()):
            if has == room and states[record] == POSTED:
                return False
        return True

    def replenish(self) -> None:
        """Post slots like those of the last payloads."""
        with self._lock:
            self.depleted = False
            if self._retired:
                return
            for record in list(self._ours):
                filled = self._posts.filled(record)
                if filled is not None and record not in self._claimed and self._posts.is_withdrawn(filled):
                    self._drop(filled)
            wanted, states = Counter(self._rooms), self._posts.states()
            for record, (_, room) in list(self._ours.items()):
                if states[record] == POSTED:
                    if wanted[room] > 0:
                        wanted[room] -= 1
                    else:
                        self._take_back(record)
            self._post(wanted.elements())

    def _post(self, rooms: Iterable[int]) -> None:
        free = [record for record in range(RECORDS) if record not in self._ours]
        budget = self._slots.size // 2 - sum(list(self._slots.posted.values()))
        for room in rooms:
            if not free or room > budget:
                return
            try:
                offset = self._slots.alloc(room)
            except PoolExhausted:
                return
            record = free.pop()
            self._ours[record] = offset, room
            self._slots.posted[offset] = room
            self._posts.post(record, offset, room)
            budget -= room

    # -------------------------------------------------------------------------- take back
    def reclaim(self) -> None:
        """Take back whatever can be: rather the payload that is asked for than those that may be."""
        with self._lock:
            self._clear()

    def retire(self) -> None:
        """Post nothing more, and let go of all slots, each when the sender is done with it. Idempotent.

        For the end of the sender's stage or of our own connector.
        """
        with self._lock:
            self._retired = True
            self._clear()
            for record in list(self._ours):
                if record not in self._claimed:  # it is just being filled
                    offset = self._forget(record)
                    self._leave(offset, partial(self._is_over, record, offset))
            self._close_if_done()

    @property
    def is_over(self) -> bool:
        """Tell whether no copy of the sender's can come any more; once retired."""
        for offset in list(self._leaving):
            self._has_left(offset)
        return not self._leaving and not self._ours  # a get() may have one of these in its hands

    def _clear(self) -> None:
        for record in list(self._ours):
            filled = self._posts.filled(record)
            if filled is not None and record not in self._claimed:
                self._drop(filled)
            elif filled is None:
                self._take_back(record)

    def _take_back(self, record: int) -> None:
        """Take back a slot that is posted, unless the sender is at it just now, and lives."""
        if record not in self._claimed and (self._posts.revoke(record) or self._sender.gone):
            self._slots.give_back(self._forget(record))

    def _drop(self, filled: Filled) -> None:
        """Let a filled slot go."""
        over = self._sender.watch(filled.event)
        self._leave(self._free(filled.record), over)
        self._close_if_done()

    def _free(self, record: int) -> int:
        """Free a filled record; returns its slot's offset."""
        offset = self._forget(record)
        self._posts.free(record)
        return offset

    def _forget(self, record: int) -> int:
        """Remove a record from our books; returns its slot's offset."""
        offset, _ = self._ours.pop(record)
        self._claimed.discard(record)
        self._slots.posted.pop(offset, None)
        return offset

    def _leave(self, offset: int, over: Callable[[], bool]) -> None:
        """Give a slot back as soon as the sender is done with it."""
        self._leaving[offset] = over
        self._slots.give_back_when(partial(self._has_left, offset), offset)

    def _has_left(self, offset: int) -> bool:
        over = self._leaving.get(offset)
        if over is not None and not over():
            return False
        self._leaving.pop(offset, None)
        self._close_if_done()
        return True

    def _is_over(self, record: int, offset: int) -> bool:
        """Tell whether nothing can come into a slot that was just being filled when we let it go."""
        if self._sender.gone or self._posts.revoke(record):
            return True
        filled = self._posts.filled(record)
        if filled is None:
            return False
        self._leaving[offset] = over = self._sender.watch(filled.event)
        return over()

    def _close_if_done(self) -> None:
        if self._retired and not self._ours and not self._leaving:
            self._posts.close()
