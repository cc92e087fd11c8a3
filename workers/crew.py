"""The transfer workers of one control process: started, introduced to peers, fed, watched, replaced.

Two launchers make workers: as child processes (worker_mode process) and as threads (worker_mode thread). The
crew treats both alike. A worker that dies, or holds a job for longer than the job time-out, is replaced, and
its jobs go to another one; one that dies too often is given up, and once no worker is left its jobs fail.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from mori_mp.shared import messages
from mori_mp.shared.errors import MoriMPError
from mori_mp.shared.faults import Faults
from mori_mp.shared.messages import ControlSetup, WorkerReady, WorkerSetup
from mori_mp.shared.pool import Pool
from mori_mp.workers.dispatch import Dispatcher
from mori_mp.workers.peers import Peers
from mori_mp.workers.spawn import spawn
from mori_mp.workers.transfer import TransferWorker

logger = logging.getLogger(__name__)

RESTART_WINDOW_SECONDS = 60.0
_STOP_SECONDS = 2.0


class RunningWorker(Protocol):
    """A started worker; fileno() becomes readable when it has ended."""

    pid: int

    def fileno(self) -> int: ...
    def kill(self) -> None: ...
    def exit_status(self) -> int | None: ...
    def reap(self, timeout: float) -> bool: ...


class WorkerLauncher(Protocol):
    """Starts one worker."""

    def __call__(self, setup: WorkerSetup) -> RunningWorker: ...


class ProcessLauncher:
    """Workers as child processes of the control process."""

    def __init__(self, setup: ControlSetup) -> None:
        self._interpreter = setup.worker_python
        self._fence_fd = setup.fence_fd

    def __call__(self, setup: WorkerSetup) -> RunningWorker:
        fds = [setup.pool_fd, self._fence_fd]
        return spawn(setup, pass_fds=fds, output_fd=1, interpreter=self._interpreter)


class _WorkerThread:
    def __init__(self, setup: WorkerSetup, pool: Pool, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.pid = os.getpid()
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)
        self._lifeline, self._cut = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(setup, pool, context), daemon=True)
        self._thread.name = f"mori-mp-{setup.label}"
        self._thread.start()

    def _run(self, setup: WorkerSetup, pool: Pool, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        try:
            TransferWorker(setup, pool, context, self._lifeline).run()
        finally:
            os.eventfd_write(self._ended, 1)

    def fileno(self) -> int:
        return self._ended

    def kill(self) -> None:
        """Ask it to end; a thread cannot be killed."""
        if self._cut >= 0:
            os.close(self._cut)
            self._cut = -1

    def exit_status(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def reap(self, timeout: float) -> bool:
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self.kill()
        os.close(self._lifeline)
        os.close(self._ended)
        return True


class ThreadLauncher:
    """Workers as threads of the stage process, over the stage's own mapping of the pool."""

    def __init__(self, pool: Pool, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._pool = pool
        self._context = context

    def __call__(self, setup: WorkerSetup) -> RunningWorker:
        return _WorkerThread(setup, self._pool, self._context)


class _Member:
    __slots__ = ("identity", "index", "info", "peers", "process", "ready", "restarts", "serial", "started_at")

    def __init__(self, index: int) -> None:
        self.index = index
        self.serial = 0
        self.identity = ""
        self.process: RunningWorker | None = None
        self.ready = False
        self.info: WorkerReady | None = None
        self.peers: set[int] = set()
        self.restarts: deque[float] = deque()
        self.started_at = 0.0


class Crew:
    """See the module's docstring."""

    def __init__(
        self,
        setup: ControlSetup,
        dispatcher: Dispatcher,
        peers: Peers,
        launcher: WorkerLauncher,
        faults: Faults | None = None,
    ) -> None:
        self._faults = faults if faults is not None else Faults("control")
        self.on_dispatch: Callable[[int, float], None] | None = None  # (write id, now); for a trace
        self._setup = setup
        self._dispatcher = dispatcher
        self._peers = peers
        self._launch = launcher
        self._members = [_Member(i) for i in range(setup.workers)]
        self.announced = False
        self.given_up = 0

    def open(
        self,
        jobs: zmq.Socket[bytes],
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
        cannot_start: Callable[[str], None],
    ) -> None:
        """Start all workers. Raises StartupError when one cannot even be started.

        cannot_start(reason) is called when one is given up before all of them were ready.
        """
        self._jobs = jobs
        self._watch, self._unwatch, self._cannot_start = watch, unwatch, cannot_start
        for member in self._members:
            self._start(member)

    def ready(self, identity: str, message: WorkerReady) -> bool:
        """A worker reports for work; False if it is one that has been replaced since."""
        for member in self._members:
            if member.identity == identity:
                member.ready, member.info = True, message
                self._dispatcher.add_worker(identity, message.depth)
                logger.debug(  # the worker's own line at its start tells the same
                    "transfer worker %d ready: engine %s, pid %d, cpus %s",
                    member.index,
                    message.engine,
                    message.pid,
                    message.cpus,
                )
                return True
        return False

    def all_ready_once(self) -> bool:
        """True the first time that every worker is ready."""
        if self.announced or not all(m.ready for m in self._members):
            return False
        self.announced = True
        return True

    def dispatch(self, now: float) -> list[tuple[int, str]]:
        """Send queued jobs out. Returns (write id, error) of those that no worker can ever take."""
        for forgotten in self._peers.forgotten:
            for member in self._members:
                if forgotten in member.peers:
                    member.peers.discard(forgotten)
                    self._send(member, messages.DropPeer(forgotten))
        self._peers.forgotten.clear()
        by_identity = {m.identity: m for m in self._members}
        for identity, job in self._dispatcher.assign(now):
            member = by_identity[identity]
            if job.peer not in member.peers:
                peer = self._peers[job.peer]
                member.peers.add(job.peer)
                introduction = messages.AddPeer(job.peer, peer.engine_desc, peer.mem_desc, peer.device)
                self._send(member, introduction)
            self._send(member, job)
            if self.on_dispatch is not None:
                self.on_dispatch(job.write_id, now)
        if all(m.process is None for m in self._members):
            return [(job.write_id, "no transfer worker is left") for job in self._dispatcher.take_queued()]
        return []

    def check_overdue(self, now: float) -> None:
        """Kill workers that hold a job for too long; their exit does the rest."""
        for identity, late in self._dispatcher.overdue(now, self._setup.job_timeout_seconds).items():
            for member in self._members:
                if member.identity == identity and member.process is not None:
                    self._fault(
                        "worker_hung",
                        f"transfer worker {member.index} (pid {member.process.pid}) has {len(late)} write(s) "
                        f"over the time limit of {self._setup.job_timeout_seconds:g} s; killing it",
                    )
                    member.process.kill()

    def stop(self, patience: float = _STOP_SECONDS) -> None:
        """End all workers: asked first, killed after so many seconds."""
        for member in self._members:
            if member.process is not None and member.ready:
                self._send(member, messages.Stop())
        deadline = time.monotonic() + patience
        for member in self._members:
            process = member.process
            if process is None:
                continue
            if not member.ready or not process.reap(max(0.0, deadline - time.monotonic())):
                process.kill()
                if not process.reap(_STOP_SECONDS):
                    logger.error("transfer worker %d (pid %d) cannot be ended", member.index, process.pid)
            member.process = None

    def report(self) -> list[dict[str, Any]]:
        """Describe each worker for health()."""
        load = self._dispatcher.load()
        now = time.monotonic()
        return [
            {
                "index": m.index,
                "pid": m.process.pid if m.process is not None else None,
                "ready": m.ready,
                "restarts": m.serial - 1,
                "uptime_s": round(now - m.started_at, 3),
                "cpus": m.info.cpus if m.info is not None else "",
                "asked_cpus": self._cpus(m.index),
                "jobs": load.get(m.identity, 0),
                "peers": len(m.peers),
            }
            for m in self._members
        ]

    # ------------------------------------------------------------------------- inside
    def _start(self, member: _Member) -> None:
        setup = self._setup
        member.serial += 1
        member.identity = f"{member.index}.{member.serial}"
        member.ready, member.info = False, None
        member.peers = set()
        member.started_at = time.monotonic()
        member.process = self._launch(
            WorkerSetup(
                role="worker",
                label=f"worker {setup.label.removeprefix('control ')} index={member.index}",
                path=setup.path,
                cpus=self._cpus(member.index),
                log_level=setup.log_level,
                index=member.index,
                identity=member.identity,
                engine=setup.engine,
                device=setup.device,
                device_engine=setup.device_engine,
                gpu_pool=setup.gpu_pool,
                trace_folder=setup.observing.trace_folder,
                epoch=setup.epoch,
                engine_options=setup.engine_options,
                pool_fd=setup.pool_fd,
                pool_size=setup.pool_size,
                jobs_endpoint=setup.jobs_endpoint,
                prefault=setup.prefault
                and member.index == 0
                and member.serial == 1
                and setup.incarnation == 1,
            )
        )
        self._watch(member.process.fileno(), lambda: self._exited(member))

    def _cpus(self, index: int) -> list[int]:
        sets = self._setup.worker_cpus
        return sets[index % len(sets)] if sets else []

    def _exited(self, member: _Member) -> None:
        process = member.process
        assert process is not None
        status = process.exit_status()
        self._unwatch(process.fileno())
        process.reap(_STOP_SECONDS)
        member.process, member.ready = None, False
        lost = self._dispatcher.remove_worker(member.identity)
        now = time.monotonic()
        while member.restarts and now - member.restarts[0] > RESTART_WINDOW_SECONDS:
            member.restarts.popleft()
        if len(member.restarts) >= self._setup.restart_limit:
            self.given_up += 1
            self._fault(
                "worker_given_up",
                f"transfer worker {member.index} ended (status {status}) for the "
                f"{len(member.restarts) + 1}th time in {RESTART_WINDOW_SECONDS:.0f} s; giving it up",
                level=logging.CRITICAL,
            )
            if not self.announced:
                self._cannot_start(f"transfer worker {member.index} ended with status {status} at its start")
            return
        member.restarts.append(now)
        self._fault(
            "worker_died",
            f"transfer worker {member.index} (pid {process.pid}) ended with status {status}; restarting it, "
            f"{len(lost)} write(s) go to another",
        )
        try:
            self._start(member)
        except MoriMPError as exc:
            text = f"transfer worker {member.index} cannot be restarted: {exc}"
            self._fault("worker_failed", text, level=logging.CRITICAL)

    def _fault(self, cause: str, text: str, level: int = logging.ERROR) -> None:
        self._faults.report(logger, cause, text, level=level)

    def _send(self, member: _Member, message: messages.ToWorker) -> None:
        try:
            self._jobs.send_multipart([member.identity.encode(), messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as exc:
            # It has just died: its exit puts the jobs back into the queue.
            logger.debug("message to transfer worker %d lost: %s", member.index, exc)
