"""The first line of a child process: pin it and read the mask back.

`os.sched_setaffinity(0, ...)` moves the calling *thread* only, and threads started later inherit its mask. So
a child calls `pin_self` before it imports anything that may start threads (ZMQ, BLAS, a transfer engine), and
this module imports nothing but `os`.
"""

from __future__ import annotations

import os


def pin_self(cpus: frozenset[int] | None) -> frozenset[int]:
    """Pin the calling thread to `cpus` (None: keep what it inherited) and return the mask it has then.

    The kernel silently drops CPUs outside the process's cpuset, so the caller compares what it gets with what
    it asked for. Raises OSError when nothing of `cpus` is left, ValueError for a negative CPU number.
    """
    if cpus is not None:
        try:
            os.sched_setaffinity(0, cpus)
        except OSError as err:
            raise OSError(
                err.errno,
                f"cannot pin to CPUs {sorted(cpus)} ({err.strerror}): none of them is online and inside this "
                f"process's cpuset; it runs on {sorted(os.sched_getaffinity(0))}",
            ) from err
    return frozenset(os.sched_getaffinity(0))
