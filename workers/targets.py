"""Where the stage may push GPU payloads: to the receiver that alone listens to an edge. No sockets.

With several on an edge nobody knows yet which of them a payload is for. A receiver that has not heard yet who
serves our port now may still name what it has posted to our predecessor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from mori_mp.shared.errors import WireError
from mori_mp.shared.posts import PostsDescriptor
from mori_mp.workers.identity import Identity
from mori_mp.workers.sessions import Sessions

logger = logging.getLogger(__name__)


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
            posts = alone.posts if alone is not None and self._are_ours(alone.posts) else b""
            if self._told.get(edge) != posts:
                self.pending[edge] = posts
            if listeners:
                self._told[edge] = posts
            else:
                self._told.pop(edge, None)

    def _are_ours(self, posts: bytes) -> bool:
        """Tell whether slots are posted to our stage."""
        try:
            return bool(posts) and PostsDescriptor.unpack(posts).epoch == self._us.epoch
        except WireError as exc:
            logger.warning("GPU payloads are not pushed to a receiver: %s", exc)
            return False
