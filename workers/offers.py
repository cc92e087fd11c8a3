"""Ready notices, and the payloads that they offer to be read in place. No sockets.

A notice has the payload's bytes inside (*eager*), or says where they lie in our pool (*offer*), or only that
they can be pulled. The memory of an offered payload is freed when nobody has a claim on it any more
(`mori_mp.shared.claims`): until then it is kept, whatever the ledger says.
"""

from __future__ import annotations

from collections.abc import Callable

from mori_mp.shared import wire
from mori_mp.shared.board import LeaseBoard
from mori_mp.shared.claims import Claims
from mori_mp.shared.lane import MAX_EAGER_PACKET, is_lane
from mori_mp.workers.identity import Identity
from mori_mp.workers.ledger import Entry
from mori_mp.workers.sessions import Session

_NOTHING = memoryview(b"")


class Offers:
    """The offered payloads of one control process. Sizes and offsets are bytes of the send pool.

    read(offset, size) returns a view of the pool; counters are the broker's, of which `eager` and `offered`
    are counted here.
    """

    def __init__(
        self,
        us: Identity,
        eager_bytes: int,
        board: LeaseBoard,
        claims: Claims,
        read: Callable[[int, int], memoryview],
        counters: dict[str, int],
    ) -> None:
        self._us = us
        self._eager_bytes = eager_bytes
        self._board = board
        self._claims = claims
        self._read = read
        self._counters = counters
        self._offered: set[int] = set()  # generations that someone may have claimed
        self._kept: dict[int, int] = {}  # generations done with but for a claim -> slot

    @property
    def kept(self) -> int:
        """Payloads that only a claim keeps."""
        return len(self._kept)

    def keeps(self, generation: int) -> bool:
        """Tell whether only a claim keeps this payload."""
        return generation in self._kept

    def replayed(self, generation: int) -> None:
        """A predecessor of ours may have offered this payload."""
        if self._us.lend:
            self._offered.add(generation)

    def notice(self, session: Session, entry: Entry, alone: bool) -> wire.Ready:
        """Make the notice for one receiver; with bytes or an offer only if nobody else listens."""
        data, offset = _NOTHING, -1
        eager = alone and entry.size <= self._eager_bytes and not entry.device
        if eager and is_lane(session.identity):
            # A raw payload is handed out in a pool's memory anyway, and copying more costs more than a claim.
            eager = entry.size <= MAX_EAGER_PACKET and not (entry.fast_path and self._us.may_lend(session))
        if eager and session.take_credit(entry.generation, entry.size):
            data = self._read(entry.offset, entry.size)
            self._counters["eager"] += 1
        elif alone and self._us.may_lend(session) and (not entry.device or session.device_peer is not None):
            self._board.offer(entry.slot, entry.generation)
            self._offered.add(entry.generation)
            offset = entry.offset
            self._counters["offered"] += 1
        return wire.Ready(
            entry.key,
            entry.generation,
            entry.size,
            entry.fast_path,
            data,
            offset,
            entry.device,
            entry.event,
        )

    def free(self, generation: int, slot: int) -> bool:
        """Tell whether a payload that the ledger has done with can be freed now; keep it if not."""
        return generation not in self._offered or self._exclude(generation, slot)

    def retry(self, generation: int) -> bool:
        """Tell whether a payload was kept for a claim and can be freed now."""
        slot = self._kept.get(generation)
        return slot is not None and self._exclude(generation, slot)

    def sweep(self) -> list[int]:
        """Return the payloads that were kept and can be freed now."""
        return [generation for generation in list(self._kept) if self.retry(generation)]

    def _exclude(self, generation: int, slot: int) -> bool:
        if not self._claims.exclude(slot):
            self._kept[generation] = slot
            return False
        self._board.clear(slot)
        self._claims.drop(slot)
        self._kept.pop(generation, None)
        self._offered.discard(generation)
        return True
