"""Parked pulls: requests that overtook the publication of their payload. Pure bookkeeping, no sockets.

A pull waits under its key until the payload is published, its receiver gives it up, or its time is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mori_mp.shared import wire

MAX_PARKED = 4096


class ParkedPull(NamedTuple):
    """One of them; the deadline is in monotonic seconds."""

    identity: bytes
    epoch: str | None  # of the receiver; None: a v1 peer
    request: wire.Pull | wire.PullRequest
    deadline: float

    @property
    def corr(self) -> int | None:
        """What the answer must name; None: a v1 peer, which gets a bare word."""
        return None if isinstance(self.request, wire.PullRequest) else self.request.corr


class Parking:
    """All parked pulls of one control process, by key, the oldest first."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[ParkedPull]] = {}
        self._count = 0
        self._ends: deque[tuple[float, str]] = deque()  # (deadline, key), also of pulls taken since

    def __len__(self) -> int:
        return self._count

    def add(self, key: str, pull: ParkedPull) -> bool:
        """Park a pull; False if MAX_PARKED are parked already."""
        if self._count >= MAX_PARKED:
            return False
        self._queues.setdefault(key, deque()).append(pull)
        if not self._ends or pull.deadline >= self._ends[-1][0]:  # else it comes back, and has an end already
            self._ends.append((pull.deadline, key))
        self._count += 1
        return True

    def take(self, key: str) -> Sequence[ParkedPull]:
        """Take all pulls of a key out; the caller serves them, and may add() them again."""
        pulls = self._queues.pop(key, ())
        self._count -= len(pulls)
        return pulls

    def give_up(self, epoch: str, corrs: Iterable[int]) -> list[int]:
        """Drop a receiver's pulls that are among these; returns those that were parked."""
        wanted = set(corrs)
        dropped: list[int] = []
        for key, queue in list(self._queues.items()):
            kept: deque[ParkedPull] = deque()
            for pull in queue:
                corr = pull.corr
                if pull.epoch != epoch or corr is None or corr not in wanted:
                    kept.append(pull)
                    continue
                wanted.discard(corr)
                dropped.append(corr)
            if kept:
                self._queues[key] = kept
            else:
                del self._queues[key]
        self._count -= len(dropped)
        return dropped

    def readdress(self, epoch: str, identity: bytes) -> None:
        """Have the answers to a receiver's pulls go to the socket that it has now."""
        for queue in self._queues.values():
            for at, pull in enumerate(queue):
                if pull.epoch == epoch:
                    queue[at] = pull._replace(identity=identity)

    def overdue(self, now: float) -> Iterator[tuple[str, ParkedPull]]:
        """Take out, with their keys, the pulls whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            _, key = self._ends.popleft()
            queue = self._queues.get(key)
            while queue and queue[0].deadline <= now:
                self._count -= 1
                yield key, queue.popleft()
            if queue is not None and not queue:
                del self._queues[key]

    def next_deadline(self) -> float | None:
        """Return when to ask for overdue() pulls: no later than the earliest deadline of all."""
        return self._ends[0][0] if self._ends else None
