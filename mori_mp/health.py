"""What health() reports: the in-tree class's keys, and the state of every part behind them.

`StageHealth` is one connector's view of itself. It makes the stage's part of a health document (the control
process asks for that too), and the whole document for health(): see docs/health-schema.md. It knows the
connector's parts, never the connector, so that it keeps none alive.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mori_mp.meters import StageMeters
from mori_mp.publisher import Publisher
from mori_mp.receiver import Receiver
from mori_mp.shared.faults import Faults
from mori_mp.shared.procinfo import ProcessTable
from mori_mp.shared.topology import format_cpulist
from mori_mp.workers.dump import DumpFile
from mori_mp.workers.report import Child, Part, compose, fit, process_rows, worker_child
from mori_mp.workers.reporter import DUMP_SECONDS

if TYPE_CHECKING:
    from mori_mp.heart import Heart

CONTROL_ANSWER_SECONDS = 0.5
_GET_ERRORS = ("errors", "corrupt", "pool_exhausted", "refused")


class StageHealth:
    """See the module's docstring. Thread-safe.

    fixed: keys of the document that never change. counters: the connector's own (`puts`, `bytes_put`,
    `errors`). dump_path: where dumps about faults go, None for nowhere.
    """

    def __init__(
        self,
        fixed: Mapping[str, Any],
        counters: Mapping[str, int],
        publisher: Publisher,
        receiver: Receiver,
        meters: StageMeters,
        faults: Faults,
        dump_path: Path | None,
    ) -> None:
        self._fixed = fixed
        self._counters = counters
        self._publisher = publisher
        self._receiver = receiver
        self._meters = meters
        self.faults = faults
        self._started_at = time.monotonic()
        self._heart: Heart | None = None
        self._table = ProcessTable()
        self._lock = threading.Lock()  # of what follows
        self._sender: dict[str, Any] | None = None
        self._sender_at = 0.0
        self._dumps: FaultDumps | None = None
        if dump_path is not None:
            self._dumps = FaultDumps(DumpFile(dump_path), lambda: self._compose(None))
            faults.listener = self._at_fault

    @property
    def started_at(self) -> float:
        """Return when the connector was made, in monotonic seconds."""
        return self._started_at

    def attach(self, heart: Heart) -> None:
        """The connector has a control process from now on."""
        self._heart = heart

    # ---------------------------------------------------------------------------- parts
    def stage_part(self) -> dict[str, Any]:
        """Describe what only the stage knows."""
        self.faults.flush()
        received = self._receiver.report()
        counters = received["counters"]
        pools = self._publisher.pool_stats()
        part: dict[str, Any] = {
            **self._fixed,
            "puts": self._counters["puts"],
            "gets": counters["gets"],
            "bytes_transferred": self._counters["bytes_put"] + counters["bytes"],
            "errors": self._counters["errors"] + sum(counters[name] for name in _GET_ERRORS),
            "timeouts": counters["timeouts"],
            "pool": {
                **pools["pool"],
                "published": self._publisher.outstanding,
                "quarantined_bytes": sum(sender["quarantined_bytes"] for sender in received["senders"]),
            },
            "put_pool_exhausted": self._publisher.exhausted,
            "control_restarts": 0,
            "receiver": received,
            "edges": self._meters.report(),
            "faults": self.faults.as_dict(),
            "queues": {
                "publish_backlog": self._publisher.backlog,
                "ready_notices": sum(sender["ready"] for sender in received["senders"]),
            },
            "transfer_families": self._meters.transfer_families(),
        }
        if "device_pool" in pools:
            part["device_pool"] = pools["device_pool"]
        heart = self._heart
        if heart is not None:
            supervisor, plan = heart.supervisor, heart.plan
            part["control_restarts"] = supervisor.restarts
            part["pinning"] = {"node": plan.node, "degraded": plan.degraded, "reasons": list(plan.reasons)}
            part["failed"], part["pool_error"] = supervisor.failed, supervisor.pool_error
        return part

    def document(self) -> dict[str, Any]:
        """Make the whole document; a control process that does not answer in time is not waited for."""
        heart = self._heart
        answer = heart.supervisor.health(CONTROL_ANSWER_SECONDS) if heart is not None else None
        return self._compose(answer)

    def _compose(self, answer: dict[str, Any] | None) -> dict[str, Any]:
        heart, stage = self._heart, Part(self.stage_part())
        with self._lock:
            now = time.monotonic()
            if answer is not None:
                self._sender, self._sender_at = answer, now
            sender = None
            if heart is not None:
                sender = Part(self._sender, now - self._sender_at if self._sender else 0.0, answer is None)
            rows = process_rows(
                self._table, os.getpid(), now - self._started_at, _children(heart, sender) if heart else []
            )
        return compose(stage, sender, rows, reporter="stage")

    # ---------------------------------------------------------------------------- dumps
    def _at_fault(self, cause: str) -> None:
        """Have the control process write a dump, or do it here; never waits."""
        heart = self._heart
        if (heart is None or not heart.supervisor.tell_fault(cause)) and self._dumps is not None:
            self._dumps.want(cause)

    def close(self, timeout: float) -> None:
        """Give a dump that is being written up to timeout seconds."""
        if self._dumps is not None:
            self._dumps.close(timeout)


class FaultDumps:
    """Dumps that the stage writes, where no control process can: one a second, with all faults until then.

    compose makes the document. Written by a short-lived thread: a path may lie on a file system that hangs.
    """

    def __init__(self, file: DumpFile, compose: Callable[[], dict[str, Any]]) -> None:
        self._file = file
        self._compose = compose
        self._lock = threading.Lock()
        self._reason = ""
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def want(self, cause: str) -> None:
        """Have a dump written soon; the first reason of several is told."""
        with self._lock:
            if self._closing.is_set():
                return
            self._reason = self._reason or f"fault: {cause}"
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mori-mp-dump", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                reason, self._reason = self._reason, ""
                if not reason:
                    self._thread = None
                    return
            self._file.write(partial(self._text, reason))
            self._closing.wait(DUMP_SECONDS)

    def _text(self, reason: str) -> bytes:
        return fit({**self._compose(), "reason": reason})

    def close(self, timeout: float) -> None:
        """Give dumps that are wanted up to timeout seconds."""
        self._closing.set()
        thread = self._thread
        if thread is not None:
            thread.join(timeout)


def _children(heart: Heart, sender: Part | None) -> list[Child]:
    """List the control process, as the supervisor knows it, and the workers, as that last told of them."""
    report = (sender.report if sender is not None else None) or {}
    stale = sender is None or sender.stale
    control = report.get("control", {})
    pid = heart.supervisor.pid or None
    ours = control.get("pid") == pid
    asked = format_cpulist(heart.plan.control or ())
    children = [
        Child(
            "control",
            None,
            pid,
            pid is not None and not stale,
            stale,
            control.get("uptime_s") if ours else None,
            heart.supervisor.restarts,
            asked,
        )
    ]
    for worker in report.get("workers", ()) if ours else ():
        children.append(worker_child(worker, stale))
    return children
