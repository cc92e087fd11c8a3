"""The mind of a control process: every event of its sockets in, every message it owes out. No sockets here.

It joins pieces of bookkeeping: the ledger (who may touch which pool bytes), the sessions (who listens), the
offers (what may be read in place), the targets (to whom the stage may push), the landings (which worker
writes what) and the parking (pulls that overtook their publication). The shell (`mori_mp.workers.control`)
feeds it decoded events, then carries out what has gathered in `replies`, `landings`, `targets`, `freed` and
`watch`.

A payload reaches a receiver in one of these ways, and leaves the ledger by the same one:

    eager    its bytes ride in the Ready notice; Settle(consumed) ends it
    offer    the Ready notice says where it lies, and the receiver reads it in place under a claim;
             Settle(consumed) ends it, and the memory is free when no claim is left
    push     put() has had it copied into a slot that the receiver has posted, which we need not know;
             Settle(consumed) ends it
    lease    the same on request; Settle(released), the board or the holder's death ends it
    landing  a worker writes it into the receiver's slot; the end of the last write ends it
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mori_mp.shared import wire
from mori_mp.shared.board import LeaseBoard
from mori_mp.shared.claims import Claims
from mori_mp.shared.errors import WireError
from mori_mp.shared.faults import Faults
from mori_mp.shared.messages import Publish
from mori_mp.shared.pool import BLOCK
from mori_mp.workers.identity import Identity
from mori_mp.workers.landings import Landings
from mori_mp.workers.ledger import Action, Entry, Freed, Gone, LeaseReply, Ledger
from mori_mp.workers.ledger_table import Reason
from mori_mp.workers.meters import SenderMeters
from mori_mp.workers.offers import Offers
from mori_mp.workers.parking import MAX_PARKED, ParkedPull, Parking
from mori_mp.workers.replies import Replies
from mori_mp.workers.sessions import Session, Sessions
from mori_mp.workers.targets import Targets

logger = logging.getLogger(__name__)

MAX_AHEAD = 16_384


class Limits(NamedTuple):
    """Bytes and seconds."""

    eager_bytes: int
    ttl_seconds: float
    park_seconds: float


class Broker:
    """See the module's docstring. Times are monotonic seconds, sizes and offsets bytes."""

    def __init__(
        self,
        us: Identity,
        limits: Limits,
        board: LeaseBoard,
        read: Callable[[int, int], memoryview],
        claims: Claims,
        meters: SenderMeters | None = None,
        faults: Faults | None = None,
        host_bytes: int = 1 << 62,
        catch_up: Callable[[], None] = lambda: None,
    ) -> None:
        """host_bytes: published offsets from there on are those of the GPU pool.

        catch_up(): take in what the stage has told before now.
        """
        self.us = us
        self._host_bytes = host_bytes
        self._catch_up = catch_up
        self._ahead: dict[int, None] = {}  # settled before we have heard of them; the newest MAX_AHEAD
        self.meters = meters if meters is not None else SenderMeters()
        self.faults = faults if faults is not None else Faults("control")
        self.limits = limits
        self.ledger = Ledger()
        self.sessions = Sessions()
        self.replies = Replies()
        self.parking = Parking()
        self.freed: list[int] = []
        self.watch: set[int] = set()
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)
        self.landings = Landings(
            self.ledger, self.sessions, self.replies, self.meters, self.faults, self.counters
        )
        self.targets = Targets(us, self.sessions)
        self.offers = Offers(us, limits.eager_bytes, board, claims, read, self.counters)
        self._board = board

    # ------------------------------------------------------------------ from the stage
    def publish(self, message: Publish, now: float) -> None:
        """A payload is in the pool; also replayed to us after a predecessor's death."""
        slot = message.offset // BLOCK  # of both pools, one after the other, as on the lease board
        device = message.offset >= self._host_bytes
        lessee = self._board.lessee(slot, message.generation) if message.replayed else 0
        if message.replayed:
            self.offers.replayed(message.generation)
        actions = self.ledger.publish(
            message.key,
            message.generation,
            message.offset - self._host_bytes if device else message.offset,
            message.size,
            message.fast_path,
            slot,
            now,
            True,
            holder=lessee or None,
            device=device,
            event=message.event,
        )
        if self._ahead and message.generation in self._ahead:
            del self._ahead[message.generation]
            actions += self.ledger.consumed(message.generation, False)
        if lessee and self._board.was_released(slot, message.generation):
            actions += self.ledger.release(message.generation, lessee)
        elif lessee:
            self.watch.add(lessee)
        self.counters["pushed"] += message.pushed
        if message.put_us:
            self.meters.published(message, now)
        self._apply(actions, now)

    def withdraw(self, generations: Iterable[int], now: float) -> None:
        """The stage's cleanup(): these payloads are not wanted any more."""
        for generation in generations:
            self._apply(self.ledger.withdraw(generation), now)

    # ----------------------------------------------------------------- from receivers
    def request(self, identity: bytes, payload: bytes | memoryview, now: float) -> None:
        """One message from the ROUTER socket, whatever it holds."""
        try:
            message = wire.decode_request(payload)
        except WireError as exc:
            self.counters["bad_requests"] += 1
            self.fault("bad_request", f"refused a bad request: {exc}", peer=identity, level=logging.WARNING)
            self.replies.v1(identity, wire.TRANS_ERROR)
            return
        if isinstance(message, wire.Pull):
            if self.sessions.get(identity) is None or not self.us.is_meant(message):
                self.replies.send(identity, wire.Stranger(message.corr))
            else:
                self._pull(identity, message, now + self.limits.park_seconds)
        elif isinstance(message, wire.Settle):
            self._settle(identity, message, now)
        elif isinstance(message, wire.PullRequest):
            self._pull(identity, message, now + self.limits.park_seconds)
        elif isinstance(message, wire.QueryRequest):
            self._query(identity, message)
        elif isinstance(message, wire.Audit):
            self._audit(identity, message)
        elif isinstance(message, wire.Abandon):
            self._abandon(identity, message)
        else:
            self._hello(identity, message)

    def unreachable(self, identity: bytes) -> None:
        """A receiver's socket is gone."""
        session = self.sessions.drop(identity)
        if session is not None:
            self._end(session)

    def holder_gone(self, pid: int, now: float) -> None:
        """A process that held leases has exited."""
        self.watch.discard(pid)
        if self.ledger.holds(pid):
            text = f"process {pid} has ended without releasing what it read in place"
            self.faults.report(logger, "holder_died", text, peer=f"pid {pid}", level=logging.WARNING)
        self._apply(self.ledger.holder_gone(pid), now)
        for session in self.sessions.of_process(pid, self.us.host_id):
            self.unreachable(session.identity)

    def _hello(self, identity: bytes, hello: wire.Hello) -> None:
        session, ended = self.sessions.hello(identity, hello)
        if hello.mem_desc:  # before the old session lets go of the same memory
            session.peer = self.landings.peers.hold(hello.engine_desc, hello.mem_desc)
        if hello.device_mem_desc:
            session.device_peer = self.landings.peers.hold(
                hello.device_engine_desc, hello.device_mem_desc, device=True
            )
        for old in ended:
            self._end(old)
        self.targets.update(session.edges)
        self.landings.readdress(hello.epoch, identity)
        self.parking.readdress(hello.epoch, identity)
        self.replies.send(identity, self.us.welcome(hello.corr, session))
        alone = {edge: len(self.sessions.on_edge(edge)) == 1 for edge in session.edges}
        for entry in self.ledger.visible():
            edge = wire.edge_of(entry.key)
            if edge in alone:
                self._ready(session, entry, alone=alone[edge])

    def _abandon(self, identity: bytes, abandon: wire.Abandon) -> None:
        """Drop the parked ones of these pulls, and answer all that are not being written."""
        session = self.sessions.get(identity)
        if session is None:
            self.replies.send(identity, wire.Stranger(0))
            return
        given_up = set(abandon.pulls) - self.landings.under_way(session.epoch)
        for corr in self.parking.give_up(session.epoch, given_up):
            given_up.discard(corr)
            self.replies.done(identity, corr, wire.NOT_FOUND, "this pull was given up")
        for corr in given_up:
            self.replies.done(identity, corr, wire.LOST, "no such pull is under way")

    def _audit(self, identity: bytes, audit: wire.Audit) -> None:
        session = self.sessions.get(identity)
        if session is None:
            self.replies.send(identity, wire.Stranger(audit.corr))
            return
        for key in audit.keys:
            entry = self.ledger.lookup(key)
            if entry is not None:
                self._ready(session, entry, alone=True)
        self.replies.done(identity, audit.corr)

    def _settle(self, identity: bytes, settle: wire.Settle, now: float) -> None:
        session = self.sessions.get(identity)
        if session is None:
            self.replies.send(identity, wire.Stranger(0))
            return
        if settle.epoch and settle.epoch != self.us.epoch:
            self.counters["stale_settles"] += 1  # it counts the generations of our predecessor's
            return
        for generation in settle.consumed:
            if self.ledger.find(generation) is None:
                self._catch_up()  # a pushed payload can be taken before we have heard of it
            if self.ledger.find(generation) is None:  # still: the channel is full
                self._ahead[generation] = None
                if len(self._ahead) > MAX_AHEAD:
                    del self._ahead[next(iter(self._ahead))]
            eager = session.give_credit(generation)
            if self.offers.retry(generation):
                self.freed.append(generation)
            if self.meters.export:
                entry = self.ledger.find(generation)
                if entry is not None:
                    self.meters.asked_for(entry.key, entry.published_at, now)
            self._apply(self.ledger.consumed(generation, eager), now)
        for generation in settle.released:
            self._apply(self.ledger.release(generation, session.pid), now)

    def _query(self, identity: bytes, query: wire.QueryRequest) -> None:
        entry = self.ledger.lookup(query.request_id)
        if entry is None:
            self.replies.v1(identity, wire.INFO_NOT_FOUND)
        else:
            answer = wire.QueryResponse(entry.key, entry.size, entry.fast_path)
            self.replies.v1(identity, wire.encode_v1(answer))

    def _pull(self, identity: bytes, request: wire.Pull | wire.PullRequest, park_until: float) -> None:
        """Serve a pull, or park it when its payload has not been published yet."""
        if isinstance(request, wire.PullRequest):
            key, session = request.request_id, None
            entry = self.ledger.lookup(key)
        else:
            key, session = request.key, self.sessions.get(identity)
            # Its own lease is visible to a holder that asks for it again, not for a landing write.
            entry = self.ledger.lookup(key, holder=session.pid if session and request.lease else None)
        if entry is None:
            epoch = session.epoch if session is not None else None
            self._park(key, ParkedPull(identity, epoch, request, park_until))
            return
        since = park_until - self.limits.park_seconds
        if self.meters.export:
            self.meters.asked_for(key, entry.published_at, since)
        if isinstance(request, wire.Pull) and request.lease:
            self._lend(identity, request, entry, since)
        else:
            self.landings.start(identity, request, entry, since)

    def _park(self, key: str, pull: ParkedPull) -> None:
        if self.parking.add(key, pull):
            self.counters["parked"] += 1
        else:
            self._refuse(pull, wire.BUSY, f"{MAX_PARKED} pulls are parked already")

    # --------------------------------------------------------------------- deliveries
    def _lend(self, identity: bytes, request: wire.Pull, entry: Entry, since: float) -> None:
        session = self.sessions.get(identity)
        if entry.device:
            self.replies.done(identity, request.corr, wire.ELSEWHERE, "it lies in GPU memory", entry)
            return
        if session is None or not self.us.may_lend(session):
            text = "this sender lends only to its own host"
            self.fault("pull_refused", f"refused a lease: {text}", key=entry.key, peer=identity)
            self.replies.done(identity, request.corr, wire.REFUSED, text)
            return
        if self.ledger.grant_lease(entry.generation, session.pid) is not LeaseReply.GRANTED:
            text = f"{entry.key!r} is being delivered elsewhere"
            self.fault("pull_refused", f"refused a lease: {text}", key=entry.key, peer=identity)
            self.replies.done(identity, request.corr, wire.BUSY, text)
            return
        self._board.grant(entry.slot, entry.generation, session.pid)
        self.watch.add(session.pid)
        self.counters["lent"] += 1
        self.meters.lent(entry, since)
        self.replies.done(identity, request.corr, entry=entry)

    def write_ended(
        self, write_id: int, error: str, now: float, worker: str | None = None, microseconds: int = 0
    ) -> None:
        """A worker has finished a job, in so many microseconds, or (worker None) nobody can."""
        self._apply(self.landings.ended(write_id, error, now, worker, microseconds), now)

    # ------------------------------------------------------------------------- time
    def tick(self, now: float) -> None:
        """Do what is due: expire payloads, refuse pulls parked too long, sweep the board, forget peers."""
        self._apply(self.ledger.expire(now, self.limits.ttl_seconds), now)
        for entry in self.ledger.leased():
            if self._board.was_released(entry.slot, entry.generation):
                self._apply(self.ledger.release(entry.generation, entry.holder or 0), now)
        self.freed += self.offers.sweep()
        self.landings.peers.forget_idle(now)
        self.unpark(now)

    def unpark(self, now: float) -> None:
        """Refuse the pulls whose parking time is over."""
        for key, pull in self.parking.overdue(now):
            self._refuse(pull, wire.NOT_FOUND, f"{key!r} has not been published")

    def next_deadline(self) -> float | None:
        """Return when to call unpark(): no later than the earliest parked pull must be refused."""
        return self.parking.next_deadline()

    # --------------------------------------------------------------------- outcomes
    def _apply(self, actions: Iterable[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Freed):
                if self.offers.free(action.generation, action.slot):
                    self.freed.append(action.generation)
                if action.reason is Reason.EXPIRED and not self.offers.keeps(action.generation):
                    text = f"nobody fetched it within {self.limits.ttl_seconds:g} s"
                    self.faults.report(logger, "expired", text, key=action.key, level=logging.WARNING)
                for session in self.sessions:
                    session.give_credit(action.generation)
            elif isinstance(action, Gone):
                listeners = self.sessions.on_edge(wire.edge_of(action.key))
                notice = wire.Gone(action.key, action.generation, str(action.reason.value))
                self.replies.send_all([session.identity for session in listeners], notice)
            else:
                self._visible(action.entry, now)

    def _visible(self, entry: Entry, now: float) -> None:
        for pull in self.parking.take(entry.key):
            self._pull(pull.identity, pull.request, pull.deadline)
        if self.ledger.lookup(entry.key) is entry:
            listeners = self.sessions.on_edge(wire.edge_of(entry.key))
            for session in listeners:
                self._ready(session, entry, alone=len(listeners) == 1)

    def _ready(self, session: Session, entry: Entry, alone: bool) -> None:
        self.replies.send(session.identity, self.offers.notice(session, entry, alone))

    def _refuse(self, pull: ParkedPull, status: str, message: str) -> None:
        self.counters["refused"] += 1
        self.replies.answer(pull.identity, pull.corr, status, message, None)

    def fault(
        self, cause: str, text: str, *, key: str = "", peer: bytes = b"", level: int = logging.ERROR
    ) -> None:
        """Note a fault; peer is the identity of the socket that has to do with it."""
        self.faults.report(logger, cause, text, key=key, peer=self.sessions.name_of(peer), level=level)

    def _end(self, session: Session) -> None:
        self.targets.update(session.edges)
        for peer in (session.peer, session.device_peer):
            if peer is not None:
                self.landings.peers.release(peer)

    def report(self, now: float) -> dict[str, Any]:
        """Describe the state for health(): counts, bytes and seconds."""
        return {
            "ledger": self.ledger.stats(now),
            "sessions": len(self.sessions),
            "parked": len(self.parking),
            "claimed": self.offers.kept,
            "jobs_queued": self.landings.dispatcher.queued,
            "jobs_under_way": self.landings.dispatcher.under_way,
            "counters": dict(self.counters),
            "edges": self.meters.report(),
            "faults": self.faults.as_dict(),
        }


_COUNTERS = (
    "eager",
    "offered",
    "pushed",
    "lent",
    "landed",
    "failed_writes",
    "parked",
    "refused",
    "bad_requests",
    "stale_settles",
    "notices_dropped",
)
