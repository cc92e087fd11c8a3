"""A receiver's link to one sender: session, mailbox and requests under way.

A link finds out on first contact which protocol its sender speaks: a v2 sender answers Hello with Welcome,
the in-tree class (v1) with `trans_error`; requests to the latter are the business of `link_v1`.

A control process may be replaced at any time. The new one does not know this socket and answers Stranger;
the link says Hello again and gets Welcome with another incarnation. By then every process of the old one is
gone (the sender's supervisor sees to that before it starts a new one), so landing slots that waited for its
writes are free again, and requests that it never answered are sent anew. Each sending of a pull has a
correlation id of its own and names the process it is meant for, so that no pull can be served twice, nor by a
process that we took for dead when we handed out its landing slot again.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable
from enum import Enum

from mori_mp.lent import LentPool
from mori_mp.link_v1 import V1Requests
from mori_mp.mailbox import Mailbox
from mori_mp.shared import wire
from mori_mp.shared.errors import EngineUnavailable, WireError
from mori_mp.shared.faults import Faults
from mori_mp.shared.pool import Pool, PoolDescriptor, process_group_alive
from mori_mp.switchboard import Line, Switchboard

logger = logging.getLogger(__name__)

AUDIT_SECONDS = 1.0
EAGER_CREDIT_BYTES = 8 << 20
_PATIENCE = 8  # audits without a sound from the sender, after which we ask less often
_PATIENT_SECONDS = 30.0
_WELCOME_SECONDS = 0.05  # how long a Welcome may take before Hello is said again

LateHandler = Callable[["wire.Done | None"], None]
"""Takes the answer to a pull that was given up; None: the sender is gone, and its writes with it."""


class Peer(Enum):
    """Which protocol the sender speaks."""

    UNKNOWN = "unknown"
    V1 = "v1"
    V2 = "v2"


class Us:
    """What a receiver says of itself in Hello; memory may be empty where it takes no landing writes."""

    def __init__(self, epoch: str, host_id: str, engine_desc: bytes, mem_desc: bytes, lease: bool) -> None:
        self.epoch = epoch
        self.host_id = host_id
        self.engine_desc = engine_desc
        self.mem_desc = mem_desc
        self.lease = lease
        self.device_engine_desc = b""
        self.device_mem_desc = b""


class _Request:
    """A pull under way.

    done is the sender's answer; lost: its sender is gone; refused: the correlation id of the sending that got
    Stranger, and how often we had been welcome by then; group: the processes that may write for it, 0 if
    unknown; since: when it was given up, in monotonic seconds. Only the thread in pull() sends.
    """

    __slots__ = ("done", "group", "lost", "message", "on_late", "refused", "since")

    def __init__(self, message: wire.Pull) -> None:
        self.message = message
        self.done: wire.Done | None = None
        self.lost = False
        self.refused = (0, 0)
        self.group = 0
        self.since = 0.0
        self.on_late: LateHandler | None = None

    def is_for(self, welcome: wire.Welcome | None) -> bool:
        """Tell whether it was sent to the process that said Welcome."""
        return welcome is not None and (self.message.epoch, self.message.incarnation) == _who(welcome)

    @property
    def is_refused(self) -> bool:
        """Tell whether nothing was or will be done for it as it was sent last."""
        return self.refused[0] == self.message.corr


class Link:
    """See the module's docstring. Deadlines are monotonic seconds."""

    def __init__(
        self,
        board: Switchboard,
        host: str,
        port: int,
        us: Us,
        on_change: Callable[[], None],
        faults: Faults | None = None,
    ) -> None:
        self._faults = faults if faults is not None else Faults("stage")
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
        self._orphans: dict[int, _Request] = {}  # those that were given up
        self._corrs = itertools.count(1)  # next() is atomic
        self._last_audit = 0.0
        self._audits = 0  # since the sender was last heard
        self._hello_sent = 0.0
        self._welcomes = 0
        self._hello_pending = False
        self._lent: tuple[str, LentPool] | None = None  # epoch, pool
        self._lane: Line | None = None
        self._lane_of: tuple[str, int] | None = None  # who offered the lane that was tried last
        self._closed = False
        self._line = board.open(self.address, self._receive, wire.MAX_NOTICE_BYTES)
        self.v1 = V1Requests(board, self.address, self._greet_again)

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

    def is_v1(self) -> bool:
        """Tell whether the sender is the in-tree class, as far as we know now."""
        return self.peer is Peer.V1

    @property
    def edges(self) -> list[str]:
        """Edges that we subscribe to."""
        return list(self._edges)

    @property
    def epoch(self) -> str:
        """Return which stage serves the sender's port, "" before first contact."""
        return self.welcome.epoch if self.welcome is not None else ""

    @property
    def can_lease(self) -> bool:
        """Tell whether the sender lends its pool to us."""
        return self.welcome is not None and bool(self.welcome.mem_desc)

    def audit(self, now: float) -> None:
        """Ask again, at most once a second, for the keys that callers missed; also renews a lost session."""
        pause = AUDIT_SECONDS if self._audits < _PATIENCE else _PATIENT_SECONDS
        if now - self._last_audit < pause:
            return
        self._last_audit = now
        self._audits += 1
        if self._line.blocked:
            self._connect_anew()
        if self.peer is Peer.UNKNOWN:
            self._greet_again()
            return
        if self.peer is Peer.V2:
            self._post(wire.Audit(self._corr(), self.mailbox.collect_missed()))
        self._sweep_orphans(now)

    def _connect_anew(self) -> None:
        """Replace a socket that takes no more: it is full of old messages, or ZMQ has given it up."""
        logger.warning("connecting to %s anew: the connection takes no more messages", self.address)
        old, self._line = self._line, self._board.open(self.address, self._receive, wire.MAX_NOTICE_BYTES)
        self._board.retire(old)
        self._say_hello()

    def _greet_again(self) -> None:
        """Find out who is there now, at most every few seconds: a v1 sender logs a Hello as an error."""
        if time.monotonic() - self._hello_sent > 5 * AUDIT_SECONDS:
            self._say_hello()

    def _say_hello(self) -> None:
        self._hello_sent = time.monotonic()
        self._hello_pending = True
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
                us.device_engine_desc,
                us.device_mem_desc,
            )
        )

    def _corr(self) -> int:
        return next(self._corrs)

    def _post(self, message: wire.Request) -> None:
        (self._lane or self._line).post([wire.encode(message)])

    # ------------------------------------------------------------------ receiving (token)
    def _receive(self, frames: list[bytes]) -> None:
        self._audits = 0
        try:
            if len(frames) == 1:
                self._notice(wire.decode_notice(frames[0]))
            elif frames[-1] == wire.TRANS_ERROR:
                self._not_understood()
            else:
                raise WireError(f"unexpected reply of {len(frames)} frames")
        except WireError as exc:
            text = f"from {self.address}: {exc}"
            self._faults.report(logger, "notice_invalid", text, peer=self.address)

    def _open_lane(self, path: str) -> None:
        """Move the session to the sender's lane, if it can be reached from here."""

        def receive(frames: list[bytes]) -> None:
            if frames:
                self._receive(frames)
            elif self._lane is lane:  # it has ended; who serves the TCP port now, if anyone?
                self._lane = None
                self._say_hello()

        try:
            lane = self._board.open_lane(path, receive)
        except OSError as exc:
            logger.info("going on over TCP with the sender at %s: its lane %s: %s", self.address, path, exc)
            return
        self._lane = lane
        self._say_hello()

    def _not_understood(self) -> None:
        """The sender cannot read v2: it speaks v1, or one that does has taken the place of a v2 sender.

        A v2 sender that failed to read one message only answers the new Hello with Welcome, and we are back.
        """
        if self.peer is Peer.V2:
            logger.warning("sender at %s no longer understands v2; going on with v1", self.address)
            self._say_hello()
        self.peer = Peer.V1
        self._on_change()

    def _notice(self, notice: wire.Notice) -> None:
        if isinstance(notice, wire.Ready):
            for generation in self.mailbox.deliver(notice):
                self.settle(consumed=generation)
            self._on_change()
        elif isinstance(notice, wire.Done):
            request = self._requests.get(notice.corr)
            if request is not None:
                request.done = notice
            orphan = self._orphans.pop(notice.corr, None)  # also when it is given up just now
            if orphan is None:
                return
            if notice.status == wire.LOST and orphan.message.lease:
                self._send_anew(orphan, self._orphans)  # we may hold it, and must know
            else:
                _end_orphan(orphan, notice)
        elif isinstance(notice, wire.Gone):
            self.mailbox.withdraw(notice)
            self._on_change()
        elif isinstance(notice, wire.Welcome):
            self._welcomed(notice)
        else:
            self._refused(notice.corr)

    def _refused(self, corr: int) -> None:
        """The sender does not know us, or a pull was meant for its predecessor: nothing was done for it."""
        request = self._requests.get(corr)
        if request is not None:
            request.refused = corr, self._welcomes
        orphan = self._orphans.pop(corr, None)
        if orphan is not None:
            _end_orphan(orphan, None)
        if request is not None and not request.is_for(self.welcome):
            return  # it is sent anew to whoever is there now
        if time.monotonic() - self._hello_sent > _WELCOME_SECONDS or not self._hello_pending:
            self._say_hello()

    def _welcomed(self, welcome: wire.Welcome) -> None:
        before, self.welcome, self.peer = self.welcome, welcome, Peer.V2
        self._welcomes += 1
        self._hello_pending = False
        self._on_change()
        if self._lane_of != _who(welcome):
            self._leave_lane()
            self._lane_of = _who(welcome)
            if welcome.lane and welcome.host_id == self._us.host_id:
                self._open_lane(welcome.lane)
        if before is not None and _who(before) != _who(welcome):
            self._succeeded(before, welcome)

    def _leave_lane(self) -> None:
        lane, self._lane = self._lane, None
        if lane is not None:
            self._board.retire(lane)

    def _succeeded(self, before: wire.Welcome, welcome: wire.Welcome) -> None:
        """Another process serves the sender's port."""
        same_stage = before.epoch == welcome.epoch
        what = "control process" if same_stage else "stage"
        text = f"sender at {self.address} is a new {what}; renewing the session"
        self._faults.report(logger, "sender_restarted", text, peer=self.address, level=logging.WARNING)
        if not same_stage:
            self.mailbox = Mailbox()
            for request in list(self._requests.values()):
                request.lost = request.message.epoch != welcome.epoch
            return
        for corr, orphan in list(self._orphans.items()):
            if orphan.is_for(welcome) or self._orphans.pop(corr, None) is None:
                continue
            if orphan.message.lease:
                self._send_anew(orphan, self._orphans)  # we may hold it, and must know
            else:
                _end_orphan(orphan, None)

    # ------------------------------------------------------------------------ payloads
    def pull(self, message: wire.Pull, deadline: float) -> wire.Done | None:
        """Ask for a payload and wait for the answer; None at deadline, or when a v1 sender has come instead.

        The caller must then say, by `abandon()`, what is to happen when the answer comes late.
        """
        request = _Request(message)
        self._send_anew(request, self._requests)

        def ended() -> bool | None:
            if self._must_send_anew(request):
                self._requests.pop(message.corr, None)
                self._send_anew(request, self._requests)
            over = request.done is not None or request.lost or self.peer is Peer.V1
            return True if over else None

        while not self._board.wait(ended, min(deadline, time.monotonic() + AUDIT_SECONDS)):
            self.audit(time.monotonic())  # finds out about a control process that died with our request
            if time.monotonic() >= deadline or self._board.closed:
                break
        done = request.done
        if done is not None:
            self._requests.pop(message.corr, None)
        return done  # without an answer it stays where the answer will find it, for abandon()

    def _must_send_anew(self, request: _Request) -> bool:
        if request.lost or request.done is not None:
            return False
        if self.welcome is not None and not request.is_for(self.welcome):
            return True  # its addressee is gone, and would be refused by the new one
        return request.is_refused and self._welcomes > request.refused[1]

    def _send_anew(self, request: _Request, among: dict[int, _Request]) -> None:
        """Send a pull to whoever is there now, under a new correlation id."""
        message, welcome = request.message, self.welcome
        message.corr = self._corr()
        if welcome is not None:
            message.epoch, message.incarnation = _who(welcome)
            request.group = welcome.process_group
        among[message.corr] = request
        self._post(message)

    def new_pull(
        self, key: str, length: int, dst_offset: int, lease: bool, device: bool = False
    ) -> wire.Pull:
        """Make a pull; pull() will say whom it is meant for."""
        return wire.Pull(0, key, length, dst_offset, lease, device=device)

    def abandon(self, message: wire.Pull, on_late: LateHandler) -> None:
        """Give up an unanswered pull. on_late gets its answer, after which no write can touch our memory."""
        request = self._requests.get(message.corr)
        if request is None:
            raise ValueError(f"pull {message.corr} of {message.key!r} is not under way")
        request.on_late = on_late
        request.since = time.monotonic()
        self._orphans[message.corr] = request
        del self._requests[message.corr]
        if request.done is not None or request.is_refused:  # just now, beside us
            if self._orphans.pop(message.corr, None) is not None:
                _end_orphan(request, request.done)
        elif self.peer is Peer.V2 and request.is_for(self.welcome):
            self._post(wire.Abandon([message.corr]))

    def settle(self, consumed: int | None = None, released: int | None = None) -> None:
        """Tell the sender of one generation taken, or one lease ended. Safe in a finalizer."""
        welcome = self.welcome
        self._post(
            wire.Settle(
                [] if consumed is None else [consumed],
                [] if released is None else [released],
                "" if welcome is None else welcome.epoch,
            )
        )

    def _sweep_orphans(self, now: float) -> None:
        """End the abandoned pulls of a sender that no longer exists on this host; ask about the others."""
        same_host = self.welcome is not None and self.welcome.host_id == self._us.host_id
        asked: list[int] = []
        for corr, orphan in list(self._orphans.items()):
            if now - orphan.since < AUDIT_SECONDS:
                continue
            if same_host and orphan.group and not process_group_alive(orphan.group):
                if self._orphans.pop(corr, None) is not None:
                    _end_orphan(orphan, None)
            elif orphan.is_for(self.welcome):
                asked.append(corr)  # its answer may have been lost
        if asked and self.peer is Peer.V2:
            self._post(wire.Abandon(asked[: wire.MAX_SETTLED]))

    @property
    def quarantined(self) -> int:
        """Landing writes that were given up and may still be coming."""
        return len(self._orphans)

    # --------------------------------------------------------------------------- leases
    def lent_pool(self) -> LentPool:
        """Return the sender's pool, mapped. Raises EngineUnavailable when it is out of reach."""
        with self._map_lock:
            welcome = self.welcome
            if welcome is None or self._closed:
                raise EngineUnavailable(f"the pool of the sender at {self.address} is not to be had any more")
            if self._lent is not None and self._lent[0] == welcome.epoch:
                return self._lent[1]
            self._retire_pool()
            lent = LentPool(Pool.open_peer(PoolDescriptor.unpack(welcome.mem_desc)))
            self._lent = welcome.epoch, lent
            return lent

    def _retire_pool(self) -> None:
        lent, self._lent = self._lent, None
        if lent is not None:
            lent[1].retire()

    def close(self) -> None:
        """Let go of the lent pool; the switchboard closes the sockets."""
        with self._map_lock:
            self._closed = True
            self._retire_pool()


def _who(welcome: wire.Welcome) -> tuple[str, int]:
    return welcome.epoch, welcome.incarnation


def _end_orphan(request: _Request, done: wire.Done | None) -> None:
    if request.on_late is not None:
        request.on_late(done)
