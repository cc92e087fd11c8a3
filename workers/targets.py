"""Where the stage may push GPU payloads: to the receiver that alone listens to an edge. No sockets.

With several on an edge nobody knows yet which of them a payload is for.
"""

from __future__ import annotations

from collections.abc import Iterable

from mori_mp.workers.identity import Identity
from mori_mp.workers.sessions import Sessions


class Targets:
    """What the stage is told of its edges; `pending` is still to be told: posts by edge, b"" for none."""

    def __init__(self, us: Identity, sessions: Sessions) -> None:
        self._us = us
        self._sessions = sessions
        self._told: dict[str, bytes] = {}
        self.pending: dict[str, bytes] = {}

    def update(self, edges: Iterable[str]) -> None:
        """Note that receivers have come or gone on these edges."""
        if not self._us.device_desc:
            return
        for edge in edges:
            listeners = self._sessions.on_edge(edge)
            alone = listeners[0] if len(listeners) == 1 and self._us.may_lend(listeners[0]) else None
            posts = alone.posts if alone is not None else b""
            if self._told.get(edge) != posts:
                self.pending[edge] = posts
            if listeners:
                self._told[edge] = posts
            else:
                self._told.pop(edge, None)
