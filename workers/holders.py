"""The processes that hold leases, watched through pidfds, so that their leases end with them."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from functools import partial

from mori_mp.workers.reactor import Reactor

logger = logging.getLogger(__name__)

_FOR_NOW = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Holders:
    """gone(pid) is called once for each watched process that has exited."""

    def __init__(self, reactor: Reactor, gone: Callable[[int], None]) -> None:
        self._reactor = reactor
        self._gone = gone
        self._pidfds: dict[int, int] = {}

    def watch(self, pids: set[int]) -> None:
        """Watch these processes too; those that cannot be watched for now are left in the set."""
        for pid in list(pids):
            pids.discard(pid)
            if pid in self._pidfds:
                continue
            try:
                pidfd = os.pidfd_open(pid)
            except OSError as exc:
                if exc.errno in _FOR_NOW:
                    logger.error("process %d, which holds a lease, cannot be watched yet: %s", pid, exc)
                    pids.add(pid)
                else:  # it is gone, or was none: a thread's id, say
                    self._gone(pid)
                continue
            self._pidfds[pid] = pidfd
            self._reactor.on(pidfd, partial(self._exited, pid))

    def close(self) -> None:
        """Watch nobody any more; the loop is over."""
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()

    def _exited(self, pid: int) -> None:
        pidfd = self._pidfds.pop(pid)
        self._reactor.off(pidfd)
        os.close(pidfd)
        self._gone(pid)
