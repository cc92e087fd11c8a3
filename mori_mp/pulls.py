"""Pulls under way to one v2 sender, and those that were given up and may still be answered.

A sender's control process may be replaced while a pull is under way. Each sending of a pull has a correlation
id of its own and names the process it is meant for, so that no pull can be served twice, nor by a process
that we took for dead when we handed out its landing slot again. A pull that its caller gives up becomes an
orphan: its answer says that no write touches our memory any more, and so does the end of every process that
could answer it.

No input here: `mori_mp.link` tells what comes in, and who serves the sender's port (its Welcome, None before
the first).
"""

from __future__ import annotations

import time
from collections.abc import Callable

from mori_mp.shared import wire
from mori_mp.shared.pool import process_group_alive

LateHandler = Callable[["wire.Done | None"], None]
"""Takes the answer to a pull that was given up; None: the sender is gone, and its writes with it."""


class Request:
    """A pull under way.

    done is the sender's answer; lost: its sender is gone; refused: the correlation id of the sending that got
    Stranger, and how often we had been welcome by then; group: the processes that may write for it, 0 if
    unknown; since: when it was given up, in monotonic seconds. Only the thread in pull() sends.
    """

    __slots__ = ("done", "group", "lost", "message", "on_late", "refused", "since")

    def __init__(self, message: wire.Pull) -> None:
        self.message = message
        self.done: wire.Done | None = None
        self.lost = False
        self.refused = (0, 0)
        self.group = 0
        self.since = 0.0
        self.on_late: LateHandler | None = None

    def is_for(self, welcome: wire.Welcome | None) -> bool:
        """Tell whether it was sent to the process that said Welcome."""
        return welcome is not None and (self.message.epoch, self.message.incarnation) == who(welcome)

    @property
    def is_refused(self) -> bool:
        """Tell whether nothing was or will be done for it as it was sent last."""
        return self.refused[0] == self.message.corr

    def end_late(self, done: wire.Done | None) -> None:
        """Tell whoever gave it up that it has ended."""
        if self.on_late is not None:
            self.on_late(done)


class Pulls:
    """See the module's docstring. post sends a message; corr makes correlation ids. Thread-safe."""

    def __init__(self, post: Callable[[wire.Request], None], corr: Callable[[], int]) -> None:
        self._post = post
        self._corr = corr
        self._under_way: dict[int, Request] = {}
        self._orphans: dict[int, Request] = {}  # those that were given up

    @property
    def given_up(self) -> int:
        """Pulls that were given up and may still be answered."""
        return len(self._orphans)

    # ------------------------------------------------------------------ the thread in pull()
    def begin(self, message: wire.Pull, welcome: wire.Welcome | None) -> Request:
        """Send a pull."""
        request = Request(message)
        self._send(request, self._under_way, welcome)
        return request

    def renew(self, request: Request, welcome: wire.Welcome | None, welcomes: int) -> None:
        """Send it anew if that is due; welcomes: how often we have been welcome."""
        if request.lost or request.done is not None:
            return
        moved = welcome is not None and not request.is_for(welcome)  # its addressee is gone
        if moved or (request.is_refused and welcomes > request.refused[1]):
            self._under_way.pop(request.message.corr, None)
            self._send(request, self._under_way, welcome)

    def finish(self, request: Request) -> wire.Done | None:
        """Take its answer; without one it stays where the answer will find it, for give_up()."""
        done = request.done
        if done is not None:
            self._under_way.pop(request.message.corr, None)
        return done

    def give_up(self, message: wire.Pull, on_late: LateHandler, welcome: wire.Welcome | None) -> None:
        """Make an orphan of an unanswered pull, and tell the sender if it is the one that was asked.

        Raises ValueError if it is not under way.
        """
        request = self._under_way.get(message.corr)
        if request is None:
            raise ValueError(f"pull {message.corr} of {message.key!r} is not under way")
        request.on_late = on_late
        request.since = time.monotonic()
        self._orphans[message.corr] = request
        del self._under_way[message.corr]
        if request.done is not None or request.is_refused:  # just now, beside us
            if self._orphans.pop(message.corr, None) is not None:
                request.end_late(request.done)
        elif request.is_for(welcome):
            self._post(wire.Abandon([message.corr]))

    # ------------------------------------------------------------------ what comes in (token)
    def answered(self, done: wire.Done, welcome: wire.Welcome | None) -> None:
        """The sender has answered."""
        request = self._under_way.get(done.corr)
        if request is not None:
            request.done = done
        orphan = self._orphans.pop(done.corr, None)  # also when it is given up just now
        if orphan is None:
            return
        if done.status == wire.LOST and orphan.message.lease:
            self._send(orphan, self._orphans, welcome)  # we may hold it, and must know
        else:
            orphan.end_late(done)

    def refused(self, corr: int, welcome: wire.Welcome | None, welcomes: int) -> bool:
        """Nothing was done for a message: the sender does not know us, or is another than it was meant for.

        Returns False for a pull that was meant for another: that is sent anew to whoever is there now.
        """
        request = self._under_way.get(corr)
        if request is not None:
            request.refused = corr, welcomes
        orphan = self._orphans.pop(corr, None)
        if orphan is not None:
            orphan.end_late(None)
        return request is None or request.is_for(welcome)

    def stage_replaced(self, epoch: str) -> None:
        """Another stage, of this epoch, serves the sender's port: what its predecessor was asked is lost."""
        for request in list(self._under_way.values()):
            request.lost = request.message.epoch != epoch

    def control_replaced(self, welcome: wire.Welcome) -> None:
        """The sender has another control process, and no process of the old one is left."""
        for corr, orphan in list(self._orphans.items()):
            if orphan.is_for(welcome) or self._orphans.pop(corr, None) is None:
                continue
            if orphan.message.lease:
                self._send(orphan, self._orphans, welcome)  # we may hold it, and must know
            else:
                orphan.end_late(None)

    def sweep(self, before: float, same_host: bool, welcome: wire.Welcome | None) -> None:
        """End the orphans of a sender that no longer exists on this host; ask it about the others.

        Only about those that were given up before that time.
        """
        asked: list[int] = []
        for corr, orphan in list(self._orphans.items()):
            if orphan.since > before:
                continue
            if same_host and orphan.group and not process_group_alive(orphan.group):
                if self._orphans.pop(corr, None) is not None:
                    orphan.end_late(None)
            elif orphan.is_for(welcome):
                asked.append(corr)  # its answer may have been lost
        if asked:
            self._post(wire.Abandon(asked[: wire.MAX_SETTLED]))

    # ------------------------------------------------------------------------- inside
    def _send(self, request: Request, among: dict[int, Request], welcome: wire.Welcome | None) -> None:
        """Send a pull to whoever is there now, under a new correlation id."""
        message = request.message
        message.corr = self._corr()
        if welcome is not None:
            message.epoch, message.incarnation = who(welcome)
            request.group = welcome.process_group
        among[message.corr] = request
        self._post(message)


def who(welcome: wire.Welcome) -> tuple[str, int]:
    """Name the process that said Welcome: the epoch of its stage, and its incarnation."""
    return welcome.epoch, welcome.incarnation
