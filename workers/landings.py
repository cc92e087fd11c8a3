"""Landing writes: workers write payloads into receivers' slots. Pure bookkeeping, no sockets.

A write is the ledger's (it reads the send pool), the dispatcher's (a worker has it) and a peer's (its memory
is written to) from the pull that asks for it to the worker's report of its end, which answers the pull.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from mori_mp.shared import wire
from mori_mp.shared.faults import Faults
from mori_mp.shared.messages import Job
from mori_mp.workers.dispatch import Dispatcher
from mori_mp.workers.ledger import Action, Entry, Ledger
from mori_mp.workers.meters import SenderMeters
from mori_mp.workers.peers import Peers
from mori_mp.workers.replies import Replies
from mori_mp.workers.sessions import Sessions

logger = logging.getLogger(__name__)

MAX_WRITES = 8
"""Landing writes of one payload at a time: a retry may overtake the end of the write it repeats, no more."""


class Write(NamedTuple):
    """One write that has not ended."""

    identity: bytes
    corr: int | None  # None: a v1 peer, which gets a bare word
    entry: Entry
    peer: int
    epoch: str | None  # of the receiver; None: a v1 peer
    since: float  # when the pull came


class Landings:
    """All landing writes of one control process. Times are monotonic seconds, sizes and offsets bytes.

    The counters are the broker's, of which `landed` and `failed_writes` are counted here.
    """

    def __init__(
        self,
        ledger: Ledger,
        sessions: Sessions,
        replies: Replies,
        meters: SenderMeters,
        faults: Faults,
        counters: dict[str, int],
    ) -> None:
        self.dispatcher = Dispatcher()
        self.peers = Peers()
        self.writes: dict[int, Write] = {}
        self._ledger = ledger
        self._sessions = sessions
        self._replies = replies
        self._meters = meters
        self._faults = faults
        self._counters = counters
        self._next = 1

    def start(
        self, identity: bytes, request: wire.Pull | wire.PullRequest, entry: Entry, since: float
    ) -> None:
        """Have what a pull asks for written, or refuse it."""
        corr, session = None, None
        if isinstance(request, wire.Pull):
            corr, session = request.corr, self._sessions.get(identity)
        if request.length != entry.size:
            text = f"the payload has {entry.size} bytes, {request.length} were asked for"
            self._refuse(identity, corr, entry, wire.LENGTH, text)
            return
        peer: int | None = None
        if isinstance(request, wire.PullRequest):
            peer = self.peers.lookup(request.engine_desc_packed, request.mem_desc_packed, entry.device)
        elif request.device != entry.device:
            where = "GPU" if entry.device else "host"
            self._replies.done(identity, request.corr, wire.ELSEWHERE, f"it lies in {where} memory", entry)
            return
        elif session is not None:
            peer = session.device_peer if entry.device else session.peer
        if peer is None:
            text = f"the receiver's Hello named no {'GPU ' if entry.device else ''}memory to land in"
            self._refuse(identity, corr, entry, wire.REFUSED, text)
            return
        if entry.writes >= MAX_WRITES:
            self._refuse(identity, corr, entry, wire.BUSY, f"{MAX_WRITES} writes of it are under way")
            return
        write_id, self._next = self._next, self._next + 1
        self._ledger.start_write(entry.generation, write_id)
        self.peers.begin(peer)
        epoch = session.epoch if session is not None else None
        self.writes[write_id] = Write(identity, corr, entry, peer, epoch, since)
        self.dispatcher.submit(
            Job(write_id, peer, [entry.offset], [request.dst_offset], [entry.size], entry.event)
        )

    def dispatched(self, write_id: int, now: float) -> None:
        """A worker has been given a job; told only while there is a trace."""
        write = self.writes.get(write_id)
        if write is not None:
            self._meters.dispatched(write_id, write.entry.key, write.entry.generation, write.since, now)

    def ended(
        self, write_id: int, error: str, now: float, worker: str | None, microseconds: int
    ) -> list[Action]:
        """A worker has finished a job, in so many microseconds, or (worker None) nobody can.

        The last words of a worker whose jobs went to another one mean nothing: the other one writes now.
        Returns what the end does to the ledger's payloads.
        """
        if worker is not None and self.dispatcher.owner(write_id) != worker:
            return []
        write = self.writes.pop(write_id, None)
        if write is None:
            return []
        self.dispatcher.done(write_id)
        self.peers.end(write.peer, now)
        entry = write.entry
        if error:
            self._counters["failed_writes"] += 1
            self._meters.write_failed(entry.key)
            text = f"write of {entry.size} bytes failed, the payload is kept for a retry: {error}"
            self._fault("write_failed", text, entry, write.identity)
        else:
            self._counters["landed"] += 1
            self._meters.landed(entry, write.since, microseconds, now)
        self._replies.answer(write.identity, write.corr, wire.FAILED if error else "", error, entry)
        return self._ledger.finish_write(write_id, not error)

    def under_way(self, epoch: str) -> set[int | None]:
        """Return what the pulls of a receiver that are being written are called."""
        return {write.corr for write in self.writes.values() if write.epoch == epoch}

    def readdress(self, epoch: str, identity: bytes) -> None:
        """Have the answers to a receiver's pulls go to the socket that it has now."""
        for write_id, write in self.writes.items():
            if write.epoch == epoch:
                self.writes[write_id] = write._replace(identity=identity)

    def _refuse(self, identity: bytes, corr: int | None, entry: Entry, status: str, message: str) -> None:
        self._fault("pull_refused", f"refused a pull: {message}", entry, identity)
        self._replies.answer(identity, corr, status, message, entry)

    def _fault(self, cause: str, text: str, entry: Entry, identity: bytes) -> None:
        self._faults.report(logger, cause, text, key=entry.key, peer=self._sessions.name_of(identity))
