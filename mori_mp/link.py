"""A receiver's link to one sender: session, mailbox and requests under way.

A link finds out on first contact which protocol its sender speaks: a v2 sender answers Hello with Welcome,
the in-tree class (v1) with `trans_error`; requests to the latter are the business of `link_v1`.

A control process may be replaced at any time. The new one does not know this socket and answers Stranger;
the link says Hello again and gets Welcome with another incarnation. By then every process of the old one is
gone (the sender's supervisor sees to that before it starts a new one), so landing slots that waited for its
writes are free again, and requests that it never answered are sent anew.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

from mori_mp.lent import LentPool
from mori_mp.link_v1 import V1Requests
from mori_mp.mailbox import Mailbox
from mori_mp.shared import wire
from mori_mp.shared.errors import WireError
from mori_mp.shared.pool import Pool, PoolDescriptor, process_group_alive
from mori_mp.switchboard import Switchboard

logger = logging.getLogger(__name__)

AUDIT_SECONDS = 1.0
EAGER_CREDIT_BYTES = 8 << 20


LateHandler = Callable[["wire.Done | None"], None]
"""Takes the answer to a pull that was given up; None: the sender is gone, and its writes with it."""


class Peer(Enum):
    """Which protocol the sender speaks."""

    UNKNOWN = "unknown"
    V1 = "v1"
    V2 = "v2"


class Us:
    """What a receiver says of itself in Hello; the memory may be empty when it takes no landing writes."""

    def __init__(self, epoch: str, host_id: str, engine_desc: bytes, mem_desc: bytes, lease: bool) -> None:
        self.epoch = epoch
        self.host_id = host_id
        self.engine_desc = engine_desc
        self.mem_desc = mem_desc
        self.lease = lease


class _Request:
    """A pull under way. done: the sender's answer; again: it must be sent anew."""

    __slots__ = ("again", "done", "message", "on_late")

    def __init__(self, message: wire.Pull) -> None:
        self.message = message
        self.done: wire.Done | None = None
        self.again = False
        self.on_late: LateHandler | None = None


