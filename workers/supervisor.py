"""The stage's side of its control process: starts it, relays its logs, notices its death, starts another.

One daemon thread that sleeps in poll() until something happens: a line of output, an admin message, the exit
of the control process. It does no work for a transfer, so it never contends for the GIL with one.

After a death, in this order:
    1. fence: SIGKILL the process group, wait until every process that inherited the fence pipe is gone, so
       that no old worker can still write when a slot is handed out again;
    2. start a new control process on the same port, with incarnation + 1;
    3. replay: every publication whose memory has not come back is published again.

Shutdown has a written budget of 4 s: ask (1.5 s), cut the lifeline (1 s), SIGKILL the group (1.5 s).
"""

from __future__ import annotations

import errno
import logging
import os
import select
import shutil
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from mori_mp.shared import forks, messages
from mori_mp.shared.errors import MoriMPError, StartupError
from mori_mp.shared.faults import Faults
from mori_mp.shared.messages import ControlSetup, HotToControl
from mori_mp.shared.pool import Pool
from mori_mp.workers.childlog import Relay
from mori_mp.workers.hot import HotChannel
from mori_mp.workers.spawn import Child, spawn

logger = logging.getLogger(__name__)

START_SECONDS = 20.0
RESTART_WINDOW_SECONDS = 60.0
_GONE = (errno.EPIPE, errno.ECONNRESET, errno.EAGAIN, errno.EBADF)  # a control loop that is stuck or dead
_ASK_SECONDS, _CUT_SECONDS, _KILL_SECONDS = 1.5, 1.0, 1.5


class Control(Protocol):
    """A running control loop, process or thread; fileno() is readable once it has ended."""

    pid: int

    def fileno(self) -> int: ...
    def exit_status(self) -> int | None: ...
    def cut_lifeline(self) -> None: ...
    def reap(self, timeout: float) -> bool: ...
    def kill(self) -> None: ...


ControlLauncher = Callable[[ControlSetup, int], Control]
"""Starts a control loop: (set-up, descriptor that takes its output)."""


def launch_process(setup: ControlSetup, output_fd: int) -> Child:
    """Start the control loop as a child process, in a process group of its own."""
    fds = [setup.hot_fd, setup.admin_fd, setup.pool_fd, setup.fence_fd]
    return spawn(setup, pass_fds=fds, output_fd=output_fd, new_group=True)


