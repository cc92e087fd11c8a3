"""Delivers what a sender has announced: eager, offered, leased or landing (see `mori_mp.receiver`)."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from mori_mp import codec
from mori_mp.device_pool import DevicePool
from mori_mp.intake import Intake, Late, standalone
from mori_mp.landing import Delivery
from mori_mp.link import Link
from mori_mp.managed import ManagedBuffer
from mori_mp.meters import StageMeters
from mori_mp.shared import wire
from mori_mp.shared.errors import CorruptPayload, EngineUnavailable, TransferFailed, WireError

logger = logging.getLogger(__name__)


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

    def fetch(self, link: Link, ready: wire.Ready, deadline: float | None) -> tuple[Any, int] | None:
        """Have an announced payload delivered; None if that did not work out, which has been reported.

        deadline (monotonic seconds) None: a transfer is waited for as long as one of its size may take.
        Raises CorruptPayload.
        """
        if len(ready.data):
            if not link.mailbox.mark_taken(ready.generation):
                return None  # a call that did not wait for the notice has fetched it
            delivery = standalone(ready.data) if ready.fast_path else Delivery(ready.data, None)
            try:
                return self._finish(link, ready.key, ready.fast_path, delivery, "eager")
            finally:
                link.settle(consumed=ready.generation)
        if ready.offset >= 0 and self._lease and link.can_lease:
            offered = self._device_offer(link, ready, deadline) if ready.device else self._offer(link, ready)
            if offered is not None:
                return offered  # else it has gone meanwhile; the sender knows
            if ready.device and deadline is not None and time.monotonic() >= deadline:
                self._intake.count_timeout(ready.key, link, "its GPU payload was not complete in time")
                link.mailbox.put_back(ready)
                return None
        wait_until = deadline
        if deadline is None:
            deadline = time.monotonic() + self._intake.transfer_seconds(ready.size)
        if self._lease and link.can_lease and not ready.device:
            found = self._leased_on_request(link, ready, deadline)
        else:
            found = self._landing(link, ready, deadline, wait_until)
        if found is _ELSEWHERE:  # without a notice we cannot know; or another payload has replaced it
            ready = wire.Ready(ready.key, 0, ready.size, ready.fast_path, _NOTHING, device=not ready.device)
            found = self._landing(link, ready, deadline, wait_until)
        return None if found is _ELSEWHERE else found

    def _offer(self, link: Link, ready: wire.Ready) -> tuple[Any, int] | None:
        generation = ready.generation
        try:
            lent = link.lent_pool()
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
        return self._finish(link, ready.key, ready.fast_path, Delivery(view, buffer), "lease")

    def _device_offer(self, link: Link, ready: wire.Ready, deadline: float | None) -> tuple[Any, int] | None:
        """Copy an offered payload from the sender's GPU pool into ours."""
        pool, generation = self._device, ready.generation
        lent = link.lent_device(pool.borrow) if pool is not None else None
        if lent is None or pool is None:
            return None
        slot = self._intake.slot(ready.key, ready.size, deadline, device=True)
        if slot is None:
            return None
        until = time.monotonic() + self._intake.transfer_seconds(ready.size) if deadline is None else deadline
        claim, copied = None, False
        try:
            claim = link.lent_pool().claim_device(
                ready.offset, ready.size, generation, lambda: link.settle(consumed=generation)
            )
            if claim is not None:
                target = pool.address + slot.offset
                copied = lent.copy(ready.offset, ready.size, target, ready.event, until)
        except (EngineUnavailable, WireError, TransferFailed) as exc:
            self._intake.fault("get_failed", f"an offer cannot be read: {exc}", ready.key, link)
        if claim is None or not copied:
            slot.give_back()
            if claim is not None:
                claim.drop()
            return None
        claim.end()
        if not link.mailbox.mark_taken(generation):
            slot.give_back()
            return None
        return self._finish(link, ready.key, ready.fast_path, slot.landed(), "lease")

    def _pull(self, link: Link, request: wire.Pull, ready: wire.Ready, deadline: float) -> wire.Done | None:
        tracer = self._meters.tracer
        if tracer is None:
            return link.pull(request, deadline)
        began_ns = time.monotonic_ns()
        done = link.pull(request, deadline)
        tracer.add(
            "pull",
            began_ns,
            time.monotonic_ns(),
            ready.key,
            generation=done.generation if done is not None else ready.generation,
            size=ready.size,
        )
        return done

    def _leased_on_request(self, link: Link, ready: wire.Ready, deadline: float) -> tuple[Any, int] | None:
        request = link.new_pull(ready.key, ready.size, 0, True)
        done = self._pull(link, request, ready, deadline)
        if done is None:

            def on_late(done: wire.Done | None) -> None:
                if done is not None and not done.status:
                    delivery = self._leased(link, ready.key, done)
                    if delivery is not None:
                        self._intake.keep_late(
                            ready.key, Late(delivery, done.fast_path, "lease", time.monotonic())
                        )

            self._gave_up(link, ready)
            link.abandon(request, on_late)
            return None
        if done.status == wire.ELSEWHERE:
            return _ELSEWHERE
        if done.status:
            self._refused(link, ready, done)
            return None
        delivery = self._leased(link, ready.key, done)
        if delivery is None:
            # It may have been granted to a get() that had given up.
            return self._intake.take_late(ready.key, self.tensors_from(link))
        return self._finish(link, ready.key, done.fast_path, delivery, "lease")

    def _leased(self, link: Link, key: str, done: wire.Done) -> Delivery | None:
        """Take over a lease that the sender has granted; None if another call has the payload."""
        generation = done.generation
        try:
            lent = link.lent_pool()
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

    def _landing(
        self, link: Link, ready: wire.Ready, deadline: float, wait_until: float | None
    ) -> tuple[Any, int] | None:
        try:
            slot = self._intake.slot(ready.key, ready.size, wait_until, ready.device)
        except EngineUnavailable as exc:
            self._intake.counters["errors"] += 1
            self._intake.fault("get_failed", str(exc), ready.key, link)
            return None
        if slot is None:
            if ready.generation:
                link.mailbox.put_back(ready)
            return None
        request = link.new_pull(ready.key, ready.size, slot.offset, False, ready.device)
        done = self._pull(link, request, ready, deadline)
        if done is None:
            self._intake.quarantine(slot, link)

            def on_late(done: wire.Done | None) -> None:
                self._intake.end_quarantine(slot)
                if done is None or done.status or not link.mailbox.mark_taken(done.generation):
                    slot.give_back()
                    return
                late = Late(slot.landed(), done.fast_path, "landing", time.monotonic())
                self._intake.keep_late(ready.key, late)

            self._gave_up(link, ready)
            link.abandon(request, on_late)
            return None
        if done.status:
            slot.give_back()
            if done.status == wire.ELSEWHERE:
                return _ELSEWHERE
            self._refused(link, ready, done)
            return None
        if not link.mailbox.mark_taken(done.generation):
            slot.give_back()
            # Another call has it, or a get() that had given up.
            return self._intake.take_late(ready.key, self.tensors_from(link))
        return self._finish(link, ready.key, done.fast_path, slot.landed(), "landing")

    # ------------------------------------------------------------------------- outcomes
    def _finish(self, link: Link, key: str, fast_path: bool, delivery: Delivery, how: str) -> tuple[Any, int]:
        return self._intake.finish(key, fast_path, delivery, how, self.tensors_from(link))

    def tensors_from(self, link: Link) -> codec.Fetch:
        """Return what gets the GPU tensors of an object, which travel by themselves, from its sender."""

        def fetch(key: str, nbytes: int) -> torch.Tensor:
            ready = link.mailbox.get(key)
            if ready is None or not link.mailbox.take(ready):
                ready = wire.Ready(key, 0, nbytes, True, _NOTHING, device=True)
            found = self.fetch(link, ready, None)
            if found is None:
                raise CorruptPayload(f"its GPU tensor {key!r} ({nbytes} bytes) did not come; see the fault")
            buffer: ManagedBuffer = found[0]
            with buffer:
                data = buffer.tensor
                return data.to("cpu" if self._tensors_on_host else data.device, copy=True)

        return fetch

    def _refused(self, link: Link, ready: wire.Ready, done: wire.Done) -> None:
        if done.status == wire.NOT_FOUND:
            self._intake.counters["misses"] += 1
            logger.debug("get of %r: %s", ready.key, done.message)
            return
        self._intake.counters["refused"] += 1
        self._intake.fault(
            "get_refused", f"the sender answers {done.status}: {done.message}", ready.key, link
        )
        if done.status in (wire.BUSY, wire.FAILED) and ready.generation:
            link.mailbox.put_back(ready)  # the sender keeps it for another try

    def _gave_up(self, link: Link, ready: wire.Ready) -> None:
        self._intake.counters["timeouts"] += 1
        text = f"the sender did not answer a pull of {ready.size} bytes in time"
        self._intake.fault("get_timeout", text, ready.key, link)
        if ready.generation:
            link.mailbox.put_back(ready)


_NOTHING = memoryview(b"")
_ELSEWHERE: tuple[Any, int] = (None, -1)  # stands for: the payload lies in the other kind of memory
