"""What a sender has told a receiver: payloads that are Ready, by key. A cache, bounded, never the authority.

The sender's ledger decides what is there. A notice that got lost is asked for again (Audit), one that is
stale is found out when it is pulled. Generations taken once are remembered for a while, so that a notice
repeated by a restarted control process does not deliver a payload twice.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from mori_mp.shared.wire import Gone, Ready

K = TypeVar("K")

MAX_NOTICES = 65_536
MAX_TAKEN = 16_384
MAX_MISSED = 32


class Mailbox:
    """Notices of one sending stage (one epoch)."""

    def __init__(self) -> None:
        self._ready: OrderedDict[str, Ready] = OrderedDict()
        self._taken: OrderedDict[int, object] = OrderedDict()
        self._unseen: OrderedDict[int, object] = OrderedDict()  # taken before their notices
        self._missed: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._ready)

    def deliver(self, notice: Ready) -> list[int]:
        """Take in a notice. Returns generations that the sender should be told are settled already."""
        if notice.generation in self._taken:
            known = self._unseen.pop(notice.generation, None) is not None
            return [] if known else [notice.generation]
        old = self._ready.get(notice.key)
        if old is not None and old.generation > notice.generation:
            return []
        if old is not None and old.generation == notice.generation and len(old.data):
            return []  # a repeated notice need not carry the bytes again
        self._ready[notice.key] = notice
        self._missed.pop(notice.key, None)
        if len(self._ready) > MAX_NOTICES:
            self._ready.popitem(last=False)
        return []

    def withdraw(self, notice: Gone) -> None:
        """Forget a payload that is no longer to be had."""
        ready = self._ready.get(notice.key)
        if ready is not None and ready.generation == notice.generation:
            self._ready.pop(notice.key, None)  # another thread may be taking it

    def get(self, key: str) -> Ready | None:
        """Look a key up; a miss is remembered for the next audit."""
        ready = self._ready.get(key)
        if ready is None and len(self._missed) < MAX_MISSED:
            self._missed[key] = None
        return ready

    def take(self, ready: Ready) -> bool:
        """Claim a notice for delivery; False if another thread has claimed it."""
        current = self._ready.get(ready.key)
        if current is None or current.generation != ready.generation:
            return False
        # pop() decides between threads: only one of them gets the entry.
        popped = self._ready.pop(ready.key, None)
        if popped is None or popped.generation == ready.generation:
            return popped is not None
        self._ready.setdefault(ready.key, popped)  # replaced by a newer one just now
        return False

    def put_back(self, ready: Ready) -> None:
        """Undo take(), after a delivery that failed and may be tried again."""
        self._ready.setdefault(ready.key, ready)

    def forget(self, key: str) -> None:
        """Do not ask for a key any more. A notice that has come stays, should the caller ask again."""
        self._missed.pop(key, None)

    def mark_taken(self, generation: int) -> bool:
        """Remember that a generation has been delivered; False if it had been already."""
        return claim(self._taken, generation, MAX_TAKEN)

    def take_unannounced(self, key: str, generation: int) -> bool:
        """As mark_taken(), for a payload of which the sender is told whether or not its notice has come."""
        if not claim(self._taken, generation, MAX_TAKEN):
            return False
        ready = self._ready.get(key)
        if ready is None or ready.generation != generation or self._ready.pop(key, None) is None:
            claim(self._unseen, generation, MAX_TAKEN)
        if self._missed:
            self._missed.pop(key, None)
        return True

    def renew(self) -> None:
        """Another control process may not know what its predecessor was told: answer its notices anew."""
        self._unseen.clear()

    def collect_missed(self) -> list[str]:
        """Return the keys missed since the last call, to audit."""
        missed = list(self._missed)
        self._missed.clear()
        return missed


def claim(claims: OrderedDict[K, object], key: K, limit: int) -> bool:
    """Enter key among the newest `limit` claims; of several threads that try, one gets True."""
    ours = object()
    won = claims.setdefault(key, ours) is ours  # one atomic step
    if len(claims) > limit:
        claims.popitem(last=False)
    return won
