"""The mind of a control process: every event of its sockets in, every message it owes out. No sockets here.

It joins four pieces of bookkeeping: the ledger (who may touch which pool bytes), the sessions (who listens),
the dispatcher (which worker writes what) and the parked pulls (requests that overtook their publication).
The shell (`mori_mp.workers.control`) feeds it decoded events, then carries out what has gathered in
`outbox`, `to_workers`, `freed` and `watch`.

A payload reaches a receiver in one of three ways, and leaves the ledger by the same one:

    eager    its bytes ride in the Ready notice; Settle(consumed) ends it
    offer    the Ready notice says where it lies, and the receiver reads it in place under a claim;
             Settle(consumed) ends it, and the memory is free when no claim is left
    lease    the same on request; Settle(released), the board or the holder's death ends it
    landing  a worker writes it into the receiver's slot; the end of the last write ends it
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mori_mp.shared import wire
from mori_mp.shared.board import LeaseBoard
from mori_mp.shared.claims import Claims
from mori_mp.shared.errors import WireError
from mori_mp.shared.faults import Faults
from mori_mp.shared.lane import MAX_EAGER_PACKET, is_lane
from mori_mp.shared.messages import Job, Publish
from mori_mp.shared.pool import BLOCK
from mori_mp.workers.dispatch import Dispatcher
from mori_mp.workers.ledger import Action, Entry, Freed, Gone, LeaseReply, Ledger
from mori_mp.workers.ledger_table import Reason
from mori_mp.workers.meters import SenderMeters
from mori_mp.workers.peers import Peers
from mori_mp.workers.sessions import Session, Sessions

logger = logging.getLogger(__name__)

MAX_PARKED = 4096
MAX_WRITES = 8
"""Landing writes of one payload at a time: a retry may overtake the end of the write it repeats, no more."""


class Identity(NamedTuple):
    """What a sender says of itself in Welcome."""

    epoch: str
    incarnation: int
    process_group: int
    host_id: str
    engine: str
    mem_desc: bytes
    lend: bool
    lane: str = ""


class Limits(NamedTuple):
    """Bytes and seconds."""

    eager_bytes: int
    ttl_seconds: float
    park_seconds: float


class _Parked(NamedTuple):
    identity: bytes
    epoch: str | None  # of the receiver; None: a v1 peer
    request: wire.Pull | wire.PullRequest
    deadline: float


class _Write(NamedTuple):
    identity: bytes
    corr: int | None  # None: a v1 peer, which gets a bare word
    entry: Entry
    peer: int
    epoch: str | None  # of the receiver; None: a v1 peer
    since: float  # when the pull came


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
    ) -> None:
        self.us = us
        self.meters = meters if meters is not None else SenderMeters()
        self.faults = faults if faults is not None else Faults("control")
        self.limits = limits
        self.ledger = Ledger()
        self.sessions = Sessions()
        self.dispatcher = Dispatcher()
        self.peers = Peers()
        self._board = board
        self._read = read
        self._claims = claims
        self._offered: set[int] = set()  # generations that someone may have claimed
        self._claimed: dict[int, int] = {}  # generations done with but for a claim -> slot
        self._parked: dict[str, deque[_Parked]] = {}
        self._parked_count = 0
        self._parking_ends: deque[tuple[float, str]] = deque()  # (deadline, key), also of pulls served since
        self._writes: dict[int, _Write] = {}
        self._next_write = 1
        self.outbox: list[tuple[bytes, list[bytes]]] = []
        self.freed: list[int] = []
        self.watch: set[int] = set()
        self.counters: dict[str, int] = dict.fromkeys(_COUNTERS, 0)

    # ------------------------------------------------------------------ from the stage
    def publish(self, message: Publish, now: float) -> None:
        """A payload is in the pool; also replayed to us after a predecessor's death."""
        slot = message.offset // BLOCK
        lessee = self._board.lessee(slot, message.generation) if message.replayed else 0
        if message.replayed and self.us.lend:
            self._offered.add(message.generation)  # by our predecessor
        actions = self.ledger.publish(
            message.key,
            message.generation,
            message.offset,
            message.size,
            message.fast_path,
            slot,
            now,
            True,
            holder=lessee or None,
        )
        if lessee and self._board.was_released(slot, message.generation):
            actions += self.ledger.release(message.generation, lessee)
        elif lessee:
            self.watch.add(lessee)
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
            self._reply_v1(identity, wire.TRANS_ERROR)
            return
        if isinstance(message, wire.Pull):
            if self.sessions.get(identity) is None or not self._meant_for_us(message):
                self._send(identity, wire.Stranger(message.corr))
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
            session.peer = self.peers.hold(hello.engine_desc, hello.mem_desc)
        for old in ended:
            self._end(old)
        self._readdress(hello.epoch, identity)
        us = self.us
        self._send(
            identity,
            wire.Welcome(
                hello.corr,
                wire.VERSION,
                us.epoch,
                us.incarnation,
                us.process_group,
                us.host_id,
                us.engine,
                us.mem_desc if self._may_lend(session) else b"",
                us.lane if session.host_id == us.host_id else "",
            ),
        )
        alone = {edge: len(self.sessions.on_edge(edge)) == 1 for edge in session.edges}
        for entry in self.ledger.visible():
            edge = wire.edge_of(entry.key)
            if edge in alone:
                self._ready(session, entry, alone=alone[edge])

    def _readdress(self, epoch: str, identity: bytes) -> None:
        """Have what a receiver still waits for sent to the socket that it has now."""
        for write_id, write in self._writes.items():
            if write.epoch == epoch:
                self._writes[write_id] = write._replace(identity=identity)
        for queue in self._parked.values():
            for at, parked in enumerate(queue):
                if parked.epoch == epoch:
                    queue[at] = parked._replace(identity=identity)

    def _abandon(self, identity: bytes, abandon: wire.Abandon) -> None:
        """Drop the parked ones of these pulls, and answer all that are not being written."""
        session = self.sessions.get(identity)
        if session is None:
            self._send(identity, wire.Stranger(0))
            return
        under_way = {write.corr for write in self._writes.values() if write.epoch == session.epoch}
        given_up = set(abandon.pulls) - under_way
        for key, queue in list(self._parked.items()):
            kept: deque[_Parked] = deque()
            for parked in queue:
                corr = _corr(parked.request)
                if parked.epoch != session.epoch or corr is None or corr not in given_up:
                    kept.append(parked)
                    continue
                given_up.discard(corr)
                self._parked_count -= 1
                self._done(identity, corr, wire.NOT_FOUND, "this pull was given up")
            if kept:
                self._parked[key] = kept
            else:
                del self._parked[key]
        for corr in given_up:
            self._done(identity, corr, wire.LOST, "no such pull is under way")

    def _audit(self, identity: bytes, audit: wire.Audit) -> None:
        session = self.sessions.get(identity)
        if session is None:
            self._send(identity, wire.Stranger(audit.corr))
            return
        for key in audit.keys:
            entry = self.ledger.lookup(key)
            if entry is not None:
                self._ready(session, entry, alone=True)
        self._send(identity, wire.Done(audit.corr, "", "", 0, 0, False, 0))

    def _settle(self, identity: bytes, settle: wire.Settle, now: float) -> None:
        session = self.sessions.get(identity)
        if session is None:
            self._send(identity, wire.Stranger(0))
            return
        if settle.epoch and settle.epoch != self.us.epoch:
            self.counters["stale_settles"] += 1  # it counts the generations of our predecessor's
            return
        for generation in settle.consumed:
            session.give_credit(generation)
            if generation in self._claimed:
                self._reclaim(generation, self._claimed[generation])
            if self.meters.export:
                entry = self.ledger.find(generation)
                if entry is not None:
                    self.meters.asked_for(entry.key, entry.published_at, now)
            self._apply(self.ledger.consumed(generation), now)
        for generation in settle.released:
            self._apply(self.ledger.release(generation, session.pid), now)

    def _query(self, identity: bytes, query: wire.QueryRequest) -> None:
        entry = self.ledger.lookup(query.request_id)
        if entry is None:
            self._reply_v1(identity, wire.INFO_NOT_FOUND)
        else:
            answer = wire.QueryResponse(entry.key, entry.size, entry.fast_path)
            self._reply_v1(identity, wire.encode_v1(answer))

    def _meant_for_us(self, pull: wire.Pull) -> bool:
        us = self.us
        return not pull.incarnation or (pull.incarnation == us.incarnation and pull.epoch == us.epoch)

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
            self._park(key, _Parked(identity, epoch, request, park_until))
            return
        since = park_until - self.limits.park_seconds
        if self.meters.export:
            self.meters.asked_for(key, entry.published_at, since)
        if isinstance(request, wire.Pull) and request.lease:
            self._lend(identity, request, entry, since)
        else:
            self._land(identity, request, entry, since)

    def _park(self, key: str, parked: _Parked) -> None:
        if self._parked_count >= MAX_PARKED:
            self._refuse(parked, wire.BUSY, f"{MAX_PARKED} pulls are parked already")
            return
        self._parked.setdefault(key, deque()).append(parked)
        ends = self._parking_ends
        if not ends or parked.deadline >= ends[-1][0]:  # else it is parked again, and has an end already
            ends.append((parked.deadline, key))
        self._parked_count += 1
        self.counters["parked"] += 1

    # --------------------------------------------------------------------- deliveries
    def _lend(self, identity: bytes, request: wire.Pull, entry: Entry, since: float) -> None:
        session = self.sessions.get(identity)
        if session is None or not self._may_lend(session):
            text = "this sender lends only to its own host"
            self.fault("pull_refused", f"refused a lease: {text}", key=entry.key, peer=identity)
            self._done(identity, request.corr, wire.REFUSED, text)
            return
        if self.ledger.grant_lease(entry.generation, session.pid) is not LeaseReply.GRANTED:
            text = f"{entry.key!r} is being delivered elsewhere"
            self.fault("pull_refused", f"refused a lease: {text}", key=entry.key, peer=identity)
            self._done(identity, request.corr, wire.BUSY, text)
            return
        self._board.grant(entry.slot, entry.generation, session.pid)
        self.watch.add(session.pid)
        self.counters["lent"] += 1
        self.meters.lent(entry, since)
        self._done(identity, request.corr, "", "", entry)

    def _land(
        self, identity: bytes, request: wire.Pull | wire.PullRequest, entry: Entry, since: float
    ) -> None:
        corr = _corr(request)
        if request.length != entry.size:
            text = f"the payload has {entry.size} bytes, {request.length} were asked for"
            self._refuse_landing(identity, corr, entry, wire.LENGTH, text)
            return
        session = None
        if isinstance(request, wire.PullRequest):
            peer: int | None = self.peers.lookup(request.engine_desc_packed, request.mem_desc_packed)
        else:
            session = self.sessions.get(identity)
            peer = session.peer if session is not None else None
        if peer is None:
            text = "the receiver's Hello named no memory to land in"
            self._refuse_landing(identity, corr, entry, wire.REFUSED, text)
            return
        if entry.writes >= MAX_WRITES:
            text = f"{MAX_WRITES} writes of it are under way"
            self._refuse_landing(identity, corr, entry, wire.BUSY, text)
            return
        write_id, self._next_write = self._next_write, self._next_write + 1
        self.ledger.start_write(entry.generation, write_id)
        self.peers.begin(peer)
        epoch = session.epoch if session is not None else None
        self._writes[write_id] = _Write(identity, corr, entry, peer, epoch, since)
        self.dispatcher.submit(Job(write_id, peer, [entry.offset], [request.dst_offset], [entry.size]))

    def _refuse_landing(
        self, identity: bytes, corr: int | None, entry: Entry, status: str, message: str
    ) -> None:
        self.fault("pull_refused", f"refused a pull: {message}", key=entry.key, peer=identity)
        self._answer(identity, corr, status, message, entry)

    def dispatched(self, write_id: int, now: float) -> None:
        """A worker has been given a job; told only while there is a trace."""
        write = self._writes.get(write_id)
        if write is not None:
            self.meters.dispatched(write_id, write.entry.key, write.entry.generation, write.since, now)

    def write_ended(
        self, write_id: int, error: str, now: float, worker: str | None = None, microseconds: int = 0
    ) -> None:
        """A worker has finished a job, in so many microseconds, or (worker None) nobody can.

        The last words of a worker whose jobs went to another one mean nothing: the other one writes now.
        """
        if worker is not None and self.dispatcher.owner(write_id) != worker:
            return
        write = self._writes.pop(write_id, None)
        if write is None:
            return
        self.dispatcher.done(write_id)
        self.peers.end(write.peer, now)
        entry = write.entry
        if error:
            self.counters["failed_writes"] += 1
            self.meters.write_failed(entry.key)
            text = f"write of {entry.size} bytes failed, the payload is kept for a retry: {error}"
            self.fault("write_failed", text, key=entry.key, peer=write.identity)
        else:
            self.counters["landed"] += 1
            self.meters.landed(entry, write.since, microseconds, now)
        self._answer(write.identity, write.corr, wire.FAILED if error else "", error, entry)
        self._apply(self.ledger.finish_write(write_id, not error), now)

    # ------------------------------------------------------------------------- time
    def tick(self, now: float) -> None:
        """Do what is due: expire payloads, refuse pulls parked too long, sweep the board, forget peers."""
        self._apply(self.ledger.expire(now, self.limits.ttl_seconds), now)
        for entry in self.ledger.leased():
            if self._board.was_released(entry.slot, entry.generation):
                self._apply(self.ledger.release(entry.generation, entry.holder or 0), now)
        for generation, slot in list(self._claimed.items()):
            self._reclaim(generation, slot)
        self.peers.forget_idle(now)
        self.unpark(now)

    def unpark(self, now: float) -> None:
        """Refuse the pulls whose parking time is over."""
        ends = self._parking_ends
        while ends and ends[0][0] <= now:
            _, key = ends.popleft()
            queue = self._parked.get(key)
            while queue and queue[0].deadline <= now:
                self._parked_count -= 1
                self._refuse(queue.popleft(), wire.NOT_FOUND, f"{key!r} has not been published")
            if queue is not None and not queue:
                del self._parked[key]

    def next_deadline(self) -> float | None:
        """Return when to call unpark(): no later than the earliest parked pull must be refused."""
        return self._parking_ends[0][0] if self._parking_ends else None

    # --------------------------------------------------------------------- outcomes
    def _apply(self, actions: Iterable[Action], now: float) -> None:
        for action in actions:
            if isinstance(action, Freed):
                if action.generation in self._offered:
                    self._reclaim(action.generation, action.slot)
                else:
                    self.freed.append(action.generation)
                if action.reason is Reason.EXPIRED and action.generation not in self._claimed:
                    text = f"nobody fetched it within {self.limits.ttl_seconds:g} s"
                    self.faults.report(logger, "expired", text, key=action.key, level=logging.WARNING)
                for session in self.sessions:
                    session.give_credit(action.generation)
            elif isinstance(action, Gone):
                notice = wire.encode(wire.Gone(action.key, action.generation, str(action.reason.value)))
                for session in self.sessions.on_edge(wire.edge_of(action.key)):
                    self.outbox.append((session.identity, [notice]))
            else:
                self._visible(action.entry, now)

    def _reclaim(self, generation: int, slot: int) -> None:
        """Free an offered payload's memory, or remember to when its last reader has dropped its claim."""
        if not self._claims.exclude(slot):
            self._claimed[generation] = slot
            return
        self._board.clear(slot)
        self._claims.drop(slot)
        self._claimed.pop(generation, None)
        self._offered.discard(generation)
        self.freed.append(generation)

    def _visible(self, entry: Entry, now: float) -> None:
        queue = self._parked.pop(entry.key, None)
        while queue:
            parked = queue.popleft()
            self._parked_count -= 1
            self._pull(parked.identity, parked.request, parked.deadline)
        if self.ledger.lookup(entry.key) is entry:
            listeners = self.sessions.on_edge(wire.edge_of(entry.key))
            for session in listeners:
                self._ready(session, entry, alone=len(listeners) == 1)

    def _ready(self, session: Session, entry: Entry, alone: bool) -> None:
        """Notify one receiver: with a small payload inside, or where it lies, if nobody else listens."""
        data, offset = _NOTHING, -1
        eager = alone and entry.size <= self.limits.eager_bytes
        if eager and is_lane(session.identity):
            # A raw payload is handed out in a pool's memory anyway, and copying more costs more than a claim.
            eager = entry.size <= MAX_EAGER_PACKET and not (entry.fast_path and self._may_lend(session))
        if eager and session.take_credit(entry.generation, entry.size):
            data = self._read(entry.offset, entry.size)
            self.counters["eager"] += 1
        elif alone and self._may_lend(session):
            self._board.offer(entry.slot, entry.generation)
            self._offered.add(entry.generation)
            offset = entry.offset
            self.counters["offered"] += 1
        ready = wire.Ready(entry.key, entry.generation, entry.size, entry.fast_path, data, offset)
        self._send(session.identity, ready)

    def _refuse(self, parked: _Parked, status: str, message: str) -> None:
        self.counters["refused"] += 1
        self._answer(parked.identity, _corr(parked.request), status, message, None)

    def _answer(
        self, identity: bytes, corr: int | None, status: str, message: str, entry: Entry | None
    ) -> None:
        if corr is None:
            self._reply_v1(identity, wire.TRANS_ERROR if status else wire.TRANS_DONE)
        else:
            self._done(identity, corr, status, message, entry)

    def _done(
        self, identity: bytes, corr: int, status: str, message: str, entry: Entry | None = None
    ) -> None:
        if entry is None:
            self._send(identity, wire.Done(corr, status, message, 0, 0, False, 0))
        else:
            done = wire.Done(
                corr, status, message, entry.generation, entry.size, entry.fast_path, entry.offset
            )
            self._send(identity, done)

    def _send(self, identity: bytes, notice: wire.Notice) -> None:
        self.outbox.append((identity, [wire.encode(notice)]))

    def _reply_v1(self, identity: bytes, word: bytes) -> None:
        self.outbox.append((identity, [b"", word]))

    def _may_lend(self, session: Session) -> bool:
        return self.us.lend and session.lease and session.host_id == self.us.host_id and session.pid > 0

    def fault(
        self, cause: str, text: str, *, key: str = "", peer: bytes = b"", level: int = logging.ERROR
    ) -> None:
        """Note a fault; peer is the identity of the socket that has to do with it."""
        session = self.sessions.peek(peer)
        name = f"pid {session.pid}" if session is not None else f"socket {peer.hex()}"
        self.faults.report(logger, cause, text, key=key, peer=name, level=level)

    def _end(self, session: Session) -> None:
        if session.peer is not None:
            self.peers.release(session.peer)

    def report(self, now: float) -> dict[str, Any]:
        """Describe the state for health(): counts, bytes and seconds."""
        return {
            "ledger": self.ledger.stats(now),
            "sessions": len(self.sessions),
            "parked": self._parked_count,
            "claimed": len(self._claimed),
            "jobs_queued": self.dispatcher.queued,
            "jobs_under_way": self.dispatcher.under_way,
            "counters": dict(self.counters),
            "edges": self.meters.report(),
            "faults": self.faults.as_dict(),
        }


def _corr(request: wire.Pull | wire.PullRequest) -> int | None:
    return None if isinstance(request, wire.PullRequest) else request.corr


_NOTHING = memoryview(b"")
_COUNTERS = (
    "eager",
    "offered",
    "lent",
    "landed",
    "failed_writes",
    "parked",
    "refused",
    "bad_requests",
    "stale_settles",
    "notices_dropped",
)
