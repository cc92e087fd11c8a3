"""worker_mode thread: the control loop and the worker loops as threads of the stage.

The very same loops as in processes. It is for debugging, and it is the "with the GIL" baseline that a
benchmark compares with; it cannot survive what a process can (a thread cannot be killed or restarted).
"""

from __future__ import annotations

import os
import threading

import msgspec
import zmq

from mori_mp.shared.messages import ControlSetup, WorkerSetup
from mori_mp.shared.pool import Pool
from mori_mp.workers.control import ControlLoop
from mori_mp.workers.crew import RunningWorker
from mori_mp.workers.transfer import TransferWorker


class _WorkerThread:
    def __init__(self, setup: WorkerSetup, pool: Pool) -> None:
        self.pid = os.getpid()
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)
        self._lifeline, self._cut = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(setup, pool), daemon=True)
        self._thread.name = f"mori-mp-{setup.label}"
        self._thread.start()

    def _run(self, setup: WorkerSetup, pool: Pool) -> None:
        try:
            TransferWorker(setup, pool, self._lifeline).run()
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

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def __call__(self, setup: WorkerSetup) -> RunningWorker:
        return _WorkerThread(msgspec.structs.replace(setup, jobs_fd=os.dup(setup.jobs_fd)), self._pool)


class ControlThread:
    """A control loop in a thread, with the face of a child process."""

    def __init__(self, setup: ControlSetup, pool: Pool) -> None:
        self.pid = os.getpid()
        self._ended = os.eventfd(0, os.EFD_CLOEXEC)
        self._lifeline, self._cut = os.pipe2(os.O_CLOEXEC)
        # The supervisor closes its copies of these after the launch, as it does for a process.
        setup = msgspec.structs.replace(setup, hot_fd=os.dup(setup.hot_fd), admin_fd=os.dup(setup.admin_fd))
        self._thread = threading.Thread(
            target=self._run, args=(setup, pool), name="mori-mp-control", daemon=True
        )
        self._thread.start()

    def _run(self, setup: ControlSetup, pool: Pool) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            ControlLoop(setup, pool, context, ThreadLauncher(pool), self._lifeline).run()
        finally:
            context.destroy(linger=0)
            os.eventfd_write(self._ended, 1)

    def fileno(self) -> int:
        return self._ended

    def exit_status(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def cut_lifeline(self) -> None:
        if self._cut >= 0:
            os.close(self._cut)
            self._cut = -1

    def kill(self) -> None:
        """A thread cannot be killed; its lifeline is all there is."""
        self.cut_lifeline()

    def reap(self, timeout: float) -> bool:
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self.cut_lifeline()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            os.close(self._ended)
            self._lifeline = self._ended = -1
        return True
