"""Delivers what a sender has: pushed, eager, offered, leased or landing (see `mori_mp.receiver`)."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from mori_mp import codec
from mori_mp.device_pool import DevicePool
from mori_mp.intake import Intake, Late, standalone
from mori_mp.landing import Delivery, Slot
from mori_mp.lent_device import LentDevice, StillCopying
from mori_mp.link import Link
from mori_mp.managed import ManagedBuffer
from mori_mp.meters import StageMeters
from mori_mp.posted import PostedSlots
from mori_mp.pulls import LateHandler
from mori_mp.shared import wire
from mori_mp.shared.errors import CorruptPayload, EngineUnavailable, TransferFailed, WireError

logger = logging.getLogger(__name__)


class Pushed(NamedTuple):
    """A payload that was pushed; found None: it is still being copied, and time is over."""

    found: tuple[Any, int] | None
    generation: int


class Fetcher:
    """See the module's docstring. Thread-safe.

    lease: read in the sender's pools where it lends them. tensors_on_host: what to do with GPU tensors that
    travel by themselves.
    """

    def __init__(self, intake: Intake, lease: bool, tensors_on_host: bool, meters: StageMeters) -> None:
        self._intake = intake
        self._lease = lease
        self._tensors_on_host = tensors_on_host
        self._meters = meters
        self._device: DevicePool | None = None

    def use_device(self, pool: DevicePool) -> None:
        """Copy offered GPU payloads into this pool."""
        self._device = pool

    # ---------------------------------------------------------------------------- pushed
    def pushed(self, link: Link, key: str, deadline: float | None) -> Pushed | None:
        """Deliver a payload that the sender has pushed; None if there is none. deadline: as for fetch()."""
        posts = link.memory.posts
        filled = posts.claim(key) if posts is not None else None
        if posts is None or filled is None:
            return None
        try:
            until = self._intake.until(deadline, filled.size)
            if posts.is_out(filled.size):  # else that waits until a get() has nothing to do
                posts.replenish()
            settlement = link.settlement(filled.generation)  # once it is there, every microsecond is one more
            arrived = posts.arrived(filled, until)
        except (WireError, TransferFailed) as exc:
            posts.drop(filled)
            self._intake.fault("get_failed", f"a push cannot be taken: {exc}", key, link)
            return None
        except BaseException:  # a keyboard interrupt
            posts.let_go(filled)
            raise
        if not arrived:
            if posts.let_go(filled):
                return None  # with its sender
            self._intake.count_timeout(key, link, "its sender's GPU has not copied it in time")
            return Pushed(None, filled.generation)
        if not link.mailbox.take_unannounced(key, filled.generation):
            posts.drop(filled)
            return None
        link.post_later(settlement)
        slot = posts.take(filled)
        found = self._intake.finish(key, True, slot.landed(link.send_queued), "push")
        return Pushed(found, filled.generation)

    def _expect(self, link: Link, size: int) -> None:
        """Have the sender push payloads like this one from now on, if it can."""
        posts = link.memory.posts_for(self._new_posts)
        if posts is not None:
            posts.expect(size)
            if posts.is_out(size):
                posts.replenish()

    def restock(self, link: Link) -> None:
        """Do what is better done while there is nothing to deliver."""
        posts = link.memory.posts
        if posts is not None and posts.depleted:
            posts.replenish()

    def _new_posts(self, sender: LentDevice, epoch: str) -> PostedSlots:
        assert self._device is not None
        assert self._intake.device is not None
        return PostedSlots(self._device, self._intake.device, sender, epoch, str(os.getpid()))

    def until(self, deadline: float | None, size: int) -> float:
        """As Intake.until()."""
        return self._intake.until(deadline, size)

    def fetch(self, link: Link, ready: wire.Ready, deadline: float | None) -> tuple[Any, int] | None:
        """Have an announced payload delivered; None if that did not work out, which has been reported.

        deadline (monotonic seconds) None: a transfer is waited for as long as one of its size may take.
        Raises CorruptPayload.
        """
        found = self.attempt(link, ready, deadline, GpuTensors(self, link, deadline))
        return None if found is _ELSEWHERE or found is GONE else found

    def attempt(
        self, link: Link, ready: wire.Ready, deadline: float | None, tensors: GpuTensors | None
    ) -> tuple[Any, int] | None:
        """As fetch(); GONE if the sender has no such payload (any more). tensors: of an object."""
        until = self._intake.until(deadline, ready.size)
        order = _Order(link, ready, until, deadline, tensors)
        if len(ready.data):
            if not link.mailbox.mark_taken(ready.generation):
                return None  # a call that did not wait for the notice has fetched it
            delivery = standalone(ready.data) if ready.fast_path else Delivery(ready.data, None)
            try:
                return self._finish(order, ready.fast_path, delivery, "eager")
            finally:
                link.settle(consumed=ready.generation)
        if ready.offset >= 0 and self._lease and link.can_lease:
            offered = self._device_offer(order) if ready.device else self._offer(order)
            if offered is not None:
                return offered  # else it has gone meanwhile; the sender knows
            if time.monotonic() >= until:
                self._intake.count_timeout(ready.key, link, "it could not be read in time")
                link.mailbox.put_back(ready)
                return None
        if self._lease and link.can_lease and not ready.device:
            found = self._leased_on_request(order)
        else:
            found = self._landing(order)
        if found is _ELSEWHERE:  # without a notice we cannot know; or another payload has replaced it
            other = wire.Ready(ready.key, 0, ready.size, ready.fast_path, _NOTHING, device=not ready.device)
            found = self._landing(order._replace(ready=other))
        return found

    def _offer(self, order: _Order) -> tuple[Any, int] | None:
        link, ready = order.link, order.ready
        generation = ready.generation
        try:
            lent = link.memory.pool()
            buffer = lent.claim(
                ready.offset, ready.size, generation, lambda: link.settle(consumed=generation)
            )
        except (EngineUnavailable, WireError) as exc:
            self._intake.fault("get_failed", f"an offer cannot be read: {exc}", ready.key, link)
            return None
        if buffer is None:
            return None
        if not link.mailbox.mark_taken(generation):
            buffer.release()
            return None
        view = lent.view(ready.offset, ready.size)
        return self._finish(order, ready.fast_path, Delivery(view, buffer), "lease")

    def _device_offer(self, order: _Order) -> tuple[Any, int] | None:
        """Copy an offered payload from the sender's GPU pool into ours."""
        link, ready = order.link, order.ready
        pool, generation = self._device, ready.generation
        lent = link.memory.device(pool.borrow) if pool is not None else None
        if lent is None or pool is None:
            return None
        slot = self._intake.slot(ready.key, ready.size, order.deadline, device=True)
        if slot is None:
            return None
        claim, copied, late = None, False, None
        try:
            claim = link.memory.pool().claim_device(
                ready.offset, ready.size, generation, lambda: link.post_later(link.settlement(generation))
            )
            if claim is not None:
                target = pool.address + slot.offset
                copied = lent.copy(ready.offset, ready.size, target, ready.event, order.until)
        except StillCopying as exc:
            late = exc.over
        except (EngineUnavailable, WireError, TransferFailed) as exc:
            self._intake.fault("get_failed", f"an offer cannot be read: {exc}", ready.key, link)
        finally:
            if late is not None and claim is not None:
                pool.slots.give_back_when(partial(_end_late, late, claim.drop), slot.offset)
            elif not copied:
                slot.give_back()
                if claim is not None:
                    claim.drop()
        if claim is None or not copied:
            return None
        ours = link.mailbox.mark_taken(generation)  # before the sender is told, which takes in notices
        claim.end()
        if not ours:
            slot.give_back()
            link.send_queued()
            return None
        self._expect(link, ready.size)
        return self._finish(order, ready.fast_path, slot.landed(link.send_queued), "lease")

    def _pull(
        self, order: _Order, request: wire.Pull, on_late: LateHandler, slot: Slot | None = None
    ) -> wire.Done | None:
        """Pull; None when it is given up, as it also is by an interrupt. on_late gets a late answer then.

        slot: where the payload is to land, which may then still be written to.
        """
        done = None
        try:
            done = self._answer(order, request)
        finally:
            if done is None:
                if order.ready.generation:
                    order.link.mailbox.put_back(order.ready)
                if slot is not None:
                    self._intake.quarantine(slot, order.link)
                order.link.abandon(request, on_late)
        return done

    def _answer(self, order: _Order, request: wire.Pull) -> wire.Done | None:
        link, ready, tracer = order.link, order.ready, self._meters.tracer
        if tracer is None:
            return link.pull(request, order.until)
        began_ns = time.monotonic_ns()
        done = link.pull(request, order.until)
        tracer.add(
            "pull",
            began_ns,
            time.monotonic_ns(),
            ready.key,
            generation=done.generation if done is not None else ready.generation,
            size=ready.size,
        )
        return done

    def _leased_on_request(self, order: _Order) -> tuple[Any, int] | None:
        link, ready = order.link, order.ready
        request = link.new_pull(ready.key, ready.size, 0, True)

        def on_late(done: wire.Done | None) -> None:
            if done is not None and not done.status:
                delivery = self._leased(link, ready.key, done)
                if delivery is not None:
                    now = time.monotonic()
                    late = Late(delivery, done.fast_path, "lease", now, order.tensors)
                    self._intake.keep_late(ready.key, late)

        done = self._pull(order, request, on_late)
        if done is None:
            self._gave_up(link, ready)
            return None
        if done.status == wire.ELSEWHERE:
            return _ELSEWHERE
        if done.status:
            return self._refused(order, done)
        delivery = self._leased(link, ready.key, done)
        if delivery is None:
            # It may have been granted to a get() that had given up.
            return self._intake.take_late(ready.key, order.deadline)
        return self._finish(order, done.fast_path, delivery, "lease")

    def _leased(self, link: Link, key: str, done: wire.Done) -> Delivery | None:
        """Take over a lease that the sender has granted; None if another call has the payload."""
        generation = done.generation
        try:
            lent = link.memory.pool()
            buffer = lent.lease(done.offset, done.size, generation, lambda: link.settle(released=generation))
        except (EngineUnavailable, WireError) as exc:
            link.settle(released=generation)
            self._intake.counters["errors"] += 1
            self._intake.fault("get_failed", f"a lease cannot be read: {exc}", key, link)
            return None
        if buffer is None:
            return None
        if not link.mailbox.mark_taken(generation):
            buffer.release()  # it came in a notice, to another call
            return None
        return Delivery(lent.view(done.offset, done.size), buffer)

    def _landing(self, order: _Order) -> tuple[Any, int] | None:
        link, ready = order.link, order.ready
        try:
            slot = self._intake.slot(ready.key, ready.size, order.deadline, ready.device)
        except EngineUnavailable as exc:
            self._intake.counters["errors"] += 1
            self._intake.fault("get_failed", str(exc), ready.key, link)
            return None
        if slot is None:
            if ready.generation:
                link.mailbox.put_back(ready)
            return None
        request = link.new_pull(ready.key, ready.size, slot.offset, False, ready.device)

        def on_late(done: wire.Done | None) -> None:
            self._intake.end_quarantine(slot)
            if done is None or done.status or not link.mailbox.mark_taken(done.generation):
                slot.give_back()
                return
            late = Late(slot.landed(), done.fast_path, "landing", time.monotonic(), order.tensors)
            self._intake.keep_late(ready.key, late)

        done = self._pull(order, request, on_late, slot)
        if done is None:
            self._gave_up(link, ready)
            return None
        if done.status:
            slot.give_back()
            if done.status == wire.ELSEWHERE:
                return _ELSEWHERE
            return self._refused(order, done)
        if not link.mailbox.mark_taken(done.generation):
            slot.give_back()
            # Another call has it, or a get() that had given up.
            return self._intake.take_late(ready.key, order.deadline)
        return self._finish(order, done.fast_path, slot.landed(), "landing")

    # ------------------------------------------------------------------------- outcomes
    def _finish(self, order: _Order, fast_path: bool, delivery: Delivery, how: str) -> tuple[Any, int] | None:
        return self._intake.finish(order.ready.key, fast_path, delivery, how, order.tensors)

    def _refused(self, order: _Order, done: wire.Done) -> tuple[Any, int] | None:
        link, ready = order.link, order.ready
        if done.status == wire.NOT_FOUND:
            self._intake.counters["misses"] += 1
            logger.debug("get of %r: %s", ready.key, done.message)
            return GONE
        self._intake.counters["refused"] += 1
        self._intake.fault(
            "get_refused", f"the sender answers {done.status}: {done.message}", ready.key, link
        )
        if done.status in (wire.BUSY, wire.FAILED) and ready.generation:
            link.mailbox.put_back(ready)  # the sender keeps it for another try
        return None

    def _gave_up(self, link: Link, ready: wire.Ready) -> None:
        self._intake.counters["timeouts"] += 1
        text = f"the sender did not answer a pull of {ready.size} bytes in time"
        self._intake.fault("get_timeout", text, ready.key, link)

    def to_place(self, buffer: ManagedBuffer) -> torch.Tensor:
        """Return a copy of a GPU tensor's bytes where tensors of objects are wanted."""
        with buffer:
            data = buffer.tensor
            return data.to("cpu" if self._tensors_on_host else data.device, copy=True)


