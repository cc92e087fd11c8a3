"""A transfer worker: takes jobs from its control process, has its engine move the bytes, tells the end.

One thread, one job channel, one engine over the stage's host pool and, where it has a GPU pool, one over
that. While transfers are under way it polls them, first back to back and then with pauses inside the wait for
new jobs, because every completion call that blocks (Mori's Wait and WaitFor) costs more than it
saves. With nothing under way it sleeps in poll().

    control --AddPeer, Job--> worker --engine.submit--> bytes at the peer --JobDone--> control
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from mori_mp.shared import messages
from mori_mp.shared.affinity import pin_self
from mori_mp.shared.errors import MoriMPError, TransferFailed
from mori_mp.shared.messages import AddPeer, DropPeer, Job, JobDone, PoolBacked, Stop, WorkerSetup
from mori_mp.shared.pool import PREFAULT_STEP, Pool, prefault, total_bytes
from mori_mp.shared.procinfo import startup_line
from mori_mp.shared.topology import format_cpulist
from mori_mp.shared.tracing import Tracer
from mori_mp.workers import childlog, engines
from mori_mp.workers.boot import LIFELINE_FD
from mori_mp.workers.device_engine import DeviceEngine
from mori_mp.workers.engines import shm
from mori_mp.workers.engines.base import Engine, EngineBroken, Ready, Transfer
from mori_mp.workers.engines.bounce import BounceEngine
from mori_mp.workers.job_channel import JobChannel

logger = logging.getLogger(__name__)

_SPIN_SECONDS = 0.001  # since a transfer has begun or ended: as long as 256 MiB take on NVLink
_MAX_PAUSE_MS = 1
_LINGER_SECONDS = 0.2
_MAX_ERROR = 4000  # characters; a backend may quote all that a receiver has sent
_TRACE_FLUSH_MS = 1000
_TRY_AGAIN_SECONDS = 1.0


class _UnderWay:
    __slots__ = ("started_ns", "transfer", "write_id")

    def __init__(self, write_id: int, transfer: Transfer, started_ns: int) -> None:
        self.write_id = write_id
        self.transfer = transfer
        self.started_ns = started_ns


class _Refused(NamedTuple):
    """A peer that could not be registered; since is monotonic seconds. What was in the way may pass."""

    message: AddPeer
    error: str
    since: float


class TransferWorker:
    """The loop. `lifeline_fd` ends it: readable means that the control process (or the test) is gone."""

    def __init__(self, setup: WorkerSetup, pool: Pool, lifeline: int) -> None:
        self._setup = setup
        self._pool = pool
        self._lifeline = lifeline
        os.set_inheritable(setup.jobs_fd, False)
        self._channel = JobChannel(socket.socket(fileno=setup.jobs_fd), messages.to_worker)
        self._device: DeviceEngine | None = None
        self._peers: dict[int, Engine] = {}  # which engine writes to each
        self._refused_peers: dict[int, _Refused] = {}
        self._under_way: list[_UnderWay] = []
        self._prefaulted = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._prefault_error = ""
        self._stop = False
        self._tracer: Tracer | None = None
        if setup.trace_folder:
            name = f"worker {setup.identity}"
            folder = Path(setup.trace_folder)
            self._tracer = Tracer(folder, "worker", name, epoch=setup.epoch, thread=setup.threaded)

    def run(self) -> None:
        """Serve until told to stop or cut off."""
        setup = self._setup
        loaded: list[Engine] = []
        try:
            loaded.append(engines.load(setup.engine, self._pool, setup.engine_options))
            if setup.device_engine:
                self._device = DeviceEngine(setup.device_engine, setup.gpu_pool, setup.engine_options)
                loaded.append(self._device)
                if not setup.open_later:
                    self._device.open()
        except MoriMPError as exc:
            for engine in loaded:
                engine.close()
            self._tell(messages.WorkerFailed(setup.index, str(exc)))
            self._channel.close(_LINGER_SECONDS)
            os.close(self._prefaulted)
            return
        prefaulting: threading.Thread | None = None
        try:
            cpus = pin_self(None)
            name, depth = "+".join(engine.name for engine in loaded), max(one.depth for one in loaded)
            self._tell(messages.WorkerReady(setup.index, os.getpid(), format_cpulist(cpus), name, depth))
            logger.info(
                startup_line(
                    "worker",
                    engine=name,
                    device=setup.device,
                    cpus=cpus,
                    endpoint="",
                    index=setup.index,
                )
            )
            if setup.prefault:
                prefaulting = threading.Thread(target=self._prefault, name="mori-mp-prefault", daemon=True)
                prefaulting.start()
            self._serve(loaded)
        finally:
            if prefaulting is not None:
                prefaulting.join()
            self._under_way.clear()
            for engine in loaded:
                engine.close()
            self._channel.close(_LINGER_SECONDS)
            os.close(self._prefaulted)
            if self._tracer is not None:
                self._tracer.close()

    def _serve(self, loaded: list[Engine]) -> None:
        """Serve with the engine over the host pool and, if there is one, the engine over the GPU pool.

        A third one, from the host pool to GPU memory, is added when it is wanted.
        """
        jobs = self._channel.fileno()
        poller = select.poll()
        for fd in (jobs, self._lifeline, self._prefaulted):
            poller.register(fd, select.POLLIN)
        flushing = False
        progress = time.monotonic()
        asleep = None if self._tracer is None else _TRACE_FLUSH_MS
        while not self._stop or self._under_way:
            pause = 0 if time.monotonic() < progress + _SPIN_SECONDS else _MAX_PAUSE_MS
            timeout = pause if self._under_way else asleep
            events = poller.poll(timeout)
            if not events and self._tracer is not None and not self._under_way:
                self._tracer.flush()
            cut = False
            for fd, _ in events:
                if fd == jobs:
                    self._take(loaded)
                    progress = time.monotonic()
                elif fd == self._prefaulted:
                    os.eventfd_read(self._prefaulted)
                    self._tell(PoolBacked(self._prefault_error))
                else:
                    cut = True
            if self._reap():
                progress = time.monotonic()
            if cut or self._channel.gone:
                logger.info("control process is gone; transfer worker %d ends", self._setup.index)
                self._stop = True
                self._under_way.clear()
            elif flushing or self._channel.backlog:
                self._channel.flush()
                flushing = self._channel.backlog > 0
                poller.modify(jobs, select.POLLIN | select.POLLOUT if flushing else select.POLLIN)

    def _take(self, loaded: list[Engine]) -> None:
        """Take every message that has come."""
        while True:
            message = self._channel.receive()
            if message is None:
                return
            if isinstance(message, Job):
                self._submit(loaded, message)
            elif isinstance(message, AddPeer):
                self._add_peer(loaded, message)
            elif isinstance(message, DropPeer):
                self._refused_peers.pop(message.peer, None)
                engine = self._peers.pop(message.peer, None)
                if engine is not None:
                    engine.drop_peer(message.peer)
            elif isinstance(message, Stop):
                self._stop = True

    def _engine_for(self, loaded: list[Engine], message: AddPeer) -> Engine:
        """Return what writes to a peer: the in-tree class has GPU memory for host payloads, too."""
        if message.device:
            return loaded[1]
        if self._device is None or shm.is_ours(message.mem_desc):
            return loaded[0]
        if len(loaded) < 3:
            setup, borrowed = self._setup, self._device.pool
            loaded.append(
                BounceEngine(
                    self._pool,
                    borrowed.runtime,
                    borrowed.memory.device,
                    engines.load,
                    setup.device_engine,
                    setup.engine_options,
                )
            )
        return loaded[2]

    def _add_peer(self, loaded: list[Engine], message: AddPeer) -> None:
        try:
            engine = self._engine_for(loaded, message)
            engine.add_peer(message.peer, message.engine_desc, message.mem_desc)
            self._peers[message.peer] = engine
            self._refused_peers.pop(message.peer, None)
        except MoriMPError as exc:
            logger.error("receiver memory cannot be registered: %s", exc)
            self._refused_peers[message.peer] = _Refused(message, str(exc), time.monotonic())
        except Exception as exc:  # a peer may send anything: what a backend makes of it must not end us
            logger.exception("receiver memory cannot be registered")
            error = f"{type(exc).__name__}: {exc}"
            self._refused_peers[message.peer] = _Refused(message, error, time.monotonic())

    def _submit(self, loaded: list[Engine], job: Job) -> None:
        started = time.monotonic_ns()
        engine = self._peers.get(job.peer)
        if engine is None:
            refused = self._refused_peers.get(job.peer)
            if refused is not None and time.monotonic() - refused.since >= _TRY_AGAIN_SECONDS:
                self._add_peer(loaded, refused.message)
                engine, refused = self._peers.get(job.peer), self._refused_peers.get(job.peer)
        if engine is None:
            error = refused.error if refused is not None else f"peer {job.peer} is not registered"
            self._tell(JobDone(job.write_id, error, 0))
            return
        try:
            transfer = engine.submit(
                job.peer, job.local_offsets, job.remote_offsets, job.sizes, job.write_id, self._event(job)
            )
        except MoriMPError as exc:
            self._note(exc)
            self._tell(JobDone(job.write_id, str(exc), 0))
            return
        self._under_way.append(_UnderWay(job.write_id, transfer, started))
        self._reap()

    def _event(self, job: Job) -> Ready | None:
        """Return what a job's write must wait for."""
        if job.event < 0:
            return None
        if self._device is None:
            raise TransferFailed(
                f"this worker has no GPU pool, whose event {job.event} the write is to wait for"
            )
        return self._device.event(job.event)

    def _note(self, exc: MoriMPError) -> None:
        """End this worker, to be replaced, if its engine can do nothing any more."""
        if isinstance(exc, EngineBroken) and not self._stop:
            logger.error("transfer worker %d ends: %s", self._setup.index, exc)
            self._stop = True

    def _reap(self) -> bool:
        """Report the transfers that have ended; tell whether there were any."""
        ended = False
        for one in list(self._under_way):
            error = ""
            try:
                if not one.transfer.poll():
                    continue
            except MoriMPError as exc:
                self._note(exc)
                error = str(exc)
            self._under_way.remove(one)
            now = time.monotonic_ns()
            self._tell(JobDone(one.write_id, error, (now - one.started_ns) // 1000))
            if self._tracer is not None:
                self._tracer.add("write", one.started_ns, now, "", write_id=one.write_id)
            ended = True
        return ended

    def _tell(self, message: messages.FromWorker) -> None:
        if not isinstance(message, messages.WorkerReady) and len(message.error) > _MAX_ERROR:
            message.error = f"{message.error[:_MAX_ERROR]} ..."
        self._channel.send(message)

    def _prefault(self) -> None:
        """Back the pool with memory of this worker's NUMA node, a step at a time."""
        end = total_bytes(self._pool.size)
        try:
            for offset in range(0, end, PREFAULT_STEP):
                if self._stop:
                    return
                prefault(self._pool.fd, offset, min(PREFAULT_STEP, end - offset))
        except OSError as exc:
            self._prefault_error = f"a pool of {self._pool.size} bytes cannot be backed by memory: {exc}"
        os.eventfd_write(self._prefaulted, 1)


def main(line: bytes) -> None:
    """Run as a child process; line is the set-up."""
    setup = msgspec.json.decode(line, type=WorkerSetup)
    childlog.install(setup.label, setup.log_level)
    pool = Pool.attach(setup.pool_fd, setup.pool_size)
    TransferWorker(setup, pool, LIFELINE_FD).run()
