"""get() from an in-tree (v1) sender: ask for the size unless the metadata has it, then have it land."""

from __future__ import annotations

import time
from typing import Any

from mori_mp.intake import Intake
from mori_mp.link import Link
from mori_mp.meters import StageMeters
from mori_mp.shared import wire
from mori_mp.shared.errors import WireError
from mori_mp.switchboard import Switchboard
from mori_mp.wanted import Wanted

_POLL_SECONDS = 0.002


class V1Receiver:
    """The part of a receiver that deals with v1 senders."""

    def __init__(self, board: Switchboard, intake: Intake, meters: StageMeters) -> None:
        self._board = board
        self._intake = intake
        self._meters = meters

    def get(self, link: Link, wanted: Wanted, deadline: float | None) -> tuple[Any, int] | None:
        """Deliver a payload; as `Receiver.get`."""
        link.audit(time.monotonic())  # ends writes that a v2 predecessor has left behind
        size, fast_path = wanted.size, wanted.fast_path
        while not size:
            found = self._query(link, wanted.key, deadline)
            if found is not None:
                size, fast_path = found.data_size, found.is_fast_path
                break
            self._intake.counters["misses"] += 1
            if deadline is None or time.monotonic() >= deadline or self._board.closed:
                return None
            # A v1 sender sends no notices: asking again is all there is.
            self._board.wait(lambda: None, min(deadline, time.monotonic() + _POLL_SECONDS))
        # The in-tree class has one pool, and moves everything through it.
        slot = self._intake.slot(wanted.key, size, deadline, self._intake.device is not None)
        if slot is None:
            return None
        place = slot.place
        pull = wire.PullRequest(wanted.key, place.engine_desc, place.mem_desc, slot.offset, size)
        deadline = self._intake.until(deadline, size)
        ended: list[bool] = []

        def on_late_end() -> None:
            ended.append(True)
            self._intake.end_quarantine(slot)
            slot.give_back()

        known_ns = time.monotonic_ns()
        reply = link.v1.ask(wire.encode_v1(pull), deadline, on_late_end)
        if reply is None:
            self._intake.quarantine(slot, link)
            if ended:
                self._intake.end_quarantine(slot)
            self._intake.count_timeout(wanted.key, link, f"the transfer of {size} bytes did not end in time")
            return None
        if reply != wire.TRANS_DONE:
            slot.give_back()
            self._intake.counters["errors"] += 1
            text = f"the sender refused or failed the transfer ({reply!r})"
            self._intake.fault("get_refused", text, wanted.key, link)
            return None
        found_there = self._intake.finish(wanted.key, fast_path, slot.landed(), "landing")
        if found_there is not None:
            self._meters.fetched(wanted, known_ns, size, 0, "")
        return found_there

    def _query(self, link: Link, key: str, deadline: float | None) -> wire.QueryResponse | None:
        until = time.monotonic() + self._intake.timeouts.query
        if deadline is not None:
            until = min(until, deadline)
        reply = link.v1.ask(wire.encode_v1(wire.QueryRequest(key)), until)
        if reply is None or reply == wire.INFO_NOT_FOUND:
            return None
        try:
            return wire.decode_query_response(reply)
        except WireError as exc:
            self._intake.counters["errors"] += 1
            self._intake.fault("get_failed", f"a query's answer makes no sense: {exc}", key, link)
            return None
