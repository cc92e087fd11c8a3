"""What a control process owes its receivers: messages of wire v1 and v2, encoded, until they are sent.

No sockets here: `mori_mp.workers.control` sends what has gathered in `outbox`, and empties it.
"""

from __future__ import annotations

from mori_mp.shared import wire
from mori_mp.workers.ledger import Entry


class Replies:
    """The outbox of one control process: (socket identity, frames)."""

    def __init__(self) -> None:
        self.outbox: list[tuple[bytes, list[bytes]]] = []

    def send(self, identity: bytes, notice: wire.Notice) -> None:
        """Owe a v2 notice."""
        self.outbox.append((identity, [wire.encode(notice)]))

    def send_all(self, identities: list[bytes], notice: wire.Notice) -> None:
        """Owe the same v2 notice to several sockets."""
        if identities:
            frame = wire.encode(notice)
            self.outbox.extend((identity, [frame]) for identity in identities)

    def v1(self, identity: bytes, word: bytes) -> None:
        """Owe a v1 reply."""
        self.outbox.append((identity, [b"", word]))

    def done(
        self, identity: bytes, corr: int, status: str = "", message: str = "", entry: Entry | None = None
    ) -> None:
        """Owe the end of a v2 request; a status is why it failed, the entry what it was about."""
        if entry is None:
            self.send(identity, wire.Done(corr, status, message, 0, 0, False, 0))
        else:
            done = wire.Done(
                corr, status, message, entry.generation, entry.size, entry.fast_path, entry.offset
            )
            self.send(identity, done)

    def answer(
        self, identity: bytes, corr: int | None, status: str, message: str, entry: Entry | None
    ) -> None:
        """Owe the end of a pull: as done(), or a bare word for a v1 peer (corr None)."""
        if corr is None:
            self.v1(identity, wire.TRANS_ERROR if status else wire.TRANS_DONE)
        else:
            self.done(identity, corr, status, message, entry)
