"""One stage process of a pipeline run: `python -m mori_mp.pipeline.stage`, started by the runner.

It does around the connector what a vLLM-Omni stage does: builds it from the configuration the host would
give, receives, sends, closes. The main thread only waits and reports; the work is in threads:

    main      control pipe, progress, start and end of everything else
    commands  reads the control pipe; its end means the runner is gone, so the stage ends too
    send      Source or Relay: the stage's only caller of put()
    receive   one or more callers of get(), see `receivers`
    busy      optional pure-Python spin, as a scheduler that never lets go of the GIL

    plan -> connector up -> ready -> go -> done (all traffic ended) -> stop -> pool whole? -> close -> result

A stage that fails says so on the pipe, closes its connector and exits 1.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any

import msgspec
import psutil
import torch

from mori_mp.pipeline.control import ControlPipe
from mori_mp.pipeline.plan import Edge, StagePlan
from mori_mp.pipeline.receivers import receiver_work
from mori_mp.pipeline.streams import Connector, Inbox, Outbox, Relay, RunClock, Source, Stream
from mori_mp.pipeline.workload import Workload
from mori_mp.shared.errors import MoriMPError

logger = logging.getLogger(__name__)

_PROGRESS_S = 0.25
_DRAIN_STEP_S = 0.01
_ORPHAN_GRACE_S = 8.0
_JOIN_S = 2.0
_THREAD_PREFIX = "pipeline-"


class _CalledOff(Exception):
    """The runner asked this stage to end before the traffic did, or went away."""


class Crew:
    """Threads whose failure is noticed. `changed` is called when one of them ends."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """No thread is running yet."""
        self.failure: BaseException | None = None
        self._changed = changed
        self._threads: list[threading.Thread] = []

    def start(self, name: str, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(
            target=self._guard, args=(work,), name=f"{_THREAD_PREFIX}{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()
        return thread

    def finished(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end, all together up to timeout_s."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failure = self.failure or error
        finally:
            self._changed()


class StageProcess:
    """Runs one plan."""

    def __init__(self, plan: StagePlan, control: ControlPipe) -> None:
        self._plan = plan
        self._control = control
        self._wake = threading.Event()
        self._commands: dict[str, dict[str, Any]] = {}
        self._called_off = ""
        self._connector: Connector | None = None
        self._workload = Workload(plan.traffic)
        self._receivers = Crew(self._wake.set)
        self._senders = Crew(self._wake.set)
        self._outbox: Outbox | None = None
        self._inbox: Inbox | None = None

    # ------------------------------------------------------------------- start and end
    def run(self) -> int:
        """Exit status: 0 when the plan was carried out, whatever arrived; 1 when it could not be."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._read_commands, name=f"{_THREAD_PREFIX}commands", daemon=True).start()
        try:
            self._connector = load_class(self._plan.connector_class)(dict(self._plan.connector_config))
            listen = getattr(self._connector, "listen", None)
            if self._plan.outputs and callable(listen):
                listen()  # a run does not measure the start of processes
            self._control.send("ready", endpoint=_endpoint(self._connector))
            self._stream(self._wait_for("go"))
            self._finish(aborted=False)
            return 0
        except _CalledOff as error:
            logger.warning("stage %d ends early: %s", self._plan.stage_id, error)
            self._finish(aborted=True)
            return 1
        except Exception as error:
            # What mori-mp raises on purpose says all there is to say.
            told = isinstance(error, MoriMPError)
            logger.error("stage %d failed: %s", self._plan.stage_id, error, exc_info=not told)
            self._control.send("failed", error=f"{type(error).__name__}: {error}", told=told)
            if self._connector is not None:
                self._connector.close()
            return 1
        finally:
            self._end_threads()

    def _end_threads(self) -> None:
        """Let threads end before the interpreter does: one that is inside torch then would abort the process.

        Their run is over and the connector is closed, so they are about to.
        """
        for crew in (self._receivers, self._senders):
            crew.join(_JOIN_S)
            if not crew.finished():
                logger.error("stage %d: a thread does not end; leaving it", self._plan.stage_id)
                logging.shutdown()
                os._exit(1)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._called_off = f"received {signal.Signals(signum).name}"
        self._wake.set()

    def _read_commands(self) -> None:
        while (command := self._control.receive()) is not None:
            self._commands[command["op"]] = command
            self._wake.set()
        self._called_off = "the runner is gone"
        self._wake.set()
        # Nobody is left to end this process if closing the connector should hang.
        time.sleep(_ORPHAN_GRACE_S)
        os._exit(1)

    def _wait_for(self, op: str) -> dict[str, Any]:
        while op not in self._commands:
            self._check_called_off()
            self._wake.wait()
            self._wake.clear()
        return self._commands[op]

    def _check_called_off(self) -> None:
        if self._called_off:
            raise _CalledOff(self._called_off)

    # ------------------------------------------------------------------------ traffic
    def _stream(self, go: dict[str, Any]) -> None:
        """Carry out the plan's traffic; returns when the runner says stop."""
        clock = RunClock(go["start_ns"], go["deadline_ns"])
        receivers, senders = self._receivers, self._senders
        relay = None
        try:
            relay = self._start_threads(clock, go["endpoints"])
            told = False
            while "stop" not in self._commands:
                self._wake.wait(_PROGRESS_S)
                self._wake.clear()
                self._check_called_off()
                for failure in (senders.failure, receivers.failure):
                    if failure is not None:
                        raise failure
                if relay is not None and receivers.finished():
                    relay.close()
                self._control.send("progress", **self._counters(live=True))
                if not told and receivers.finished() and senders.finished():
                    told = True
                    self._control.send("done")
        finally:
            clock.stopped.set()
            if relay is not None:
                relay.close()

    def _start_threads(self, clock: RunClock, endpoints: dict[str, Any]) -> Relay | None:
        plan, workload, connector = self._plan, self._workload, self._connector
        assert connector is not None
        self._outbox = outbox = Outbox(connector, workload, plan.outputs, clock)
        relay = Relay(outbox, workload, plan.inputs, plan.outputs) if plan.inputs and plan.outputs else None
        self._inbox = inbox = Inbox(workload, plan.inputs, relay)
        streams = [
            Stream(edge, request, self._metadata(edge, endpoints))
            for edge in plan.inputs
            for request in range(plan.traffic.requests)
        ]
        if streams:
            for work in receiver_work(plan.get_mode, connector, inbox, streams, clock):
                self._receivers.start("receive", work)
        if relay is not None:
            self._senders.start("send", relay.run)
        elif plan.outputs:
            self._senders.start("send", Source(outbox, workload, plan.outputs, clock).run)
        if plan.busy:
            threading.Thread(
                target=_spin, args=(clock.stopped,), name=f"{_THREAD_PREFIX}busy", daemon=True
            ).start()
        return relay

    def _metadata(self, edge: Edge, endpoints: dict[str, Any]) -> dict[str, Any] | None:
        """What get() is told about the sender.

        A connector knows one sender, that of its stage's first input edge; for any other the host's engine
        passes the endpoint with the request, and so does this.
        """
        if self._plan.metadata == "endpoint" or edge != self._plan.inputs[0]:
            found: dict[str, Any] | None = endpoints.get(str(edge.source))
            return found
        return None

    def _counters(self, *, live: bool) -> dict[str, Any]:
        return {
            "sent": self._outbox.reports(live=live) if self._outbox else [],
            "received": self._inbox.reports(live=live) if self._inbox else [],
        }

    # --------------------------------------------------------------------------- end
    def _finish(self, *, aborted: bool) -> None:
        """Wait for the pool, close the connector, look for what is left, report."""
        connector = self._connector
        assert connector is not None
        if not aborted:
            gc.collect()
            _wait_until_drained(connector, self._plan.drain_s)
        health = _plain(connector.health())
        cpu = psutil.Process().cpu_times()
        began = time.monotonic()
        connector.close()
        close_s = time.monotonic() - began
        self._control.send(
            "result",
            **self._counters(live=False),
            aborted=aborted,
            health=health,
            close_s=round(close_s, 3),
            cpu_s=round(cpu.user + cpu.system, 2),
            left_over=[*_pool_left_over(health), *_left_over_after_close()],
        )


