"""What a sender says of itself to the receivers that greet it, and to which of them it lends its memory."""

from __future__ import annotations

from typing import NamedTuple

from mori_mp.shared import wire
from mori_mp.workers.sessions import Session


class Identity(NamedTuple):
    """One incarnation of a sender. lend: whether receivers on its host may read its pools in place."""

    epoch: str
    incarnation: int
    process_group: int
    host_id: str
    engine: str
    mem_desc: bytes
    lend: bool
    lane: str = ""
    device_desc: bytes = b""

    def may_lend(self, session: Session) -> bool:
        """Tell whether a receiver may read our pool in place: it wants to, and is a process of our host."""
        return self.lend and session.lease and session.host_id == self.host_id and session.pid > 0

    def is_meant(self, pull: wire.Pull) -> bool:
        """Tell whether a pull is for this incarnation, or for any."""
        return not pull.incarnation or (pull.incarnation == self.incarnation and pull.epoch == self.epoch)

    def welcome(self, corr: int, session: Session) -> wire.Welcome:
        """Answer a Hello."""
        return wire.Welcome(
            corr,
            wire.VERSION,
            self.epoch,
            self.incarnation,
            self.process_group,
            self.host_id,
            self.engine,
            self.mem_desc if self.may_lend(session) else b"",
            self.lane if session.host_id == self.host_id else "",
            self.device_desc if self.may_lend(session) else b"",
            bool(self.device_desc) and self.may_lend(session),
        )
