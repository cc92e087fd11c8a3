"""The sender's end of posts (`mori_mp.shared.posts`): put() has payloads pushed into slots of the receiver's.

The control process tells which receiver alone listens to an edge, and where it posts its slots. Nothing waits
for such a receiver, and nothing depends on it: if it has posted no slot that fits, the payload is delivered
as any other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mori_mp.device_pool import DevicePool
from mori_mp.lent_device import LentDevice
from mori_mp.shared.errors import MoriMPError
from mori_mp.shared.pool import BLOCK
from mori_mp.shared.posts import RECORDS, Posts, PostsDescriptor

logger = logging.getLogger(__name__)

_kept: list[_Target] = []
"""Receivers that a copy is still under way to at the end: mapped until this process ends."""


class _Target:
    """A receiver's posts and its GPU pool, both mapped."""

    def __init__(self, packed: bytes, pool: DevicePool) -> None:
        """Raises EngineUnavailable, WireError."""
        desc = PostsDescriptor.unpack(packed)
        self.packed = packed
        self.posts = Posts.open_peer(desc)
        try:
            self.memory: LentDevice = pool.borrow(desc.gpu_pool)
        except BaseException:
            self.posts.close()
            raise
        self.filled: dict[int, int] = {}  # by record, the generation in it
        self.filling = 0  # puts that have begun to fill a record
        self.ended: set[int] = set()  # the events behind its copies

    def fitting(self, size: int) -> int | None:
        """Return the record of the smallest posted slot that fits and is not much too large."""
        return self.posts.fitting(size, max(2 * size, BLOCK) + 1)

    def address(self, record: int, size: int) -> int | None:
        """Return where a slot lies in our address space; None if that is not in the receiver's pool."""
        offset = self.posts.offset(record)
        return self.memory.address + offset if 0 <= offset <= self.memory.size - size else None

    def close(self) -> None:
        """Let go of it, once all copies have ended."""
        for record in range(RECORDS):  # also of what is withdrawn: the events may go before it
            self.posts.set_over(record)
        self.posts.close()
        self.memory.retire()


class Push(NamedTuple):
    """A payload of so many bytes on its way into a posted slot; ended: the event behind that copy."""

    target: _Target
    record: int
    size: int
    ended: int
    edge: str


class Pusher:
    """See the module's docstring. Thread-safe. Sizes in bytes."""

    def __init__(self, pool: DevicePool) -> None:
        self._pool = pool
        self._targets: dict[str, _Target] = {}  # by edge
        self._records: dict[int, tuple[_Target, int, str]] = {}  # by generation, with the edge
        self._leaving: list[_Target] = []
        self._lock = threading.Lock()
        self._closed = False

    def set_target(self, edge: str, packed: bytes) -> None:
        """Push payloads of an edge to the receiver that posts so; b"" for to none.

        For the supervisor's thread.
        """
        with self._lock:
            before = self._targets.get(edge)
            if before is not None and before.packed == packed:
                return
            known = (*self._targets.values(), *self._leaving)
            target = next((one for one in known if one.packed == packed), None)
            if target in self._leaving:
                self._leaving.remove(target)  # else its end would be told of copies that begin now
        if target is None and packed:
            try:
                target = _Target(packed, self._pool)
            except MoriMPError as exc:
                logger.warning("GPU payloads are not pushed to the receiver on edge %s: %s", edge, exc)
        with self._lock:
            if target is None:
                self._targets.pop(edge, None)
            elif self._closed and self._is_over(target):  # close() does not wait for us for ever
                target.close()
            elif self._closed:
                _kept.append(target)
            else:
                self._targets[edge] = target
            # Another receiver may take these now.
            self._withdraw([generation for generation, (_, _, of) in self._records.items() if of == edge])
            self._part_with(before)

    def _part_with(self, target: _Target | None) -> None:
        """Let go of a receiver that no edge leads to any more, once the last copy to it has ended."""
        if target is not None and target not in self._targets.values():
            self._leaving.append(target)
        still = [one for one in self._leaving if not self._is_over(one)]
        for one in self._leaving:
            if one not in still:
                one.close()
        self._leaving = still

    def _is_over(self, target: _Target) -> bool:
        return not target.filling and all(map(self._pool.has_happened, target.ended))

    # ----------------------------------------------------------------------------- put
    def push(self, edge: str, offset: int, size: int, event: int) -> Push | None:
        """Enqueue the copy of a slot of our pool, behind an event, into a posted slot, to be ended by fill().

        None if the receiver on this edge has posted none that fits. Raises GpuError.
        """
        target = self._targets.get(edge)
        record = self._begin(edge, target, size) if target is not None else None
        if target is None or record is None:
            return None
        ended, address = None, target.address(record, size)
        try:
            if address is not None:
                ended = self._pool.push(offset, size, event, address)
        except BaseException:  # what of it is enqueued is not known, so that slot is not used any more
            self._end(target, record, target.posts.unlock)
            raise
        if ended is None:
            self._end(target, record, target.posts.cancel)
            return None
        return Push(target, record, size, ended, edge)

    def _begin(self, edge: str, target: _Target, size: int) -> int | None:
        with self._lock:
            if self._closed or target.memory.gone or self._targets.get(edge) is not target:
                return None
            record = target.fitting(size)
            if record is None or not target.posts.begin(record, size):
                return None
            target.filling += 1
            return record

    def _end(self, target: _Target, record: int, how: Callable[[int], None]) -> None:
        with self._lock:
            target.filling -= 1
            how(record)

    def fill(self, push: Push, key: str, generation: int) -> None:
        """Tell the receiver which payload it is that is being copied."""
        with self._lock:
            target, record, size, ended, edge = push
            target.filling -= 1
            self._records.pop(target.filled.get(record, 0), None)
            target.filled[record] = generation
            target.ended.add(ended)
            self._records[generation] = target, record, edge
            target.posts.fill(record, key.encode(), generation, size, ended)
            if self._targets.get(edge) is not target:  # not any more
                self._withdraw([generation])

    def withdraw(self, generations: Iterable[int]) -> None:
        """Have receivers read these payloads no more: they are withdrawn, replaced, or delivered."""
        with self._lock:
            self._withdraw(generations)
            if self._leaving and not self._closed:
                self._part_with(None)

    def _withdraw(self, generations: Iterable[int]) -> None:
        for generation in generations:
            target, record, _ = self._records.pop(generation, (None, 0, ""))
            if target is not None:
                del target.filled[record]
                target.posts.withdraw(record, generation)

    def close(self) -> None:
        """Push nothing more; before the pool is closed. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._leaving += set(self._targets.values())
            self._targets.clear()
            for target in self._leaving:
                for record, generation in target.filled.items():
                    target.posts.withdraw(record, generation)
            self._part_with(None)
            _kept.extend(self._leaving)
