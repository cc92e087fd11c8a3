"""Requests to an in-tree (v1) sender: one at a time, since its replies carry no correlation.

A pull that is given up keeps its socket until the late reply has come: only that reply tells that the landing
write behind it has ended. Further requests go over a fresh socket.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mori_mp.shared import wire
from mori_mp.switchboard import Line, Switchboard


class _Conversation:
    """One socket and its one outstanding request."""

    def __init__(self, board: Switchboard, address: str, on_end: Callable[[_Conversation], None]) -> None:
        self._board = board
        self._on_end = on_end
        self.reply: bytes | None = None
        self._late: list[Callable[[], None]] = []  # pop() decides who of two threads calls it
        self.line: Line = board.open(address, self._receive, wire.MAX_REQUEST_BYTES)

    def abandon(self, on_late_end: Callable[[], None]) -> None:
        """Keep the socket for the late reply, which may be coming at this very moment."""
        self._late.append(on_late_end)
        if self.reply is not None:
            self._end()

    def _receive(self, frames: list[bytes]) -> None:
        self.reply = frames[-1]
        self._end()

    def _end(self) -> None:
        try:
            on_late_end = self._late.pop()
        except IndexError:
            return  # somebody waits for the reply, or has seen to it
        self._board.retire(self.line)
        self._on_end(self)
        on_late_end()


class V1Requests:
    """See the module's docstring."""

    def __init__(self, board: Switchboard, address: str, on_unanswered: Callable[[], None]) -> None:
        self._board = board
        self._address = address
        self._on_unanswered = on_unanswered
        self._turn = threading.Lock()
        self._current: _Conversation | None = None
        self._abandoned: set[_Conversation] = set()

    @property
    def quarantined(self) -> int:
        """Requests that were given up and may still be answered."""
        return len(self._abandoned)

    def ask(
        self, payload: bytes, deadline: float, on_late_end: Callable[[], None] | None = None
    ) -> bytes | None:
        """Send a request and return the reply; None at deadline (monotonic seconds).

        After None, on_late_end runs when the reply comes after all.
        """
        if not self._turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            if on_late_end is not None:
                on_late_end()  # nothing was sent
            return None
        try:
            talk = self._current
            if talk is None:
                talk = self._current = _Conversation(self._board, self._address, self._abandoned.discard)
            talk.reply = None
            talk.line.post([b"", payload])
            reply = self._board.wait(lambda: talk.reply, deadline)
            if reply is None:
                self._current = None
                if on_late_end is None:
                    self._board.retire(talk.line)  # nothing of ours hangs on the late reply
                else:
                    self._abandoned.add(talk)
                    talk.abandon(on_late_end)
                self._on_unanswered()
            return reply
        finally:
            self._turn.release()
