"""Starting and watching child processes.

`subprocess`, never fork without exec and never `multiprocessing`: a vLLM worker is daemonic and may have no
multiprocessing children, and neither CUDA nor HIP survives a fork. The set-up goes over the child's standard
input, which stays open: it is the child's lifeline, and its end of file tells the child that the parent is
gone. (PR_SET_PDEATHSIG would fire when the *thread* that spawned the child ends.)
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

import mori_mp
from mori_mp.shared.errors import StartupError
from mori_mp.shared.messages import ChildSetup

logger = logging.getLogger(__name__)

_BOOT = Path(__file__).with_name("boot.py")


def module_path() -> list[str]:
    """Return the sys.path for a child of the same interpreter, this very mori_mp first."""
    root = str(Path(mori_mp.__file__).resolve().parent.parent)
    return [root, *(os.path.abspath(entry) for entry in sys.path if entry != root)]


class Child:
    """A running child process. fileno() is its pidfd: readable when it has exited."""

    def __init__(self, process: subprocess.Popen[bytes], label: str) -> None:
        self._process = process
        self.label = label
        self.pid = process.pid
        self._pidfd = os.pidfd_open(process.pid)

    def fileno(self) -> int:
        return self._pidfd

    def exit_status(self) -> int | None:
        """Return the exit status once it has exited (negative: the signal that ended it)."""
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    def cut_lifeline(self) -> None:
        """Tell it to go, by the end of its standard input."""
        stdin = self._process.stdin
        if stdin is not None and not stdin.closed:
            with suppress(BrokenPipeError):  # it went before it had read its set-up
                stdin.close()

    def reap(self, timeout: float) -> bool:
        """Wait up to timeout seconds for its exit, and let go of it. False if it still runs."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        self.cut_lifeline()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        return True


def spawn(
    setup: ChildSetup,
    *,
    pass_fds: Sequence[int],
    output_fd: int,
    interpreter: str = "",
    new_group: bool = False,
) -> Child:
    """Start a child and send it its set-up. Raises StartupError if the interpreter cannot be run.

    interpreter "" means this one; another one gets its own site-packages. new_group puts the child, and so
    its own children, into a process group of their own.
    """
    own = not interpreter
    argv = [interpreter or sys.executable, *(["-S"] if own else []), str(_BOOT), *setup.label.split()]
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=output_fd,
            stderr=output_fd,
            pass_fds=pass_fds,
            start_new_session=new_group,
            cwd="/",
        )
    except OSError as exc:
        fix = "" if own else "; set worker_python to a Python interpreter of this machine"
        raise StartupError(f"cannot start {setup.role} process: {argv[0]}: {exc.strerror}{fix}") from exc
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(setup) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        logger.debug("%s exited before it read its set-up", setup.label)
    return Child(process, setup.label)