def load_class(path: str) -> Callable[[dict[str, Any]], Connector]:
    """The class named `package.module:Class`; ValueError when there is none."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"connector class {path!r} must look like package.module:Class")
    try:
        found: Callable[[dict[str, Any]], Connector] = getattr(import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"connector class {path!r} cannot be imported: {error}") from error
    return found


def pool_used_bytes(health: dict[str, Any]) -> int | None:
    """Bytes of a connector's pool that are not free, or None when its health does not tell."""
    pool = health.get("pool")
    used = pool.get("used_bytes") if isinstance(pool, dict) else None
    return used if isinstance(used, int) else None


def _endpoint(connector: Any) -> dict[str, Any] | None:
    """Where receivers find this connector, as get() metadata; None for a connector without a listener."""
    describe = getattr(connector, "get_connection_info", None)
    info = describe() if callable(describe) else None
    if not info or not info.get("zmq_port"):
        return None
    return {"source_host": info["host"], "source_port": info["zmq_port"]}


def _wait_until_drained(connector: Connector, timeout_s: float) -> None:
    """Give releases that are on their way time to arrive. No connector tells of that, hence the polling."""
    until = time.monotonic() + timeout_s
    while pool_used_bytes(connector.health()) and time.monotonic() < until:
        time.sleep(_DRAIN_STEP_S)


def _pool_left_over(health: dict[str, Any]) -> list[str]:
    used = pool_used_bytes(health)
    return [f"{used} bytes of the pool were not returned"] if used else []


def _left_over_after_close() -> list[str]:
    # Python's own resource tracker ends with the process that it serves, so it is not left over yet.
    children = [
        f"process {child.pid} ({child.name()}, {child.status()})"
        for child in psutil.Process().children(recursive=True)
        if not any("multiprocessing.resource_tracker" in word for word in child.cmdline())
    ]
    threads = [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.name.startswith(_THREAD_PREFIX)
    ]
    return children + threads


def _plain(health: dict[str, Any]) -> dict[str, Any]:
    """health() as JSON values, whatever else a connector puts into it."""
    plain: dict[str, Any] = json.loads(json.dumps(health, default=str))
    return plain


def _spin(stopped: threading.Event) -> None:
    turns = 0
    while not stopped.is_set():
        turns += 1


def main() -> int:
    """Entry point of a stage process."""
    control = ControlPipe.take_over_stdio()
    line = control.receive_line()
    if line is None:
        return 1
    plan = msgspec.json.decode(line, type=StagePlan)
    logging.basicConfig(
        stream=sys.stderr,
        level=os.environ.get("MORI_MP_LOG_LEVEL", "INFO"),
        format=f"stage {plan.stage_id}: %(levelname)s %(name)s: %(message)s",
    )
    torch.set_num_threads(1)
    return StageProcess(plan, control).run()


if __name__ == "__main__":
    sys.exit(main())
