"""The receiving half of a connector: finds a payload, has it delivered, decodes it.

What get() does depends on what is known, cheapest first:

    eager    the payload itself came with the Ready notice: nothing to ask
    offer    the notice says where it lies in the pool of a sender on this host: claim it, read it in place,
             or have our GPU copy it if it lies in GPU memory
    lease    the same without a notice: one round trip
    landing  allocate a slot of our pool and have a worker of the sender write into it: one round trip
    v1       the in-tree class: query its size unless the metadata has it, then a landing pull

A landing slot whose get() gave up is quarantined: it is not handed out again before the sender reports the
end of that write, or is known to be gone with all its processes. What arrives late waits for the next get().
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from mori_mp import codec
from mori_mp.device_pool import DevicePool
from mori_mp.intake import Intake, Late, Timeouts, standalone
from mori_mp.landing import Delivery, DevicePlace, HostPlace
from mori_mp.link import Link, Peer, Us
from mori_mp.managed import ManagedBuffer
from mori_mp.meters import StageMeters
from mori_mp.receiver_v1 import V1Receiver
from mori_mp.shared import wire
from mori_mp.shared.errors import CorruptPayload, EngineUnavailable, TransferFailed, WireError
from mori_mp.shared.faults import Faults
from mori_mp.slots import PoolSlots
from mori_mp.switchboard import Switchboard
from mori_mp.wanted import Wanted

logger = logging.getLogger(__name__)

FIRST_CONTACT_SECONDS = 1.0

SPIN_SECONDS = 0.0001
"""A notice that complete metadata promises is looked for so long before the thread sleeps: to be woken takes
about as long."""

NOTICE_GRACE_SECONDS = 0.02
"""A Ready notice overtakes a pull of our own; with complete metadata we give it this long to arrive."""


class Receiver:
    """See the module's docstring. Thread-safe."""

    def __init__(
        self,
        us: Us,
        slots: PoolSlots,
        timeouts: Timeouts,
        lease: bool,
        decode_view: bool,
        tensors_on_host: bool,
        meters: StageMeters,
        faults: Faults,
    ) -> None:
        self._us = us
        self._meters = meters
        self._faults = faults
        self._lease = lease
        self._tensors_on_host = tensors_on_host
        self._device: DevicePool | None = None
        self._board = Switchboard()
        host = HostPlace(slots, us.engine_desc, us.mem_desc)
        self._intake = Intake(host, self._board, timeouts, decode_view, faults, self._on_change)
        self._v1 = V1Receiver(self._board, self._intake, meters)
        self._links: dict[tuple[str, int], Link] = {}
        self._links_lock = threading.Lock()
        self._generation = 0
        self.counters = self._intake.counters

    def use_device(self, pool: DevicePool) -> None:
        """Take GPU payloads into a GPU pool; before the first link. Raises EngineUnavailable, ConfigError."""
        place = DevicePlace(pool)
        self._us.device_engine_desc, self._us.device_mem_desc = place.engine_desc, place.mem_desc
        self._intake.device = place
        self._device = pool

    @property
    def late_device_writes(self) -> bool:
        """Tell whether a write into the GPU pool may still come."""
        return self._intake.late_device_writes

    # ---------------------------------------------------------------------------- links
    def link(self, host: str, port: int, edge: str) -> Link:
        """Return the link to a sender, made and subscribed on first use."""
        with self._links_lock:
            link = self._links.get((host, port))
            if link is None:
                link = self._links[host, port] = Link(
                    self._board, host, port, self._us, self._on_change, self._faults
                )
        if edge:
            link.subscribe(edge)
        return link

    def _on_change(self) -> None:
        self._generation += 1

    @property
    def generation(self) -> int:
        """Count changes that may make a get() succeed that missed before; takes in what has come."""
        self._board.pump()
        return self._generation

    def wait_for_change(self, generation: int, deadline: float) -> bool:
        """Wait until `generation` is outdated; False at deadline (monotonic seconds)."""
        while True:
            now = time.monotonic()
            pause = min(deadline, now + 1.0)
            if self._board.wait(lambda: True if self._generation != generation else None, pause):
                return True
            for link in list(self._links.values()):
                link.audit(time.monotonic())
            if time.monotonic() >= deadline or self._board.closed:
                return False

    # ----------------------------------------------------------------------------- get
    def get(self, wanted: Wanted, deadline: float | None) -> tuple[Any, int] | None:
        """Deliver a payload; None when it is not there.

        With a deadline (monotonic seconds) it is waited for until then. Without, only a transfer that has
        begun, or one that complete metadata promises, is waited for. Raises CorruptPayload.
        """
        began_ns = time.monotonic_ns()
        found = self._get(wanted, deadline)
        if found is not None:
            self._meters.got(wanted.edge, began_ns, found[1])
        return found

    def _get(self, wanted: Wanted, deadline: float | None) -> tuple[Any, int] | None:
        link = self.link(wanted.host, wanted.port, wanted.edge)
        if self._intake.any_late:
            self._intake.drop_late()
            late = self._intake.take_late(wanted.key, self._fetch_from(link))
            if late is not None:
                return late
        if not self._reached(link, wanted, deadline):
            return None
        while True:
            if link.is_v1():
                return self._v1.get(link, wanted, deadline)
            ready = self._find(link, wanted, deadline)
            if ready is _LATE:
                return self._get(wanted, deadline)
            if ready is None and link.is_v1():
                continue
            if ready is None:
                if not wanted.size:
                    self._intake.counters["misses"] += 1
                    return None
                if deadline is not None:  # it is over: a pull now would be given up as soon as it is sent
                    self._intake.count_timeout(
                        wanted.key, link, f"its {wanted.size} bytes were not announced in time"
                    )
                    return None
                ready = wire.Ready(wanted.key, 0, wanted.size, wanted.fast_path, _NOTHING)
            elif not link.mailbox.take(ready):
                continue  # another thread has it
            known_ns = time.monotonic_ns()
            result = self._fetch(link, wanted, ready, deadline)
            if result is not None:
                self._meters.fetched(wanted, known_ns, result[1], ready.generation, link.epoch)
            if result is None and link.is_v1():
                continue  # a v1 sender has come in its place
            if result is not None or deadline is None or time.monotonic() >= deadline:
                return result
            if self._board.closed:
                return None
            wanted = wanted._replace(size=0)

    def _reached(self, link: Link, wanted: Wanted, deadline: float | None) -> bool:
        """Tell whether the sender has answered yet; the first caller of a link waits for that a little."""
        if link.peer is not Peer.UNKNOWN:
            return True
        now = time.monotonic()
        if deadline is None:
            if link.greeted and not wanted.size:
                deadline = now
            else:
                deadline = now + (self._intake.timeouts.query if wanted.size else FIRST_CONTACT_SECONDS)
        link.greeted = True
        while link.await_peer(min(deadline, time.monotonic() + 1.0)) is Peer.UNKNOWN:
            if self._board.closed:
                return False
            link.audit(time.monotonic())
            if time.monotonic() >= deadline:
                if wanted.size:
                    self._intake.count_timeout(wanted.key, link, "the sender has not answered at all")
                self._intake.counters["unreached"] += 1
                text = "the sender has not been reached yet"
                self._faults.report(
                    logger, "sender_unreached", text, edge=wanted.edge, peer=link.address, level=logging.INFO
                )
                return False
        return True

    def _find(self, link: Link, wanted: Wanted, deadline: float | None) -> wire.Ready | None:
        """Look into the mailbox; wait for a notice if there is a deadline or one must be under way."""
        self._board.pump()
        ready = link.mailbox.get(wanted.key)
        spin_until = time.monotonic() + SPIN_SECONDS if wanted.size else 0.0
        while ready is None and time.monotonic() < spin_until:
            self._board.pump()
            ready = link.mailbox.get(wanted.key)
        if ready is not None:
            return ready
        link.audit(time.monotonic())  # here too, or a caller with short deadlines would never ask again
        if deadline is None and not wanted.size:
            return None
        until = deadline if deadline is not None else time.monotonic() + NOTICE_GRACE_SECONDS
        while True:
            pause = min(until, time.monotonic() + 1.0)
            ready = self._board.wait(lambda: self._announced(link, wanted.key), pause)
            if ready is not None or time.monotonic() >= until or self._board.closed:
                return ready
            if link.is_v1():
                return None
            link.audit(time.monotonic())

    def _announced(self, link: Link, key: str) -> wire.Ready | None:
        return _LATE if self._intake.has_late(key) else link.mailbox.get(key)

    def _fetch(
        self, link: Link, wanted: Wanted, ready: wire.Ready, deadline: float | None
    ) -> tuple[Any, int] | None:
        if len(ready.data):
            if not link.mailbox.mark_taken(ready.generation):
                return None  # a call that did not wait for the notice has fetched it
            delivery = standalone(ready.data) if ready.fast_path else Delivery(ready.data, None)
            try:
                return self._finish(link, wanted.key, ready.fast_path, delivery, "eager")
            finally:
                link.settle(consumed=ready.generation)
        if ready.offset >= 0 and self._lease and link.can_lease:
            offered = (
                self._fetch_device_offer(link, ready, deadline)
                if ready.device
                else self._fetch_offer(link, ready)
            )
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
            found = self._fetch_lease(link, ready, deadline)
        else:
            found = self._fetch_landing(link, ready, deadline, wait_until)
        if found is _ELSEWHERE:  # without a notice we cannot know; or another payload has replaced it
            ready = wire.Ready(ready.key, 0, ready.size, ready.fast_path, _NOTHING, device=not ready.device)
            found = self._fetch_landing(link, ready, deadline, wait_until)
        return None if found is _ELSEWHERE else found

    def _fetch_offer(self, link: Link, ready: wire.Ready) -> tuple[Any, int] | None:
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

    def _fetch_device_offer(
        self, link: Link, ready: wire.Ready, deadline: float | None
    ) -> tuple[Any, int] | None:
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

    def _fetch_lease(self, link: Link, ready: wire.Ready, deadline: float) -> tuple[Any, int] | None:
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
            return self._intake.take_late(ready.key, self._fetch_from(link))
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

    def _fetch_landing(
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
            return self._intake.take_late(ready.key, self._fetch_from(link))
        return self._finish(link, ready.key, done.fast_path, slot.landed(), "landing")

    # ------------------------------------------------------------------------- outcomes
    def _finish(self, link: Link, key: str, fast_path: bool, delivery: Delivery, how: str) -> tuple[Any, int]:
        return self._intake.finish(key, fast_path, delivery, how, self._fetch_from(link))

    def _fetch_from(self, link: Link) -> codec.Fetch:
        """Return what gets the GPU tensors of an object from its sender."""

        def fetch(key: str, nbytes: int) -> torch.Tensor:
            known = link.mailbox.get(key)
            if known is not None:
                link.mailbox.take(known)
            ready = wire.Ready(key, 0, nbytes, True, _NOTHING, device=True)
            deadline = time.monotonic() + self._intake.transfer_seconds(nbytes)
            found = self._fetch_landing(link, ready, deadline, deadline)
            if found is None or found is _ELSEWHERE:
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

    def forget(self, key: str) -> None:
        """Do not ask for a key any more, on whichever edge; what came late is dropped."""
        for link in list(self._links.values()):
            for edge in link.edges:
                internal = f"{key}@{edge}"
                link.mailbox.forget(internal)
                self._intake.forget_late(internal)

    def report(self) -> Mapping[str, Any]:
        """Describe the state for health()."""
        links = list(self._links.values())
        self._board.pump()
        self._intake.drop_late()
        return {
            "counters": dict(self.counters),
            "senders": [
                {
                    "address": link.address,
                    "protocol": link.peer.value,
                    "lease": link.can_lease,
                    "ready": len(link.mailbox),
                    "quarantined": link.quarantined + link.v1.quarantined,
                    "quarantined_bytes": self._intake.quarantined_bytes(link),
                }
                for link in links
            ],
        }

    def close(self) -> None:
        """Let go of every socket and of other stages' pools. A get() that waits returns None."""
        self._board.close()
        self._intake.close()
        for link in self._links.values():
            link.close()

    def let_go_of_pool(self) -> None:
        """Drop our view of the connector's own pool; no get() is or will be under way."""
        self._intake.let_go_of_pool()


_NOTHING = memoryview(b"")
_LATE = wire.Ready("", 0, 0, False, _NOTHING)  # stands for: look among the late deliveries
_ELSEWHERE: tuple[Any, int] = (None, -1)  # stands for: the payload lies in the other kind of memory