class GpuTensors:
    """Gets the GPU tensors of one object that travel by themselves; those that have come are kept.

    deadline: monotonic seconds, None: each is waited for as long as a transfer of its size may take.
    """

    def __init__(self, fetcher: Fetcher, link: Link, deadline: float | None) -> None:
        self.deadline = deadline
        self._fetcher = fetcher
        self._link = link
        self._come: dict[str, torch.Tensor] = {}

    def __call__(self, key: str, nbytes: int) -> torch.Tensor:
        if len(key.encode()) > wire.MAX_KEY_BYTES or not 0 < nbytes <= wire.MAX_PAYLOAD_BYTES:
            raise CorruptPayload(f"a GPU tensor of {nbytes} bytes with a key of {len(key)} characters")
        if key not in self._come:
            self._come[key] = self._get(key, nbytes)
        return self._come[key]

    def _get(self, key: str, nbytes: int) -> torch.Tensor:
        mailbox = self._link.mailbox
        pushed = self._fetcher.pushed(self._link, key, self.deadline)
        if pushed is not None:
            if pushed.found is None:
                raise codec.TensorMissing(gone=False)
            return self._tensor(key, nbytes, pushed.found)
        ready = mailbox.get(key)
        if ready is None or not mailbox.take(ready):
            mailbox.forget(key)
            ready = wire.Ready(key, 0, nbytes, True, _NOTHING, device=True)
        if ready.size != nbytes or not ready.fast_path:
            raise CorruptPayload(f"its GPU tensor {key!r} has {ready.size} bytes, not {nbytes}")
        until = self._fetcher.until(self.deadline, nbytes)
        found = self._fetcher.attempt(self._link, ready, until, None)
        if found is None or found is GONE:
            raise codec.TensorMissing(gone=found is GONE)
        return self._tensor(key, nbytes, found)

    def _tensor(self, key: str, nbytes: int, found: tuple[Any, int]) -> torch.Tensor:
        if not isinstance(found[0], ManagedBuffer) or found[1] != nbytes:
            raise CorruptPayload(f"its GPU tensor {key!r} is something else")
        return self._fetcher.to_place(found[0])


def _end_late(over: Callable[[], bool], drop: Callable[[], None]) -> bool:
    """Tell whether a late copy is over, and let go of its source then."""
    if not over():
        return False
    drop()
    return True


class _Order(NamedTuple):
    """What one get() wants delivered.

    until: monotonic seconds when a transfer is given up; deadline: the caller's, who waits for memory, too,
    None for none. tensors gets those of an object.
    """

    link: Link
    ready: wire.Ready
    until: float
    deadline: float | None
    tensors: GpuTensors | None


GONE: tuple[Any, int] = (None, -2)  # stands for: the sender has no such payload
_NOTHING = memoryview(b"")
_ELSEWHERE: tuple[Any, int] = (None, -1)  # stands for: the payload lies in the other kind of memory
