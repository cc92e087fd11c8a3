"""The sending half of a connector: copies a payload into the pool and publishes it.

put() is local: allocate a slot, copy, send one packet to the control process. None of it waits, and for
payloads up to a few MiB none of it gives up the GIL. From then on the control process owns the payload's
life; its Freed tells when the memory is ours again. Until that comes, the publication stays in `_live`, from
where it is replayed to a new control process.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from typing import Any, NamedTuple

import torch

from mori_mp import codec
from mori_mp.device_pool import DevicePool
from mori_mp.managed import ManagedBuffer
from mori_mp.push import Push, Pusher
from mori_mp.shared import wire
from mori_mp.shared.claims import Claims
from mori_mp.shared.errors import PayloadError, PoolExhausted
from mori_mp.shared.messages import HotToControl, Publish, Withdraw
from mori_mp.shared.pool import BLOCK
from mori_mp.shared.syscalls import copy_memory
from mori_mp.shared.tracing import Tracer
from mori_mp.slots import PoolSlots, Slots
from mori_mp.workers.engines.gpu_runtime import GpuError
from mori_mp.workers.hot import HotChannel

logger = logging.getLogger(__name__)

_COLLECT_PUTS = 8  # publications with whose memory we go on before we look what has been freed
_REUSE_BYTES = 256 << 10  # host payloads of which we look before each one
_LOOK_AGAIN_SECONDS = 0.02
POOL_WAIT_SECONDS = 1.0
"""How long put() waits for receivers to free memory of a full pool before it fails."""


class _Publication(NamedTuple):
    """whole: internal key of the payload that it is, or is a part of.

    ended: the event of the GPU pool behind all that put() has enqueued on its memory, -1 for none.
    """

    message: Publish
    name: str
    whole: str
    ended: int


class _InPlace(NamedTuple):
    """A payload in its slot of a pool, before it is published.

    offset: the published one; event: the GPU pool's behind the copy into the slot, -1 for none.
    """

    offset: int
    size: int
    event: int = -1
    push: Push | None = None

    @property
    def ended(self) -> int:
        """Return the event behind all that is enqueued on the slot, -1 for none."""
        return self.push.ended if self.push is not None else self.event


class Publisher:
    """See the module's docstring. Thread-safe."""

    def __init__(self, slots: PoolSlots, tracer: Tracer | None = None) -> None:
        self._slots = slots
        self._device: DevicePool | None = None
        self._pusher: Pusher | None = None
        self._apart = False
        self._tracer = tracer
        self._hot: HotChannel | None = None
        # No two stages count alike: what names a generation of our predecessor's means nothing here.
        self._generations = itertools.count(secrets.randbits(39) << 20 | 1)
        self._live: dict[int, _Publication] = {}
        self._by_name: dict[str, set[int]] = {}
        self._offsets: set[int] = set()
        self._doomed: set[int] = set()  # of what is live, what is withdrawn or replaced
        self._lock = threading.Lock()
        self.exhausted = 0

    def attach(self, hot: HotChannel) -> None:
        """Publish over this channel from now on."""
        self._hot = hot

    def use_device(self, pool: DevicePool, apart: bool) -> None:
        """Publish GPU tensors from a GPU pool from now on; it must be lent before the first one.

        apart: those inside objects too, by themselves; else they are encoded with the object.
        """
        self._device, self._pusher, self._apart = pool, Pusher(pool), apart

    def set_target(self, edge: str, posts: bytes) -> None:
        """Push GPU payloads of an edge to the receiver that posts slots so; b"" for to none."""
        if self._pusher is not None:
            self._pusher.set_target(edge, posts)

    def pool_stats(self) -> dict[str, dict[str, int]]:
        """Describe the pools for health(): `pool`, and `device_pool` if there is one."""
        stats = {"pool": self._slots.stats()}
        if self._device is not None:
            stats["device_pool"] = self._device.slots.stats()
        return stats

    @property
    def outstanding(self) -> int:
        """Publications whose memory has not come back yet."""
        return len(self._live)

    @property
    def backlog(self) -> int:
        """Messages that the control process has not yet had room for."""
        return self._hot.backlog if self._hot is not None else 0

    # ---------------------------------------------------------------------------- put
    def put(self, name: str, key: str, data: Any) -> tuple[int, bool] | None:
        """Publish a payload under an internal key; name is what cleanup() will be called with.

        Returns (bytes, fast_path), or None for an empty payload. Raises PayloadError for an object that
        cannot be encoded, PoolExhausted when the pool stays too full for it.
        """
        began_ns = time.monotonic_ns()
        if len(key.encode()) > wire.MAX_KEY_BYTES:
            raise PayloadError(f"key {key[:80]!r}… is longer than {wire.MAX_KEY_BYTES} bytes")
        done = self._put(name, key, data, began_ns)
        if len(self._live) >= _COLLECT_PUTS:  # not before: who waits for this payload would wait for that
            self.collect()
        return done

    def _put(self, name: str, key: str, data: Any, began_ns: int) -> tuple[int, bool] | None:
        if isinstance(data, ManagedBuffer):
            own = self._own_slot(key, data)
            if own is not None:
                self._publish(name, key, own, True, began_ns)
                return data.size, True
            data = data.tensor
        elif not isinstance(data, torch.Tensor) and _is_managed(data):
            data = data.tensor
        pool = self._device
        if isinstance(data, torch.Tensor) and pool is not None and pool.holds(data):
            return self._put_on_device(pool, name, key, data, began_ns)
        if isinstance(data, (bytes, bytearray, memoryview, torch.Tensor)):
            address, size, keepalive = codec.raw_view(data)
            if size == 0:
                return None
            offset = self._alloc(self._slots, size)
            copy_memory(self._slots.pool.address + offset, address, size)
            del keepalive
            self._publish(name, key, _InPlace(offset, size), True, began_ns)
            return size, True
        return self._put_object(name, key, data, began_ns), False

    def _put_object(self, name: str, key: str, data: Any, began_ns: int) -> int:
        """Publish an encoded object, after those of its GPU tensors that travel by themselves."""
        apart = None
        if self._device is not None and self._apart:
            apart = codec.DeviceTensors(key, next(self._generations), self._device.holds)
        plan = codec.plan(data, apart)
        offset = self._alloc(self._slots, plan.nbytes)
        copied: list[tuple[str, _InPlace]] = []
        try:
            plan.write_into_address(self._slots.pool.address + offset)
            for part, tensor in apart.tensors if apart is not None else ():
                assert self._device is not None
                if len(part.encode()) > wire.MAX_KEY_BYTES:
                    raise PayloadError(f"key {key[:80]!r}… leaves no room to name its GPU tensors")
                copied.append((part, self._copy_to_device(self._device, part, tensor)))
        except BaseException:
            for part, place in copied:
                self._give_back(place.offset, place.ended)
                self._fill(place, part, next(self._generations))  # of what is not live
            self._slots.give_back(offset)
            raise
        before = self._parts(name, key) if self._apart else []
        for part, place in copied:
            self._publish(name, part, place, True, began_ns, key)
        self._publish(name, key, _InPlace(offset, plan.nbytes), False, began_ns)
        if before:  # those of the object that this one replaces
            assert self._hot is not None
            self._hot.send(Withdraw(before))
        return plan.nbytes

    def _parts(self, name: str, key: str) -> list[int]:
        """List the live GPU tensors of the object under a key."""
        with self._lock:
            return [
                generation
                for generation in self._by_name.get(name, ())
                if self._live[generation].whole == key != self._live[generation].message.key
            ]

    def _put_on_device(
        self, pool: DevicePool, name: str, key: str, data: torch.Tensor, began_ns: int
    ) -> tuple[int, bool] | None:
        """Publish a GPU tensor from the GPU pool; the copy is enqueued, not waited for."""
        try:
            codec.check_plain(data)
        except TypeError as exc:
            raise PayloadError(f"cannot send {exc} as a raw payload") from exc
        size = data.nbytes
        if size == 0:
            return None
        self._publish(name, key, self._copy_to_device(pool, key, data), True, began_ns)
        return size, True

    def _copy_to_device(self, pool: DevicePool, key: str, tensor: torch.Tensor) -> _InPlace:
        """Enqueue the copy of a tensor into the GPU pool, and on to a slot that its receiver has posted."""
        tensor = codec.dense(tensor)
        size = tensor.nbytes
        offset = self._alloc(pool.slots, size)
        try:
            event = pool.copy_in(offset, tensor)
            return _InPlace(self._slots.size + offset, size, event, self._push(key, offset, size, event))
        except BaseException:
            pool.slots.give_back_read(offset)  # the copy may have been enqueued
            raise

    def _push(self, key: str, offset: int, size: int, event: int) -> Push | None:
        if self._pusher is None:
            return None
        try:
            return self._pusher.push(wire.edge_of(key), offset, size, event)
        except GpuError as exc:  # the payload itself is in its slot
            logger.error("put of %r: it is not pushed to its receiver: %s", key, exc)
            return None

    def _own_slot(self, key: str, data: ManagedBuffer) -> _InPlace | None:
        """Take a share of the slot of one of our own buffers, to publish it as it is."""
        if data.released:
            return None
        pool, address = self._device, data.pool_tensor.data_ptr()
        if address == self._slots.pool.address:
            pool = None
        elif pool is None or address != pool.address:
            return None
        slots: Slots = self._slots if pool is None else pool.slots
        offset = data.offset + (0 if pool is None else self._slots.size)
        with self._lock:
            if offset in self._offsets:
                return None  # published already: one block carries one publication, so copy
            slots.share(data.offset)
            self._offsets.add(offset)
        if pool is None:
            return _InPlace(offset, data.size)
        try:
            event = pool.mark()
            return _InPlace(offset, data.size, event, self._push(key, data.offset, data.size, event))
        except BaseException:
            self._offsets.discard(offset)
            pool.slots.give_back_read(data.offset)
            raise

    def _give_back(self, offset: int, event: int) -> None:
        """Remove an owner of a published slot; a copy into the GPU pool may still be on its way."""
        if offset < self._slots.size:
            self._slots.give_back(offset)
        elif self._device is not None:
            self._device.slots.give_back_written(offset - self._slots.size, event)

    def _alloc(self, slots: Slots, size: int) -> int:
        if size >= _REUSE_BYTES and slots is self._slots:
            self.collect()  # what was used last may still be in the caches
        try:
            return slots.alloc(size)
        except PoolExhausted:
            if size > slots.size:
                self.exhausted += 1
                raise
        self.collect()
        deadline = time.monotonic() + POOL_WAIT_SECONDS
        while True:
            slots.reclaim()  # rather this payload than those that we may receive
            try:
                return slots.alloc(size)
            except PoolExhausted:
                if time.monotonic() >= deadline:
                    self.exhausted += 1
                    raise
            self._wait_freed(deadline)

    def _wait_freed(self, deadline: float) -> None:
        """Wait for the control process to free memory; also look now and then for what no message tells:
        a received buffer that the stage has let go of, memory whose message another put() has taken.
        """
        assert self._hot is not None
        self._hot.wait(min(_LOOK_AGAIN_SECONDS, max(0.0, deadline - time.monotonic())))
        self.collect()

    def _publish(
        self, name: str, key: str, place: _InPlace, fast_path: bool, began_ns: int, whole: str = ""
    ) -> None:
        assert self._hot is not None
        began_us, now_us = began_ns // 1000, time.monotonic_ns() // 1000
        with self._lock:
            generation = next(self._generations)  # here, so that what is live under the key is older
            message = Publish(
                key,
                generation,
                place.offset,
                place.size,
                fast_path,
                False,
                began_us,
                now_us - began_us,
                place.event,
                place.push is not None,
            )
            of_name = self._by_name.setdefault(name, set())
            replaced = [one for one in of_name if self._live[one].message.key == key]
            self._live[generation] = _Publication(message, name, whole or key, place.ended)
            self._offsets.add(place.offset)
            of_name.add(generation)
            self._doomed.update(replaced)
        self._hot.send(message)
        if replaced and self._pusher is not None:
            self._pusher.withdraw(replaced)
        self._fill(place, key, generation)  # now that a receiver's answer to it means something
        if self._tracer is not None:
            now_ns = time.monotonic_ns()
            self._tracer.add("put", began_ns, now_ns, key, generation=generation, size=place.size)

    def _fill(self, place: _InPlace, key: str, generation: int) -> None:
        """Tell the receiver of a payload that is pushed, unless it is no more by now."""
        if place.push is None or self._pusher is None:
            return
        self._pusher.fill(place.push, key, generation)
        if generation not in self._live or generation in self._doomed:  # another thread's doing
            self._pusher.withdraw([generation])

    def withdraw_from_device(self) -> bool:
        """Keep receivers from reading the GPU pool any more; False if one is just doing so.

        For the end of the connector, when its control process is gone: a receiver that claims a payload now
        finds that it is not there.
        """
        if self._pusher is not None:
            self._pusher.close()
        pool, free = self._slots.pool, True
        claims = Claims(pool.fd)
        with self._lock:
            slots = [p.message.offset // BLOCK for p in self._live.values() if p.message.offset >= pool.size]
        for slot in slots:
            if claims.exclude(slot):
                pool.board.clear(slot)
                claims.drop(slot)
            else:
                free = False
        return free

    # ------------------------------------------------------------------------- release
    def collect(self) -> None:
        """Take back the memory that the control process has freed; never waits."""
        if self._hot is not None:
            self.freed(self._hot.drain())

    def freed(self, generations: list[int]) -> None:
        """Note that nothing can touch the memory of these generations any more."""
        for generation in generations:
            with self._lock:
                publication = self._live.pop(generation, None)
                if publication is None:
                    continue
                self._offsets.discard(publication.message.offset)
                self._doomed.discard(generation)
                of_name = self._by_name[publication.name]
                of_name.discard(generation)
                if not of_name:
                    del self._by_name[publication.name]
            self._give_back(publication.message.offset, publication.ended)
        if self._pusher is not None:
            self._pusher.withdraw(generations)

    def withdraw(self, name: str, key: str | None = None) -> int:
        """Withdraw what was put under name: on every edge, or only the internal key. Returns how many."""
        if self._hot is None:
            return 0
        with self._lock:
            generations = [
                g for g in self._by_name.get(name, ()) if key is None or self._live[g].whole == key
            ]
            self._doomed.update(generations)
        if generations:
            if self._pusher is not None:
                self._pusher.withdraw(generations)
            self._hot.send(Withdraw(generations))
        self.collect()
        return len(generations)

    def replay(self) -> list[HotToControl]:
        """List all live publications, oldest first, for a new control process."""
        with self._lock:
            live = [self._live[generation].message for generation in sorted(self._live)]
        return [
            Publish(m.key, m.generation, m.offset, m.size, m.fast_path, True, event=m.event) for m in live
        ]


def _is_managed(data: Any) -> bool:
    """Recognise vllm-omni's own ManagedBuffer without importing it."""
    return type(data).__name__ == "ManagedBuffer" and isinstance(getattr(data, "tensor", None), torch.Tensor)
