"""The transfer workers of one control process: started, introduced to peers, fed, watched, replaced.

A launcher makes workers: child processes (worker_mode process, here) or threads (worker_mode thread,
mori_mp.workers.inline). The crew treats both alike. Each start of a worker has a job channel of its own, on
which nothing is lost or overtaken while the worker lives; what waits there is bounded by the jobs that it may
have. A worker that dies, or holds a job for longer than the job time-out, is replaced, and its jobs go to
another one; one that dies too often is given up, and once no worker is left its jobs fail.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from mori_mp.shared import messages
from mori_mp.shared.errors import MoriMPError, StartupError, WireError
from mori_mp.shared.faults import Faults
from mori_mp.shared.messages import ControlSetup, FromWorker, WorkerReady, WorkerSetup
from mori_mp.workers.dispatch import Dispatcher
from mori_mp.workers.engines import ONE_HOST
from mori_mp.workers.job_channel import JobChannel
from mori_mp.workers.peers import Peers
from mori_mp.workers.spawn import spawn

logger = logging.getLogger(__name__)

RESTART_WINDOW_SECONDS = 60.0
_STOP_SECONDS = 2.0
_DRAIN = 256  # messages taken from one worker before others get their turn


class RunningWorker(Protocol):
    """A started worker; fileno() becomes readable when it has ended."""

    pid: int

    def fileno(self) -> int: ...
    def kill(self) -> None: ...
    def exit_status(self) -> int | None: ...
    def reap(self, timeout: float) -> bool: ...


class WorkerLauncher(Protocol):
    """Starts one worker, which gets a descriptor of its own for jobs_fd."""

    def __call__(self, setup: WorkerSetup) -> RunningWorker: ...


class ProcessLauncher:
    """Workers as child processes of the control process."""

    def __init__(self, setup: ControlSetup) -> None:
        self._interpreter = setup.worker_python
        self._fence_fd = setup.fence_fd

    def __call__(self, setup: WorkerSetup) -> RunningWorker:
        fds = [setup.pool_fd, setup.jobs_fd, self._fence_fd]
        return spawn(setup, pass_fds=fds, output_fd=1, interpreter=self._interpreter)


class _Member:
    __slots__ = (
        "channel",
        "identity",
        "index",
        "info",
        "peers",
        "process",
        "ready",
        "restarts",
        "serial",
        "started_at",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.serial = 0
        self.identity = ""
        self.process: RunningWorker | None = None
        self.channel: JobChannel[FromWorker] | None = None
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
        self.dispatched_at = 0.0  # monotonic seconds
        self.given_up = 0

    def open(
        self,
        watch: Callable[[int, Callable[[], None], bool], None],
        unwatch: Callable[[int], None],
        heard: Callable[[str, FromWorker], None],
        cannot_start: Callable[[str], None],
    ) -> None:
        """Start all workers. Raises StartupError when one cannot even be started.

        watch(fd, handler, writable) and unwatch(fd) register with the process's poll; heard(identity,
        message) takes what a worker says. cannot_start(reason) is called when one is given up before all of
        them were ready.
        """
        self._watch, self._unwatch = watch, unwatch
        self._heard, self._cannot_start = heard, cannot_start
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
        """Send queued jobs out. Returns (write id, error) of those that no worker can ever take.

        They are the dispatcher's until it hears of their end.
        """
        for forgotten in self._peers.forgotten:
            for member in self._members:
                if forgotten in member.peers:
                    member.peers.discard(forgotten)
                    self._send(member, messages.DropPeer(forgotten))
        self._peers.forgotten.clear()
        by_identity = {m.identity: m for m in self._members}
        impossible: list[tuple[int, str]] = []
        for identity, job in self._dispatcher.assign(now):
            member = by_identity[identity]
            try:
                if job.peer not in member.peers:
                    peer = self._peers[job.peer]
                    introduction = messages.AddPeer(job.peer, peer.engine_desc, peer.mem_desc, peer.device)
                    self._send(member, introduction)
                    member.peers.add(job.peer)
                self._send(member, job)
                self.dispatched_at = now
            except WireError as exc:
                impossible.append((job.write_id, str(exc)))
                continue
            if self.on_dispatch is not None:
                self.on_dispatch(job.write_id, now)
        if all(m.process is None for m in self._members):
            queued = self._dispatcher.take_queued()
            impossible += [(job.write_id, "no transfer worker is left") for job in queued]
        return impossible

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
                if member.channel is not None and member.channel.backlog:
                    self._hang_up(member)  # it does not hear Stop: the end of the channel tells it
        deadline = time.monotonic() + patience
        for member in self._members:
            process = member.process
            if process is None:
                continue
            if not member.ready or not process.reap(max(0.0, deadline - time.monotonic())):
                process.kill()
                if not process.reap(_STOP_SECONDS):
                    logger.error("transfer worker %d (pid %d) cannot be ended", member.index, process.pid)
            self._hang_up(member)
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
        member.serial += 1
        member.identity = f"{member.index}.{member.serial}"
        member.ready, member.info = False, None
        member.peers = set()
        member.started_at = time.monotonic()
        try:
            ours, theirs = messages.socketpair()
        except OSError as exc:
            raise StartupError(f"cannot start a worker: no job channel: {exc.strerror}") from exc
        try:
            member.process = self._launch(self._setup_of(member, theirs.fileno()))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        member.channel = JobChannel(ours, messages.from_worker)
        self._watch(member.process.fileno(), partial(self._exited, member), False)
        self._watch(ours.fileno(), partial(self._ready, member), False)

    def _setup_of(self, member: _Member, jobs_fd: int) -> WorkerSetup:
        setup = self._setup
        return WorkerSetup(
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
            open_later=setup.lend and setup.device_engine in ONE_HOST,
            trace_folder=setup.observing.trace_folder,
            epoch=setup.epoch,
            engine_options=setup.engine_options,
            pool_fd=setup.pool_fd,
            pool_size=setup.pool_size,
            jobs_fd=jobs_fd,
            threaded=setup.threaded,
            prefault=setup.prefault and member.index == 0 and member.serial == 1 and setup.incarnation == 1,
        )

    def _cpus(self, index: int) -> list[int]:
        sets = self._setup.worker_cpus
        return sets[index % len(sets)] if sets else []

    def _exited(self, member: _Member) -> None:
        process = member.process
        assert process is not None
        status = process.exit_status()
        self._unwatch(process.fileno())
        process.reap(_STOP_SECONDS)
        while not self._take_in(member):  # its last words count
            pass
        self._hang_up(member)
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
        """Send, or keep until there is room. Raises WireError.

        What is for one that has just died is lost: its exit puts the jobs back into the queue.
        """
        channel = member.channel
        if channel is None:
            return
        waiting = channel.backlog
        channel.send(message)
        if channel.backlog and not waiting:
            self._watch(channel.fileno(), partial(self._ready, member), True)

    def _ready(self, member: _Member) -> None:
        """A worker has said something, has ended, or has room for what waits."""
        channel = member.channel
        if channel is None:
            return
        if channel.backlog:
            channel.flush()
            if not channel.backlog:
                self._watch(channel.fileno(), partial(self._ready, member), False)
        self._take_in(member)
        if channel.ended:  # its exit does the rest
            self._unwatch(channel.fileno())

    def _take_in(self, member: _Member) -> bool:
        """Pass on what a worker has said; False if there may be more."""
        for _ in range(_DRAIN):
            message = member.channel.receive() if member.channel is not None else None
            if message is None:
                return True
            self._heard(member.identity, message)
        return False

    def _hang_up(self, member: _Member) -> None:
        """Close the channel to a worker, if it is still open."""
        if member.channel is not None:
            self._unwatch(member.channel.fileno())
            member.channel.close()
            member.channel = None
