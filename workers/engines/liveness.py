"""Is the process behind a peer's GPU memory still there?

A mapping of GPU memory outlives the process that exported it, and writes into such an orphan succeed. So an
engine that maps a peer's memory asks for the process before it believes a success. A pidfd answers without
waiting and cannot be fooled by a reused pid once it is open.
"""

from __future__ import annotations

import os
from pathlib import Path

from mori_mp.shared.errors import EngineUnavailable
from mori_mp.shared.syscalls import Readable


class PeerProcess:
    """A process of this host, watched through a pidfd; or one that cannot be watched and is never `gone`."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._has_exited = Readable(pidfd)

    @classmethod
    def exact(cls, pid: int, started: int) -> PeerProcess:
        """Watch the process with this pid and start time (clock ticks, see `start_time`).

        For peers of the same PID namespace. Raises EngineUnavailable if there is no such process (any more).
        """
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            raise EngineUnavailable(f"receiver process {pid} has exited") from None
        except OSError as exc:
            raise EngineUnavailable(f"receiver process {pid} cannot be watched: {exc}") from exc
        if start_time(pid) != started:
            os.close(pidfd)
            raise EngineUnavailable(f"receiver process {pid} has exited; its pid has a new owner")
        return cls(pid, pidfd)

    @classmethod
    def likely(cls, pid: int, library: str) -> PeerProcess:
        """Watch a process if it has mapped a library of that name; else return one that is never `gone`.

        For descriptors that carry a pid and nothing to check it by: in another PID namespace the same number
        is another process, or none.
        """
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return cls(pid, -1)
        try:
            mapped = library in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            mapped = False
        if not mapped:
            os.close(pidfd)
            pidfd = -1
        return cls(pid, pidfd)

    @property
    def watched(self) -> bool:
        """False if nothing is known about the process."""
        return self._pidfd >= 0

    def gone(self) -> bool:
        """Tell whether the process is known to have exited; a microsecond or two, with the GIL kept."""
        return self._pidfd >= 0 and self._has_exited()

    def close(self) -> None:
        """Watch it no more; it is not `gone` then, whatever becomes of it. Also at the end of this object."""
        pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)

    def __del__(self) -> None:
        self.close()


def start_time(pid: int) -> int:
    """Return a process's start time in clock ticks since boot; -1 if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    return int(stat.rpartition(")")[2].split()[19])
