"""The receiving half of a connector: finds a payload, has it delivered, decodes it.

What get() does depends on what is known, cheapest first:

    push     the sender has had it copied into a slot of our GPU pool that was posted: wait for that copy
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

from mori_mp.device_pool import DevicePool
from mori_mp.fetch import Fetcher
from mori_mp.intake import Intake, Timeouts
from mori_mp.landing import DevicePlace, HostPlace
from mori_mp.link import Link, Peer, Us
from mori_mp.meters import StageMeters
from mori_mp.receiver_v1 import V1Receiver
from mori_mp.shared import wire
from mori_mp.shared.faults import Faults
from mori_mp.slots import PoolSlots
from mori_mp.switchboard import Switchboard
from mori_mp.wanted import Wanted

logger = logging.getLogger(__name__)

FIRST_CONTACT_SECONDS = 1.0

SPIN_SECONDS = 0.0001
"""A notice that complete metadata promises is looked for so long before the thread sleeps: to be woken takes
about as long."""

_FIRST_PAUSE_SECONDS = 0.001
_LONGEST_PAUSE_SECONDS = 0.1

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
        self._board = Switchboard()
        host = HostPlace(slots, us.engine_desc, us.mem_desc)
        self._intake = Intake(host, self._board, timeouts, decode_view, faults, self._on_change)
        self._fetcher = Fetcher(self._intake, lease, tensors_on_host, meters)
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
        pool.slots.reclaim = self._reclaim_posts
        self._fetcher.use_device(pool)

    @property
    def late_device_copies(self) -> bool:
        """Tell whether a GPU copy from or into the GPU pool is still to end, once this is closed."""
        if self._intake.device is not None:
            self._intake.device.slots.collect()  # which asks for the end of copies
        late = [link.memory.late_copies for link in list(self._links.values())]
        return any(late)  # of all, since each lets go of what has ended

    @property
    def late_device_writes(self) -> bool:
        """Tell whether a write into the GPU pool may still come."""
        return self.late_device_copies or self._intake.late_device_writes

    # ---------------------------------------------------------------------------- links
    def link(self, host: str, port: int, edge: str) -> Link:
        """Return the link to a sender, made and subscribed on first use."""
        link = self._links.get((host, port))
        if link is None:
            link = self._new_link(host, port)
        if edge:
            link.subscribe(edge)
        return link

    def _new_link(self, host: str, port: int) -> Link:
        with self._links_lock:
            link = self._links.get((host, port))  # another thread may have made it
            if link is None:
                link = self._links[host, port] = Link(
                    self._board, host, port, self._us, self._on_change, self._faults
                )
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
        pause = _FIRST_PAUSE_SECONDS
        if self._intake.late:
            self._intake.drop_late()
        while wanted.key in self._intake.late:
            late = self._intake.take_late(wanted.key, deadline)
            if late is not None:
                return late
            if wanted.key in self._intake.late:  # still: an object whose GPU tensors have not come
                if deadline is None or time.monotonic() >= deadline or self._board.closed:
                    return None
                pause = self._pause(pause, deadline)
        if link.peer is Peer.UNKNOWN and not self._reached(link, wanted, deadline):
            return None
        while True:
            if link.is_v1():
                return self._v1.get(link, wanted, deadline)
            known_ns = time.monotonic_ns()
            pushed = self._fetcher.pushed(link, wanted.key, deadline)
            if pushed is not None:
                if pushed.found is not None:
                    size = pushed.found[1]
                    self._meters.fetched(wanted, known_ns, size, pushed.generation, link.epoch)
                return pushed.found
            ready = self._find(link, wanted, deadline)
            if ready is _LATE:
                return self._get(wanted, deadline)
            if ready is _PUSHED:
                continue
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
            result = self._fetcher.fetch(link, ready, deadline)
            if result is not None:
                self._meters.fetched(wanted, known_ns, result[1], ready.generation, link.epoch)
            if result is None and link.is_v1():
                continue  # a v1 sender has come in its place
            if result is not None or deadline is None or time.monotonic() >= deadline:
                return result
            if self._board.closed:
                return None
            wanted = wanted._replace(size=0)
            pause = self._pause(pause, deadline)

    def _pause(self, seconds: float, deadline: float) -> float:
        """Wait before a payload is tried again; returns how long to wait the next time."""
        self._board.wait(lambda: None, min(deadline, time.monotonic() + seconds))
        return min(2 * seconds, _LONGEST_PAUSE_SECONDS)

    def _reached(self, link: Link, wanted: Wanted, deadline: float | None) -> bool:
        """Tell whether a sender answers at last; the first caller of a link waits for that a little."""
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
        ready = self._announced(link, wanted.key)
        spin_until = time.monotonic() + SPIN_SECONDS if wanted.size else 0.0
        while ready is None and time.monotonic() < spin_until and self._board.pump():
            ready = self._announced(link, wanted.key)
        if ready is not None:
            return ready
        self._fetcher.restock(link)
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
        if key in self._intake.late:
            return _LATE
        posts = link.memory.posts
        if posts is not None and posts.has(key):
            return _PUSHED
        return link.mailbox.get(key)

    def _reclaim_posts(self) -> None:
        for link in list(self._links.values()):
            link.memory.reclaim_posts()

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
                    "silent_s": round(link.silent_seconds(time.monotonic()), 1),
                }
                for link in links
            ],
        }

    def close(self) -> None:
        """Let go of every socket and of other stages' pools. A get() that waits returns None."""
        self._board.close()
        self._intake.close()
        for link in list(self._links.values()):  # a get() may just be making one
            link.close()

    def let_go_of_pool(self) -> None:
        """Drop our view of the connector's own pool; no get() is or will be under way."""
        self._intake.let_go_of_pool()


_NOTHING = memoryview(b"")
_LATE = wire.Ready("", 0, 0, False, _NOTHING)  # stands for: look among the late deliveries
_PUSHED = wire.Ready("", 0, 0, False, _NOTHING)  # stands for: look into the posted slots