class Link:
    """See the module's docstring. Deadlines are monotonic seconds."""

    def __init__(
        self, board: Switchboard, host: str, port: int, us: Us, on_change: Callable[[], None]
    ) -> None:
        self.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self.host = host
        self.port = port
        self._board = board
        self._us = us
        self._on_change = on_change
        self.peer = Peer.UNKNOWN
        self.mailbox = Mailbox()
        self.welcome: wire.Welcome | None = None
        self.greeted = False  # a caller has waited for the first contact once
        self._edges: set[str] = set()
        self._map_lock = threading.Lock()
        self._requests: dict[int, _Request] = {}
        self._orphans: dict[int, tuple[_Request, int, float]] = {}  # corr -> request, process group, since
        self._next_corr = 1
        self._last_audit = 0.0
        self._hello_sent = 0.0
        self._consumed: deque[int] = deque()
        self._released: deque[int] = deque()
        self._lent: LentPool | None = None
        self._line = board.open(self.address, self._receive, wire.MAX_NOTICE_BYTES)
        self.v1 = V1Requests(board, self.address)

    # ------------------------------------------------------------------------ session
    def subscribe(self, edge: str) -> None:
        """Have the sender notify us of an edge's payloads."""
        if edge not in self._edges and len(self._edges) < wire.MAX_EDGES:
            self._edges.add(edge)
            self._say_hello()

    def await_peer(self, deadline: float) -> Peer:
        """Wait until the sender has been reached, or until deadline."""
        self._board.wait(lambda: None if self.peer is Peer.UNKNOWN else True, deadline)
        return self.peer

    @property
    def can_lease(self) -> bool:
        """Tell whether the sender lends its pool to us."""
        return self.welcome is not None and bool(self.welcome.mem_desc)

    def audit(self, now: float) -> None:
        """Ask again, at most once a second, for the keys that callers missed; also renews a lost session."""
        if now - self._last_audit < AUDIT_SECONDS:
            return
        self._last_audit = now
        if self.peer is Peer.UNKNOWN:
            if now - self._hello_sent > 5 * AUDIT_SECONDS:
                self._say_hello()
            return
        if self.peer is Peer.V2:
            self._post(wire.Audit(self._corr(), self.mailbox.collect_missed()))
            self._sweep_orphans(now)

    def _say_hello(self) -> None:
        self._hello_sent = time.monotonic()
        us = self._us
        self._post(
            wire.Hello(
                self._corr(),
                wire.VERSION,
                us.epoch,
                os.getpid(),
                us.host_id,
                us.engine_desc,
                us.mem_desc,
                sorted(self._edges),
                EAGER_CREDIT_BYTES,
                us.lease,
            )
        )

    def _corr(self) -> int:
        corr = self._next_corr
        self._next_corr = corr + 1
        return corr

    def _post(self, message: wire.Request) -> None:
        self._line.post([wire.encode(message)])

    # ------------------------------------------------------------------ receiving (token)
    def _receive(self, frames: list[bytes]) -> None:
        try:
            if len(frames) == 1:
                self._notice(wire.decode_notice(frames[0]))
            elif frames[-1] == wire.TRANS_ERROR and self.peer is not Peer.V2:
                self.peer = Peer.V1
            elif frames[-1] == wire.TRANS_ERROR:
                raise WireError("the sender refused a message")
            else:
                raise WireError(f"unexpected reply of {len(frames)} frames")
        except WireError as exc:
            logger.error("from %s: %s", self.address, exc)

    def _notice(self, notice: wire.Notice) -> None:
        if isinstance(notice, wire.Ready):
            for generation in self.mailbox.deliver(notice):
                self.settle(consumed=generation)
            self._on_change()
        elif isinstance(notice, wire.Done):
            request = self._requests.get(notice.corr)
            if request is not None:
                request.done = notice
                return
            orphan = self._orphans.pop(notice.corr, None)
            if orphan is not None:
                _end_orphan(orphan[0], notice)
        elif isinstance(notice, wire.Gone):
            self.mailbox.withdraw(notice)
            self._on_change()
        elif isinstance(notice, wire.Welcome):
            self._welcomed(notice)
        elif time.monotonic() - self._hello_sent > 0.05 or notice.corr in self._requests:
            self._say_hello()  # Stranger

    def _welcomed(self, welcome: wire.Welcome) -> None:
        before, self.welcome, self.peer = self.welcome, welcome, Peer.V2
        self._on_change()
        if before is None:
            return
        if (before.epoch, before.incarnation) == (welcome.epoch, welcome.incarnation):
            return
        logger.warning(
            "sender at %s is a new %s; renewing the session",
            self.address,
            "control process" if before.epoch == welcome.epoch else "stage",
        )
        if before.epoch != welcome.epoch:
            self.mailbox = Mailbox()
            self._retire_pool()
        else:
            for corr, (request, _, _) in list(self._orphans.items()):
                if request.message.lease:
                    self._post(request.message)  # we may hold it, and must know
                else:
                    del self._orphans[corr]
                    _end_orphan(request, None)
        for request in self._requests.values():
            request.again = True
        self._flush_settled()

    # ------------------------------------------------------------------------ payloads
    def pull(self, message: wire.Pull, deadline: float) -> wire.Done | None:
        """Ask for a payload and wait for the answer; None at deadline.

        The caller must then say, by `abandon()`, what is to happen when the answer comes late.
        """
        request = _Request(message)
        corr = message.corr
        self._requests[corr] = request
        self._post(message)

        def answered() -> wire.Done | None:
            if request.again:
                request.again = False
                self._post(message)
            return request.done

        try:
            while True:
                pause = min(deadline, time.monotonic() + AUDIT_SECONDS)
                done = self._board.wait(answered, pause)
                if done is not None or time.monotonic() >= deadline or self._board.closed:
                    return done
                self.audit(time.monotonic())  # finds out about a control process that died with our request
        finally:
            del self._requests[corr]

    def new_pull(self, key: str, length: int, dst_offset: int, lease: bool) -> wire.Pull:
        """Make a pull with a correlation id of its own."""
        return wire.Pull(self._corr(), key, length, dst_offset, lease)

    def abandon(self, message: wire.Pull, on_late: LateHandler) -> None:
        """Give up an unanswered pull. on_late gets its answer, after which no write can touch our memory."""
        request = _Request(message)
        request.on_late = on_late
        group = self.welcome.process_group if self.welcome is not None else 0
        self._orphans[message.corr] = (request, group, time.monotonic())

    def settle(self, consumed: int | None = None, released: int | None = None) -> None:
        """Tell the sender of one generation taken, or one lease ended. Safe in a finalizer."""
        if consumed is not None:
            self._consumed.append(consumed)
        if released is not None:
            self._released.append(released)
        self._flush_settled()

    def _flush_settled(self) -> None:
        consumed, released = _take(self._consumed), _take(self._released)
        if consumed or released:
            self._post(wire.Settle(consumed, released))

    def _sweep_orphans(self, now: float) -> None:
        """End the abandoned pulls of a sender that no longer exists on this host."""
        same_host = self.welcome is not None and self.welcome.host_id == self._us.host_id
        for corr, (request, group, since) in list(self._orphans.items()):
            if same_host and now - since > AUDIT_SECONDS and group and not process_group_alive(group):
                del self._orphans[corr]
                _end_orphan(request, None)

    @property
    def quarantined(self) -> int:
        """Landing writes that were given up and may still be coming."""
        return len(self._orphans)

    # --------------------------------------------------------------------------- leases
    def lent_pool(self) -> LentPool:
        """Return the sender's pool, mapped. Raises EngineUnavailable when it is out of reach."""
        with self._map_lock:
            if self._lent is None:
                assert self.welcome is not None
                self._lent = LentPool(Pool.open_peer(PoolDescriptor.unpack(self.welcome.mem_desc)))
            return self._lent

    def _retire_pool(self) -> None:
        lent, self._lent = self._lent, None
        if lent is not None:
            lent.retire()

    def close(self) -> None:
        """Let go of the lent pool; the switchboard closes the sockets."""
        self._retire_pool()


def _end_orphan(request: _Request, done: wire.Done | None) -> None:
    if request.on_late is not None:
        request.on_late(done)


def _take(queue: deque[int]) -> list[int]:
    """Empty a queue, as far as one Settle can hold it; other threads may append meanwhile."""
    taken: list[int] = []
    while queue and len(taken) < wire.MAX_SETTLED // 2:
        taken.append(queue.popleft())
    return taken
