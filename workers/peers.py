"""Receivers' memory that workers have registered, by small ids. Pure bookkeeping, no sockets.

A peer is a pair of packed descriptors, and which pool of the stage it is written from. v2 receivers hold
theirs for as long as their session lasts; v1 receivers send theirs with every pull, so an unheld peer is kept
while it is being used and a while after: a registration costs more than a small write, yet it also keeps a
dead receiver's memory mapped.
"""

from __future__ import annotations

IDLE_SECONDS = 60.0
MAX_PEERS = 2048


class Peer:
    """One registered remote memory."""

    __slots__ = ("device", "engine_desc", "idle_since", "mem_desc", "peer", "sessions", "writes")

    def __init__(self, peer: int, engine_desc: bytes, mem_desc: bytes, device: bool) -> None:
        self.peer = peer
        self.engine_desc = engine_desc
        self.mem_desc = mem_desc
        self.device = device
        self.sessions = 0
        self.writes = 0
        self.idle_since = 0.0


class Peers:
    """All peers of one control process, and those that workers must forget."""

    def __init__(self) -> None:
        self._by_desc: dict[tuple[bytes, bytes, bool], Peer] = {}
        self._by_id: dict[int, Peer] = {}
        self._next = 1
        self.forgotten: list[int] = []

    def __len__(self) -> int:
        return len(self._by_id)

    def __getitem__(self, peer: int) -> Peer:
        return self._by_id[peer]

    def lookup(self, engine_desc: bytes, mem_desc: bytes, device: bool = False) -> int | None:
        """Return the id for a pair of descriptors; None when there are too many peers."""
        desc = (engine_desc, mem_desc, device)
        found = self._by_desc.get(desc)
        if found is None:
            if len(self._by_id) >= MAX_PEERS:
                return None
            found = self._by_desc[desc] = self._by_id[self._next] = Peer(self._next, *desc)
            self._next += 1
        return found.peer

    def hold(self, engine_desc: bytes, mem_desc: bytes, device: bool = False) -> int | None:
        """As lookup(), and keep it until release()."""
        peer = self.lookup(engine_desc, mem_desc, device)
        if peer is not None:
            self._by_id[peer].sessions += 1
        return peer

    def release(self, peer: int) -> None:
        """End one hold; the peer is forgotten when nothing uses it."""
        self._by_id[peer].sessions -= 1
        self._forget_unused(self._by_id[peer])

    def begin(self, peer: int) -> None:
        """A write to this peer starts."""
        self._by_id[peer].writes += 1

    def end(self, peer: int, now: float) -> None:
        """A write to this peer has ended."""
        found = self._by_id[peer]
        found.writes -= 1
        found.idle_since = now

    def forget_idle(self, now: float) -> None:
        """Forget the peers that no session holds and no write has used for IDLE_SECONDS."""
        for found in list(self._by_id.values()):
            if now - found.idle_since > IDLE_SECONDS:
                self._forget_unused(found)

    def _forget_unused(self, found: Peer) -> None:
        if not found.sessions and not found.writes:
            del self._by_id[found.peer]
            del self._by_desc[found.engine_desc, found.mem_desc, found.device]
            self.forgotten.append(found.peer)
