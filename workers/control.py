"""The control process: a thin shell of sockets around `mori_mp.workers.broker`.

One thread, one poll. What it listens to:

    ROUTER tcp://host:port     other stages' connectors (wire v1 and v2)
    lanes                      the same, from receivers on this host
    hot socketpair             the stage: Publish, Withdraw
    admin socketpair           the stage: HealthRequest, Shutdown, StageReport, StageFault
    job channels               its transfer workers (mori_mp.workers.crew)
    lifeline                   end of file: the stage is gone, so are we, within a second
    pidfds                     workers (restarted) and processes that hold leases (leases end)
    health.sock, metrics port  operators and their tools (mori_mp.workers.observer)

Nothing here ever waits for a peer: a message that cannot be sent now is dropped if it is a notice (a cache),
and kept if it tells the stage that memory is free.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from mori_mp.shared import messages
from mori_mp.shared.affinity import pin_self
from mori_mp.shared.claims import Claims
from mori_mp.shared.errors import MoriMPError, StartupError
from mori_mp.shared.lane import is_lane
from mori_mp.shared.listening import cannot_listen
from mori_mp.shared.messages import ControlSetup, HealthRequest, Publish, Shutdown, StageFault, StageReport
from mori_mp.shared.pool import Pool, host_id
from mori_mp.shared.procinfo import startup_line
from mori_mp.shared.syscalls import try_send
from mori_mp.shared.topology import format_cpulist
from mori_mp.workers import childlog
from mori_mp.workers.boot import LIFELINE_FD
from mori_mp.workers.broker import Broker, Limits
from mori_mp.workers.crew import Crew, ProcessLauncher, WorkerLauncher
from mori_mp.workers.front import Front
from mori_mp.workers.holders import Holders
from mori_mp.workers.identity import Identity
from mori_mp.workers.lanes import Lanes
from mori_mp.workers.observer import Observer
from mori_mp.workers.reactor import Reactor
from mori_mp.workers.report import Child, worker_child

logger = logging.getLogger(__name__)

_TICK_SECONDS = 1.0
_FREED_BATCH = 2000
_DRAIN = 256  # messages taken from one socket before the others get their turn
_LINGER_MS = 500
_SPIN_SECONDS = 0.0002  # how long a worker's answer is looked for before this process sleeps
_SWITCH_SECONDS = 0.0002  # how long a report that is being written down may keep the GIL from the loop
_ORPHAN_PATIENCE_SECONDS = 0.5  # for workers whose stage is dead: everything is to be gone within 2 s


class ControlLoop:
    """The loop of one control process; in worker_mode thread, of one control thread."""

    def __init__(
        self,
        setup: ControlSetup,
        pool: Pool,
        context: zmq.Context[zmq.Socket[bytes]],
        launcher: WorkerLauncher,
        lifeline: int,
    ) -> None:
        self._setup = setup
        self._lifeline = lifeline
        self._hot = socket.socket(fileno=setup.hot_fd)
        self._admin = socket.socket(fileno=setup.admin_fd)
        for channel in (self._hot, self._admin):
            channel.setblocking(False)
        us = Identity(
            epoch=setup.epoch,
            incarnation=setup.incarnation,
            process_group=os.getpgrp(),
            host_id=host_id(),
            engine=setup.engine,
            mem_desc=setup.mem_desc,
            lend=setup.lend,
            lane=setup.lane_path,
            device_desc=setup.gpu_pool,
        )
        limits = Limits(setup.eager_bytes, setup.ttl_seconds, setup.park_seconds)
        self.observer = Observer(setup)
        self._broker = Broker(
            us,
            limits,
            pool.board,
            lambda at, size: pool.view[at : at + size],
            Claims(pool.fd),
            self.observer.meters,
            self.observer.faults,
            pool.size,
            self._from_stage,
        )
        self._targets_stuck = False  # the stage does not read what it is told
        self._lanes: Lanes | None = None
        self._crew = Crew(
            setup,
            self._broker.landings.dispatcher,
            self._broker.landings.peers,
            launcher,
            self.observer.faults,
        )
        if self.observer.tracer is not None:
            self._crew.on_dispatch = self._broker.landings.dispatched
        self._reactor = Reactor()
        self._holders = Holders(self._reactor, self._holder_gone)
        self._want_writable = False
        self._running = True
        self._orphaned = False
        self._started_at = time.monotonic()
        self._front = Front(context, setup.host, guarded=not setup.threaded)

    # --------------------------------------------------------------------------- life
    def run(self) -> None:
        """Serve until the stage says so or is gone."""
        try:
            try:
                self._open()
            except (zmq.ZMQError, MoriMPError, OSError) as exc:
                self._tell_stage(messages.Failed(str(exc)))
                return
            next_tick = time.monotonic() + _TICK_SECONDS
            while self._running:
                self._reactor.poll(self._due(next_tick))
                now = time.monotonic()
                self._broker.unpark(now)
                self.observer.tick(now)
                if now >= next_tick:
                    next_tick = now + _TICK_SECONDS
                    self._targets_stuck = False
                    self._broker.tick(now)
                    self._crew.check_overdue(now)
                    self.observer.housekeep(now)
                    if self._front.must_replace():
                        self._reactor.off(self._front.socket)
                        self._front.replace()
                        self._reactor.on(self._front.socket, self._from_receivers)
                self._carry_out(now)
        finally:
            if self._orphaned:
                self._crew.stop(_ORPHAN_PATIENCE_SECONDS)
            else:
                self._crew.stop()
            self._holders.close()
            self.observer.close()
            if self._lanes is not None:
                self._lanes.close()
            self._front.close(_LINGER_MS)
            self._hot.close()
            self._admin.close()

    def _due(self, next_tick: float) -> float:
        """Return until when to sleep; not at all while a worker has just been given a job."""
        waiting = self._broker.landings.dispatcher.under_way and not self._setup.threaded
        if waiting and time.monotonic() < self._crew.dispatched_at + _SPIN_SECONDS:
            return 0.0
        return min(next_tick, self._broker.next_deadline() or next_tick, self.observer.deadline())

    def _open(self) -> None:
        setup, reactor = self._setup, self._reactor
        try:
            self._front.bind(setup.port)
        except zmq.ZMQError as exc:
            raise StartupError(cannot_listen(setup.host, setup.port, exc.errno, exc.strerror)) from exc
        reactor.on(self._front.socket, self._from_receivers)
        reactor.on(self._hot.fileno(), self._from_stage)
        reactor.on(self._admin.fileno(), self._from_admin)
        reactor.on(self._lifeline, self._stage_gone)
        self.observer.open(reactor.watch, reactor.off, self._ask_stage, self._report, self._children)
        if setup.lane_path:
            self._lanes = Lanes(
                Path(setup.lane_path),
                reactor.watch_both,
                reactor.off,
                lambda identity, packet: self._broker.request(identity, packet, time.monotonic()),
                self._broker.unreachable,
            )
        self._crew.open(reactor.watch_both, reactor.off, self._from_worker, self._cannot_start)
        logger.info(
            startup_line(
                "control",
                engine=setup.engine,
                device=setup.device,
                cpus=pin_self(None),
                endpoint=self._endpoint,
                stage=setup.observing.stage_id,
            )
        )

    def _stage_gone(self) -> None:
        logger.info("stage process is gone; control process ends")
        self._running, self._orphaned = False, True
        if not self._setup.threaded:  # else it is only closing, and removes the directory itself
            shutil.rmtree(self._setup.runtime_dir, ignore_errors=True)

    # ------------------------------------------------------------------------- inputs
    def _from_receivers(self) -> None:
        now = time.monotonic()
        for _ in range(_DRAIN):
            try:
                frames = self._front.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if 2 <= len(frames) <= 3 and not is_lane(frames[0]):  # a ZMQ client chooses its own identity
                if len(frames) == 3:  # a v1 query is not parked: take in what was put before it was sent
                    self._from_stage()
                self._broker.request(frames[0], frames[-1], now)
            else:
                self._broker.counters["bad_requests"] += 1

    def _from_stage(self) -> None:
        for _ in range(_DRAIN):
            try:
                packet = self._hot.recv(messages.MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:  # the stage is gone, and had not read all that we told it
                packet = b""
            if not packet:
                self._reactor.off(self._hot.fileno())
                return
            message = messages.hot_to_control.decode(packet)
            now = time.monotonic()
            if isinstance(message, Publish):
                self._broker.publish(message, now)
            else:
                self._broker.withdraw(message.generations, now)

    def _from_admin(self) -> None:
        try:
            packet = self._admin.recv(messages.MAX_PACKET_BYTES)
        except ConnectionResetError:
            packet = b""
        if not packet:
            self._stage_gone()
            return
        message = messages.admin_to_control.decode(packet)
        if isinstance(message, HealthRequest):
            self._tell_stage(messages.Health(message.corr, self._report()))
        elif isinstance(message, StageReport):
            self.observer.stage_answered(message.report)
        elif isinstance(message, StageFault):
            self.observer.on_fault(message.cause)
        elif isinstance(message, Shutdown):
            self._running = False

    def _from_worker(self, identity: str, message: messages.FromWorker) -> None:
        if isinstance(message, messages.JobDone):
            now = time.monotonic()
            self._broker.write_ended(message.write_id, message.error, now, identity, message.microseconds)
        elif isinstance(message, messages.WorkerReady):
            if self._crew.ready(identity, message) and self._crew.all_ready_once():
                self._tell_stage(messages.Started(self._front.port, os.getpid()))
        elif isinstance(message, messages.WorkerFailed):
            text = f"transfer worker {message.index} cannot start: {message.error}"
            self.observer.faults.report(logger, "worker_failed", text)
            if not self._crew.announced:
                self._cannot_start(message.error)
        else:
            self._tell_stage(messages.Pooled(message.error))

    def _cannot_start(self, reason: str) -> None:
        self._tell_stage(messages.Failed(reason))

    def _holder_gone(self, pid: int) -> None:
        self._broker.holder_gone(pid, time.monotonic())
        self._send_freed()

    # ------------------------------------------------------------------------ outputs
    def _carry_out(self, now: float) -> None:
        """Send whatever the broker owes."""
        broker = self._broker
        while impossible := self._crew.dispatch(now):  # each makes room for another job
            for write_id, error in impossible:
                broker.write_ended(write_id, error, now)
        for identity, frames in broker.replies.outbox:
            if self._lanes is not None and is_lane(identity):
                if not self._lanes.send(identity, frames[-1]):
                    self._notice_dropped(identity)
                continue
            try:
                self._front.socket.send_multipart([identity, *frames], zmq.NOBLOCK)
            except zmq.Again:
                self._notice_dropped(identity)
            except zmq.ZMQError as exc:
                if exc.errno != zmq.EHOSTUNREACH:
                    raise
                broker.unreachable(identity)
        broker.replies.outbox.clear()
        if broker.targets.pending:
            self._tell_targets()
        if broker.meters.replies:
            broker.meters.sent(time.monotonic())
        self._send_freed()
        self._holders.watch(broker.watch)

    def _tell_targets(self) -> None:
        pending = self._broker.targets.pending
        while pending and not self._targets_stuck:
            edge = next(iter(pending))
            if self._tell_stage(messages.Target(edge, pending[edge])):
                del pending[edge]
            else:
                self._targets_stuck = True  # until the next tick

    def _notice_dropped(self, identity: bytes) -> None:
        self._broker.counters["notices_dropped"] += 1
        text = "a receiver reads too slowly: a notice was dropped, it will ask again"
        self._broker.fault("notice_dropped", text, peer=identity, level=logging.WARNING)

    def _send_freed(self) -> None:
        freed = self._broker.freed
        try:
            while freed:
                batch = freed[:_FREED_BATCH]
                if not try_send(self._hot.fileno(), messages.encode(messages.Freed(batch))):
                    break
                del freed[: len(batch)]
        except (BrokenPipeError, ConnectionResetError):
            freed.clear()
        hot = self._hot.fileno()
        if bool(freed) != self._want_writable and hot in self._reactor:
            self._want_writable = bool(freed)
            self._reactor.watch_both(hot, self._from_stage, bool(freed))

    def _tell_stage(self, message: messages.AdminToStage) -> bool:
        try:
            self._admin.send(messages.encode(message))
        except BlockingIOError:
            logger.warning("the stage does not read its admin channel; dropped %s", type(message).__name__)
            return False
        except (BrokenPipeError, ConnectionResetError):
            self._running = False
            return False
        return True

    def _ask_stage(self) -> bool:
        return self._tell_stage(messages.StageRequest())

    @property
    def _endpoint(self) -> str:
        return f"tcp://{_bracketed(self._setup.host)}:{self._front.port}"

    def _report(self) -> dict[str, Any]:
        """Make this process's part of a health document."""
        now = time.monotonic()
        return {
            **self._broker.report(now),
            "freed_backlog": len(self._broker.freed),
            "control": {
                "pid": os.getpid(),
                "incarnation": self._setup.incarnation,
                "uptime_s": round(now - self._started_at, 3),
                "cpus": format_cpulist(pin_self(None)),
                "asked_cpus": self._setup.cpus,
                "endpoint": self._endpoint,
            },
            "workers": self._crew.report(),
            **self.observer.metrics_state(),
        }

    def _children(self) -> list[Child]:
        """List this process and its workers for a health document."""
        uptime, restarts = round(time.monotonic() - self._started_at, 3), self._setup.incarnation - 1
        asked = format_cpulist(self._setup.cpus)
        control = Child("control", None, os.getpid(), True, False, uptime, restarts, asked)
        return [control, *(worker_child(worker, False) for worker in self._crew.report())]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def main(line: bytes) -> None:
    """Run as a child process; line is the set-up."""
    setup = msgspec.json.decode(line, type=ControlSetup)
    childlog.install(setup.label, setup.log_level)
    pool = Pool.attach(setup.pool_fd, setup.pool_size)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    loop = ControlLoop(setup, pool, context, ProcessLauncher(setup), LIFELINE_FD)
    signal.signal(signal.SIGUSR1, loop.observer.on_signal)
    sys.setswitchinterval(_SWITCH_SECONDS)
    loop.run()
    context.destroy(linger=_LINGER_MS)
