"""What operators see of a control process, tied to its loop: health.sock, dumps, metrics, spans, SIGUSR1.

The parts know nothing of the loop and nothing here waits: a question is answered when the stage's part of the
answer has come, or has not come in time (mori_mp.workers.reporter), and the answer has been written down in
another thread (mori_mp.workers.aside).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mori_mp.shared.faults import Faults
from mori_mp.shared.messages import ControlSetup
from mori_mp.shared.tracing import Tracer
from mori_mp.workers.aside import Aside
from mori_mp.workers.health_socket import MAX_REPORT_BYTES, HealthSocket
from mori_mp.workers.httpd import Answer, HttpServer, Route, Watch
from mori_mp.workers.meters import SenderMeters
from mori_mp.workers.report import Child, fit
from mori_mp.workers.reporter import Make, Reporter

if TYPE_CHECKING:
    from mori_mp.workers.metrics import Metrics

logger = logging.getLogger(__name__)

_BIND_AGAIN_SECONDS = 2.0
_CLOSE_SECONDS = 0.5


class Observer:
    """See the module's docstring.

    meters and faults are for the other parts of the loop to use. After construction the loop calls open(),
    then in every turn tick(), which is due at deadline() at the latest, and about once a second housekeep().
    """

    def __init__(self, setup: ControlSetup) -> None:
        self._setup = setup
        observing = setup.observing
        self.tracer: Tracer | None = None
        if observing.trace_folder:
            name = f"control {observing.stage_id}"
            folder = Path(observing.trace_folder)
            self.tracer = Tracer(folder, "control", name, epoch=setup.epoch, thread=setup.threaded)
        self.meters = SenderMeters(bool(observing.prometheus_port), self.tracer)
        self.faults = Faults("control")
        self.faults.listener = self.on_fault
        self._health: HealthSocket | None = None
        self._document = b""
        self._http: HttpServer | None = None
        self._metrics: Metrics | None = None
        self._metrics_error = ""
        self._bind_at = float("inf")
        self._scrapes = 0
        self._opened = False
        self._signalled = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def open(
        self,
        watch: Watch,
        unwatch: Callable[[int], None],
        ask_stage: Callable[[], bool],
        sender: Callable[[], dict[str, Any]],
        children: Callable[[], list[Child]],
    ) -> None:
        """Take part in a loop; see Reporter for what the callables do."""
        self._watch, self._unwatch = watch, unwatch
        self._reporter = Reporter(self._setup.observing, ask_stage, sender, children)
        self._opened = True
        self._aside = Aside(watch, unwatch)
        watch(self._signalled, self._take_signal, False)
        self._open_health()
        if self._setup.observing.prometheus_port:
            self._open_metrics()

    # -------------------------------------------------------------------------- the loop
    def tick(self, now: float) -> None:
        """Do what is due."""
        self._reporter.tick(now)

    def deadline(self) -> float:
        """When tick() is due next."""
        return self._reporter.deadline()

    def housekeep(self, now: float) -> None:
        """What need not be done at once."""
        self.faults.flush()
        if self.tracer is not None:
            self.tracer.flush()
        if self._http is not None:
            self._http.tick(now)
        elif now >= self._bind_at:
            self._open_metrics()

    def stage_answered(self, report: dict[str, Any]) -> None:
        """The stage has told its part."""
        self._reporter.stage_answered(report)

    def on_fault(self, cause: str) -> None:
        """Have a dump written: something went wrong here, or, as it tells us, in the stage."""
        if self._opened:
            self._reporter.want_dump(f"fault: {cause}")

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGUSR1: only note it, the loop acts."""
        os.eventfd_write(self._signalled, 1)

    def _take_signal(self) -> None:
        os.eventfd_read(self._signalled)
        self._reporter.want_dump("signal")

    def close(self) -> None:
        """Let go of everything; a dump that is being written gets a moment."""
        if self._http is not None:
            self._http.close()
        if self._health is not None:
            self._health.close()
        if self._opened:
            self._reporter.close()
            self._aside.close(_CLOSE_SECONDS)
        if self.tracer is not None:
            self.tracer.close()
        os.close(self._signalled)

    # -------------------------------------------------------------------------- health.sock
    def _open_health(self) -> None:
        path = self._setup.health_socket
        if not path:
            return
        try:
            self._health = HealthSocket(path, lambda: self._document)
        except OSError as exc:  # tools will not find this connector; payloads move all the same
            logger.error("no health reports at %s: %s", path, exc)
            return
        self._watch(self._health.fileno(), self._from_tools, False)

    def _from_tools(self) -> None:
        """Whoever has connected waits in the listener's queue while the stage is asked."""
        assert self._health is not None
        self._unwatch(self._health.fileno())
        if self._health.fresh:
            self._serve_tools(self._document)
            return

        def render(make: Make) -> None:
            self._aside.submit(lambda: fit(make(), MAX_REPORT_BYTES), self._serve_tools)

        self._reporter.ask(render)

    def _serve_tools(self, document: bytes) -> None:
        health = self._health
        if health is None:
            return
        self._document = document
        if health.serve():
            self._watch(health.fileno(), self._from_tools, False)
        else:
            health.close()
            self._health = None

    # ------------------------------------------------------------------------------ metrics
    def _open_metrics(self) -> None:
        """Serve /metrics; a port that is taken is tried again, and does not keep payloads from moving."""
        from mori_mp.workers import metrics

        host, port = self._setup.host, self._setup.observing.prometheus_port
        routes: dict[str, tuple[str, Route]] = {
            "/metrics": (metrics.CONTENT_TYPE, self._answer_metrics),
            "/health": ("application/json", self._answer_health),
        }
        try:
            self._http = HttpServer(host, port, routes, self._watch, self._unwatch)
        except OSError as exc:
            error = f"no metrics at {host}:{port}: {exc.strerror}"
            if error != self._metrics_error:
                logger.error("%s; trying again every %g s", error, _BIND_AGAIN_SECONDS)
            self._metrics_error, self._bind_at = error, time.monotonic() + _BIND_AGAIN_SECONDS
            return
        self._metrics = metrics.Metrics()
        self._metrics_error = ""
        logger.info("metrics at %s", self._url())

    def _url(self) -> str:
        host = f"[{self._setup.host}]" if ":" in self._setup.host else self._setup.host
        return f"http://{host}:{self._setup.observing.prometheus_port}/metrics"

    def _answer_metrics(self, answer: Answer) -> None:
        def render(make: Make) -> None:
            metrics = self._metrics
            assert metrics is not None
            self._scrapes += 1
            transfers = [self._reporter.stage_transfers(), self.meters.transfer_families()]
            self._aside.submit(lambda: metrics.text(make(), transfers), answer)

        self._reporter.ask(render)

    def _answer_health(self, answer: Answer) -> None:
        self._reporter.ask(lambda make: self._aside.submit(lambda: fit(make()), answer))

    def metrics_state(self) -> dict[str, Any]:
        """Describe the metrics endpoint for the health document; empty where none is asked for."""
        if not self._setup.observing.prometheus_port:
            return {}
        state: dict[str, Any] = {"endpoint": self._url(), "scrapes": self._scrapes}
        if self._metrics_error:
            state["error"] = self._metrics_error
        return {"metrics": state}