class Supervisor:
    """Owns the control loop of one connector; see the module's docstring.

    template is the set-up of every incarnation, less what changes. replay lists what is published; freed
    takes the generations that a dying control process had freed. stage_report makes the stage's part of a
    health document. target(edge, posts) hears where payloads of an edge may be pushed to (messages.Target).
    """

    def __init__(
        self,
        template: ControlSetup,
        pool: Pool,
        runtime: Path,
        launch: ControlLauncher,
        replay: Callable[[], list[HotToControl]],
        freed: Callable[[list[int]], None],
        stage_report: Callable[[], dict[str, Any]],
        faults: Faults,
        target: Callable[[str, bytes], None],
    ) -> None:
        self._template = template
        self._pool = pool
        self._runtime = runtime
        self._launch = launch
        self._replay = replay
        self._freed = freed
        self._stage_report = stage_report
        self._faults = faults
        self._target = target
        self.hot = HotChannel()
        self.port = template.port
        self.restarts = 0
        self.failed = ""
        self.pool_error = ""
        self.pool_backed = threading.Event()
        self._incarnation = 0
        self._deaths: deque[float] = deque()
        self._control: Control | None = None
        self._admin: socket.socket | None = None
        self._fence_fd = -1
        self._relay = Relay(template.label)
        self._name = template.label.removeprefix("control ")
        self._output_fd, self._output_write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._output_write_fd, False)  # for the children, which inherit it
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._answers: dict[int, dict[str, Any] | None] = {}
        self._answered = threading.Condition()
        self._next_corr = 1
        self._started = threading.Event()
        self._start_error = ""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mori-mp-supervisor", daemon=True)
        forks.watch(self)

    # ----------------------------------------------------------------------- start
    def start(self) -> None:
        """Start the control loop and its workers, and wait until they serve. Raises StartupError."""
        self._start_control()
        self._thread.start()
        if not self._started.wait(START_SECONDS):
            self._start_error = f"it was not up within {START_SECONDS:.0f} s"
        if self._start_error:
            story = "; ".join(self._relay.last_lines[-3:])
            raise StartupError(
                f"control process of {self._name} could not start: {self._start_error}"
                + (f" (its last output: {story})" if story else "")
            )

    def _start_control(self) -> None:
        self._incarnation += 1
        ours_hot, theirs_hot = messages.socketpair()
        ours_admin, theirs_admin = messages.socketpair()
        fence_read, fence_write = os.pipe2(os.O_CLOEXEC)
        setup = msgspec.structs.replace(
            self._template,
            incarnation=self._incarnation,
            port=self.port,
            hot_fd=theirs_hot.fileno(),
            admin_fd=theirs_admin.fileno(),
            fence_fd=fence_write,
            lane_path=self._template.lane_path.format(incarnation=self._incarnation),
        )
        try:
            self._control = self._launch(setup, self._output_write_fd)
        except BaseException:
            for end in (ours_hot, ours_admin, theirs_hot, theirs_admin):
                end.close()
            os.close(fence_read)
            os.close(fence_write)
            raise
        os.close(fence_write)
        theirs_hot.close()
        theirs_admin.close()
        if self._fence_fd >= 0:
            os.close(self._fence_fd)
        self._fence_fd = fence_read
        ours_admin.setblocking(False)
        if self._admin is not None:
            self._admin.close()
        self._admin = ours_admin
        self._freed(self.hot.replace(ours_hot, self._replay))

    # ------------------------------------------------------------------------ loop
    def _run(self) -> None:
        while not self._closing:
            control, admin = self._control, self._admin
            poller = select.poll()
            poller.register(self._output_fd, select.POLLIN)
            poller.register(self._wake_fd, select.POLLIN)
            if control is not None and admin is not None:
                poller.register(control.fileno(), select.POLLIN)
                poller.register(admin.fileno(), select.POLLIN)
            if self.hot.backlog and self.hot.fileno() >= 0:
                poller.register(self.hot.fileno(), select.POLLOUT)
            ready = {fd for fd, _ in poller.poll()}
            if self._output_fd in ready:
                self._relay.feed(os.read(self._output_fd, 1 << 16))
            if self._wake_fd in ready:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            if admin is not None and admin.fileno() in ready:
                self._from_control(admin)
            if self.hot.fileno() in ready:
                self._freed(self.hot.drain())
            if control is not None and control.fileno() in ready and not self._closing:
                self._control_ended(control)

    def _from_control(self, admin: socket.socket) -> None:
        try:
            packet = admin.recv(messages.MAX_PACKET_BYTES)
        except (BlockingIOError, ConnectionResetError):
            return
        if not packet:
            return
        message = messages.admin_to_stage.decode(packet)
        if isinstance(message, messages.Started):
            self.port = message.port
            self._started.set()
        elif isinstance(message, messages.Failed):
            self._start_error = message.error
            self._started.set()
        elif isinstance(message, messages.Health):
            with self._answered:
                if message.corr in self._answers:
                    self._answers[message.corr] = message.report
                    self._answered.notify_all()
        elif isinstance(message, messages.StageRequest):
            self._tell_stage_report(admin)
        elif isinstance(message, messages.Target):
            self._target(message.edge, message.posts)
        else:
            self.pool_error = message.error
            if message.error:
                self._faults.report(logger, "pool_unbacked", message.error)
            self.pool_backed.set()

    def _tell_stage_report(self, admin: socket.socket) -> None:
        packet = messages.encode(messages.StageReport(self._stage_report()))
        if len(packet) > messages.MAX_PACKET_BYTES:
            logger.warning("this stage's report has %d bytes, too many for its control process", len(packet))
            return
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):  # it is stuck or dead
            admin.send(packet)

    def _control_ended(self, control: Control) -> None:
        status = control.exit_status()
        self._fence(control)
        control.reap(_KILL_SECONDS)
        self._control = None
        if not self._started.is_set():
            self._start_error = f"it ended with status {status}"
            self._drain_output()
            self._started.set()
            return
        now = time.monotonic()
        while self._deaths and now - self._deaths[0] > RESTART_WINDOW_SECONDS:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > self._template.restart_limit:
            self.failed = (
                f"control process ended {len(self._deaths)} times within {RESTART_WINDOW_SECONDS:.0f} s "
                f"(last status {status}); see the log lines before this one"
            )
            text = f"{self._name}: {self.failed}. This connector sends nothing more."
            self._faults.report(logger, "control_given_up", text, level=logging.CRITICAL)
            return
        self.restarts += 1
        text = f"{self._name}: control process (pid {control.pid}) ended with status {status}"
        self._faults.report(logger, "control_died", f"{text}; starting another and replaying to it")
        try:
            self._start_control()
        except MoriMPError as exc:
            self.failed = str(exc)
            text = f"{self._name}: {exc}"
            self._faults.report(logger, "control_given_up", text, level=logging.CRITICAL)

    def _fence(self, control: Control) -> None:
        """Make sure that no process of an ended incarnation is left."""
        if control.pid == os.getpid():
            return
        with suppress(ProcessLookupError):
            os.killpg(control.pid, signal.SIGKILL)
        poller = select.poll()
        poller.register(self._fence_fd, select.POLLIN)
        if not poller.poll(_KILL_SECONDS * 1000):
            text = (
                f"{self._name}: processes of group {control.pid} survive SIGKILL; their writes "
                f"cannot be ruled out"
            )
            self._faults.report(logger, "fence_failed", text, level=logging.CRITICAL)

    def _drain_output(self) -> None:
        poller = select.poll()
        poller.register(self._output_fd, select.POLLIN)
        while poller.poll(0):
            self._relay.feed(os.read(self._output_fd, 1 << 16))

    # ---------------------------------------------------------------------- health
    @property
    def pid(self) -> int:
        """Return the control loop's process id, 0 when there is none."""
        control = self._control
        return control.pid if control is not None else 0

    def health(self, timeout: float) -> dict[str, Any] | None:
        """Ask the control loop for its report; None when it does not answer within timeout seconds."""
        with self._answered:
            corr, self._next_corr = self._next_corr, self._next_corr + 1
            admin = self._admin
            if admin is None or self._control is None:
                return None
            self._answers[corr] = None
            try:
                admin.send(messages.encode(messages.HealthRequest(corr)))
                self._answered.wait_for(lambda: self._answers[corr] is not None, timeout)
            except OSError as exc:
                if exc.errno not in _GONE:
                    raise
            return self._answers.pop(corr)

    def tell_fault(self, cause: str) -> bool:
        """Have the control loop write a dump about a fault of the stage; False if it cannot be told now."""
        admin = self._admin
        if admin is None or self._control is None:
            return False
        try:
            admin.send(messages.encode(messages.StageFault(cause)))
        except OSError as exc:
            if exc.errno not in _GONE:
                raise
            return False
        return True

    # ----------------------------------------------------------------------- close
    def leave_to_parent(self) -> None:
        """In a forked child: let go of the lifeline, which must end with the stage. For `shared.forks`."""
        self._closing = True
        if self._control is not None:
            self._control.cut_lifeline()

    def close(self) -> None:
        """End the control loop and its workers within the budget, and remove every trace. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.is_alive():
            self._thread.join(_KILL_SECONDS)
        control, admin = self._control, self._admin
        if control is not None and admin is not None:
            with suppress(OSError):
                admin.send(messages.encode(messages.Shutdown()))
            ended = control.reap(_ASK_SECONDS)
            if not ended:
                control.cut_lifeline()
                ended = control.reap(_CUT_SECONDS)
            if not ended:
                control.kill()
                control.reap(_KILL_SECONDS)
            self._fence(control)
        self._control = None
        if admin is not None:
            admin.close()
        self.hot.close()
        self._drain_output()
        for fd in (self._output_fd, self._output_write_fd, self._wake_fd, self._fence_fd):
            if fd >= 0:
                os.close(fd)
        shutil.rmtree(self._runtime, ignore_errors=True)
