"""A receiver's link to one sender: session, mailbox and lane; its pulls are in `pulls`.

A link finds out on first contact which protocol its sender speaks: a v2 sender answers Hello with Welcome,
the in-tree class (v1) with `trans_error`; requests to the latter are the business of `link_v1`.

A control process may be replaced at any time. The new one does not know this socket and answers Stranger;
the link says Hello again and gets Welcome with another incarnation. By then every process of the old one is
gone (the sender's supervisor sees to that before it starts a new one), so landing slots that waited for its
writes are free again, and pulls that it never answered are sent anew (`mori_mp.pulls`).
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable
from enum import Enum

from mori_mp.link_v1 import V1Requests
from mori_mp.mailbox import Mailbox
from mori_mp.pulls import LateHandler, Pulls, who
from mori_mp.sender_memory import SenderMemory
from mori_mp.shared import wire
from mori_mp.shared.errors import WireError
from mori_mp.shared.faults import Faults
from mori_mp.switchboard import Line, Switchboard

logger = logging.getLogger(__name__)

AUDIT_SECONDS = 1.0
EAGER_CREDIT_BYTES = 8 << 20
_PATIENCE = 8  # audits without a sound from the sender, after which we ask less often
_PATIENT_SECONDS = 30.0
SPIN_SECONDS = 0.0003
"""The answer to a pull is looked for so long before the thread sleeps: to be woken, and to get the GIL back
beside a busy thread, takes longer than most transfers."""
_WELCOME_SECONDS = 0.05  # how long a Welcome may take before Hello is said again


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
        self._corrs = itertools.count(1)  # next() is atomic
        self._pulls = Pulls(self._post, self._corr)
        self._last_audit = 0.0
        self._audits = 0  # since the sender was last heard
        self._asked_since: float | None = None  # the first question since then, in monotonic seconds
        self._hello_sent = 0.0
        self._welcomes = 0
        self._hello_pending = False
        self._lane: Line | None = None
        self._lane_of: tuple[str, int] | None = None  # who offered the lane that was tried last
        self.memory = SenderMemory(self.address, lambda: self.welcome, self._say_hello)
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
        same_host = self.welcome is not None and self.welcome.host_id == self._us.host_id
        self._pulls.sweep(now - AUDIT_SECONDS, same_host, self._addressee)

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
        self.mailbox.renew()  # what was told before may be lost with the connection
        us, posts = self._us, self.memory.posts
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
                posts.packed if posts is not None else b"",
            )
        )

    def _corr(self) -> int:
        return next(self._corrs)

    def silent_seconds(self, now: float) -> float:
        """Return how long the sender has left a question of ours without an answer; 0.0 if it has not."""
        since = self._asked_since
        return 0.0 if since is None else max(0.0, now - since)

    def _post(self, message: wire.Request) -> None:
        if self._asked_since is None and isinstance(message, (wire.Hello, wire.Audit, wire.Pull)):
            self._asked_since = time.monotonic()
        (self._lane or self._line).post([wire.encode(message)])

    # ------------------------------------------------------------------ receiving (token)
    def _receive(self, frames: list[bytes]) -> None:
        self._audits = 0
        self._asked_since = None
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
            self._pulls.answered(notice, self.welcome)
        elif isinstance(notice, wire.Gone):
            self.mailbox.withdraw(notice)
            self._on_change()
        elif isinstance(notice, wire.Welcome):
            self._welcomed(notice)
        else:
            self._refused(notice.corr)

    def _refused(self, corr: int) -> None:
        """The sender does not know us, or a pull was meant for its predecessor: nothing was done for it."""
        if not self._pulls.refused(corr, self.welcome, self._welcomes):
            return
        if time.monotonic() - self._hello_sent > _WELCOME_SECONDS or not self._hello_pending:
            self._say_hello()

    def _welcomed(self, welcome: wire.Welcome) -> None:
        before, self.welcome, self.peer = self.welcome, welcome, Peer.V2
        self._welcomes += 1
        self._hello_pending = False
        self._on_change()
        if self._lane_of != who(welcome):
            self._leave_lane()
            self._lane_of = who(welcome)
            if welcome.lane and welcome.host_id == self._us.host_id:
                self._open_lane(welcome.lane)
        if before is not None and who(before) != who(welcome):
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
            self.memory.sender_replaced()
            self._pulls.stage_replaced(welcome.epoch)
        else:
            self.mailbox.renew()
            self._pulls.control_replaced(welcome)

    # ------------------------------------------------------------------------ payloads
    def pull(self, message: wire.Pull, deadline: float) -> wire.Done | None:
        """Ask for a payload and wait for the answer; None at deadline, or when a v1 sender has come instead.

        The caller must then say, by `abandon()`, what is to happen when the answer comes late.
        """
        request = self._pulls.begin(message, self.welcome)

        def ended() -> bool | None:
            self._pulls.renew(request, self.welcome, self._welcomes)
            over = request.done is not None or request.lost or self.peer is Peer.V1
            return True if over else None

        spin_until = min(deadline, time.monotonic() + SPIN_SECONDS)
        while ended() is None and time.monotonic() < spin_until and self._board.pump():
            pass  # beside a thread that sleeps over the sockets, this one would only keep the GIL from it
        while not self._board.wait(ended, min(deadline, time.monotonic() + AUDIT_SECONDS)):
            self.audit(time.monotonic())  # finds out about a control process that died with our request
            if time.monotonic() >= deadline or self._board.closed:
                break
        return self._pulls.finish(request)

    def new_pull(
        self, key: str, length: int, dst_offset: int, lease: bool, device: bool = False
    ) -> wire.Pull:
        """Make a pull; pull() will say whom it is meant for."""
        return wire.Pull(0, key, length, dst_offset, lease, device=device)

    def abandon(self, message: wire.Pull, on_late: LateHandler) -> None:
        """Give up an unanswered pull. on_late gets its answer, after which no write can touch our memory."""
        self._pulls.give_up(message, on_late, self._addressee)

    def settle(self, consumed: int | None = None, released: int | None = None) -> None:
        """Tell the sender of one generation taken, or one lease ended.

        Safe in a finalizer: no handler is called, which could need a lock that this thread holds.
        """
        taken = [] if consumed is None else [consumed]
        ended = [] if released is None else [released]
        self.post_later(wire.encode(wire.Settle(taken, ended, self.epoch)))
        self._board.send_queued()

    def settlement(self, consumed: int) -> bytes:
        """Return what tells the sender of one generation taken, for post_later()."""
        return wire.encode(wire.Settle([consumed], [], self.epoch))

    def post_later(self, settlement: bytes) -> None:
        """Send a message with the next one or `send_queued()`: nobody waits for it."""
        (self._lane or self._line).post_later([settlement])

    def send_queued(self) -> None:
        """Send what was left for later. Safe in a finalizer."""
        self._board.send_queued()

    @property
    def _addressee(self) -> wire.Welcome | None:
        """Who can be told about pulls; None while a v1 sender is there."""
        return self.welcome if self.peer is Peer.V2 else None

    @property
    def quarantined(self) -> int:
        """Landing writes that were given up and may still be coming."""
        return self._pulls.given_up

    def close(self) -> None:
        """Let go of the sender's memory; the switchboard closes the sockets."""
        self.memory.close()
