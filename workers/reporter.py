"""The control process's answers to operators: health documents on demand, dumps, metrics. No sockets here.

A document needs the stage's part, which only the stage knows. It is asked for over the admin channel and
waited for briefly, without holding up the loop:

    ask(done) -> stage asked -> its report comes, or STAGE_SECONDS pass -> done(make); make() -> document

make() may run in another thread: it holds copies of all that the loop owns, and reads /proc.

While a stage does not answer (it is stopped, or its GIL is held), what it last said is used, marked stale,
and the next questions wait for LATE_SECONDS only. One question is under way at a time, however many ask.

Dumps are asked for by a timer, a signal and faults; all that ask within DUMP_SECONDS of the last dump share
the next one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from mori_mp.shared.files import expand
from mori_mp.shared.messages import Observing
from mori_mp.shared.procinfo import ProcessTable
from mori_mp.workers.dump import DumpFile
from mori_mp.workers.report import Child, Part, compose, fit, process_rows

logger = logging.getLogger(__name__)

STAGE_SECONDS = 0.3
LATE_SECONDS = 0.05
FRESH_SECONDS = 0.02
DUMP_SECONDS = 1.0
_FINISH_SECONDS = 0.5


Make = Callable[[], dict[str, Any]]
"""Makes a document, in whichever thread."""
Take = Callable[[Make], None]
"""Takes what makes a document, in the loop."""


class Reporter:
    """See the module's docstring; times are monotonic seconds, one thread calls.

    ask_stage() sends the question, False if it cannot be sent now. sender() makes the control process's part,
    children() lists it and its workers.
    """

    def __init__(
        self,
        observing: Observing,
        ask_stage: Callable[[], bool],
        sender: Callable[[], dict[str, Any]],
        children: Callable[[], list[Child]],
    ) -> None:
        self._observing = observing
        self._ask_stage = ask_stage
        self._sender = sender
        self._children = children
        self._table = ProcessTable()
        self._stage: dict[str, Any] = dict(observing.stage_report)
        self._told_at = time.monotonic()
        self._asked = False
        self._late = False
        self._waiting: list[Take] = []
        self._wait_until = 0.0
        self._reason = ""
        self._dumping = False
        self._last_dump = float("-inf")
        interval = observing.dump_interval_seconds
        self._next_dump = time.monotonic() + interval if interval and observing.dump_path else None
        self.file = (
            DumpFile(expand(observing.dump_path, pid=observing.stage_pid, stage=observing.stage_id))
            if observing.dump_path
            else None
        )

    # ---------------------------------------------------------------------- documents
    def ask(self, done: Take, fresh_seconds: float = FRESH_SECONDS) -> None:
        """Have done(make) called when a document would be current: at once, or within STAGE_SECONDS.

        fresh_seconds: how old may be what the stage has told.
        """
        now = time.monotonic()
        if not self._late and now - self._told_at < fresh_seconds:
            done(self._maker())
            return
        if not self._asked:
            self._asked = self._ask_stage()
        if not self._waiting:
            self._wait_until = now + (LATE_SECONDS if self._late else STAGE_SECONDS)
        self._waiting.append(done)

    def stage_answered(self, report: dict[str, Any]) -> None:
        """The stage's part has come, in time or late."""
        self._stage, self._told_at = report, time.monotonic()
        self._asked = self._late = False
        self._release()

    def _maker(self) -> Make:
        """Take down all that is needed for a document of this moment."""
        now = time.monotonic()
        stage, sender = Part(self._stage, now - self._told_at, self._late), Part(self._sender())
        children, uptime = self._children(), now - self._observing.stage_started

        def make() -> dict[str, Any]:
            rows = process_rows(self._table, self._observing.stage_pid, uptime, children)
            rows[0]["stale"] = stage.stale
            return compose(stage, sender, rows, reporter="control")

        return make

    def stage_transfers(self) -> dict[str, Any]:
        """Return the stage's counts of vLLM-Omni's families, as last told."""
        found: dict[str, Any] = self._stage.get("transfer_families", {})
        return found

    def _release(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            make = self._maker()
            for done in waiting:
                done(make)

    # --------------------------------------------------------------------------- dumps
    def want_dump(self, reason: str) -> None:
        """Have a dump written soon; the first reason of several is told."""
        if self.file is None:
            if reason == "signal":
                logger.warning("SIGUSR1: no dump, since health_dump_path is not set")
            return
        self._reason = self._reason or reason

    def _dump(self, make: Make) -> None:
        assert self.file is not None
        self._dumping = False
        reason, self._reason = self._reason, ""
        self.file.write_aside(lambda: fit({**make(), "reason": reason}))

    # ---------------------------------------------------------------------------- time
    def tick(self, now: float) -> None:
        """Do what is due; call it in every turn of the loop."""
        if self._waiting and now >= self._wait_until:
            self._late = True
            self._release()
        if self._next_dump is not None and now >= self._next_dump:
            self._next_dump = now + self._observing.dump_interval_seconds
            self.want_dump("interval")
        if self._reason and not self._dumping and now - self._last_dump >= DUMP_SECONDS:
            self._dumping, self._last_dump = True, now
            self.ask(self._dump, 0.0)  # it must have the fault that it is about

    def deadline(self) -> float:
        """Return when tick() is due next; infinity when nothing is."""
        due = float("inf") if self._next_dump is None else self._next_dump
        if self._waiting:
            due = min(due, self._wait_until)
        if self._reason and not self._dumping:
            due = min(due, self._last_dump + DUMP_SECONDS)
        return due

    def close(self) -> None:
        """Let a dump that is being written end."""
        if self.file is not None:
            self.file.finish(_FINISH_SECONDS)
